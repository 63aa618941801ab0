"""Parts of a model that a step leaves out, as of experts without rows: their parameters have no gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_empty_rounds import by_numel
from test_expert_loops import hit
from torch import Tensor, nn

import plait
from plait.compile.capture.capture import capture
from plait.engine.compiler import Captures, Compiler
from plait.errors import PlanError
from plait.plan.plan import Plan

pytestmark = pytest.mark.xdist_group("parts_left_out")

WIDTH, EXPERTS = 8, 4
ADAMW = functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)


class Mixture(nn.Module):
    """Expert 3 has the rows whose first feature is above 0, and the other experts share the rest."""

    def __init__(self, loop: Callable[..., Tensor]) -> None:
        super().__init__()
        self.loop = loop
        self.first, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        last = torch.where(x[:, :1] > 0, 50.0, -50.0)
        scores = self.gate(x) + F.pad(last, (EXPERTS - 1, 0))
        top, ids = scores.softmax(-1).topk(2, -1)
        x = self.first(x)
        return x + self.loop(self, x, top, ids, torch.zeros_like(x))


def by_count(m: Mixture, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    for number, expert in enumerate(m.experts):
        if counts[number] > 0:
            token, place = torch.where(ids == number)
            out[token] += top[token, place, None] * expert(x[token])
    return out


def apart(m: Mixture, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """Rounds that differ, so that each expert computes all rows."""
    for number, acts in enumerate((F.relu, F.silu, torch.tanh, F.gelu)):
        token, place = torch.where(ids == number)
        if token.numel() > 0:
            out.index_add_(0, token, acts(m.experts[number](x[token])) * top[token, place, None])
    return out


def masked(m: Mixture, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """No experts: rows that a mask selects, if there are any."""
    for number in (3, 1):
        chosen = (ids == number).any(-1)
        if chosen.any():
            out[chosen] = out[chosen] + m.experts[number](x[chosen])
    return out + m.experts[0](x) + m.experts[2](x)


def with_zeros(m: Mixture, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """As for DDP, where parameters without rows have a gradient of zeros."""
    for number, expert in enumerate(m.experts):
        token, place = torch.where(ids == number)
        if token.numel() > 0:
            out[token] += top[token, place, None] * expert(x[token])
        elif m.training:
            out[0, 0] += 0 * sum(p.sum() for p in expert.parameters())
    return out


def without_question(m: Mixture, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        token, place = torch.where(ids == number)
        out[token] += top[token, place, None] * expert(x[token])
    return out


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def made(loop: Callable[..., Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Mixture(loop).double()


def batch(with_last: int = 0, seed: int = 1) -> Tensor:
    """Eight rows, of which so many are of expert 3."""
    x = torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    sign = torch.where(torch.arange(8) < with_last, 1.0, -1.0)
    return torch.cat([x[:, :1].abs() * sign[:, None], x[:, 1:]], 1)


@functools.cache
def verifier(loop: Callable[..., Tensor]) -> plait.Verifier:
    return plait.Verifier(made(loop), loss_fn, batch(), optimizer=ADAMW, clip_norm=0.5)


LAST = {f"experts.3.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")}


@pytest.mark.parametrize("loop", [by_numel, hit, by_count, apart, masked])
def test_what_may_have_no_gradient_is_known(loop: Callable[..., Tensor]) -> None:
    names = set(capture(made(loop), loss_fn, batch()).left_out.names)
    every_one = {name for name, _ in made(loop).named_parameters() if name.startswith("experts")}
    some = {name for name in every_one if name.split(".")[1] in "13"}
    assert names == (some if loop is masked else every_one)
    report = verifier(loop).verify("data=2")
    assert report.ok, report


@pytest.mark.parametrize("loop", [with_zeros, without_question])
def test_zeros_that_one_device_has_stay(loop: Callable[..., Tensor]) -> None:
    found = capture(made(loop), loss_fn, batch())
    assert not found.left_out.names and found.aux is None and all(o.kind != "aux" for o in found.outputs)
    report = verifier(loop).verify("data=2")
    assert report.ok, report


@pytest.mark.parametrize(
    "plan",
    [
        "", "data=2 zero=3 micro=2", "expert=2", "data=4 expert=2 zero=1 micro=2", "pipeline=2 micro=2 cut=first",
        "expert=2 tensor=2", "data=2 home.optimizer=disk", "data=2 home.parameters=disk", "data=2 central=host",
        "data=2 compress=int8", "data=2 sync=2", "data=2 sync=2 moments=averaged",
        "data=2 precision=bf16-params", "data=2 recompute=experts.*",
    ],
)  # fmt: skip
def test_an_optimizer_passes_over_experts_without_rows(plan: str) -> None:
    report = verifier(by_numel).verify(plan)
    assert report.ok, report


@pytest.mark.parametrize("plan", ["data=2", "expert=2", "data=2 zero=2", "data=2 home.parameters=disk"])
def test_gradients_come_and_go(plan: str) -> None:
    """Also over several batches that make one update."""
    batches = [[batch(3, 1)], [batch(0, 2)], [batch(0, 3), batch(2, 4)], [batch(1, 5), batch(0, 6)], [batch(0, 7)]]
    if "home" in plan:  # where gradients of several batches are not added up
        batches = [each[:1] for each in batches]
    model, wanted = made(by_numel), []
    optimizer = ADAMW(model.parameters())
    for each in batches:
        optimizer.zero_grad()
        for x in each:
            loss_fn(model, x).backward()
        wanted.append({name for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    assert wanted[1] == wanted[0] - LAST
    chosen = Plan.parse(plan)
    compiler = Compiler(Captures(made(by_numel), loss_fn), chosen)

    def rank(world: Any) -> tuple[list[set[str]], dict[str, Tensor]]:
        trainer = plait.Trainer(compiler.model, loss_fn, ADAMW, chosen, world=world, compiler=compiler)
        found = []
        for each in batches:
            for x in each:
                trainer.forward_backward(x)
            found.append({*trainer.gradients()})
            trainer.optimizer_step()
        executor = trainer.executor
        whole = {name: executor.whole(name, executor.local(name)).clone() for name in executor.layouts}
        trainer.close()
        return found, whole

    for found, whole in plait.run_ranks(chosen.mesh, rank):
        assert found == wanted
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(whole[name], parameter.detach(), rtol=1e-9, atol=1e-12)


def test_outputs_are_those_of_the_loss() -> None:
    def with_outputs(model: nn.Module, x: Tensor) -> Any:
        out = model(x)
        return out.square().mean(), {"largest": plait.Max(out.max())}

    for loss, names in ((with_outputs, ["largest"]), (loss_fn, None)):
        trainer = plait.Trainer(made(by_numel), loss, ADAMW, "micro=2")
        found = trainer.step(batch())
        assert (list(found[1]) if isinstance(found, tuple) else None) == names
        trainer.close()


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (
            "pipeline=2 micro=2 schedule=pipedream cut=first",
            "schedule=pipedream updates weights before.*or use schedule=1f1b",
        ),
        ("workers=2 servers=1", "with workers=2 servers take the gradients of all parameters"),
        ("data=2 backend=xla", "backend=xla updates all parameters in one program"),
    ],
)
def test_updates_that_need_all_gradients_are_refused(plan: str, why: str) -> None:
    match = rf"experts.0.0.weight has no gradient in a step that leaves out its part of the model.*{why}"
    with pytest.raises(PlanError, match=match):
        plait.verify(made(by_numel), loss_fn, batch(), plan)
    report = plait.verify(made(without_question), loss_fn, batch(), plan) if "pipedream" in plan else None
    assert report is None or report.ok
