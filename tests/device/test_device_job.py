"""`plait train` takes a GPU where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from metrics_file import read_metrics

from plait.api.job.config import load_config
from plait.api.job.from_config import GO_ON
from plait.api.job.training import run_job
from plait.plan.plan import Plan

JOB = """
[model]
layers = 1
width = 16
heads = 2
sequence = 16
dropout = 0.2
[data]
source = "text.txt"
[optimizer]
lr = 1e-2
[scheduler]
warmup = 2
[train]
steps = 4
batch_size = 4
clip_norm = 1.0
out = "run"
save_every = 4
evaluate_every = 4
[sample]
length = 8
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PLAIT_PLAN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training.toml").write_text(JOB)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog while it rains. " * 40)


def test_a_job_trains_on_the_gpu_is_saved_and_goes_on() -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run_job(load_config("training.toml"), Plan())
    assert torch.cuda.max_memory_allocated() > before
    run_job(load_config("training.toml", ["train.steps=6"]), Plan(), GO_ON)
    found = read_metrics(Path("run/metrics.jsonl"))
    assert [each["step"] for each in found] == [*range(1, 7)]
    assert found[-1]["loss"] < found[0]["loss"] and found[3]["held_out_loss"] < found[0]["loss"]
