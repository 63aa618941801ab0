"""The training loop, on one process: its files, its losses, stopping and going on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
from metrics_file import read_metrics

from plait.api.job import server_training
from plait.api.job.config import Config, load_config
from plait.api.job.from_config import AUTO, Resume, check_job, hold_out
from plait.api.job.training import Outcome, run_job
from plait.engine.checkpoint import write
from plait.errors import CheckpointError, ConfigError, LossError, PlanError
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
steps = 8
batch_size = 4
clip_norm = 1.0
out = "run"
save_every = 3
evaluate_every = 4
[sample]
length = 8
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "PLAIT_PLAN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training.toml").write_text(JOB)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog while it rains. " * 40)
    return tmp_path


def config(*changes: str) -> Config:
    return load_config("training.toml", changes)


@pytest.mark.parametrize(
    ("plan", "changes", "message"),
    [
        ("pipeline=2 micro=4 schedule=pipedream precision=fp16", ["train.clip_norm=null"], "loss scale of fp16"),
        ("pipeline=2 micro=4 schedule=pipedream", [], "clip_norm=1.0 needs the norm of all gradients"),
        ("data=2 compress=int8 compress.nope=none", [], "compress.nope=none: no parameter has a name that matches"),
        ("pipeline=2 micro=2 cut=nowhere", [], "cut=nowhere: the model calls no module of this name"),
        ("data=2", ["optimizer.name=LBFGS"], "LBFGS runs the model several times a step"),
    ],
)
def test_what_no_rank_can_do_is_refused_before_any_starts(plan: str, changes: list[str], message: str) -> None:
    job = config(*[change for change in changes if not change.endswith("null")])
    dropped = {change.partition("=")[0] for change in changes if change.endswith("null")}
    if "train.clip_norm" in dropped:
        job = job.model_copy(update={"train": job.train.model_copy(update={"clip_norm": None})})
    with pytest.raises(PlanError, match=message):
        check_job(job, Plan.parse(plan))


OWN = """
import torch
from torch import nn

SEEN = torch.zeros(1)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, row):
        return {"x": torch.full((8,), row / 64)}

class Branch(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y.exp() if y.sum() > 0 else y

class NeedsValues(nn.Linear):
    def __init__(self):
        super().__init__(8, 1)
        self.scale = self.weight.sum().item()

def loss(model, batch):
    return model(batch["x"]).square().mean()

def counted(model, batch):
    SEEN.add_(batch["x"].mean())
    return loss(model, batch)

def rows():
    return Rows(), None

def branch():
    return Branch(8, 1), loss

def outside():
    return nn.Linear(8, 1), counted

def needs_values():
    return NeedsValues(), loss
"""


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        ("branch", "data=2 zero=1", "needs the graph of the step"),
        ("branch", "data=2 micro=2", "needs the graph of the step"),
        ("outside", "data=2 sync=2", "outside"),
        ("branch", "data=2", None),  # DistributedDataParallel runs it
        ("needs_values", "data=2 zero=1", None),
    ],
)
def test_what_only_the_graph_tells_is_refused_before_any_rank_starts(
    model: str, plan: str, message: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "own_model.py").write_text(OWN)
    (folder / "own.toml").write_text(
        f'[model]\nname = "own_model:{model}"\n[data]\nsource = "own_model:rows"\n[optimizer]\nname = "SGD"\nlr = 0.1\n'
        '[train]\nsteps = 2\nbatch_size = 8\nout = "run"\nevaluate_every = 0\n'
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    refused = pytest.raises(PlanError, match=message) if message else contextlib.nullcontext()
    with refused:
        check_job(load_config("own.toml"), Plan.parse(plan))


def train(*changes: str, resume: bool | Resume = False) -> Outcome:
    resume = resume if isinstance(resume, Resume) else Resume(resume)
    check_job(config(*changes), Plan(), resume)
    return run_job(config(*changes), Plan(), resume)


def losses(out: str) -> list[float]:
    return [line["loss"] for line in read_metrics(Path(out) / "metrics.jsonl")]


def test_what_a_run_leaves(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("train.steps=22").step == 22
    lines = read_metrics(folder / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 23))
    assert set(lines[0]) == {
        "plan",
        "step",
        "loss",
        "lr",
        "tokens_per_s",
        "seconds",
        "data_seconds",
        "sent_bytes",
        "gradient_norm",
    }
    assert [line["step"] for line in lines if "held_out_loss" in line] == [4, 8, 12, 16, 20, 22]
    assert lines[0]["lr"] == pytest.approx(5e-3) and lines[1]["lr"] == pytest.approx(1e-2)
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert [path.name for path in write.checkpoints("run/checkpoints")] == ["step-00000021", "step-00000022"]
    assert (folder / "run" / "sample.txt").read_text().startswith("The ")
    assert "a sample of what it learned:" in capsys.readouterr().out


def test_stop_by_signal_and_resume(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # an epoch has 35 batches: the stop falls into the second one
    train("train.out=whole", "train.steps=40")
    from plait.api.job import training

    original, calls = training.num_tokens, []

    def stop_at_37(batch: object) -> int:
        calls.append(1)
        if len(calls) == 37:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(batch)  # type: ignore[arg-type]

    monkeypatch.setattr(training, "num_tokens", stop_at_37)
    before = signal.getsignal(signal.SIGTERM)  # Ray's, where its tests ran before
    outcome = train("train.steps=40")
    assert outcome.stopped and outcome.step == 37 and outcome.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    outcome = train("train.steps=40", resume=True)
    assert not outcome.stopped and outcome.step == 40
    assert losses("run") == losses("whole")


def test_resume_of_a_damaged_checkpoint_is_refused_before_the_start(folder: Path) -> None:
    train("train.steps=3")
    with pytest.raises(CheckpointError, match="holds checkpoints of an earlier run"):
        train("train.steps=5")
    with pytest.raises(Exception, match="has done 3 steps and train.steps = 3"):
        train("train.steps=3", resume=True)
    file = next(folder.glob("run/checkpoints/step-00000003/part-*"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=rf"{file.name} \(crc32 \w+\) has"):
        train("train.steps=5", resume=True)


def test_a_killed_first_save_stops_nothing(folder: Path) -> None:
    half = folder / "run" / "checkpoints" / "step-00000002"
    half.mkdir(parents=True)
    (half / "part-00000-0123abcd.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="step-00000002 is none.*--resume=auto begins anew"):
        train("train.steps=3", resume=True)
    (folder / "run" / "checkpoints" / "notes").mkdir()
    assert train("train.steps=3", resume=AUTO).step == 3
    assert sorted(path.name for path in half.parent.iterdir()) == ["notes", "step-00000003"]
    assert train("train.steps=4", resume=AUTO).step == 4  # there is one now, from which it goes on
    assert len(losses("run")) == 4
    with pytest.raises(CheckpointError, match="holds checkpoints of an earlier run"):
        train("train.steps=5")


def test_a_folder_to_which_another_run_writes_is_refused(folder: Path) -> None:
    job = config("train.steps=1")
    held = hold_out(job)
    assert held is not None
    for use in (lambda: check_job(job, Plan()), lambda: run_job(job, Plan())):
        with pytest.raises(CheckpointError, match="train.out = .*: another run writes into this folder now"):
            use()
    os.close(held)
    assert run_job(job, Plan()).step == 1
    os.close(hold_out(job) or -1)


def test_a_checkpoint_is_chosen_and_damage_elsewhere_does_not_matter(folder: Path) -> None:
    train("train.steps=3", "train.save_every=1", "train.keep=3")
    saved = folder / "run" / "checkpoints"
    manifest = saved / "step-00000001" / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(b"?" + whole[1:])
    assert [path.name[-1] for path in write.checkpoints(saved)] == ["1", "2", "3"]
    assert train("train.steps=4", resume=True).step == 4
    newest = saved / "step-00000004" / "manifest.json"
    newest.write_bytes(newest.read_bytes()[:-9])
    older = write.checkpoints(saved)[-2].name
    for how in (True, AUTO):
        with pytest.raises(CheckpointError, match=rf"step-00000004/manifest.json is damaged.*--checkpoint {older}"):
            train("train.steps=5", resume=how)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint 'step-9' in .*, which has .*step-00000004"):
        train("train.steps=5", resume=Resume(True, checkpoint="step-9"))
    assert train("train.steps=5", resume=Resume(True, checkpoint="step-3")).step == 5
    assert [path.name[-1] for path in write.checkpoints(saved)][-1] == "5"


def test_resume_with_servers_is_checked_before_anything_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_training, "cluster", lambda job: pytest.fail("Ray was started"))
    train("train.steps=2")
    plan = Plan.parse("workers=2 servers=1")
    for change, why in (("model.width=32", "made by another model"), ("train.seed=5", "seed and number of items were")):
        with pytest.raises(CheckpointError, match=why):
            server_training.run_served(config(change, "train.steps=4", "train.evaluate_every=0"), plan, Resume(True))


def test_checkpoints_elsewhere_and_as_many_as_asked_for(folder: Path) -> None:
    train("train.steps=4", "train.save_every=1", "train.keep=3", "train.checkpoints=memory://job")
    assert [path.name[-1] for path in write.checkpoints("memory://job")] == ["2", "3", "4"]
    assert not (folder / "run" / "checkpoints").exists()
    with pytest.raises(CheckpointError, match="memory://job holds checkpoints of an earlier run.*train.checkpoints"):
        train("train.steps=5", "train.checkpoints=memory://job")
    assert train("train.steps=5", "train.checkpoints=memory://job", resume=True).step == 5
    with pytest.raises(ConfigError, match=r"train.keep = 0; it should be greater than or equal to 1"):
        config("train.keep=0")


def test_resume_with_another_model_is_refused(folder: Path) -> None:
    train("train.steps=2")
    with pytest.raises(CheckpointError, match=r"norm.bias has shape \[16\] there and \[32\] here"):
        train("train.steps=3", "model.width=32", resume=True)


def test_loss_that_is_not_finite_stops_the_run(folder: Path) -> None:
    with pytest.raises(LossError, match="step"):
        train("optimizer.lr=1e30", "train.clip_norm=1e30")
