"""Ranks that are processes, each with a GPU of its own, which exchange through NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import host_gpu
import pytest
import torch
from metrics_file import read_metrics

from plait.plan.plan import Plan

JOB = """
[model]
layers = 4
width = 32
heads = 4
sequence = 16
[data]
source = "text.txt"
[optimizer]
lr = 1e-2
[train]
steps = 5
batch_size = 8
clip_norm = 1.0
"""
PLANS = {  # each with the plan of one GPU that has its numbers
    "data=2": "data=1",
    "data=2 zero=3 micro=2": "micro=2",
    "tensor=2 sequence=yes": "data=1",
    "context=2": "data=1",
    "context=2 context.kind=ring precision=bf16": "precision=bf16",
    "pipeline=2 micro=4": "micro=4",
    "pipeline=2 micro=4 schedule=zb-v": "micro=4",
    "data=2 tensor=2": "data=1",
    "pipeline=2 data=2 zero=2 micro=2 schedule=interleaved": "micro=2",
    "pipeline=4 micro=4 schedule=zb-h1": "micro=4",
    "replica=2 data=2 zero=3": "data=1",
    "pipeline=2 data=2 tensor=2 micro=2": "micro=2",
}


def losses(plan: str, folder: Path) -> list[float]:
    """The losses of a job of some steps, in processes of its own."""
    folder.mkdir()
    (folder / "training.toml").write_text(JOB)
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog while it rains. " * 40)
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PLAIT_PLAN")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, "-m", "plait", "train", "training.toml", "--plan", plan]
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (found,) = folder.glob("**/metrics.jsonl")
    return [each["loss"] for each in read_metrics(found)]


@pytest.mark.skipif(host_gpu.is_here(), reason="a GPU in the host's memory has no NCCL")
@pytest.mark.parametrize("plan", PLANS)
def test_processes_on_gpus_of_their_own_have_the_losses_of_one(plan: str, tmp_path: Path) -> None:
    num = Plan.parse(plan).num_processes
    if num > torch.cuda.device_count():
        pytest.skip(f"{num} GPUs are wanted for NCCL, and here is {torch.cuda.device_count()}")
    wanted = losses(PLANS[plan], tmp_path / "one")
    assert losses(plan, tmp_path / "many") == pytest.approx(wanted, rel=1e-2 if "bf16" in plan else 1e-4)
