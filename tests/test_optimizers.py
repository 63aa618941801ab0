"""Optimizers on parts of tensors: the numbers of one device, or a refusal that says what works."""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.api.job.config import Config
from plait.api.job.from_config import optimizer_factory
from plait.api.trainer import Trainer
from plait.comm.protocol import World
from plait.engine.compiler import Captures, Compiler
from plait.engine.optimizer_trials import state_layouts
from plait.engine.rank_optimizers import OptimizerFactory
from plait.errors import ConfigError, PlanError, RankFailed
from plait.optim import Lamb
from plait.optim.adafactor import Adafactor
from plait.spec.layout import Layout, Only, Shard

STEPS = 4
OPTIMIZERS = [
    value
    for _, value in sorted(vars(torch.optim).items())
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
]
REFUSED = {torch.optim.LBFGS: "LBFGS runs the model several times.*AdamW", torch.optim.SparseAdam: "sparse.*use Adam"}


class Net(nn.Module):
    """Sizes that two ranks cut evenly, unevenly (7, 5) and not at all (1); tensors of one to four dims."""

    def __init__(self, matrices_only: bool = False) -> None:
        super().__init__()
        self.conv = None if matrices_only else nn.Conv2d(1, 7, 2, stride=2)
        self.a = nn.Linear(16 if matrices_only else 28, 12, bias=not matrices_only)
        self.b = nn.Linear(12, 5, bias=not matrices_only)
        self.head = nn.Linear(5, 1, bias=not matrices_only)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1) if self.conv is None else self.conv(x).flatten(1)
        found: Tensor = self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return found


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["x"])[:, 0] - batch["y"]).square().mean()


def batch(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(8, 1, 4, 4, generator=generator, dtype=dtype),
        "y": torch.randn(8, generator=generator, dtype=dtype),
    }


def net(matrices_only: bool = False) -> Net:
    torch.manual_seed(1)
    return Net(matrices_only).double()


def one_device(model: nn.Module, factory: Callable[..., Any], loss: Any, data: Any, steps: int = STEPS) -> Any:
    model = copy.deepcopy(model)
    optimizer = factory(list(model.parameters()))
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, data).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def under(plan: str, model: nn.Module, factory: OptimizerFactory, loss: Any, data: Any, steps: int = STEPS) -> Any:
    def rank(trainer: Trainer) -> Any:
        for _ in range(steps):
            trainer.step(data)
        return trainer.full_state_dict()

    return on_ranks(plan, model, factory, rank, loss, data)[0]


def on_ranks(
    plan: str,
    model: nn.Module,
    factory: OptimizerFactory,
    fn: Callable[[Trainer], Any],
    loss: Any = loss_fn,
    data: Any = None,
) -> list[Any]:
    """What `fn` returns of each rank's trainer; they share a capture, of which threads can make one at a time."""
    compiler = Compiler(Captures(model, loss), plait.Plan.parse(plan))
    compiler.compiled(batch() if data is None else data)

    def rank(world: World) -> Any:
        return fn(Trainer(model, loss, factory, plan, world=world, compiler=compiler))

    return plait.run_ranks(compiler.plan.mesh, rank)


def worst(found: dict[str, Tensor], expected: dict[str, Tensor], start: nn.Module) -> float:
    """The largest difference of a parameter, as part of how far training moved it."""
    before = {name: p.detach() for name, p in start.named_parameters()}
    return max(
        float((found[name] - value).abs().max() / (value - before[name]).abs().max())
        for name, value in expected.items()
    )


class Anchored(torch.optim.Optimizer):
    """Its constructor makes its state, as those of torch's Adagrad do in some versions."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {
                "sum": torch.full_like(p, 0.5), "anchor": p.detach().clone(), "step": torch.tensor(0.0)
            }  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["step"] += 1
                state["sum"] += p.grad.square()
                p -= group["lr"] / state["step"] * (p.grad / state["sum"].sqrt() + 0.1 * (p - state["anchor"]))


@pytest.mark.parametrize("kind", [*OPTIMIZERS, Lamb, Anchored], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("plan", ["tensor=2 data=2 zero=1", "data=2 zero=3"])
def test_every_optimizer_has_the_numbers_of_one_device_or_is_refused(kind: Any, plan: str) -> None:
    model = net(matrices_only=kind is torch.optim.Muon)
    if kind in REFUSED:
        with pytest.raises(RankFailed, match=REFUSED[kind]):
            under(plan, model, kind, loss_fn, batch())
        return
    found = under(plan, model, kind, loss_fn, batch())
    assert worst(found, one_device(model, kind, loss_fn, batch()), model) < 1e-7


CASES = [
    functools.partial(Lamb, lr=0.02),
    functools.partial(torch.optim.Adafactor, lr=0.05, weight_decay=0.1, d=1.5, maximize=False),
]


class Attention(nn.Module):
    """Queries, keys and values from one weight, which tensor parallelism cuts in three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.fused(x).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


@pytest.mark.parametrize("factory", CASES, ids=lambda f: f.func.__name__)
@pytest.mark.parametrize("plan", ["tensor=2", "tensor=2 data=2 zero=3", "replica=2 data=2 zero=2", "data=3 zero=1"])
def test_norms_are_of_whole_tensors(factory: Any, plan: str) -> None:
    torch.manual_seed(0)
    model = Attention().double()
    data = torch.randn(12, 5, 8, dtype=torch.float64)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    def rank(trainer: Trainer) -> Any:
        for _ in range(STEPS):
            trainer.step(data)
        return trainer.full_state_dict(), trainer.layouts["fused.weight"]

    found, layout = on_ranks(plan, model, factory, rank, loss, data)[0]
    assert ("tensor", Shard(0, blocks=3)) in layout.placements or "tensor" not in plan
    assert worst(found, one_device(model, factory, loss, data), model) < 1e-7


@pytest.mark.parametrize("zero", [1, 3])
def test_lamb_in_float32_to_a_millionth(zero: int) -> None:
    model = net().float()
    factory = functools.partial(Lamb, lr=0.02)
    expected = one_device(model, factory, loss_fn, batch(torch.float32))
    found = under(f"tensor=2 data=2 zero={zero}", model, factory, loss_fn, batch(torch.float32))
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-6, atol=1e-6), name


def test_lamb_is_what_its_paper_says() -> None:
    x = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    optimizer = Lamb([x], lr=0.1, betas=(0.5, 0.75), eps=0.25, weight_decay=0.5)
    value, m, v = x.detach().clone(), torch.zeros(2), torch.zeros(2)
    for step, gradient in enumerate((torch.tensor([1.0, -2.0]), torch.tensor([0.5, 4.0])), start=1):
        x.grad = gradient.double()
        optimizer.step()
        m = 0.5 * m + 0.5 * gradient.double()
        v = 0.75 * v + 0.25 * gradient.double() ** 2
        u = (m / (1 - 0.5**step)) / ((v / (1 - 0.75**step)).sqrt() + 0.25) + 0.5 * value
        value = value - 0.1 * value.norm() / u.norm() * u
        assert torch.allclose(x.detach(), value, rtol=1e-12)
    zero = nn.Parameter(torch.zeros(2))
    zero.grad = torch.tensor([1.0, -1.0])
    Lamb([zero], lr=0.1, eps=0.0).step()
    assert zero.tolist() == pytest.approx([-0.1, 0.1])  # of no length yet: moved as Adam would
    for wrong in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}, {"lr": torch.ones(2)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Lamb([x], **wrong)  # type: ignore[arg-type]


def test_lamb_state_survives_a_copy_and_takes_groups_and_a_tensor_rate() -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}]
    one = Lamb(groups, lr=torch.tensor(0.1))
    for p in weights:
        p.grad = torch.randn_like(p)
    one.step()
    twins = [nn.Parameter(p.detach().clone()) for p in weights]
    other = Lamb([{"params": twins[:1]}, {"params": twins[1:], "weight_decay": 0.0}], lr=0.1)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for p, twin in zip(weights, twins, strict=True):
        twin.grad = p.grad
    one.step()
    other.step()
    assert all(torch.equal(p, twin) for p, twin in zip(weights, twins, strict=True))


@pytest.mark.parametrize(
    ("factory", "calls"), [(Lamb, {"data": 1, "tensor": 1}), (torch.optim.Adafactor, {"data": 2, "tensor": 2})]
)
def test_all_norms_travel_together(factory: Any, calls: dict[str, int]) -> None:
    def rank(trainer: Trainer) -> Counter[str]:
        trainer.step(batch())
        found: Counter[str] = Counter()
        for axis in ("data", "tensor"):
            comm = trainer.world.comm(axis)

            def counted(*args: Any, axis: str = axis, reduce: Any = comm.all_reduce, **more: Any) -> Any:
                found[axis] += 1
                return reduce(*args, **more)

            comm.all_reduce = counted  # type: ignore[method-assign]
        for p in trainer.executor.parameters.values():
            p.grad = torch.ones_like(p)
        assert trainer.optimizer is not None
        trainer.optimizer.step()
        return found

    for found in on_ranks("tensor=2 data=2 zero=1", net(), factory, rank):
        assert found == calls


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon, Lamb])
def test_state_goes_on_under_another_plan(kind: Any) -> None:
    def rank(trainer: Trainer, state: Any, steps: int) -> Any:
        if state is not None:
            trainer.load_state_dict(state)
        for _ in range(steps):
            trainer.step(data)
        return copy.deepcopy(trainer.state_dict()), trainer.full_state_dict()

    def run(plan: str, state: Any, steps: int) -> Any:
        return on_ranks(plan, model, kind, functools.partial(rank, state=state, steps=steps), data=data)[0]

    torch.manual_seed(2)
    layers = [nn.Linear(6, 16, bias=kind is not torch.optim.Muon), nn.Linear(16, 4, bias=False)]
    model = nn.Sequential(*layers).double()
    data = {"x": torch.randn(4, 6, dtype=torch.float64), "y": torch.randn(4, dtype=torch.float64)}
    expected = run("", None, 6)[1]
    state = run("tensor=2 data=2 zero=1", None, 2)[0]
    state = run("", state, 2)[0]
    found = run("data=2 zero=3", state, 2)[1]
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name


class Normed(torch.optim.SGD):
    """Divides each gradient by its own norm: not elementwise, and nobody has taught it parts."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(p.grad.norm())
        return super().step(closure)


class OnlyLarge(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            if any(p.shape[0] < 5 for p in group["params"]):
                raise ValueError("too small for me")
        return super().step(closure)


class Sole(torch.optim.SGD):
    """SGD with a step of each parameter's gradient that `of` makes, from what it has kept."""

    def of(self, group: Any, kept: Any, gradient: Tensor) -> Tensor:
        raise NotImplementedError

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.copy_(self.of(group, self.state[p], p.grad))
        return super().step(closure)


class Stable(Sole):
    """AdamW's steps, shorter where their mean square is above 1 (Wortsman et al. 2023): at first it is 1 everywhere."""

    def of(self, group: Any, kept: Any, gradient: Tensor) -> Tensor:
        kept["square"] = 0.99 * kept.get("square", gradient.square()) + 0.01 * gradient.square()
        ratio = gradient / (kept["square"].sqrt() + 1e-12)
        return ratio / ratio.square().mean().sqrt().clamp(min=1.0)


class Smallest(Sole):
    """Keeps the largest squares of each row and column (Anil et al. 2019): nothing of them shows at first."""

    def of(self, group: Any, kept: Any, gradient: Tensor) -> Tensor:
        square = gradient.square()
        if "of" in kept:
            dims = range(gradient.ndim)
            largest = [kept["of"].amax([d for d in dims if d != dim], keepdim=True) for dim in dims]
            square += functools.reduce(torch.minimum, largest)
        kept["of"] = square
        return gradient / (kept["of"].sqrt() + 1e-12)


class Estimating(Sole):
    """Estimates the distance to go from all elements, by which it moves once that is large (Mishchenko 2023)."""

    def of(self, group: Any, kept: Any, gradient: Tensor) -> Tensor:
        group["distance"] = group.get("distance", 0.0) + 1e-9 * float(gradient.abs().mean())
        return gradient * max(1e-6, group["distance"])


class Mostly(Sole):
    """A millionth of the step is that of the norm: another number all the same."""

    def of(self, group: Any, kept: Any, gradient: Tensor) -> Tensor:
        return gradient + 1e-4 * gradient.norm() * gradient.sign()


class Lerped(Sole):
    """Elementwise, in float32 whatever its parameters are in."""

    def of(self, group: Any, kept: Any, gradient: Tensor) -> Tensor:
        kept["mean"] = kept.get("mean", torch.zeros_like(gradient, dtype=torch.float32)).lerp(gradient, 0.1)
        return kept["mean"]


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad.add_(torch.randn_like(p), alpha=random.random())
        return super().step(closure)


@pytest.mark.parametrize("kind", [Stable, Smallest, Estimating, Mostly, Noisy])
def test_what_shows_only_in_later_steps_or_little_is_found_by_trying(kind: Any) -> None:
    factory = functools.partial(kind, lr=1e-3)
    with pytest.raises(RankFailed, match=f"{kind.__name__} updates an element by the values of other elements"):
        under("data=2 zero=1", net().float(), factory, loss_fn, batch(torch.float32), steps=1)
    if kind in (Estimating, Noisy):
        with pytest.raises(RankFailed, match=f"{kind.__name__} updates a tensor by the values of other tensors"):
            under("pipeline=2 micro=2", net().float(), factory, loss_fn, batch(torch.float32), steps=1)


def test_an_optimizer_that_takes_no_float64_is_tried_in_float32() -> None:
    under("data=2 zero=1", net().float(), functools.partial(Lerped, lr=0.1), loss_fn, batch(torch.float32), steps=1)


@pytest.mark.parametrize("plan", ["data=2", "data=2 sync=2", "data=2 micro=2"])
def test_ranks_draw_the_same_in_the_optimizer(plan: str) -> None:
    found = plait.verify(net(), loss_fn, batch(), plan, optimizer=functools.partial(Noisy, lr=0.1))
    assert found.ok, found
    state = torch.get_rng_state()
    under("data=2", net(), functools.partial(Noisy, lr=0.1), loss_fn, batch(), steps=1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("kind", "plan", "message"),
    [
        (Normed, "tensor=2", r"Normed updates an element by the values.*cut of \S+ \(f32\[.*data=2, which cuts no"),
        (Normed, "data=2 zero=1", r"Normed updates an element by the values.*plait.optim.Lamb.*bind\(parts\)"),
        (OnlyLarge, "data=2 zero=1", r"cannot be tried on a small tensor \(ValueError: too small for me\)"),
    ],
)
def test_what_is_not_elementwise_is_found_by_trying(kind: Any, plan: str, message: str) -> None:
    model = net().float()
    with pytest.raises(RankFailed, match=message):
        under(plan, model, functools.partial(kind, lr=0.0), loss_fn, batch(torch.float32), steps=1)
    factory = functools.partial(kind, lr=0.1)
    under("data=2", nn.Sequential(nn.Linear(8, 8)), factory, lambda m, b: m(b).square().mean(), torch.ones(4, 8), 1)


def test_trying_leaves_the_optimizer_alone() -> None:
    seen: list[int] = []

    def factory(named_parameters: Any) -> Any:
        optimizer = torch.optim.RMSprop(named_parameters, lr=0.0)
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
        return optimizer

    def rank(trainer: Trainer) -> None:
        trainer.prepare(batch())
        assert trainer.optimizer is not None
        (group,) = trainer.optimizer.param_groups
        assert not trainer.optimizer.state and not seen
        assert group["lr"] == 0.0 and len(group["params"]) == len(group["param_names"]) == 8
        trainer.step(batch())

    on_ranks("tensor=2", net(), factory, rank)
    assert len(seen) == 2


def test_adafactor_keeps_its_groups_and_names() -> None:
    def factory(named_parameters: Iterator[tuple[str, Tensor]]) -> Any:
        named = list(named_parameters)
        groups = [
            {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.5},
            {"params": [(n, p) for n, p in named if p.ndim <= 1], "lr": 0.5},
        ]
        return torch.optim.Adafactor(groups, lr=0.25)

    def rank(trainer: Trainer) -> None:
        trainer.prepare(batch())
        optimizer = trainer.optimizer
        assert type(optimizer) is Adafactor
        first, second = optimizer.param_groups
        assert (first["lr"], first["weight_decay"], second["lr"], second["weight_decay"]) == (0.25, 0.5, 0.5, 0.0)
        assert second["param_names"] == ["conv.bias", "a.bias", "b.bias", "head.bias"]

    on_ranks("data=2 zero=1", net(), factory, rank)


def test_an_optimizer_of_other_tensors_is_refused() -> None:
    model = net()
    trainer = Trainer(model, loss_fn, lambda _: torch.optim.SGD([nn.Parameter(torch.zeros(3))]), "")
    with pytest.raises(PlanError, match=r"SGD has a parameter of shape \[3\] that it was not given"):
        trainer.step(batch())


def test_layouts_of_state_are_known_without_the_parameter() -> None:
    matrix = Layout("f32", (8, 6), (("data", Shard(0)), ("tensor", Only(1))))
    vector = Layout("f32", (8,), (("data", Shard(0)),))
    held = nn.Parameter(torch.zeros(4))
    layouts = {"absent": matrix, "bias": vector}
    found = state_layouts(Adafactor([held]), {"bias": held}, layouts)
    assert found["bias"] == {"step": None, "variance": vector}
    whole = (("tensor", Only(1)),)
    assert found["absent"] == {
        "step": None,
        "row_var": Layout("f32", (8, 1), whole),
        "col_var": Layout("f32", (1, 6), whole),
    }
    found = state_layouts(torch.optim.SGD([held], momentum=0.9), {"bias": held}, layouts)
    assert found == {"absent": {"momentum_buffer": matrix}, "bias": {"momentum_buffer": vector}}
    assert not held.grad


def test_the_fused_update_is_used_where_there_is_one() -> None:
    def fused(factory: Any) -> Any:
        trainer = Trainer(net().float(), loss_fn, factory, "")
        trainer.prepare(batch(torch.float32))
        assert trainer.optimizer is not None
        return trainer.optimizer.param_groups[0].get("fused")

    assert fused(torch.optim.AdamW) is True
    assert fused(functools.partial(torch.optim.AdamW, foreach=True)) is None
    assert fused(Lamb) is None


def test_a_job_may_name_lamb() -> None:
    section = {"name": "Lamb", "lr": 0.02, "weight_decay": 0.1}
    optimizer = optimizer_factory(Config.model_validate({"optimizer": section}))([nn.Parameter(torch.zeros(2))])
    assert type(optimizer) is Lamb and optimizer.param_groups[0]["weight_decay"] == 0.1
    with pytest.raises(ConfigError, match="optimizer.name = 'Lars'; torch.optim and plait.optim have .*, Lamb, Muon"):
        optimizer_factory(Config.model_validate({"optimizer": {"name": "Lars"}}))


@pytest.mark.parametrize("options", [{"capturable": True}, {"capturable": True, "foreach": True}, {"foreach": True}])
def test_options_that_choose_a_kernel_leave_the_numbers(options: dict[str, bool]) -> None:
    """`capturable` is for accelerators, and PyTorch refuses it elsewhere: a plan for them is verified without."""
    factory = functools.partial(torch.optim.AdamW, lr=1e-2)
    found = under("data=2 zero=1", net(), functools.partial(factory, **options), loss_fn, batch())
    assert worst(found, one_device(net(), factory, loss_fn, batch()), net()) < 1e-9


def test_an_optimizer_for_an_accelerator_is_tried_on_the_host() -> None:
    model = nn.Linear(4, 4, device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), capturable=True)
    layout = Layout("f32", (4, 4), ())
    kept = state_layouts(optimizer, dict(model.named_parameters()), {"weight": layout})
    assert kept == {"weight": {"step": None, "exp_avg": layout, "exp_avg_sq": layout}}
