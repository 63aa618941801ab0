"""Several optimizers over one model: wrappers, lists and pairs of pattern and function, exact, saved and resumed."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_optimizers import batch, loss_fn, net, on_ranks, under, worst
from torch import Tensor, nn

import plait
from plait.api.trainer import Trainer
from plait.engine.rank_optimizers import make_optimizer
from plait.errors import CheckpointError, PlanError, RankFailed
from plait.optim.combined import CombinedOptimizer

PLANS = ["tensor=2 data=2 zero=1", "data=2 zero=3", "pipeline=2 data=2 zero=2 micro=2", "data=2 central=host"]


class Two(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        params = list(params)
        self.matrices = torch.optim.Muon([p for p in params if p.ndim == 2], lr=lr)
        self.rest = torch.optim.AdamW([p for p in params if p.ndim != 2], lr=lr)
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.matrices.step()
        self.rest.step()


class Lookahead(torch.optim.Optimizer):
    """Keeps weights of its own in its state, and counts steps in an attribute."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        params = list(params)
        self.inner = torch.optim.AdamW(params, lr=lr)
        self.count = 0
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in held:
            if "slow" not in self.state[p]:
                self.state[p]["slow"] = p.detach().clone()
        self.inner.step()
        self.count += 1
        for p in held if self.count % 2 == 0 else []:
            p.copy_(self.state[p]["slow"].lerp_(p, 0.5))


class NoOptimizer:
    """Holds a list, and is not a torch.optim.Optimizer itself."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        self.each = [
            torch.optim.Adafactor([p for p in params if p.ndim == 2], lr=0.05),
            torch.optim.SGD([p for p in params if p.ndim != 2], lr=0.05, momentum=0.9),
        ]

    def step(self) -> None:
        for one in self.each:
            one.step()


def listed(params: Any) -> list[torch.optim.Optimizer]:
    params = list(params)
    return [torch.optim.Muon([p for p in params if p.ndim == 2]), torch.optim.AdamW([p for p in params if p.ndim != 2])]


PAIRS = [("[ab].weight", functools.partial(torch.optim.Muon, lr=0.05)), ("*", functools.partial(torch.optim.AdamW))]
KINDS: dict[str, Any] = {"two": Two, "lookahead": Lookahead, "object": NoOptimizer, "list": listed, "pairs": PAIRS}


def one_device(factory: Any, steps: int = 4) -> dict[str, Tensor]:
    """The plain loop: the user's own object, or of pairs one optimizer after the other."""
    model = net()
    if callable(factory):
        found = factory(list(model.parameters()))
        optimizers = found if isinstance(found, list) else [found]
    else:
        named = dict(model.named_parameters())
        first = {n: p for n, p in named.items() if n in ("a.weight", "b.weight")}
        optimizers = [PAIRS[0][1](first.values()), PAIRS[1][1]([p for n, p in named.items() if n not in first])]
    for _ in range(steps):
        model.zero_grad()
        loss_fn(model, batch()).backward()  # type: ignore[no-untyped-call]
        for each in optimizers:
            each.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS)
def test_several_have_the_numbers_of_one_device(kind: str, plan: str) -> None:
    assert worst(under(plan, net(), KINDS[kind], loss_fn, batch()), one_device(KINDS[kind]), net()) < 1e-9


@pytest.mark.parametrize("kind", ["two", "lookahead", "pairs"])
@pytest.mark.parametrize(("plan", "other"), [("data=2 zero=3", "pipeline=2 micro=2"), ("", "tensor=2 data=2 zero=1")])
def test_state_of_all_goes_on_under_another_plan(kind: str, plan: str, other: str, tmp_path: Path) -> None:
    def first(trainer: Trainer) -> Any:
        for _ in range(3):
            trainer.step(batch())
        trainer.save(tmp_path)
        return copy.deepcopy(trainer.state_dict())

    def second(trainer: Trainer, state: Any) -> Any:
        trainer.prepare(batch())
        trainer.load(tmp_path) if state is None else trainer.load_state_dict(state)
        trainer.step(batch())
        return trainer.full_state_dict()

    expected = one_device(KINDS[kind])
    state = on_ranks(plan, net(), KINDS[kind], first)[0]
    for given in (None, state):
        found = on_ranks(other, net(), KINDS[kind], functools.partial(second, state=given))[0]
        assert worst(found, expected, net()) < 1e-9


def test_pairs_are_stepped_some_at_a_time_from_disk_and_wrappers_are_refused() -> None:
    plan = "data=2 zero=3 home.optimizer=disk home.parameters=disk"
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).double()
    pairs = [("0.*", functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)), ("*", torch.optim.AdamW)]
    data = torch.randn(4, 64, dtype=torch.float64)
    found = [under(each, model, pairs, _square, data, steps=2) for each in (plan, "")]
    assert worst(found[0], found[1], model) < 1e-9
    with pytest.raises(PlanError, match=r"Two steps several optimizers.*home.optimizer=disk.*pairs"):
        plait.verify(net(), loss_fn, batch(), plan, optimizer=Two)


def _square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Clipping(Two):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()


class ClippedSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "plan", "message"),
    [
        (Clipping, "tensor=2", "Clipping, which steps several optimizers, updates an element by the values of"),
        (
            Clipping,
            "pipeline=2 micro=2",
            "Clipping updates a tensor by the values of other tensors, and with pipeline=2",
        ),
        (
            ClippedSGD,
            "data=2 zero=1",
            "ClippedSGD updates an element by the values of other elements, or of other tensors",
        ),
        (
            ClippedSGD,
            "pipeline=2 micro=2",
            "ClippedSGD updates a tensor by the values of other tensors, and with pipeline=2",
        ),
    ],
)
def test_what_is_done_around_the_steps_is_tried_too(kind: Any, plan: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plait.verify(net(), loss_fn, batch(), plan, optimizer=functools.partial(kind, lr=0.1))
    assert plait.verify(net(), loss_fn, batch(), "data=2", optimizer=functools.partial(kind, lr=0.1)).ok


def test_lists_that_cannot_be() -> None:
    named = list(net().named_parameters())
    for bad, message in [
        ([("a.*", torch.optim.SGD)], "no optimizer is for conv.weight.*'a.\\*'; add a pair for the rest"),
        ([("*", torch.optim.SGD), ("b.*", torch.optim.SGD)], "'b.\\*' has nothing to train: earlier patterns take all"),
        (
            [("c.*", torch.optim.SGD), ("*", torch.optim.SGD)],
            "'c.\\*' has nothing to train: no parameter has",
        ),
        (lambda p: [torch.optim.SGD(p), 3], "returned a list, not a torch.optim.Optimizer, nor a list of"),
        (lambda p: [torch.optim.LBFGS(p)], "LBFGS runs the model several times"),
    ]:
        with pytest.raises(PlanError, match=message):
            make_optimizer(bad, named)
    for bad in ([], [torch.optim.SGD], [("*", torch.optim.SGD(net().parameters()))], {"*": torch.optim.SGD}):
        with pytest.raises(PlanError, match="no pair of a name pattern|the trainer makes its own"):
            Trainer(net(), loss_fn, bad, "")  # type: ignore[arg-type]


def test_servers_refuse_several() -> None:
    with pytest.raises(PlanError, match=re.escape("(Muon, AdamW) are several; use one optimizer, or data=N")):
        plait.verify(net(), loss_fn, batch(), "workers=2 servers=1", optimizer=PAIRS)


def test_clipping_scheduler_loss_scale_and_local_steps_are_over_all() -> None:
    model, data = net().float(), batch(torch.float32)
    for plan in ("data=2 precision=fp16 zero=1", "data=2 sync=2 moments=averaged"):
        assert plait.verify(model, loss_fn, data, plan, optimizer=PAIRS, steps=3).ok, plan
    assert plait.verify(net(), loss_fn, batch(), "tensor=2", optimizer=PAIRS, clip_norm=0.01).ok

    def rank(world: Any) -> list[float]:
        schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
        trainer = Trainer(net(), loss_fn, PAIRS, "tensor=2", world=world, scheduler=schedule)
        trainer.step(batch())
        assert isinstance(trainer.optimizer, CombinedOptimizer)
        return [group["lr"] for member in trainer.optimizer.members.values() for group in member.param_groups]

    assert plait.run_ranks(plait.Plan.parse("tensor=2").mesh, rank)[1] == [0.025, 0.0005]


class Hoarder(Two):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = [torch.zeros(3).add_(1)]
        super().step()


def test_tensors_that_a_checkpoint_would_lack_are_not_lost_silently(tmp_path: Path) -> None:
    trainer = Trainer(net(), loss_fn, Hoarder, "")
    trainer.step(batch())
    with pytest.raises(CheckpointError, match=r"Hoarder\(Muon, AdamW\) keeps tensors in its attribute seen"):
        trainer.save(tmp_path)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Muon])
def test_a_factory_may_make_its_scheduler(kind: Any) -> None:
    made: list[Any] = []

    def factory(params: Any) -> Any:
        optimizer = kind(params, lr=0.1)
        made.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)))
        return optimizer

    model = net(matrices_only=True)

    def rank(trainer: Trainer) -> Any:
        trainer.prepare(batch())
        scheduler = next(it for optimizer, it in made if optimizer is trainer.optimizer)
        for _ in range(3):
            trainer.step(batch())
            scheduler.step()
        return trainer.full_state_dict()

    twin = copy.deepcopy(model)
    optimizer = kind(twin.parameters(), lr=0.1)
    for power in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5**power
        twin.zero_grad()
        loss_fn(twin, batch()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found = on_ranks("tensor=2 data=2 zero=1", model, factory, rank)[0]
    assert worst(found, {n: p.detach() for n, p in twin.named_parameters()}, model) < 1e-7


@pytest.mark.parametrize("plan", ["tensor=2", "data=2 zero=3"])
def test_muon_in_float32_is_as_exact_as_its_bfloat16(plan: str) -> None:
    model = net(matrices_only=True).float()
    factory = functools.partial(torch.optim.Muon, lr=0.05)
    assert plait.verify(model, loss_fn, batch(torch.float32), plan, optimizer=factory, steps=3).ok


def test_verify_refuses_before_ranks_start() -> None:
    with pytest.raises(PlanError, match="LBFGS") as caught:
        plait.verify(net(), loss_fn, batch(), "tensor=2", optimizer=torch.optim.LBFGS)
    assert not isinstance(caught.value, RankFailed)
