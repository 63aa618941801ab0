"""precision=fp16: the loss is scaled, an overflow anywhere skips the step on every rank, and the scale is kept."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from test_zero import Odd, odd_batch, weighted_loss
from torch import Tensor, nn

import plait
from plait.api.trainer import Trainer
from plait.comm.protocol import World
from plait.engine import train_state
from plait.engine.compiler import Captures, Compiler
from plait.plan.plan import Plan

ADAM = functools.partial(torch.optim.AdamW, lr=0.01)
STEP = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
PLANS = ["data=2", "data=2 zero=1", "data=2 zero=2 micro=2", "data=2 zero=3", "tensor=2", "replica=2 data=2 zero=1"]


class Steep(nn.Module):
    """The gradient of `steep`'s second row, half of which another rank holds, is 50 times that of the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.steep = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.steep(torch.tanh(self.up(x))) * torch.tensor([1.0, 50.0])


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().mean()


def rows() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def trainers(plan: str, fn: Any, **options: Any) -> list[Any]:
    """What `fn(trainer)` gives on every rank."""
    compiler = Compiler(Captures(Steep(), loss_fn), Plan.parse(f"{plan} precision=fp16"))

    def rank(world: World) -> Any:
        more = {"scheduler": STEP, "world": world, "compiler": compiler} | options
        return fn(Trainer(compiler.model, loss_fn, ADAM, compiler.plan, **more))

    return plait.run_ranks(compiler.plan.mesh, rank)


@pytest.mark.parametrize("plan", PLANS)
def test_an_overflow_skips_the_step_on_every_rank_and_halves_the_scale(plan: str) -> None:
    def run(trainer: Trainer) -> list[tuple[float, bool, float]]:
        found = []
        trainer.prepare(rows())
        for _ in range(12):
            before = [p.detach().clone() for p in trainer.executor.parameters.values()]
            trainer.step(rows())
            same = all(map(torch.equal, before, trainer.executor.parameters.values()))
            assert trainer.optimizer is not None and trainer.state.loss_scale is not None
            assert not (same and trainer.optimizer.state)  # what is skipped leaves nothing
            found.append((trainer.state.loss_scale.value, same, trainer.scheduler.get_last_lr()[0]))
        assert trainer.step_number == 12
        return found

    ranks = trainers(plan, run)
    assert all(each == ranks[0] for each in ranks)
    scales, skipped, rates = zip(*ranks[0], strict=True)
    num = sum(skipped)
    assert 0 < num < 12 and skipped == (True,) * num + (False,) * (12 - num)
    assert scales == tuple(2.0**16 / 2 ** min(i + 1, num) for i in range(12))
    assert rates == tuple(0.01 * 0.5 ** max(i + 1 - num, 0) for i in range(12))


def test_the_scale_grows_after_enough_good_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_state, "_INTERVAL", 3)

    def run(trainer: Trainer) -> list[float]:
        assert trainer.state.loss_scale is not None
        trainer.state.loss_scale.value = 4.0
        scales = []
        for _ in range(7):
            trainer.step(rows())
            scales.append(trainer.state.loss_scale.value)
        return scales

    assert trainers("data=2 zero=1", run) == [[4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 16.0]] * 2


def test_the_scale_is_part_of_the_state() -> None:
    states: list[Any] = []

    def save(trainer: Trainer) -> None:
        assert trainer.state.loss_scale is not None
        for _ in range(2):
            trainer.step(rows())
        trainer.state.loss_scale.num_good = 7
        states.append(trainer.state_dict())

    def load(trainer: Trainer) -> tuple[float, int]:
        trainer.load_state_dict(states[0])
        trainer.prepare(rows())
        assert trainer.state.loss_scale is not None
        return trainer.state.loss_scale.value, trainer.state.loss_scale.num_good

    trainers("", save)
    assert trainers("data=2 zero=3", load) == [(2.0**14, 7)] * 2


@pytest.mark.parametrize("plan", ["data=3 zero=3", "data=4 zero=1 micro=2"])
def test_ranks_that_hold_nothing_of_a_parameter_agree_too(plan: str) -> None:
    torch.manual_seed(0)
    report = plait.verify(Odd(), weighted_loss, odd_batch(), f"{plan} precision=fp16")
    assert report.ok, report


def test_small_gradients_do_not_vanish() -> None:
    """A loss of 1e-6 has gradients that fp16 cannot say: scaled they come back as they were."""

    def faint(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).float().square().mean() * 1e-7

    for plan in ("data=2 precision=fp16", "data=2 zero=3 precision=fp16"):
        report = plait.verify(Steep().up, faint, rows(), plan, steps=1)
        assert report.ok, report
    fp32 = Captures(Steep().up, faint)
    gradients = []
    for plan in ("", "precision=fp16"):
        trainer = Trainer(fp32.model, faint, ADAM, plan, compiler=Compiler(fp32, Plan.parse(plan)))
        trainer.forward_backward(rows())
        gradients.append(trainer.gradients()["weight"])
        trainer.optimizer_step()
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0.02, atol=1e-9)
