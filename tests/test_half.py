"""Half precision: the numbers of PyTorch's own kernels, and a tolerance that follows each value."""

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
from plait.compile.ops.split_sums import LargestParts, SplitSums

SGD = functools.partial(torch.optim.SGD, lr=0.0)
Act = Callable[[Tensor], Tensor]


class Gated(nn.Module):
    def __init__(self, activation: Act = F.silu, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm, self.activation = nn.LayerNorm(32), activation
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.gate.weight.dtype)
        return self.norm(self.down(self.activation(self.gate(x)) * self.up(x)) + x)  # type: ignore[no-any-return]


class Apart(nn.Module):
    """Two models in one: of one the numbers are bf16's, the other is float32 throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse, self.fine = Gated(dtype=torch.bfloat16), Gated()


def batch() -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return {"x": torch.randn(16, 32, generator=draws), "y": torch.randn(16, 32, generator=draws)}


def plain(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["x"]).float() - batch["y"]).square().mean()  # type: ignore[no-any-return]


def apart(model: Any, batch: Any) -> Tensor:
    return plain(model.coarse, batch) + plain(model.fine, batch)


def within_autocast(model: nn.Module, batch: Any, cache: bool = True) -> Tensor:
    """A region in bf16, one in it that is not, and a weight that is cast in each."""
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        x = model(batch["x"])
        with torch.autocast("cpu", enabled=False):
            x = model(x.float())
        x = model(x)
    return (x.float() - batch["y"]).square().mean()  # type: ignore[no-any-return]


@functools.cache
def verifier(make: Callable[[], nn.Module], loss: Callable[..., Tensor]) -> plait.Verifier:
    torch.manual_seed(0)
    return plait.Verifier(make(), loss, batch())


@pytest.mark.parametrize("activation", [F.silu, F.mish, F.gelu, F.hardswish])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_those_of_pytorchs_kernels(activation: Act, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_bits(Gated(activation, dtype), plain)


@pytest.mark.parametrize("cache", [True, False])
def test_autocast_within_the_loss_is_captured_as_it_runs(cache: bool) -> None:
    torch.manual_seed(0)
    check_bits(Gated(), functools.partial(within_autocast, cache=cache))


def check_bits(model: nn.Module, loss: Callable[..., Tensor]) -> None:
    twin = copy.deepcopy(model)
    trainer = plait.Trainer(model, loss, SGD, "data=1")
    trainer.forward_backward(batch())
    found = trainer.gradients()
    loss(twin, batch()).backward()
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None and found[name].equal(parameter.grad), name


@pytest.mark.parametrize("plan", ["data=2", "tensor=2", "data=2 pipeline=2 micro=4", "data=4 zero=2 micro=2"])
@pytest.mark.parametrize(
    ("make", "loss"),
    [(Gated, within_autocast), (functools.partial(Gated, dtype=torch.float16), plain), (Apart, apart)],
)
def test_half_precision_of_the_models_own_accord_verifies(make: Any, loss: Any, plan: str) -> None:
    report = verifier(make, loss).verify(plan)
    assert report.ok, report


def test_the_tolerance_follows_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a third of a percent is rounding in bf16, and an error beside it."""
    right = plait.Trainer.gradients

    def wrong(self: plait.Trainer) -> dict[str, Tensor]:
        return {name: gradient * 1.003 for name, gradient in right(self).items()}

    monkeypatch.setattr(plait.Trainer, "gradients", wrong)
    report = verifier(Apart, apart).verify("data=2")
    bad = {difference.name.partition(".")[0] for difference in report.gradients if difference.relative > 1e-4}
    assert bad == {"fine"}, report


class Tied(nn.Module):
    """A language model whose embedding is its head: it says again what it read, and its loss is near 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.norm(x + self.down(F.gelu(self.up(x)))))  # type: ignore[no-any-return]


def again(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


@pytest.mark.parametrize("seed", [8, 11, 27])
def test_a_loss_near_0_is_a_difference_of_large_numbers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One device is off by percents of it, which is no fault of a plan; an error beyond that is."""
    torch.manual_seed(seed)
    tied = plait.Verifier(Tied().bfloat16(), again, torch.randint(0, 16, (8, 12)))
    for plan in ("tensor=2", "tensor=4", "pipeline=2 micro=2"):
        report = tied.verify(plan)
        assert report.ok, report
    right = plait.Trainer._forward_backward

    def wrong(self: plait.Trainer, batch: Any, **options: Any) -> Any:
        return right(self, batch, **options) + 0.05

    monkeypatch.setattr(plait.Trainer, "_forward_backward", wrong)
    assert not tied.verify("tensor=2").ok


class Grouped(nn.Module):
    """Experts as DeepSeek-V3 computes them: tokens in the order of their experts, one product for all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(4, a, b) * a**-0.5) for a, b in ((32, 64), (64, 32)))

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.gate(x).softmax(-1).topk(2, -1)
        expert = index.flatten()
        order = expert.argsort(stable=True)
        ends = F.one_hot(expert, 4).sum(0).cumsum(0).to(torch.int32)
        inner = F.silu(torch._grouped_mm(x[order // 2].bfloat16(), self.up.bfloat16(), offs=ends))
        out = torch._grouped_mm(inner, self.down.bfloat16(), offs=ends)
        return x + torch.zeros_like(x).index_add(0, order // 2, (out * weight.flatten()[order, None]).to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_by_a_grouped_product_in_bfloat16(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Grouped(), nn.Linear(32, 4)).to(dtype)
    grouped = plait.Verifier(model, lambda m, b: m(b).float().square().mean(), torch.randn(8, 32, dtype=dtype))
    for plan in ("data=2", "tensor=2", "data=2 tensor=2 zero=3 micro=2", "pipeline=2 micro=2"):
        report = grouped.verify(plan)
        assert report.ok, report


def ordered(model: nn.Module, batch: Tensor) -> Tensor:
    """Pairs of rows in their right order: the terms of the score's bias cancel over rows, but not over half of them."""
    score, right = model(batch[:, :8]).mean(1), batch[:, 8]
    return F.softplus(-(score[:, None] - score) * (right[:, None] - right).sign()).mean()


@pytest.mark.parametrize("seed", [16, 37])
def test_a_sum_of_parts_that_cancel(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank rounds its half of the sum, by a multiple of what the sum is. That explains no other tensor."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return ordered(model, batch)

    torch.manual_seed(seed)
    batch = torch.randn(8, 9)
    batch[:, 8] = torch.arange(8.0)
    verifier = plait.Verifier(nn.Linear(8, 4), loss, batch)
    report = verifier.verify("data=2")
    assert report.ok, report
    true = verifier._run_plan

    def wrong(*args: Any) -> Any:
        found, *rest = true(*args)
        found.gradients["weight"] += found.gradients["weight"].abs().max() * 0.1
        return found, *rest

    monkeypatch.setattr(verifier, "_run_plan", wrong)
    assert verifier.verify("data=2").first_bad.name == "weight"


@pytest.mark.parametrize("num_parts", [2, 3])
def test_split_sums_are_sums(num_parts: int) -> None:
    """The same numbers as PyTorch's but for rounding, of the sums that ranks have parts of."""
    torch.manual_seed(0)
    x, ids = torch.randn(6, 3, 8, 8, dtype=torch.bfloat16), torch.randint(0, 5, (6, 4))
    layers = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.LayerNorm(6), nn.Linear(6, 5), nn.Embedding(5, 5)]).bfloat16()

    def gradients() -> list[Tensor]:
        y = layers[2](layers[1](layers[0](x).tanh())) @ layers[3](ids).transpose(1, 2)[:, None]
        return list(torch.autograd.grad(y.tanh().sum() + y.square().sum((0, 1)).mean(), layers.parameters()))

    plain = gradients()
    with SplitSums(num_parts):
        split = gradients()
    assert any(not torch.equal(one, other) for one, other in zip(plain, split, strict=True))
    for one, other in zip(plain, split, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.06 * float(one.abs().max()))


def test_the_largest_parts_of_a_sum_that_cancel() -> None:
    layer = nn.Linear(4, 3, dtype=torch.float64)
    largest = []
    layer.bias.register_hook(lambda gradient: largest.append(float(parts.largest(gradient))))
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)[:, None]
    with LargestParts(2) as parts:
        ((layer(torch.randn(4, 4, dtype=torch.float64)) * signs).sum() + 0.5 * layer.bias.sum()).backward()
    assert float(layer.bias.grad.abs().max()) == 0.5
    assert largest == [2.0]
