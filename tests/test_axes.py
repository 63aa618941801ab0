"""The table of axes: one row is an axis. A toy axis, `shelf`, is added by a row and trains like the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.comm.protocol import World
from plait.errors import PlanError
from plait.plan import axes
from plait.plan.axes import AxisKind
from plait.plan.plan import Plan, describe_keys

SHELF = AxisKind("shelf", doc="ranks that each take a part of the part that data leaves", order=15, cuts_rows=True)
BOOKS = AxisKind("books", doc="ranks that each take a part of the weights", order=45, cuts_weights=True)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axes, "AXES", (*axes.AXES[:3], SHELF, *axes.AXES[3:]))


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axes, "AXES", (*axes.AXES, BOOKS))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.dropout(self.norm(self.up(x)).relu(), 0.2, self.training))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    found = model(batch["x"])
    return plait.Weighted((batch["w"][:, None] * (found - batch["y"]).square()).sum(), batch["w"].sum())


def _net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def _batch(rows: int = 16) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "x": torch.randn(rows, 6, dtype=torch.float64),
        "y": torch.randn(rows, 6, dtype=torch.float64),
        "w": torch.rand(rows, dtype=torch.float64),
    }


def test_an_axis_without_a_row_is_no_key() -> None:
    with pytest.raises(PlanError, match="unknown key 'shelf'"):
        Plan.parse("shelf=2")
    with pytest.raises(PlanError, match="unknown key 'inner'"):
        Plan.parse("inner=2")
    with pytest.raises(PlanError, match="unknown key 'axes.shelf'"):
        Plan.parse("axes.shelf=2")
    with pytest.raises(
        PlanError, match="unknown axis 'shelf'; there are pipeline, replica, data, context, expert, tensor, inner"
    ):
        Plan(other_axes=(("shelf", 2),))


@pytest.mark.usefixtures("shelf")
def test_a_row_is_a_key_of_the_plan() -> None:
    plan = Plan.parse("shelf=2 data=2 micro=3")
    assert Plan.parse(str(plan)) == plan and plan.num_processes == 4
    assert str(plan.mesh) == "pipeline=1 replica=1 data=2 shelf=2 context=1 expert=1 tensor=1 inner=1"
    assert plan.num_batch_parts == 4
    assert [plan.batch_part(plan.mesh.coordinates(rank)) for rank in range(4)] == [0, 1, 2, 3]
    assert ("shelf", "1", SHELF.doc) in describe_keys()
    with pytest.raises(PlanError, match=r"bad value 'two' in 'shelf=two' \(word 1"):
        Plan.parse("shelf=two")
    with pytest.raises(PlanError, match="shelf is given twice"):
        Plan.parse("shelf=2 shelf=3")
    with pytest.raises(PlanError, match="did you mean shelf"):
        Plan.parse("shelv=2")


@pytest.mark.usefixtures("shelf")
@pytest.mark.parametrize(
    "plan",
    [
        "shelf=2", "shelf=2 data=2 zero=3 micro=2", "shelf=2 replica=2 batchnorm=local",
        "shelf=2 tensor=2 data=2 zero=1", "shelf=2 pipeline=2 cut=down micro=2 data=2 zero=2",
    ],
)  # fmt: skip
def test_a_batch_axis_of_one_row_trains_as_one_device(plan: str) -> None:
    report = plait.verify(_net(), loss_fn, _batch(), plan)
    assert report.ok, report


@pytest.mark.usefixtures("shelf")
@pytest.mark.parametrize("plan", ["shelf=2 replica=2 data=2 sync=2", "shelf=2 replica=2 compress=int8"])
def test_replicas_are_cut_by_it(plan: str) -> None:
    """Rows of a replica are those that the axes before and after it leave."""
    report = plait.verify(_net(), loss_fn, _batch(32), plan + " batchnorm=local")
    assert report.ok, report


@pytest.mark.usefixtures("books")
def test_an_axis_of_one_row_splits_weights() -> None:
    report = plait.verify(_net(), loss_fn, _batch(), "books=2 data=2")
    assert report.ok, report
    assert "up.weight" in str(plait.explain(_net(), loss_fn, _batch(), "books=2"))


@pytest.mark.usefixtures("shelf")
def test_the_loader_cuts_by_it() -> None:
    def rank(world: World) -> list[list[int]]:
        found = plait.loader(list(range(16)), 8, world=world, shuffle=False)
        return [batch.tree.tolist() for batch in found]

    found = plait.run_ranks(Plan.parse("shelf=2 data=2").mesh, rank)
    assert found == [[[2 * i, 2 * i + 1], [8 + 2 * i, 9 + 2 * i]] for i in range(4)]


@pytest.mark.usefixtures("shelf")
def test_a_batch_that_it_does_not_divide() -> None:
    with pytest.raises(PlanError, match="shelf=3 does not divide the batch of 16"):
        plait.verify(_net(), loss_fn, _batch(), "shelf=3")


def test_parts_around_an_axis() -> None:
    mesh = Plan.parse("data=2 replica=3").mesh
    assert axes.parts_around(mesh, "data") == (1, 3) and axes.parts_around(mesh, "replica") == (2, 1)
