"""The user's model: as it was after a failed start, an error while its weights are elsewhere, whole in gathered()."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_optimizers import batch, loss_fn, net, worst
from torch import Tensor, nn

import plait
from plait.api.trainer import Trainer
from plait.errors import ModelError, PlanError, RankFailed

ADAMW = functools.partial(torch.optim.AdamW, lr=0.02)
PLANS = ["data=2", "tensor=2", "data=2 zero=1", "data=2 zero=3", "pipeline=2 micro=2", "data=2 central=host"]


def on_ranks(plan: str, fn: Callable[..., Any], model: nn.Module | None = None, **more: Any) -> list[Any]:
    """As processes would: each rank has a model of its own, which its trainer adopts; rank 0's values count."""
    template = net() if model is None else model
    found = {"loss_fn": loss_fn, "optimizer": ADAMW, **more}

    def rank(world: Any) -> Any:
        mine = copy.deepcopy(template)
        for p in mine.parameters() if world.rank else ():
            p.data.add_(1.0)
        trainer = Trainer(mine, found["loss_fn"], found["optimizer"], plan, world=world)
        trainer.engine._adopt = True
        return fn(trainer, mine)

    return plait.run_ranks(plait.Plan.parse(plan).mesh, rank)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def spoil(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.zero_()
    raise ZeroDivisionError


def one_device(decay: float, steps: int, clamp_after: int) -> tuple[nn.Module, nn.Module]:
    """The model after so many steps, clamped in between, and its moving average."""
    model = net()
    optimizer, average = ADAMW(model.parameters()), copy.deepcopy(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_fn(model, batch()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for mean, p in zip(average.parameters(), model.parameters(), strict=True):
            mean.data.lerp_(p.data, 1 - decay)
        for p in model.parameters() if step + 1 == clamp_after else ():
            p.data.clamp_(-0.1, 0.1)
    return model, average


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_changed_inside_is_taken_over(plan: str) -> None:
    def rank(trainer: Trainer, model: nn.Module) -> Any:
        trainer.step(batch())
        with trainer.gathered() as same, torch.no_grad():
            assert same is model
            inside = float(loss_fn(model, batch()))
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)
        evaluated = float(trainer.evaluate(batch()))
        with trainer.gathered(write=False):
            for p in model.parameters():
                p.data.zero_()
        with pytest.raises(ZeroDivisionError), trainer.gathered(rank=0):
            spoil(model if trainer.world.rank == 0 else nn.Module())
        with trainer.gathered(at_once=False), torch.no_grad():
            by_op = float(loss_fn(model, batch()))
        trainer.step(batch())
        return inside, evaluated, by_op, trainer.full_state_dict()

    expected, _ = one_device(0.5, 2, clamp_after=1)
    before, _ = one_device(0.5, 1, clamp_after=9)
    clamped, _ = one_device(0.5, 1, clamp_after=1)
    for inside, evaluated, by_op, found in on_ranks(plan, rank):
        assert inside == pytest.approx(float(loss_fn(before, batch()).detach()), rel=1e-12)
        assert evaluated == pytest.approx(float(loss_fn(clamped, batch()).detach()), rel=1e-12)
        assert by_op == pytest.approx(evaluated, rel=1e-12)
        assert worst(found, values(expected), net()) < 1e-9


@pytest.mark.parametrize("plan", ["tensor=2", "data=2 zero=1"])
def test_changes_of_one_rank_reach_all_and_others_are_refused(plan: str) -> None:
    def one(trainer: Trainer, model: nn.Module) -> Any:
        trainer.prepare(batch())
        with trainer.gathered(rank=1):
            if trainer.world.rank == 1:
                for p in model.parameters():
                    p.data.fill_(3.0)
        return trainer.full_state_dict()

    def unlike(trainer: Trainer, model: nn.Module) -> None:
        trainer.prepare(batch())
        with trainer.gathered():
            next(model.parameters()).data.fill_(float(trainer.world.rank))

    assert all((value == 3.0).all() for found in on_ranks(plan, one) for value in found.values())
    with pytest.raises(RankFailed, match=r"weights after gathered\(\).*gathered\(rank=0\)"):
        on_ranks(plan, unlike)


class Normed(nn.Module):
    """A tied weight, a recurrent module, attention that reads its child's weight, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.recurrent(self.embedding(ids))[0]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        found: Tensor = self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return found


_ZEROS = torch.zeros(1, 2, 8, dtype=torch.float64)


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("plan", ["data=2 zero=3", "tensor=2"])
def test_tied_recurrent_and_attention_weights_and_buffers(plan: str) -> None:
    torch.manual_seed(0)
    template = Normed().double()
    ids = torch.randint(0, 12, (4, 6))

    def rank(trainer: Trainer, model: Any) -> Any:
        trainer.step(ids)
        with pytest.raises(ModelError, match="gathered"):  # tensor leaves recurrent weights whole
            (model if plan == "tensor=2" else model.recurrent)(ids if plan == "tensor=2" else _ZEROS)
        found = []
        model.eval()
        for at_once in (True, False):
            with trainer.gathered(at_once=at_once), torch.no_grad():
                assert model.head.weight is model.embedding.weight
                found.append(float(next_token(model, ids)))
                saved = {name: value.clone() for name, value in model.state_dict().items()}
                assert all(torch.equal(saved[n], v) for n, v in trainer.full_state_dict().items())
        return [*found, float(trainer.evaluate(ids))]

    for found in on_ranks(plan, rank, template, loss_fn=next_token):
        assert found == pytest.approx(found[:1] * 3, rel=1e-12)


class Following(nn.Module):
    """A trained layer, and one that follows it in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.k.weight.lerp_(self.q.weight, 0.5)
        return (self.q(x) - self.k(x) + 1).square().mean()


@pytest.mark.parametrize("adopt", [True, False])
def test_frozen_parameters_that_the_step_changes_begin_with_rank_0_s_values_and_are_in_the_model(adopt: bool) -> None:
    torch.manual_seed(0)
    template, x = Following().double(), torch.randn(4, 6, dtype=torch.float64)
    alone = copy.deepcopy(template)
    optimizer = ADAMW(alone.q.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        alone(x).backward()
        optimizer.step()

    def rank(trainer: Trainer, model: Any) -> Any:
        trainer.engine._adopt = adopt
        for _ in range(2):
            trainer.step(x)
        with trainer.gathered():
            found = {name: p.detach().clone() for name, p in model.named_parameters()}
            model.k.bias.data.fill_(3.0)
        return found, trainer.full_state_dict()

    for found, changed in on_ranks("data=2 zero=3", rank, template, loss_fn=lambda m, b: m(b)):
        torch.testing.assert_close(found, dict(alone.named_parameters()), rtol=1e-12, atol=1e-12)
        assert bool((changed["k.bias"] == 3.0).all()) and torch.equal(changed["k.weight"], found["k.weight"])


def test_tensors_outside_the_model_that_differ_on_ranks_are_refused() -> None:
    def rank(world: Any) -> None:
        torch.manual_seed(0)
        target = nn.Linear(6, 4).requires_grad_(False)
        target.bias.data += world.rank
        model = nn.Linear(6, 4)
        Trainer(model, lambda m, x: (m(x) - target(x)).square().mean(), ADAMW, "data=2", world=world).step(_INPUT)

    with pytest.raises(RankFailed, match="do not agree on the values of loss_fn:target.* 1 more.*torch.manual_seed"):
        plait.run_ranks(plait.Plan.parse("data=2").mesh, rank)


_INPUT = torch.randn(4, 6)

USES: dict[str, Callable[[Any], Any]] = {
    "forward": lambda model: loss_fn(model, batch()),
    "state_dict": lambda model: model.state_dict(),
    "save": lambda model: torch.save(model, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "to": lambda model: model.to(torch.float16),
    "load": lambda model: model.load_state_dict(net().state_dict()),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "data": lambda model: model.a.weight.data,
    "tolist": lambda model: model.a.weight.tolist(),
    "init": lambda model: nn.init.zeros_(model.a.weight),
    "another trainer": lambda model: Trainer(model, loss_fn, ADAMW, "").step(batch()),
}


def test_every_use_of_weights_that_are_elsewhere_says_what_to_do() -> None:
    def rank(trainer: Trainer, model: Any) -> dict[str, str]:
        trainer.step(batch())
        found = {}
        for name, use in USES.items() if trainer.world.rank == 0 else ():
            with pytest.raises(ModelError) as caught:
                use(model)
            found[name] = str(caught.value)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert shapes == {name: tuple(p.shape) for name, p in net().named_parameters()}
        assert all(isinstance(p, nn.Parameter) and p.dtype == torch.float64 for p in model.parameters())
        assert "a.weight, [12, 28] of torch.float64, which is elsewhere" in repr(model.a.weight)
        model.zero_grad()
        model.requires_grad_(True)
        trainer.step({"x": batch()["x"][:4], "y": batch()["y"][:4]})  # captured anew, over what stands in
        return found

    found = on_ranks("data=2 zero=3", rank)[0]
    assert len(found) == len(USES)
    assert all("under the plan 'data=2 zero=3'" in text and "trainer.gathered()" in text for text in found.values())
    assert found["data"].startswith("a.weight is not in the model now: ")


def test_weights_on_disk_are_elsewhere_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 4))
    data = torch.ones(4, 128)
    plan = "home.parameters=disk home.optimizer=disk"
    trainer = Trainer(model, lambda m, x: m(x).square().mean(), ADAMW, plan, scratch=tmp_path)
    trainer.step(data)
    with pytest.raises(ModelError, match=r"0.weight is not in the model now.*on the disk.*gathered"):
        model(data)
    with trainer.gathered(), torch.no_grad():
        model[0].weight.zero_()
    assert not trainer.full_state_dict()["0.weight"].any()
    trainer.close()


@pytest.mark.parametrize("plan", ["data=2", "tensor=2 data=2 zero=3", "data=2 central=host"])
def test_after_a_failed_start_the_model_is_as_it_was(plan: str) -> None:
    def rank(trainer: Trainer, model: nn.Module) -> None:
        model.eval()
        kept = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
        for _ in range(2):
            with pytest.raises(PlanError, match="returned a int"):
                trainer.step(batch())
            assert not trainer.engine.is_prepared and not model.training
            for name, p in model.named_parameters():
                before, place, value = kept[name]
                assert p is before and p.data_ptr() == place and torch.equal(p, value)
        trainer.engine.factories = (ADAMW, None)
        trainer.step(batch())

    on_ranks(plan, rank, optimizer=lambda params: 3)


def test_of_replicas_it_is_the_mean_and_changes_are_of_all() -> None:
    def rank(trainer: Trainer, model: nn.Module) -> Any:
        trainer.step(batch())
        mean = trainer.full_state_dict()
        own = values(model)
        with trainer.gathered():
            inside = values(model)
            next(model.parameters()).data.fill_(0.25)
        return mean, own, inside, values(model)

    (mean, own, inside, after), (_, other, _, same) = on_ranks("data=2 sync=3 outer=nesterov", rank)
    assert all(torch.allclose(inside[name], value) for name, value in mean.items())
    first, *rest = list(own)
    assert not torch.equal(own[rest[0]], other[rest[0]])
    assert (after[first] == 0.25).all() and torch.equal(after[first], same[first])
    assert all(torch.equal(after[name], own[name]) for name in rest)


@pytest.mark.parametrize(("plan", "other"), [("", "data=2 zero=3"), ("pipeline=2 micro=2", "tensor=2 data=2 zero=2")])
def test_the_moving_average_goes_on_under_another_plan(plan: str, other: str, tmp_path: Path) -> None:
    def first(trainer: Trainer, model: nn.Module) -> Any:
        trainer.ema(0.7)
        for _ in range(2):
            trainer.step(batch())
        trainer.save(tmp_path)
        return copy.deepcopy(trainer.state_dict())

    def second(trainer: Trainer, model: nn.Module, state: Any) -> Any:
        average = trainer.ema(0.7)
        trainer.prepare(batch())
        trainer.load(tmp_path) if state is None else trainer.load_state_dict(state)
        trainer.step(batch())
        with average.applied():
            loss, whole = float(trainer.evaluate(batch())), trainer.full_state_dict()
        with trainer.gathered(ema=True):
            inside = values(model)
        trainer.step(batch())
        return loss, whole, inside, trainer.full_state_dict()

    _, average = one_device(0.7, 3, 9)
    last, _ = one_device(0.7, 4, 9)
    state = on_ranks(plan, first)[0]
    for given in (None, state):
        loss, whole, inside, end = on_ranks(other, functools.partial(second, state=given))[0]
        assert loss == pytest.approx(float(loss_fn(average, batch()).detach()), rel=1e-9)
        assert worst(whole, values(average), net()) < 1e-9 and worst(inside, values(average), net()) < 1e-9
        assert worst(end, values(last), net()) < 1e-9


def test_what_gathered_and_ema_cannot() -> None:
    trainer = Trainer(net(), loss_fn, ADAMW, "")
    with pytest.raises(PlanError, match="not seen a batch yet"):
        trainer.state_dict()
    trainer.prepare(batch())
    with pytest.raises(PlanError, match="rank=2: the plan has ranks 0 to 0"), trainer.gathered(rank=2):
        pass
    with pytest.raises(PlanError, match="rank=0 alone cannot"), trainer.gathered(rank=0, at_once=False):
        pass
    with pytest.raises(PlanError, match=r"call trainer.ema\(decay\) first"), trainer.gathered(ema=True):
        pass
    with pytest.raises(ModelError, match="gathered already"), trainer.gathered(), trainer.gathered():
        pass
    for decay in (1.0, -0.1):
        with pytest.raises(PlanError, match=f"decay={decay}"):
            trainer.ema(decay)

    def rank(world: Any) -> None:
        with pytest.raises(PlanError, match="replicas that agree later"):
            Trainer(net(), loss_fn, ADAMW, "data=2 sync=2", world=world).ema(0.9)

    plait.run_ranks(plait.Plan.parse("data=2").mesh, rank)
