"""What the fuzzer found: each case is a model and plans that were once wrong, or crashed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.comm.protocol import World
from plait.comm.threads import run_ranks
from plait.errors import LossError
from plait.run.agreeing.exchange import MeanExchange
from plait.spec.compression import NO_COMPRESSION
from plait.spec.plan import Plan


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def mlp(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, width))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "plan", ["data=2 sync=2", "data=2 sync=2 outer=nesterov streaming=2 overlap=1", "data=2 compress=int8"]
)
def test_replicas_of_a_model_that_is_not_float32_agree(dtype: torch.dtype, plan: str) -> None:
    report = plait.verify(mlp().to(dtype), square, torch.randn(8, 8, dtype=dtype), plan, steps=4)
    assert report.ok, report


def test_the_mean_of_float64_is_float64() -> None:
    def rank(world: World) -> Tensor:
        value = torch.tensor([1.0 + world.rank * 2.0**-40], dtype=torch.float64)
        return MeanExchange(world.comm("data"), NO_COMPRESSION).mean({"w": value})["w"]

    assert run_ranks(Plan.parse("data=2").mesh, rank)[0].item() == 1.0 + 2.0**-41


def test_a_frozen_parameter_with_servers() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    report = plait.verify(model, square, torch.randn(8, 8), "workers=2 servers=1")
    assert report.ok, report
    assert len(report.parameters) == 4


class Ordered(nn.Module):
    """Pairs of rows in their right order: the bias of the score has no effect, and its gradient is zero but for
    rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x).mean(1)


def test_a_gradient_that_is_exactly_zero_on_one_device() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        score, right = model(batch[:, :8]), batch[:, 8]
        return nn.functional.softplus(-(score[:, None] - score) * (right[:, None] - right).sign()).mean()

    torch.manual_seed(0)
    verifier = plait.Verifier(Ordered().double(), loss, torch.randn(8, 9, dtype=torch.float64))
    for plan in ("data=2", "data=4", "data=2 micro=2"):
        report = verifier.verify(plan)
        assert report.ok, report


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("plan", ["data=4 sync=2", "data=4 compress=bf16", "workers=4 servers=1"])
def test_replicas_whose_loss_is_not_finite_cannot_be_compared(plan: str) -> None:
    """A spread over rows, of which each replica has one; it was said that the plan's numbers differ."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).std(0).mean()

    with pytest.raises(LossError, match="is nan on one device"):
        plait.verify(mlp(), loss, torch.randn(4, 8), plan)


def test_a_gradient_that_is_not_finite_cannot_be_compared() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) * 0).abs().sqrt().mean()

    with pytest.raises(LossError, match=r"the gradient of 0\.weight is not finite on one device"):
        plait.verify(mlp(), loss, torch.randn(4, 8), "data=2", steps=1)


class MovingMean(nn.Module):
    """A parameter that does not train, and that the step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.mean = nn.Parameter(torch.zeros(16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0) * 0.1)
        return self.down(h - self.mean)


@pytest.mark.parametrize("plan", ["data=2 sync=2", "data=2 sync=2 outer=sgd", "data=2 compress=bf16"])
def test_replicas_agree_on_parameters_that_the_step_changes(plan: str) -> None:
    report = plait.verify(MovingMean(), square, torch.randn(8, 8), plan)
    assert report.ok, report
    assert {d.name for d in report.buffers} == {"mean"}
