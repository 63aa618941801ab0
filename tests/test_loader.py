"""plait.loader: each rank reads its own rows of one global order, ahead of the step that uses them."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from metrics_file import read_metrics
from torch import Tensor, nn
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import plait
from plait.api.job.config import Config
from plait.api.job.training import run_job
from plait.api.trainer import Trainer
from plait.comm.protocol import World
from plait.engine.compiler import Captures, Compiler
from plait.engine.data.loader import Loader, loader
from plait.engine.data.prefetch import WaitGauge
from plait.engine.local_batch import LocalBatch
from plait.errors import BatchError, DataError, PlanError


class Numbers:
    def __init__(self, size: int = 22) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return {"x": torch.tensor([index])}


@pytest.fixture(autouse=True)
def _no_plan_of_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "PLAIT_PLAN"):
        monkeypatch.delenv(name, raising=False)


def rank_loader(monkeypatch: pytest.MonkeyPatch, plan: str, rank: int, data: Any, size: int = 4, **more: Any) -> Loader:
    monkeypatch.setenv("RANK", str(rank))
    return loader(data, size, plan=plan, **more)


def rows(batches: Loader) -> list[list[int]]:
    return [batch.tree["x"][:, 0].tolist() for batch in batches]


def test_global_order_does_not_depend_on_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rank_loader(monkeypatch, "", 0, Numbers())
    ranks = [rank_loader(monkeypatch, "data=2 tensor=2", rank, Numbers()) for rank in range(4)]
    epochs = []
    for _ in range(2):
        parts = [rows(one) for one in ranks]
        assert parts[0] == parts[1] and parts[2] == parts[3]
        epochs.append(rows(whole))
        assert [a + b for a, b in zip(parts[0], parts[2], strict=True)] == epochs[-1]
    assert len(epochs[0]) == 5 and epochs[0] != epochs[1]  # the short sixth batch is dropped


def test_rows_of_a_rank_are_those_of_each_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """micro=2 over data=2 replica=2: microbatches 0..7 and 8..15, each cut over data first, then over replicas."""
    found = {}
    for rank in range(4):
        one = rank_loader(monkeypatch, "replica=2 data=2 micro=2", rank, Numbers(16), 16, shuffle=False)
        (found[rank],) = rows(one)
    assert found == {0: [0, 1, 8, 9], 1: [4, 5, 12, 13], 2: [2, 3, 10, 11], 3: [6, 7, 14, 15]}


def test_reads_only_its_rows_and_not_too_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Numbers()
    batches = list(rank_loader(monkeypatch, "data=2", 1, data, shuffle=False, prefetch=0))
    assert data.read == [2, 3, 6, 7, 10, 11, 14, 15, 18, 19]
    assert isinstance(batches[0], LocalBatch) and batches[0].global_size == 4 and batches[0].local_size == 2
    data = Numbers()
    one = rank_loader(monkeypatch, "data=2", 1, data, shuffle=False, prefetch=2)
    next(iter(one))
    deadline = time.monotonic() + 10
    while len(data.read) < 6 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert data.read == [2, 3, 6, 7, 10, 11]  # the one that is used, and two ahead
    assert rows(one) == [[6, 7], [10, 11], [14, 15], [18, 19]]
    one.close()
    assert data.read[:10] == [2, 3, 6, 7, 10, 11, 14, 15, 18, 19]
    assert len(data.read) <= 14 and data.read[10:] == [2, 3, 6, 7][: len(data.read) - 10]  # of the next epoch


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("ranks", [1, 4])
def test_goes_on_where_it_stood(monkeypatch: pytest.MonkeyPatch, prefetch: int, ranks: int) -> None:
    """What was read ahead does not count as used; the number of ranks may change."""
    unbroken = rank_loader(monkeypatch, "", 0, Numbers())
    expected = [row for batch in rows(unbroken) + rows(unbroken) for row in batch]
    first = rank_loader(monkeypatch, "", 0, Numbers(), prefetch=prefetch)
    seen = [row for batch in rows(first) for row in batch]
    for batch in first:
        seen += batch.tree["x"][:, 0].tolist()
        break
    state = first.state_dict()
    assert state["items"] == 4
    parts = []
    for rank in range(ranks):
        second = rank_loader(monkeypatch, f"data={ranks}", rank, Numbers(), prefetch=prefetch)
        second.load_state_dict(state)
        parts.append(rows(second))
    for batches in zip(*parts, strict=True):
        seen += [row for part in batches for row in part]
    assert seen == expected


def test_a_state_loaded_in_an_iteration_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one = rank_loader(monkeypatch, "", 0, Numbers(), shuffle=False)
    start = one.state_dict()
    found = []
    for batch in one:
        found.append(batch.tree["x"][0, 0].item())
        if len(found) == 3:
            one.load_state_dict(start)
    assert found == [0, 4, 8]
    assert rows(one)[0] == [0, 1, 2, 3]
    with pytest.raises(DataError, match="no state of a loader: it lacks items, seed"):
        one.load_state_dict({"epoch": 0, "shuffle": True, "size": 3})


def test_the_global_generator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    rows(rank_loader(monkeypatch, "", 0, Numbers()))
    assert torch.equal(before, torch.get_rng_state())


def test_plan_of_the_command_line_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_PLAN", "data=2")
    (batch, *_) = rank_loader(monkeypatch, "tensor=2", 1, Numbers(), prefetch=0)
    assert batch.local_size == 2
    with pytest.raises(PlanError, match="rank 2 is not on the mesh"):
        rank_loader(monkeypatch, "", 2, Numbers())


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BatchError, match="global batch of 4 does not split over data=3;.*such as 3"):
        rank_loader(monkeypatch, "data=3", 0, Numbers())
    message = "batch of 20 does not split over data=2 replica=2 micro=2 .8 parts.; choose a multiple of 8, such as 16"
    with pytest.raises(BatchError, match=message):
        rank_loader(monkeypatch, "replica=2 data=2 micro=2", 0, Numbers(), 20)
    with pytest.raises(DataError, match="3 items, fewer than one global batch of 4"):
        rank_loader(monkeypatch, "", 0, Numbers(3))
    with pytest.raises(DataError, match="or one that can be iterated, not int"):
        loader(3, 1)
    with pytest.raises(DataError, match="num_workers=-1: give a whole number"):
        loader([1, 2, 3], 1, num_workers=-1)
    with pytest.raises(DataError, match="prefetch=True"):
        loader([1, 2, 3], 1, prefetch=True)
    one = rank_loader(monkeypatch, "", 0, Numbers())
    with pytest.raises(DataError, match="seed was 1 and is now 0"):
        one.load_state_dict(rank_loader(monkeypatch, "", 0, Numbers(), seed=1).state_dict())
    with pytest.raises(DataError, match="2 items of its epoch"):
        one.load_state_dict({**one.state_dict(), "items": 2})

    def rank(world: World) -> None:
        with pytest.raises(PlanError, match="'data=2' is not for the ranks of this world: its mesh is .*tensor=2"):
            loader([1, 2, 3], 1, plan="data=2", world=world)
        with pytest.raises(BatchError, match="global batch of 3"):
            loader([1, 2, 3], 3, plan="tensor=2 micro=2", world=world)

    plait.run_ranks(plait.Plan.parse("tensor=2").mesh, rank)


# What goes wrong while reading


class Broken(Numbers):
    """Items 6 cannot be read, and item 9 has another shape."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 6:
            raise KeyError("no such file")
        return {"x": torch.zeros(2 if index == 9 else 1)}


class BrokenTogether(Broken):
    def __getitems__(self, items: list[int]) -> list[dict[str, Tensor]]:
        return [self[item] for item in items]


@pytest.mark.parametrize(
    "plan",
    [
        "data=2",
        "replica=2 data=2",
        "pipeline=2 data=2",
        "tensor=2",
        "pipeline=[1,2,1]",
        "stages=[tensor=2|data=2] data=2",
    ],
)
def test_a_world_alone_says_which_rows_a_rank_has(plan: str) -> None:
    def give(world: World, given: str | None) -> list[list[int]]:
        return rows(loader(Numbers(), 4, world=world, plan=given))

    mesh = plait.Plan.parse(plan).mesh
    known = plait.run_ranks(mesh, functools.partial(give, given=plan))
    assert plait.run_ranks(mesh, functools.partial(give, given=None)) == known


@pytest.mark.parametrize("kind", [Broken, BrokenTogether])
@pytest.mark.parametrize("more", [{"prefetch": 0}, {"prefetch": 2}, {"num_workers": 1}])
def test_an_item_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch, kind: Any, more: Any) -> None:
    one = rank_loader(monkeypatch, "", 0, kind(), 2, shuffle=False, **more)
    with pytest.raises(
        DataError, match=f"^item 6 of {kind.__name__} cannot be read: KeyError: 'no such file'"
    ) as caught:
        list(one)
    assert "num_workers" not in more or "in __getitem__" in caught.value.__notes__[0]
    with pytest.raises(DataError, match="^item 6 of"):  # and again: nothing was skipped
        list(one)
    one.load_state_dict(one.state_dict() | {"items": 8})
    with pytest.raises(
        DataError, match=f"^items 8, 9 of {kind.__name__} do not make a batch: RuntimeError: .*`collate`"
    ):
        list(one)
    one.close()


class Deadly(Numbers):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_worker_that_dies_names_its_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))  # seconds between looks
    one = rank_loader(monkeypatch, "", 0, Deadly(), 2, shuffle=False, num_workers=1)
    with pytest.raises(
        DataError, match=r"worker process \d+ of the loader was killed by signal 9 while it read item 5"
    ):
        list(one)


# Workers


class Draws(Numbers):
    """Items that differ each time they are read."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand(), os.getpid()])}


def test_workers_live_on_and_draw_by_item(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(plan: str, rank: int, num_workers: int, epochs: int = 2) -> tuple[dict[Any, Any], set[float]]:
        one = rank_loader(monkeypatch, plan, rank, Draws(8), num_workers=num_workers)
        found, processes = {}, set()
        for epoch in range(epochs):
            for batch in one:
                for row in batch.tree["x"].tolist():
                    found[epoch, row[0]] = row[1:4]
                    processes.add(row[4])
        one.load_state_dict(one.state_dict() | {"epoch": 0, "items": 4})
        (last,) = [batch.tree["x"].tolist() for batch in one]
        assert all(found[0, row[0]] == row[1:4] for row in last)  # as in a run that was resumed there
        processes |= {row[4] for row in last}
        one.close()
        return found, processes

    whole, processes = drawn("", 0, 2)
    assert len(processes) == 2 and os.getpid() not in processes
    assert len(whole) == 16 and len({tuple(row) for row in whole.values()}) == 16
    first, second = drawn("data=2", 0, 1)[0], drawn("data=2", 1, 1)[0]
    assert first | second == whole


def test_a_loader_that_is_let_go_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    one = rank_loader(monkeypatch, "", 0, Numbers())
    next(iter(one))
    gone = weakref.ref(one)
    assert any(thread.name == "plait data" for thread in threading.enumerate())
    del one
    assert gone() is None
    assert not any(thread.name == "plait data" for thread in threading.enumerate())


# Time


def test_the_gauge_tells_waiting_from_work() -> None:
    now = 0.0
    gauge = WaitGauge(lambda: now)

    def step(waited: float, worked: float) -> float | None:
        nonlocal now
        gauge.asked()
        now += waited
        gauge.got()
        now += worked
        return gauge.share_if_too_much()

    assert step(5.0, 1.0) is None  # nothing runs ahead of the first batch
    assert gauge.waited == (5.0, 5.0)
    for _ in range(19):
        assert step(0.0, 1.0) is None
    assert step(9.0, 1.0) is None  # one step alone
    assert step(1.0, 1.0) is None
    assert step(1.0, 1.0) == pytest.approx(11 / 31)
    assert gauge.waited == (1.0, pytest.approx(16.0))
    for _ in range(20):
        step(0.05, 1.0)
    assert gauge.share_if_too_much() is None
    for _ in range(40):
        assert step(1.0, 1e-6) is None or now < 100  # a loop that does nothing with its batches
    assert gauge.share_if_too_much() is None


def test_waiting_for_data_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(rank: int) -> list[str]:
        one = rank_loader(monkeypatch, "tensor=2", rank, Numbers(100), prefetch=1)
        clock = iter(range(10_000))
        one._gauge = WaitGauge(lambda: float(next(clock)))  # a second of waiting, a second of work
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert len(rows(one)) == 25 and len(rows(one)) == 25
        assert one.waited_seconds == (1.0, 50.0)
        return [str(w.message) for w in caught]

    (message,) = warned(0)
    assert message == (
        "the last steps waited for data for 50% of their time: raise num_workers (data.workers), now 0, to 2; or, where"
        " only some batches take long to read, prefetch (data.prefetch), now 1"
    )
    assert warned(1) == []  # once for all ranks


# Training


class Items:
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(6, generator=torch.Generator().manual_seed(index))}


@pytest.mark.parametrize("plan", ["data=2 micro=2", "replica=2 data=2 micro=2 zero=1", "data=2 tensor=2", "micro=2"])
def test_a_rank_that_reads_its_own_rows_trains_as_one_that_has_all(plan: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))  # which tells rows apart
    compiler = Compiler(Captures(model, lambda m, b: m(b["x"]).square().mean()), plait.Plan.parse(plan))
    make = functools.partial(torch.optim.SGD, lr=0.1)

    def losses(world: World, local: bool) -> list[float]:
        trainer = Trainer(model, compiler.loss_fn, make, plan, world=world, compiler=compiler)
        batches: Any = loader(Items(), 16, seed=3, plan=plan, world=world)
        if not local:
            batches = [b.tree for b in loader(Items(), 16, seed=3, plan="", prefetch=0)]
        return [float(trainer.step(batch)) for batch in batches]

    compiler.compiled({"x": torch.zeros(16 // compiler.plan.micro, 6)})
    mesh = compiler.plan.mesh
    whole = plait.run_ranks(mesh, functools.partial(losses, local=False))
    assert plait.run_ranks(mesh, functools.partial(losses, local=True)) == whole
    assert len(whole[0]) == 3


@pytest.mark.parametrize("data", [{"prefetch": 0}, {"workers": 1, "prefetch": 3}])
def test_a_job_has_the_same_losses_however_its_data_is_read(data: dict[str, int], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog while it rains. " * 40)

    def losses(out: str, **more: int) -> list[float]:
        config = Config.model_validate(
            {
                "model": {"layers": 1, "width": 16, "heads": 2, "sequence": 16},
                "data": {"source": str(text), **more},
                "train": {"steps": 5, "batch_size": 4, "evaluate_every": 2, "out": str(tmp_path / out)},
                "sample": {"length": 0},
            }
        )
        run_job(config, plait.Plan())
        lines = read_metrics(tmp_path / out / "metrics.jsonl")
        assert all(0 < line["data_seconds"] <= line["seconds"] for line in lines)
        return [line["loss"] for line in lines] + [line["held_out_loss"] for line in lines if "held_out_loss" in line]

    assert losses("one", **data) == losses("other")
