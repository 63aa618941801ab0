"""The two halves of a step: forward_backward and optimizer_step, by hand, under every kind of plan."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.engine.compiler import Captures, Compiler
from plait.errors import PlanError

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
PLANS = ["", "data=2", "data=2 zero=3 micro=2", "tensor=2", "pipeline=2 micro=2", "data=2 pipeline=2 micro=2 zero=1"]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(100 + seed)  # the ranks are threads
    return torch.randn(8, 6, dtype=torch.float64, generator=own), torch.randint(0, 4, (8,), generator=own)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def on_ranks(plan: str, fn: Callable[[plait.Trainer], Any], model: nn.Module | None = None, **given: Any) -> Any:
    """What `fn` gives on rank 0."""
    made = net() if model is None else model
    compiler = Compiler(Captures(made, loss_fn), plait.Plan.parse(plan).inner_plan)

    def rank(world: Any) -> Any:
        return fn(plait.Trainer(made, loss_fn, SGD, plan, world=world, compiler=compiler, **given))

    return plait.run_ranks(plait.Plan.parse(plan).mesh, rank)[0]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("plan", PLANS)
def test_the_two_halves_are_a_step(plan: str) -> None:
    def whole(trainer: plait.Trainer) -> Any:
        return [float(trainer.step(rows(i))) for i in range(3)], trainer.full_state_dict()

    def halves(trainer: plait.Trainer) -> Any:
        losses = []
        trainer.prepare(rows(0))
        for i in range(3):
            before = trainer.full_state_dict() if i == 0 else {}
            losses.append(float(trainer.forward_backward(rows(i))))
            if i == 0:
                same(before, trainer.full_state_dict())  # nothing is updated yet
            assert trainer.step_number == i
            trainer.optimizer_step()
        return losses, trainer.full_state_dict()

    one, two = on_ranks(plan, whole), on_ranks(plan, halves)
    assert one[0] == two[0]
    same(one[1], two[1])


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_are_those_of_one_device_and_add_up_over_batches(plan: str) -> None:
    def found(trainer: plait.Trainer) -> Any:
        trainer.forward_backward(rows(0))
        first = trainer.gradients()
        trainer.forward_backward(rows(1))
        both = trainer.gradients()
        trainer.zero_grad()
        trainer.forward_backward(rows(1))
        second = trainer.gradients()
        trainer.optimizer_step()
        return first, both, second

    first, both, second = on_ranks(plan, found)
    for seeds, gradients in (([0], first), ([0, 1], both), ([1], second)):
        plain = net()
        for seed in seeds:
            loss_fn(plain, rows(seed)).backward()
        same(gradients, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("plan", ["data=2", "data=2 zero=3", "tensor=2"])
def test_an_update_of_several_batches_is_that_of_plain_pytorch(plan: str) -> None:
    def train(trainer: plait.Trainer) -> Any:
        norms = []
        for i in range(3):
            trainer.forward_backward(rows(2 * i))
            trainer.forward_backward(rows(2 * i + 1))
            norms.append(trainer.optimizer_step())
        return norms, trainer.full_state_dict()

    norms, state = on_ranks(plan, train, clip_norm=0.5)
    plain = net()
    optimizer = SGD(plain.parameters())
    for i in range(3):
        loss_fn(plain, rows(2 * i)).backward()
        loss_fn(plain, rows(2 * i + 1)).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert norms[i] == pytest.approx(float(norm), rel=1e-9)
        optimizer.step()
        optimizer.zero_grad()
    same(state, plain.state_dict())


def test_dropout_draws_anew_for_each_batch_of_an_update() -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 4)).double()

    def losses(trainer: plait.Trainer) -> list[float]:
        return [float(trainer.forward_backward(rows())) for _ in range(2)]

    one = losses(plait.Trainer(copy.deepcopy(model), loss_fn, SGD))
    assert one[0] != one[1]
    assert on_ranks("data=2", losses, model) == pytest.approx(one)


def test_callbacks_and_the_scheduler_follow_the_second_half() -> None:
    ends: list[plait.StepEnd] = []
    schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    trainer = plait.Trainer(net(), loss_fn, SGD, callbacks=[ends.append], scheduler=schedule, clip_norm=1.0)
    loss = trainer.forward_backward(rows())
    assert not ends and trainer.optimizer is not None and trainer.optimizer.param_groups[0]["lr"] == 0.1
    norm = trainer.optimizer_step()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.05
    assert [(end.step, end.loss, end.gradient_norm) for end in ends] == [(1, float(loss), norm)]


def test_a_second_half_without_a_first_is_refused() -> None:
    trainer = plait.Trainer(net(), loss_fn, SGD)
    with pytest.raises(PlanError, match="has not seen a batch yet"):
        trainer.optimizer_step()
    trainer.step(rows())
    with pytest.raises(PlanError, match=r"no gradients wait for it; call forward_backward\(batch\) first"):
        trainer.optimizer_step()
    assert trainer.step_number == 1


def test_an_asynchronous_schedule_has_no_halves() -> None:
    def rank(trainer: plait.Trainer) -> None:
        with pytest.raises(PlanError, match="updates weights within a step, which has no halves"):
            trainer.forward_backward(rows())
        trainer.step(rows())

    on_ranks("pipeline=2 micro=4 schedule=pipedream", rank)


def test_a_model_without_a_graph_has_the_same_halves() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if x.sum() > 1e9 else self.inner(x) * 2

    trainer = plait.Trainer(Branch(), loss_fn, SGD, "")
    with pytest.warns(UserWarning, match="the model runs as it is"):
        trainer.forward_backward(rows(0))
    trainer.forward_backward(rows(1))
    plain = Branch()
    for seed in (0, 1):
        loss_fn(plain, rows(seed)).backward()
    same(trainer.gradients(), {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
