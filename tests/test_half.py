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
    _, found = plait.Trainer(model, loss, SGD, "data=1").step_with_gradients(batch())
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
    step = plait.Trainer.step_with_gradients

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        result, found = step(self, *args, **kwargs)
        return result, {name: gradient * 1.003 for name, gradient in found.items()}

    monkeypatch.setattr(plait.Trainer, "step_with_gradients", wrong)
    report = verifier(Apart, apart).verify("data=2")
    bad = {difference.name.partition(".")[0] for difference in report.gradients if difference.relative > 1e-4}
    assert bad == {"fine"}, report
