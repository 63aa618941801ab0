"""stages=[tensor=2 | data=2]: some stages split weights over their ranks, others the rows of every microbatch."""

from __future__ import annotations

import functools

import pytest
import torch
from comm_worlds import run
from test_replicated_stages import tied_gpt
from torch import Tensor, nn

import plait
from plait import PlanError, Verifier, verify
from plait.api.job.gpt import BytesGPT, loss_fn
from plait.comm.protocol import World
from plait.engine.compiler import Captures, Compiler
from plait.plan.plan import Plan
from plait.spec.layout import REPLICATE, Replicate, Shard

pytestmark = pytest.mark.xdist_group("stage_plans")  # plans share what is captured


def test_the_plan() -> None:
    plan = Plan.parse("stages=[tensor=2 | data=2 | data=2] data=2 micro=3")
    assert plan == Plan(pipeline=3, stages=(("tensor", 2), ("data", 2), ("data", 2)), data=2, micro=3)
    assert str(plan) == "pipeline=3 data=2 stages=[tensor=2|data=2|data=2] micro=3"
    assert Plan.parse(str(plan)) == plan
    assert plan.num_processes == 12 and plan.mesh.axis_size("inner") == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages=[tensor=2|data=4]", "its stages have 2, 4 ranks, but all must have the same number.*pipeline=.1,2,1."),
        ("stages=[tensor=2]", "two stages or more"),
        ("stages=[tensor=1|data=1]", "one rank each; use pipeline=2"),
        ("stages=[tensor=2|zero=2]", "stage 1 is 'zero=2', but a stage is tensor=N or data=N"),
        ("stages=[tensor=2|]", "stage 1 is 'empty'"),
        ("stages=[tensor=2 | data=2", r"a list, in brackets"),
        ("stages=[tensor=2|data=2] pipeline=3", r"has 2 stages, but the plan has pipeline=3; make them agree"),
        ("stages=[tensor=2|data=2] tensor=2", "write tensor=N within the brackets"),
    ],
)
def test_bad_plans(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.parse(text)


@functools.cache
def verifier() -> Verifier:
    model, batch = tied_gpt()
    return Verifier(model, loss_fn, batch, clip_norm=0.5)


@pytest.mark.parametrize(
    "plan",
    [
        "stages=[tensor=2|data=2] micro=3",
        "stages=[data=2|tensor=2] micro=3 schedule=zb-h1 recompute=layer",
        "stages=[tensor=2|data=2|tensor=2] micro=2 schedule=gpipe",
        "stages=[data=2|tensor=2] data=2 zero=3",
        "stages=[tensor=2|data=2] data=2 zero=1 micro=3",
        "stages=[tensor=2|data=2] micro=2 schedule=zb-v",  # each rank has a stage at either end
        "stages=[data=3|data=3] micro=2",
    ],
)
def test_equals_one_device(plan: str) -> None:
    report = verifier().verify(plan)
    assert report.ok, report


class Normed(nn.Module):
    """Batch statistics and running ones, in a stage that splits rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.third, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.second(torch.relu(self.first(x))))
        return self.last(torch.relu(self.third(x)))


@pytest.mark.parametrize("plan", ["stages=[data=2|tensor=2] cut=third", "stages=[tensor=2|data=2] cut=norm micro=2"])
def test_batch_norm_is_of_the_whole_microbatch(plan: str) -> None:
    report = verify(Normed(), lambda model, batch: model(batch).square().mean(), torch.randn(8, 6), plan)
    assert report.ok, report


def test_what_each_stage_splits() -> None:
    torch.manual_seed(0)
    model = BytesGPT(2, 16, heads=2, sequence=8, vocab=32)
    plan = Plan.parse("stages=[tensor=2|data=2] cut=blocks.1")
    rows = {"x": torch.zeros(4, 8, dtype=torch.int64), "y": torch.zeros(4, 8, dtype=torch.int64)}
    program = Compiler(Captures(model, loss_fn), plan).compiled(rows).program
    split = {name for name, layout in program.layouts.items() if not isinstance(layout.on("inner"), Replicate)}
    assert program.pipeline is not None
    assert {program.pipeline.stages[name] for name in split} == {(0,)}
    assert all(isinstance(program.layouts[name].on("inner"), Shard) for name in split)
    assert program.layouts["x"].on("inner") == REPLICATE
    (crossing,) = (value for value in program.pipeline.cells.values if value.source == ("F", 0) and value.stages())
    assert crossing.like.shape == (2, 8, 16)  # the rows that the other side wants, not all four


def test_a_microbatch_that_does_not_divide_is_refused() -> None:
    model, batch = tied_gpt()
    with pytest.raises(PlanError, match=r"stages= cuts each microbatch of 3 into 1 x 2 parts; .* multiple of 8"):
        verify(model, loss_fn, batch, "stages=[tensor=2|data=2] micro=4")


def test_a_batch_of_another_shape_and_evaluation() -> None:
    model, batch = tied_gpt()
    half = {name: tensor[:8, :6].contiguous() for name, tensor in batch.items()}
    captures = Captures(model, loss_fn)

    def train(plan: str) -> list[float]:
        compiler = Compiler(captures, Plan.parse(plan))

        def ranks(world: World) -> list[float]:
            given = {"world": world, "compiler": compiler}
            trainer = plait.Trainer(compiler.model, loss_fn, lambda p: torch.optim.SGD(p, 0.1), compiler.plan, **given)
            found = [trainer.step(batch), trainer.step(half), trainer.step(batch)]
            return [float(loss) for loss in found] + [float(trainer.evaluate(half))]

        return run("threads", Plan.parse(plan).mesh, ranks)[0]

    assert train("stages=[tensor=2|data=2] micro=2") == pytest.approx(train("micro=2"), rel=1e-5)


def test_a_world_of_other_axes_is_refused() -> None:
    plan = Plan.parse("stages=[tensor=2|data=2]")

    def rank(world: World) -> None:
        with pytest.raises(PlanError, match=r"along pipeline=2, .* along pipeline=2 inner=2; make the world"):
            plait.Trainer(nn.Linear(2, 2), loss_fn, torch.optim.SGD, plan, world=world)

    run("threads", Plan.parse("pipeline=2").mesh, rank)
