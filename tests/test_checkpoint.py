"""Checkpoints: what is saved comes back, under any number of ranks; damage is named before anything is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.comm.threads import run_ranks
from plait.errors import CheckpointError, RankFailed
from plait.run import checkpoint
from plait.spec.plan import Plan


def make_state(step: int, value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"head.weight": torch.full((4, 2), value), "head.bias": torch.full((4,), value)},
        "optimizer": {"state": {"head.weight": {"step": torch.tensor(float(step))}}, "groups": [{"lr": 0.1 * value}]},
        "step": step,
    }


def on_ranks(num_ranks: int, fn: Callable[[Any], Any]) -> Any:
    """`fn(world)` on each thread rank; a rank's own error is raised as it was."""
    try:
        return run_ranks(Plan(data=num_ranks).mesh, fn)[0]
    except RankFailed as failed:
        raise failed.__cause__ or failed from None


def save(path: Path, step: int, num_ranks: int = 1, extra: dict[str, Any] | None = None) -> Path:
    folder = on_ranks(
        num_ranks,
        lambda world: checkpoint.save(path, make_state(step, float(step)), world=world, plan="data=1", extra=extra),
    )
    assert isinstance(folder, Path)
    return folder


def load(path: Path, state: dict[str, Any], num_ranks: int = 1) -> Any:
    return on_ranks(num_ranks, lambda world: checkpoint.load(path, state if num_ranks == 1 else {**state}, world=world))


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 1), (2, 1), (1, 2)])
def test_round_trip_on_any_number_of_ranks(tmp_path: Path, saved_by: int, loaded_by: int) -> None:
    save(tmp_path, 7, saved_by, extra={"data": {"items": 3}})
    state = make_state(0, 0.0)
    assert load(tmp_path, state, loaded_by) == {"data": {"items": 3}}
    assert torch.equal(state["model"]["head.weight"], torch.full((4, 2), 7.0))
    assert state["optimizer"]["state"]["head.weight"]["step"] == 7
    if loaded_by == 1:
        assert state["step"] == 7 and state["optimizer"]["groups"] == [{"lr": pytest.approx(0.7)}]


def test_keeps_the_last_two_saved(tmp_path: Path) -> None:
    for step in (30, 40, 10):
        save(tmp_path, step)
    assert [folder.name for folder in checkpoint.checkpoints(tmp_path)] == ["step-00000040", "step-00000010"]
    assert checkpoint.newest(tmp_path).name == "step-00000010"
    save(tmp_path, 10)
    assert [folder.name for folder in checkpoint.checkpoints(tmp_path)] == ["step-00000040", "step-00000010"]


def test_a_save_that_fails_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "file_entry", lambda path: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(CheckpointError, match="step-00000002 was not written: OSError: disk full"):
            save(tmp_path, 2, num_ranks=2)
    assert checkpoint.check(tmp_path).step == 1
    save(tmp_path, 2)
    assert checkpoint.check(tmp_path).step == 2


@pytest.mark.parametrize("name", ["__0_0.distcp", "rest.pt", ".metadata", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "altered"])
def test_damage_is_named(tmp_path: Path, name: str, damage: str) -> None:
    file = save(tmp_path, 5) / name
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(data[: len(data) // 2])
    else:
        file.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    state = make_state(0, 0.0)
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path, state)
    assert torch.equal(state["model"]["head.weight"], torch.zeros(4, 2))


def test_another_model_is_refused_before_any_change(tmp_path: Path) -> None:
    save(tmp_path, 5)
    for change, message in [
        ({"head.weight": torch.zeros(4, 3)}, r"head.weight has shape \[4, 2\] there and \[4, 3\] here"),
        ({"head.bias": torch.zeros(4, dtype=torch.float64)}, "head.bias is float32 there and float64 here"),
        ({"tail.bias": torch.zeros(1)}, "it lacks tail.bias"),
    ]:
        state = make_state(0, 0.0)
        state["model"] |= change
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path, state)
        assert torch.equal(state["optimizer"]["state"]["head.weight"]["step"], torch.tensor(0.0))
    state = make_state(0, 0.0)
    del state["model"]["head.bias"]
    with pytest.raises(CheckpointError, match="it has head.bias, which this model has not"):
        load(tmp_path, state)


def test_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        checkpoint.check(tmp_path / "none")
    with pytest.raises(CheckpointError, match="there is no checkpoint .*step-00000009"):
        checkpoint.check(tmp_path / "step-00000009")
