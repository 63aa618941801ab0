"""Losses that take gradients of their own: inner gradient steps, gradient penalties, forward-mode derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import plait
from plait.plan.key_values import SCHEDULE_NAMES
from plait.schedule.families import make_schedule


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 4)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.norm(self.b(torch.tanh(self.a(x))))))  # type: ignore[no-any-return]


def inner_step(model: nn.Module, batch: Any) -> Tensor:
    """MAML (Finn et al. 2017)."""
    given = dict(model.named_parameters())
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    gradients = torch.autograd.grad(loss, list(given.values()), create_graph=True)
    moved = {name: p - 0.1 * g for (name, p), g in zip(given.items(), gradients, strict=True)}
    return F.cross_entropy(functional_call(model, moved, (batch["x"],)), batch["y"])


def inner_step_by_func(model: nn.Module, batch: Any) -> Tensor:
    given = dict(model.named_parameters())

    def inner(parameters: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (batch["x"],)), batch["y"])

    gradients = torch.func.grad(inner)(given)
    return inner({name: p - 0.1 * gradients[name] for name, p in given.items()})


def gradient_penalty(model: nn.Module, batch: Any) -> Tensor:
    """WGAN-GP (Gulrajani et al. 2017)."""
    x = (0.3 * batch["x"] + 0.7 * batch["x"].flip(1)).requires_grad_()
    score = model(x)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + 10 * (slope.norm(2, dim=1) - 1).square().mean()


def forward_mode(model: nn.Module, batch: Any) -> Tensor:
    return torch.func.jvp(model, (batch["x"],), (batch["x"].cos(),))[1].square().mean()  # type: ignore[no-any-return]


@functools.cache
def verifier(loss: Callable[..., Tensor]) -> plait.Verifier:
    torch.manual_seed(0)
    batch = {"x": torch.randn(12, 8).double(), "y": torch.randint(0, 4, (12,))}
    return plait.Verifier(Critic().double(), loss, batch, steps=1)


def check(loss: Callable[..., Tensor], plan: str) -> None:
    report = verifier(loss).verify(plan)
    assert report.ok and report.worst_gradient.relative < 1e-12, report


@pytest.mark.parametrize(
    "schedule", [name for name in SCHEDULE_NAMES if name != "naive" and not make_schedule(name, 2, 2).asynchronous]
)
def test_an_inner_gradient_step_under_every_schedule(schedule: str) -> None:
    """An inner gradient is a term of the outer one, and other stages read it too: summing must not change it."""
    check(inner_step, f"pipeline=2 micro=4 schedule={schedule}")


@pytest.mark.parametrize("loss", [inner_step_by_func, gradient_penalty, forward_mode])
@pytest.mark.parametrize(
    "plan", ["pipeline=3 micro=3", "pipeline=4 micro=2 schedule=zb-h1", "data=2 pipeline=2 micro=2 zero=2"]
)
def test_derivatives_within_the_loss(loss: Callable[..., Tensor], plan: str) -> None:
    check(loss, plan)
