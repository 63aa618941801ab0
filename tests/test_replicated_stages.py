"""pipeline=[1,2,1]: stages on several ranks, which take turns at microbatches."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor, nn

from plait import PlanError, Verifier, verify
from plait.api.job.gpt import BytesGPT, loss_fn
from plait.engine.compiler import Captures, Compiler
from plait.plan.plan import Plan
from plait.schedule.cut import Flow, Item, choose_cut
from plait.spec.layout import Only

pytestmark = pytest.mark.xdist_group("replicated_stages")  # plans share what is captured


def tied_gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = BytesGPT(3, 16, heads=2, sequence=8, vocab=32, dropout=0.1)
    model.head.weight = model.symbols.weight
    symbols = torch.randint(32, (12, 9), generator=torch.Generator().manual_seed(1))
    return model, {"x": symbols[:, :-1].contiguous(), "y": symbols[:, 1:].contiguous()}


@functools.cache
def verifier() -> Verifier:
    model, batch = tied_gpt()
    return Verifier(model, loss_fn, batch)


@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=[1,2,1] micro=6",
        "pipeline=[1,2,1] micro=1 schedule=naive",  # the second copy has nothing to do
        "pipeline=[2,1] micro=3 schedule=gpipe",
        "pipeline=[1,3] micro=4 schedule=zb-h1",  # copies of one and of two microbatches
        "pipeline=[1,2] chunks=2 micro=4 schedule=interleaved",
        "pipeline=[1,2] data=2 micro=3 zero=1",
        "pipeline=[1,2] data=2 micro=3 zero=3",
        "pipeline=[2,1] tensor=2 micro=2 recompute=layer",
    ],
)
def test_equals_one_device(plan: str) -> None:
    report = verifier().verify(plan)
    assert report.ok, report


def test_copies_hold_the_same_parameters() -> None:
    model, batch = tied_gpt()
    plan = Plan.parse("pipeline=[1,2,1] micro=6")
    assert plan.num_processes == 4 and str(plan) == "pipeline=[1,2,1] micro=6"
    rows = {name: tensor[:2] for name, tensor in batch.items()}
    program = Compiler(Captures(model, loss_fn), plan).compiled(rows).program
    assert program.pipeline is not None
    held = {name: program.layouts[name].on("pipeline") for name in program.pipeline.stages}
    assert held["symbols.weight"] == Only(0, (3,))  # tied: the first stage reads it and the last
    assert Only(1, (2,)) in held.values()
    assert program.pipeline.schedule.placement == "0|1|1|2"


def test_a_buffer_that_every_microbatch_changes_is_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x)))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    with pytest.raises(
        PlanError,
        match=r"stage 1 is on 2 ranks that share its microbatches, .* its buffer norm\..*; give that stage one",
    ):
        verify(Net(), loss, torch.randn(8, 4), "pipeline=[1,2] cut=norm micro=2")


@pytest.mark.parametrize("word", ["[2]", "[1,x]", "[1,0]", "[]"])
def test_bad_places(word: str) -> None:
    with pytest.raises(PlanError, match="pipeline="):
        Plan.parse(f"pipeline={word} micro=4")


def test_the_cut_gives_more_work_to_more_ranks() -> None:
    items = [Item(seconds) for seconds in (1.0, 1.0, 4.0, 1.0, 1.0, 2.0, 1.0)]
    flows = [Flow(i, (i + 1,), 0.1) for i in range(6)]
    copies = (1, 2, 1)

    def dearest(places: tuple[int, ...]) -> float:
        bounds = (0, *places, len(items))
        found = []
        for (start, stop), number in zip(itertools.pairwise(bounds), copies, strict=True):
            moved = 0.1 * ((start > 0) + (stop < len(items)))
            found.append((sum(item.seconds for item in items[start:stop]) + moved) / number)
        return max(found)

    best = min(dearest(places) for places in itertools.combinations(range(1, 7), 2))
    chosen = choose_cut(items, flows, 3, copies=copies)
    assert chosen is not None and dearest(chosen) == pytest.approx(best)
