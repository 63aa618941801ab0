"""Which tensors of a batch have its rows, and how those are cut."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import plait
from plait.engine.local_batch import batch_part
from plait.engine.microbatch import microbatches
from plait.errors import BatchError


def batch() -> dict[str, Tensor]:
    """Eight rows, and a weight for each of three classes, which both halves of the rows need whole."""
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 6, generator=draws), torch.randint(3, (8,), generator=draws)
    return {"x": x, "y": y, "weights": torch.tensor([1.0, 2.0, 0.5])}


def test_only_what_has_the_batchs_rows_is_cut() -> None:
    whole = {**batch(), "scale": torch.tensor(2.0), "n": 3}
    for parts in ([batch_part(whole, index, 2) for index in range(2)], microbatches(whole, 2)):
        for name in ("x", "y"):
            assert torch.equal(torch.cat([part[name] for part in parts]), whole[name]), name
            assert len(parts[0][name]) == 4, name
        for part in parts:
            assert all(part[name] is whole[name] for name in ("weights", "scale", "n"))


def test_the_last_part_may_be_smaller_but_not_empty() -> None:
    five = {"x": torch.arange(5), "y": torch.arange(5)}
    assert [batch_part(five, index, 3)["x"].tolist() for index in range(3)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(BatchError, match="5 rows does not make 4 parts"):
        batch_part(five, 0, 4)


@pytest.mark.parametrize("plan", ["data=2", "data=2 batchnorm=local", "data=2 micro=2 batchnorm=local"])
def test_class_weights_of_a_batch_stay_whole(plan: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    report = plait.verify(model, _weighted, batch(), plan)
    assert report.ok, report


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor


class Named(NamedTuple):
    x: Tensor
    y: Tensor


class Registered:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


pytree.register_pytree_node(
    Registered, lambda one: ([one.x, one.y], None), lambda values, _: Registered(*values),
    serialized_type_name="plait.tests.Registered",
)  # fmt: skip
KINDS: dict[str, Callable[..., Any]] = {
    "BatchEncoding": lambda **data: transformers.BatchEncoding(data),
    "ModelOutput": lambda x, y: transformers.utils.ModelOutput(x=x, y=y),
    "UserDict": lambda **data: collections.UserDict(data),
    "MappingProxy": lambda **data: types.MappingProxyType(data),
    "frozen dataclass": Frozen,
    "namedtuple": Named,
    "registered": Registered,
    "nested": lambda x, y: {"inputs": [Frozen(x, x)], "y": (y,)},
}


def _of_any_kind(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, dict) and "inputs" in batch:
        x, y = batch["inputs"][0].x, batch["y"][0]
    else:
        x, y = (batch["x"], batch["y"]) if hasattr(batch, "keys") else (batch.x, batch.y)
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("kind", KINDS)
def test_any_tree_of_tensors_is_a_batch(kind: str) -> None:
    """Cut in microbatches, over ranks and replicas, read by a loader, and weighed by its rows in an evaluation."""
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(10, 6, generator=draws), torch.randint(3, (10,), generator=draws)
    model = nn.Linear(6, 3)
    whole, rest = KINDS[kind](x=x[:8], y=y[:8]), KINDS[kind](x=x[8:], y=y[8:])
    parts = microbatches(whole, 2)
    assert type(parts[0]) is type(whole)
    assert plait.verify(model, _of_any_kind, whole, "data=2 micro=2", steps=1).ok
    assert plait.verify(model, _of_any_kind, whole, "data=2 sync=2", steps=2).ok
    trainer = plait.Trainer(model, _of_any_kind, functools.partial(torch.optim.SGD, lr=0.0), "data=1")
    trainer.prepare(whole)
    assert trainer.evaluate(iter([whole, rest])) == pytest.approx(float(F.cross_entropy(model(x), y).detach()))
    data_loader = plait.loader(
        [(x[i], y[i]) for i in range(8)], 8, shuffle=False, plan="data=1",
        collate=lambda rows: KINDS[kind](**dict(zip("xy", torch.utils.data.default_collate(rows), strict=True))),
    )  # fmt: skip
    assert float(trainer.step(next(iter(data_loader)))) == pytest.approx(
        float(F.cross_entropy(model(x[:8]), y[:8]).detach())
    )


def _weighted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    weights = batch["weights"][batch["y"]]
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return plait.Weighted((losses * weights).sum(), weights.sum())
