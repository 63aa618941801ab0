"""plait.loader: one global order, whatever the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.errors import BatchError, DataError, PlanError
from plait.run.loader import Loader, loader
from plait.run.local_batch import LocalBatch


class Numbers:
    def __init__(self, size: int = 22) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return {"x": torch.tensor([index])}


def rank_loader(monkeypatch: pytest.MonkeyPatch, plan: str, rank: int, data: Any, **more: Any) -> Loader:
    monkeypatch.setenv("RANK", str(rank))
    return loader(data, 4, plan=plan, **more)


def rows(batches: Loader) -> list[list[int]]:
    return [batch.tree["x"][:, 0].tolist() for batch in batches]


def test_global_order_does_not_depend_on_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAIT_PLAN", raising=False)
    whole = rank_loader(monkeypatch, "", 0, Numbers())
    ranks = [rank_loader(monkeypatch, "data=2 tensor=2", rank, Numbers()) for rank in range(4)]
    epochs = []
    for _ in range(2):
        parts = [rows(one) for one in ranks]
        assert parts[0] == parts[1] and parts[2] == parts[3]
        epochs.append(rows(whole))
        assert [a + b for a, b in zip(parts[0], parts[2], strict=True)] == epochs[-1]
    assert len(epochs[0]) == 5 and epochs[0] != epochs[1]  # the short sixth batch is dropped


def test_reads_only_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Numbers()
    batches = list(rank_loader(monkeypatch, "data=2", 1, data, shuffle=False))
    assert data.read == [2, 3, 6, 7, 10, 11, 14, 15, 18, 19]
    assert isinstance(batches[0], LocalBatch) and batches[0].global_size == 4 and batches[0].local_size == 2


def test_goes_on_where_it_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    unbroken = rank_loader(monkeypatch, "", 0, Numbers())
    expected = rows(unbroken) + rows(unbroken)
    first = rank_loader(monkeypatch, "", 0, Numbers())
    seen = rows(first)
    for batch in first:
        seen.append(batch.tree["x"][:, 0].tolist())
        break
    second = rank_loader(monkeypatch, "", 0, Numbers())
    second.load_state_dict(first.state_dict())
    assert seen + rows(second) == expected


def test_the_global_generator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    rows(rank_loader(monkeypatch, "", 0, Numbers()))
    assert torch.equal(before, torch.get_rng_state())


def test_plan_of_the_command_line_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_PLAN", "data=2")
    assert rank_loader(monkeypatch, "tensor=2", 1, Numbers())._num_parts == 2
    with pytest.raises(PlanError, match="rank 2 is not on the mesh"):
        rank_loader(monkeypatch, "", 2, Numbers())


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BatchError, match="global batch of 4 does not split over data=3.*such as 3"):
        rank_loader(monkeypatch, "data=3", 0, Numbers())
    with pytest.raises(DataError, match="3 items, fewer than one global batch of 4"):
        rank_loader(monkeypatch, "", 0, Numbers(3))
    with pytest.raises(DataError, match="not generator"):
        loader((i for i in range(3)), 1)
    one = rank_loader(monkeypatch, "", 0, Numbers())
    with pytest.raises(DataError, match="seed was 1 and is now 0"):
        one.load_state_dict(rank_loader(monkeypatch, "", 0, Numbers(), seed=1).state_dict())
    with pytest.raises(DataError, match="2 items of its epoch"):
        one.load_state_dict({**one.state_dict(), "items": 2})
