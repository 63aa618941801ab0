"""plait.loader over streams, batch samplers and ragged last batches: the same data on any number of ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

import plait
from plait.comm.protocol import World
from plait.errors import BatchError, DataError, LossError, PlanError, RankFailed

SGD = functools.partial(torch.optim.SGD, lr=0.1)


@pytest.fixture(autouse=True)
def _no_plan_of_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "PLAIT_PLAN"):
        monkeypatch.delenv(name, raising=False)


def row(index: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(index)
    return {
        "x": torch.randn(6, generator=draws, dtype=torch.float64),
        "y": torch.tensor(index % 3),
        "i": torch.tensor(index),
    }


class Stream(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size, self.epochs = size, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        begin = 100 * self.epochs[-1]
        return (row(begin + index) for index in range(self.size))


class HuggingFace:
    """As `datasets.Dataset`: items by index or many at once, as dicts; a `datasets.IterableDataset` only iterates."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        return row(index)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [row(index) for index in indices]

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("is not read by index")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    logits = model(batch["x"])
    losses = F.cross_entropy(logits, batch["y"], reduction="none")
    weights = batch.get("weight", torch.ones(len(losses)))
    right = (logits.argmax(1) == batch["y"]) * weights
    aux = {"i": batch["i"], "right": plait.Sum(right.sum()), "accuracy": plait.Weighted(right.sum(), weights.sum())}
    return plait.Weighted((losses * weights).sum(), weights.sum()), aux


def on_ranks(plan: str, run: Any) -> list[Any]:
    models = [model() for _ in range(plait.Plan.parse(plan).num_processes)]

    def rank(world: World) -> Any:
        return run(plait.Trainer(models[world.rank], loss, SGD, plan, world=world))

    return plait.run_ranks(plait.Plan.parse(plan).mesh, rank)


def sampler() -> BatchSampler:
    return BatchSampler(RandomSampler(range(10), generator=torch.Generator().manual_seed(5)), 4, drop_last=False)


SOURCES: dict[str, Any] = {
    "stream": lambda **more: plait.loader(Stream(10), 4, drop_last=False, **more),
    "sampler": lambda **more: plait.loader(HuggingFace(10), batch_sampler=sampler(), **more),
    "huggingface": lambda **more: plait.loader(HuggingFace(10), 4, drop_last=False, **more),
}


def two_epochs(source: str, trainer: plait.Trainer, **more: Any) -> tuple[list[float], list[list[int]]]:
    losses, indices = [], []
    data = SOURCES[source](plan=trainer.plan, world=trainer.world, **more)
    for _ in range(2):
        for batch in data:
            value, aux = trainer.step(batch)
            losses.append(float(value))
            indices.append(aux["i"].tolist())
            assert float(aux["accuracy"]) == pytest.approx(float(aux["right"]) / len(indices[-1]))
    data.close()
    return losses, indices


@pytest.mark.parametrize("source", SOURCES)
def test_a_ragged_last_batch_is_padded_to_what_the_plan_divides(source: str) -> None:
    expected, items = on_ranks("data=1", functools.partial(two_epochs, source))[0]
    assert [len(found) for found in items] == [4, 4, 2] * 2 and items[:3] != items[3:]
    for plan in ("data=4", "data=2 pipeline=2 micro=2"):
        for losses, found in on_ranks(plan, functools.partial(two_epochs, source, row_weights="weight")):
            assert losses == pytest.approx(expected, rel=1e-12) and found == items


def test_an_evaluation_counts_no_padding() -> None:
    def evaluated(trainer: plait.Trainer) -> Any:
        data = plait.loader(
            HuggingFace(10), 8, shuffle=False, drop_last=False, row_weights="weight", plan=trainer.plan,
            world=trainer.world, prefetch=0,
        )  # fmt: skip
        trainer.prepare(next(iter(data)))
        data.load_state_dict(data.state_dict() | {"items": 0})
        return trainer.evaluate(data)

    rows = torch.utils.data.default_collate([row(index) for index in range(10)])
    with torch.no_grad():
        expected, aux = loss(model(), rows)
    for found, outputs in on_ranks("data=4", evaluated):
        assert found == pytest.approx(float(expected.mean)) and outputs["i"].tolist() == list(range(10))
        assert float(outputs["accuracy"]) == pytest.approx(float(aux["accuracy"].mean))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loader_goes_on_where_it_stood(source: str, prefetch: int) -> None:
    more = {"plan": "data=1", "prefetch": prefetch}
    whole, first = SOURCES[source](**more), SOURCES[source](**more)
    every = [[batch.tree["i"].tolist() for batch in whole] for _ in range(2)]
    for taken in (1, 3, 5):
        first = SOURCES[source](**more)
        left = zip(range(taken), first, strict=False)
        read = [batch.tree["i"].tolist() for _, batch in left]
        assert read == every[0][:taken]
        if taken > 3:
            read = [batch.tree["i"].tolist() for _, batch in zip(range(taken - 3), first, strict=False)]
            assert read == every[1][: taken - 3]
        again = SOURCES[source](**more)
        again.load_state_dict(first.state_dict())
        rest = every[0][taken:] if taken < 3 else every[1][taken - 3 :]
        assert [batch.tree["i"].tolist() for batch in again] == rest
        first.close()
        again.close()
    whole.close()


def test_what_a_loader_refuses() -> None:
    data = HuggingFace(10)
    with pytest.raises(
        BatchError, match=r"the last batch of 10 items has 2 rows, which do not split into 4 parts.*row_w"
    ):
        plait.loader(data, 8, drop_last=False, plan="data=4")
    with pytest.raises(BatchError, match="a batch sampler says which items a batch has"):
        plait.loader(data, 4, batch_sampler=[[0, 1]], plan="data=1")
    with pytest.raises(DataError, match="no items by index to shuffle"):
        plait.loader(Stream(8), 4, shuffle=True, plan="data=1")
    with pytest.raises(DataError, match="num_workers=2: the rows of Stream come one after the other"):
        plait.loader(Stream(8), 4, num_workers=2, plan="data=1")
    with pytest.raises(DataError, match="the dataset is a dict, of 'train', 'test': give the loader one of these"):
        plait.loader({"train": data, "test": data}, 4, plan="data=1")
    with pytest.raises(PlanError, match="row_weights='w' pads a batch of all replicas"):
        plait.loader(data, 4, row_weights="w", plan="data=2 sync=4")
    with pytest.raises(BatchError, match="the batch has an entry of that name"):
        next(iter(plait.loader(data, 4, row_weights="x", plan="data=1", prefetch=0)))
    begun = plait.loader(data, batch_sampler=sampler(), plan="data=1", prefetch=0)
    next(iter(begun))
    begun.load_state_dict(begun.state_dict())
    with pytest.raises(DataError, match=r"begun 1 times and has no set_epoch\(epoch\), so it does not come back"):
        next(iter(begun))
    with pytest.raises(TypeError, match="known only when they have been read"):
        len(plait.loader(Stream(8), 4, plan="data=1"))
    once = plait.loader((row(index) for index in range(4)), 4, plan="data=1", prefetch=0)
    assert len(list(once)) == 1
    with pytest.raises(DataError, match="generator gives no item in epoch 1"):
        next(iter(once))


def test_a_mean_over_padding_is_refused() -> None:
    def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    def rank(world: World) -> None:
        data = plait.loader(
            HuggingFace(3), 4, drop_last=False, row_weights="weight", world=world, plan="data=2", prefetch=0
        )
        plait.Trainer(model(), mean, SGD, "data=2", world=world).step(next(iter(data)))

    with pytest.raises(
        RankFailed, match="padded with 1 rows of weight zero, which a mean over its rows counts"
    ) as caught:
        plait.run_ranks(plait.Plan.parse("data=2").mesh, rank)
    assert isinstance(caught.value.__cause__, LossError)


def test_streams_that_differ_between_ranks_are_noticed() -> None:
    def rank(world: World) -> None:
        stream = [row(index + 5 * world.rank) for index in range(8)]
        data = plait.loader(OnlyIterated(stream), 4, world=world, plan="data=2", prefetch=0)
        plait.Trainer(model(), loss, SGD, "data=2", world=world).step(next(iter(data)))

    with pytest.raises(RankFailed, match="place in the data"):
        plait.run_ranks(plait.Plan.parse("data=2").mesh, rank)


class OnlyIterated:
    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)
