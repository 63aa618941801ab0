"""Saving and loading of a trainer: in the background, to any place, in files that others read; damage is named."""

from __future__ import annotations

import functools
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import (
    ADAMW,
    Small,
    assert_same_state,
    batch,
    loss_fn,
    on,
    saved_once,
    trainer_of,
    whole_state,
)

import plait
from plait.comm.thread_world import run_ranks
from plait.engine.checkpoint.checkpoint_folders import checkpoints, newest
from plait.engine.checkpoint.export import export_weights
from plait.engine.checkpoint.storage import folder_of
from plait.engine.checkpoint.write import Image
from plait.errors import CheckpointError
from plait.plan.plan import Plan
from plait.report.checkpoint_text import describe_checkpoint, verify_checkpoints

pytestmark = pytest.mark.xdist_group("checkpoints")  # trainers of tests/checkpointing.py share what is compiled


class Gate:
    """Lets the writing of files wait for a word."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: OSError | None = None) -> None:

        self.open, self.error = threading.Event(), error
        original = Image.write

        def write(*arguments: Any) -> Any:
            assert self.open.wait(30)
            if self.error is not None:
                raise self.error
            return original(*arguments)

        monkeypatch.setattr(Image, "write", write)


def test_training_goes_on_while_a_save_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    def run(world: Any) -> Any:
        trainer = trainer_of("data=2 zero=1", world)
        for i in range(2):
            trainer.step(batch(i))
        at_save = whole_state(trainer)
        trainer.save(tmp_path, wait=False)
        for i in range(3):
            trainer.step(batch(i))
        assert checkpoints(tmp_path) == []
        world.everyone().barrier()
        gate.open.set()
        trainer.save(tmp_path, keep=1, wait=False)  # waits for the first
        trainer.close()
        later = whole_state(trainer)
        assert trainer.load(tmp_path) == {} and trainer.step_number == 5
        assert_same_state(whole_state(trainer), later)
        return at_save

    first = run_ranks(Plan.parse("data=2").mesh, run)[0]
    gate.open.clear()
    gate.open.set()
    assert first["step"] == {"": 2}
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step-00000005"]


def test_what_is_saved_is_the_state_at_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    def run(world: Any) -> None:
        trainer = trainer_of("data=2 tensor=2", world)
        trainer.step(batch(0))
        at_save = whole_state(trainer)
        trainer.save(tmp_path, wait=False)
        trainer.step(batch(1))
        world.everyone().barrier()
        gate.open.set()
        trainer.load(tmp_path)
        assert_same_state(whole_state(trainer), at_save)

    run_ranks(Plan.parse("data=2 tensor=2").mesh, run)


@pytest.mark.parametrize("raised_by", ["step", "save", "load", "close"])
def test_a_save_that_failed_is_raised_by_all_ranks_at_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised_by: str
) -> None:
    on("data=4", lambda world: saved_once(world, tmp_path))
    gate = Gate(monkeypatch, OSError(28, "No space left on device"))

    def run(world: Any) -> int:
        trainer = trainer_of("data=4 zero=2", world)
        trainer.step(batch(0))
        trainer.step(batch(0))
        trainer.save(tmp_path, wait=False)
        gate.open.set()
        calls = {
            "step": lambda: [trainer.step(batch(0)) for _ in range(10_000)],
            "save": lambda: trainer.save(tmp_path),
            "load": lambda: trainer.load(tmp_path),
            "close": trainer.close,
        }
        with pytest.raises(CheckpointError, match=r"part-0000\d-\w{8}.safetensors: No space left on device"):
            calls[raised_by]()
        step = trainer.step_number
        trainer.step(batch(0))  # said once; training may go on
        gate.error = None
        trainer.load(tmp_path)
        assert trainer.step_number == 1
        return step

    steps = run_ranks(Plan.parse("data=4").mesh, run)
    assert len(set(steps)) == 1


@pytest.mark.parametrize("name", ["part", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "altered"])
def test_damage_is_named_before_anything_is_changed(tmp_path: Path, name: str, damage: str) -> None:
    def run(world: Any) -> None:
        trainer = trainer_of("data=2", world)
        for _ in range(2):
            trainer.step(batch(0))
            trainer.save(tmp_path)
        if world.rank == 0:
            file = next(path for path in sorted((tmp_path / "step-00000002").iterdir()) if path.name.startswith(name))
            data = file.read_bytes()
            at = data.index(b"[0]") if name == "manifest.json" else len(data) - 100
            if damage == "missing":
                file.unlink()
            else:
                file.write_bytes(
                    data[:at] if damage == "truncated" else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                )
        before = whole_state(trainer)
        if (name, damage) == ("manifest.json", "missing"):  # no checkpoint any more: the one before it is the last
            assert trainer.load(tmp_path) == {} and trainer.step_number == 1
            return
        with pytest.raises(CheckpointError) as caught:
            trainer.load(tmp_path)
        older = f"load an older one, {tmp_path / 'step-00000001'} (plait train --checkpoint step-00000001)"
        assert str(caught.value).endswith(older), caught.value
        assert "step-00000002" in str(caught.value) and name in str(caught.value)
        assert ("crc32" in str(caught.value)) if name == "part" else True
        assert_same_state(whole_state(trainer), before)
        trainer.load(tmp_path / "step-00000001")
        assert trainer.step_number == 1

    on("data=2", run)
    if (name, damage) != ("manifest.json", "missing"):
        with pytest.raises(
            CheckpointError, match=rf"{name}[^\n]*\n.*step-00000001: \d files, .* every checksum is right"
        ):
            verify_checkpoints(str(tmp_path))


def test_torch_distributed_checkpoint_reads_them(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as dcp_load

    def run(world: Any) -> Any:
        trainer = trainer_of("data=2 tensor=2 zero=3", world)
        trainer.step(batch(0))
        trainer.save(tmp_path)
        return trainer.full_state_dict()

    expected = on("data=2 tensor=2", run)[0]
    found = {f"model/{name}": torch.zeros_like(value) for name, value in expected.items() if name != "head.weight"}
    reader = HuggingFaceStorageReader(str(tmp_path / "step-00000001"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp_load(found, storage_reader=reader, no_dist=True)
    for name, value in found.items():
        assert torch.equal(value, expected[name.removeprefix("model/")]), name


def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("pickle")

    def run(world: Any) -> None:
        trainer = trainer_of("", world, scheduler=lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 3]))
        trainer.step(batch(0))
        with monkeypatch.context() as patch:
            for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
                patch.setattr(pickle, name, refuse)
            patch.setattr(torch, "save", refuse)
            patch.setattr(torch, "load", refuse)
            trainer.save(tmp_path)
            trainer.load(tmp_path)
        assert isinstance(trainer.scheduler.milestones, Counter)

    on("", run)


def test_a_url_is_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://runs/one"

    def run(world: Any) -> None:
        trainer = trainer_of("data=2 zero=3", world)
        for i in range(3):
            trainer.step(batch(i))
            trainer.save(url, {"i": i}, wait=False)
        expected = whole_state(trainer)
        trainer.step(batch(0))
        assert trainer.load(url) == {"i": 2}
        assert_same_state(whole_state(trainer), expected)

    on("data=2", run)
    assert [str(folder) for folder in checkpoints(url)] == [f"{url}/step-0000000{i}" for i in (2, 3)]
    assert "data=2 zero=3" in describe_checkpoint(url)
    folder = newest(url)
    name = next(name for name in folder.names() if name.startswith("part"))
    data = bytearray(folder.read(name))
    data[-5] ^= 1
    folder.put(name, [bytes(data)])
    with pytest.raises(CheckpointError, match=f"memory://.*{name} .* was altered"):
        verify_checkpoints(url)
    export_weights(f"{url}/step-00000002", "memory://out/model.safetensors")
    assert folder_of("memory://out").names() == ["model.safetensors"]
    folder_of(url).remove_all()
    with pytest.raises(CheckpointError, match="there is no checkpoint in memory://runs/one"):
        newest(url)


def test_a_checkpoint_loaded_before_the_first_batch_is_taken_over_with_it(tmp_path: Path) -> None:
    noted = {"data": {"rows": [3, 1]}, "seen": torch.arange(4)}

    def save(world: Any) -> None:
        trainer = trainer_of("data=2 zero=3", world)
        trainer.step(batch(0))
        trainer.save(tmp_path, noted)

    def go_on(world: Any, prepared: bool) -> Any:
        torch.manual_seed(world.rank)
        trainer = plait.Trainer(Small(), loss_fn, ADAMW, "tensor=2", world=world)
        if prepared:
            trainer.prepare(batch(1))
        extra = trainer.load(tmp_path)
        assert extra["data"] == noted["data"] and torch.equal(extra["seen"], noted["seen"])
        trainer.step(batch(1))
        assert trainer.step_number == 2
        return whole_state(trainer)

    on("data=2", save)
    late, early = (on("tensor=2", functools.partial(go_on, prepared=prepared)) for prepared in (False, True))
    for found, whole in zip(late, early, strict=True):
        assert_same_state(found, whole)


def test_another_model_is_refused_before_the_first_batch(tmp_path: Path) -> None:
    on("data=4", lambda world: saved_once(world, tmp_path))
    model = Small(hidden=12)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = plait.Trainer(model, loss_fn, ADAMW, "data=1")
    for load in (trainer.load, trainer.load_weights):
        with pytest.raises(CheckpointError, match=r"down.weight has shape \[8, 10\] there and \[8, 12\] here"):
            load(tmp_path)
        with pytest.raises(CheckpointError, match="nowhere"):
            load(tmp_path / "nowhere")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    trainer.step(batch(0))
    assert trainer.step_number == 1
