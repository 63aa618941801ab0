"""The gradient noise scale: its estimator, its measurement in a run under any plan, and what it says of batches."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.api.trainer import StepEnd, Trainer
from plait.comm.protocol import World
from plait.cost.noise_scale import (
    NoiseSample,
    NoiseScale,
    RunningNoise,
    break_even,
    noise_scale,
    steps_to_same_loss,
    token_worth,
)
from plait.engine.local_batch import LocalBatch
from plait.errors import PlanError, RankFailed

SGD = functools.partial(torch.optim.SGD, lr=0.05)
STILL = functools.partial(torch.optim.SGD, lr=0.0)
DIM, SIGMA, AWAY = 12, 1.5, 0.5


class Quadratic(nn.Module):
    """The mean over rows x of |w - x|^2 / 2, whose gradient of one row is w - x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((DIM,), AWAY, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w - x).square().sum(1) / 2


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"]).mean()


def draws(number: int, rows: int, dim: int = DIM) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(number)
    return {"x": SIGMA * torch.randn(rows, dim, generator=random, dtype=torch.float64)}


def test_a_quadratic_has_the_noise_scale_that_is_known() -> None:
    """Of rows x ~ N(0, sigma^2) at w the gradient is w, and its covariance has the trace dim sigma^2."""
    ends: list[StepEnd] = []
    trainer = Trainer(Quadratic(), mean_loss, STILL, "", noise_every=1, callbacks=[ends.append])
    for number in range(400):
        trainer.step(draws(number, 32))
    samples = [end.noise for end in ends if end.noise is not None]
    found = noise_scale(samples)
    truth = SIGMA**2 / AWAY**2
    assert len(samples) == 400
    assert found is not None and found.low is not None and found.high is not None
    assert found.low < truth < found.high
    assert found.rows == pytest.approx(truth, rel=0.1)
    assert sum(each.signal for each in samples) / 400 == pytest.approx(DIM * AWAY**2, rel=0.05)
    assert sum(each.noise for each in samples) / 400 == pytest.approx(DIM * SIGMA**2, rel=0.05)
    assert ends[-1].noise_scale == pytest.approx(truth, rel=0.4)  # of the last twenty


def test_the_estimator_is_exact_where_gradients_have_their_means() -> None:
    signal, noise = 3.0, 40.0
    norms = [math.sqrt(signal + noise / rows) for rows in (4, 32)]
    found = NoiseSample.of_norms(4, norms[0], 32, norms[1])
    assert (found.signal, found.noise) == (pytest.approx(signal), pytest.approx(noise))
    with pytest.raises(ValueError, match="not 8 and 8"):
        NoiseSample.of_norms(8, 1.0, 8, 1.0)


class Deep(nn.Module):
    """Layers for a pipeline, with what a second run could leave a trace in: statistics and masks."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(4))
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64) if norm else nn.Identity()
        self.drop = nn.Dropout(0.2 if norm else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.drop(self.norm(x)).square().sum(1)


def trained(plan: str, every: int, norm: bool = False, local: bool = False) -> list[tuple[dict[str, Tensor], Any]]:
    """Weights and buffers after four steps, and what was measured, of each rank."""

    model = Deep(norm)  # one, as threads have random numbers in common

    def rank(world: World) -> tuple[dict[str, Tensor], Any]:
        ends: list[StepEnd] = []
        given = {"noise_every": every, "callbacks": [ends.append], "world": world}
        trainer = Trainer(copy.deepcopy(model), mean_loss, SGD, plan, **given)
        for number in range(4):
            batch = draws(number, 16, 8)
            here = plait.Plan.parse(plan).batch_part(world.mesh.coordinates(world.rank))
            mine = LocalBatch({"x": batch["x"][8 * here : 8 * here + 8]}, 8, 16, f"batch {number}") if local else batch
            trainer.step(mine)
        return trainer.full_state_dict(), [end.noise for end in ends]

    return plait.run_ranks(plait.Plan.parse(plan).mesh, rank)


@functools.cache
def of_one_device() -> list[NoiseSample]:
    found: list[NoiseSample] = trained("", 1)[0][1]
    return found


@pytest.mark.parametrize(
    "plan",
    ["data=2", "data=2 zero=3 micro=2", "tensor=2 micro=4", "pipeline=2 micro=4 schedule=zb-h1", "data=2 pipeline=2"],
)
def test_every_rank_of_a_plan_measures_what_one_device_does(plan: str) -> None:
    for _, samples in trained(plan, 1):
        for mine, theirs in zip(samples, of_one_device(), strict=True):
            assert (mine.signal, mine.noise) == (
                pytest.approx(theirs.signal, rel=1e-8),
                pytest.approx(theirs.noise, rel=1e-8),
            )


def test_rows_of_the_loader_are_those_of_each_rank() -> None:
    first, second = (samples for _, samples in trained("data=2", 1, local=True))
    assert first == second
    assert first != of_one_device()  # other rows are the few


@pytest.mark.parametrize("plan", ["", "data=2 micro=2"])
def test_the_numbers_of_the_training_stay_as_they_are(plan: str) -> None:
    with_it, without = trained(plan, 2, norm=True), trained(plan, 0, norm=True)
    assert [sample is not None for sample in with_it[0][1]] == [True, False, True, False]
    for (mine, _), (theirs, _) in zip(with_it, without, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_an_update_by_several_batches_is_not_measured() -> None:
    ends: list[StepEnd] = []
    trainer = Trainer(Quadratic(), mean_loss, STILL, "", noise_every=1, callbacks=[ends.append])
    trainer.forward_backward(draws(0, 8))
    trainer.forward_backward(draws(1, 8))
    trainer.optimizer_step()
    trainer.forward_backward(draws(0, 8))
    trainer.zero_grad()
    trainer.step(draws(2, 8))
    assert [end.noise is None for end in ends] == [True, False]


@pytest.mark.parametrize(
    ("plan", "every", "message"),
    [
        ("", -1, "noise_every=-1: the steps"),
        ("replica=2 sync=4", 1, "replicas that agree later have no gradient of the whole batch"),
        ("pipeline=2 micro=4 schedule=pipedream-2bw", 1, "has no gradient of the whole batch"),
    ],
)
def test_what_has_no_gradient_of_the_batch_is_refused(plan: str, every: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Trainer(Deep(), mean_loss, SGD, plan, noise_every=every)


def test_one_row_for_each_rank_is_refused() -> None:
    def rank(world: World) -> None:
        batch = LocalBatch({"x": draws(0, 1)["x"]}, 1, 2, "batch 0")
        Trainer(Quadratic(), mean_loss, SGD, "data=2", noise_every=1, world=world).step(batch)

    with pytest.raises(RankFailed, match="a rank has one of the batch's 2 .*at least 4 rows"):
        plait.run_ranks(plait.Plan.parse("data=2").mesh, rank)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(DIM, 1, dtype=torch.float64), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x)
        return y.square()


def test_a_step_that_leaves_a_trace_in_python_is_refused() -> None:
    with pytest.raises(PlanError, match="noise_every=1 runs some batches twice, and the step changes .*calls"):
        Trainer(Counts(), mean_loss, SGD, "", noise_every=1).step(draws(0, 8))


def test_few_or_contrary_measurements_are_not_a_scale() -> None:
    assert noise_scale([]) is None
    assert noise_scale([NoiseSample(-1.0, 2.0)] * 3) is None
    assert RunningNoise().scale is None
    assert str(noise_scale([NoiseSample(2.0, 8.0)] * 3)) == "4 rows (measured)"
    wild = noise_scale([NoiseSample((-1.0) ** i * 9 + 1, 50.0 + i) for i in range(10)])
    assert wild is not None
    assert wild.high == math.inf
    assert wild.low is not None and wild.low < wild.rows
    assert f"rows (measured, 95% above {wild.low:.2g})" in str(wild)


def test_steps_and_rows_to_the_same_loss() -> None:
    """Half of the efficiency at the noise scale, and the two extremes (McCandlish et al. 2018, section 2.3)."""
    assert token_worth(512, 512.0) == 0.5
    assert steps_to_same_loss(1024, 512.0, 1000, 512) == pytest.approx(750)
    assert steps_to_same_loss(1 << 30, 512.0, 1000, 512) == pytest.approx(500, rel=1e-3)
    assert steps_to_same_loss(2, 1e9, 1000, 4) == pytest.approx(2000, rel=1e-3)
    scale = break_even(256, 1.0, 1024, 2.0)
    assert (1 + scale / 256) * 1.0 == pytest.approx((1 + scale / 1024) * 2.0)
    assert break_even(256, 1.0, 512, 1.0) == 0.0
    assert break_even(256, 1.0, 512, 2.5) == math.inf
    assert str(NoiseScale(1234.5)) == "1,234 rows (given)"
