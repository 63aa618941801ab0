"""One step on one device without chance, for comparing a batch with the same batch padded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from plait.comm.hidden_group import without_process_group
from plait.compile.capture.batch import count_rows, map_batch
from plait.compile.capture.capture import LossFn
from plait.compile.capture.capture_errors import users_line
from plait.compile.capture.loss_values import ROWS, Outputs, read_loss
from plait.compile.ops.base import NO_OP_SPEC, OP_SPECS
from plait.compile.ops.random import GlobalRandom
from plait.engine.model_copy import Twin


@dataclass(frozen=True)
class StepValues:
    """What a run of the step gave.

    values   tensors by what they are, in words
    outputs  what the loss function returned beside the loss
    eps      the rounding of the narrowest dtype in which something was computed
    """

    values: dict[str, Tensor]
    outputs: Outputs
    eps: float


def step_values(
    model: nn.Module, loss_fn: LossFn, train: bool, device: torch.device, batch: Any, dtype: torch.dtype | None
) -> StepValues:
    """The step on a copy of the model in this dtype, without chance."""

    def moved(_: str, leaf: Any) -> Any:
        if not torch.is_tensor(leaf):
            return leaf
        return leaf.to(device, dtype if dtype is not None and leaf.is_floating_point() else None).contiguous()

    batch = map_batch(moved, batch)
    twin = Twin(model, dtype)
    with _WithoutChance() as mode, torch.set_grad_enabled(train), twin.installed() as own:
        if not train:
            own.eval()
        with without_process_group(functools.partial(users_line, model, loss_fn)):
            loss = read_loss(loss_fn(own, batch), count_rows(batch))
            if train:
                loss.mean.backward()
    values = {"the loss": loss.mean.detach(), "the sum of its terms": loss.total.detach()}
    values |= {} if loss.weight is None else {"its weight": loss.weight.detach().double()}
    values |= {f"the gradient of {n}": p.grad for n, p in twin.named_parameters() if p.grad is not None}
    values |= {f"the buffer {n}": b for n, b in twin.named_buffers() if b.is_floating_point()}
    return StepValues(values, loss.outputs or {}, mode.eps)


def difference(without: StepValues, padded: StepValues) -> str:
    """What padding has changed by more than rounding, in words; empty if nothing."""
    tolerance = max(without.eps, padded.eps) ** 0.75
    if without.values.keys() != padded.values.keys():
        return f"{sorted(without.values.keys() ^ padded.values.keys())[0]} is there in one case only"
    largest = max((float(v.abs().max()) for n, v in without.values.items() if "gradient" in n and v.numel()), default=0)
    for name, value in without.values.items():
        other = padded.values[name]
        if value.shape != other.shape:
            return f"{name} has shape {list(value.shape)}, and {list(other.shape)} with padding"
        if not value.numel():
            continue
        scale = float(value.abs().max())
        if "gradient" in name:
            scale = max(scale, 1e-3 * largest)
        error = float((value - other).abs().max())
        if not error <= tolerance * scale + max(without.eps, padded.eps):
            shown = f"{_shown(value)}, and {_shown(other)} with padding"
            return f"{name} is {shown}" if value.numel() == 1 else f"{name} differs by {error:.3g} of {scale:.3g}"
    return ""


def dims_of_outputs(
    without: StepValues, padded: StepValues, lengths: Mapping[str, int], more: Mapping[str, int]
) -> tuple[dict[str, tuple[tuple[int, str], ...]], str]:
    """The dims of outputs that have positions of padding, and what padding changes in the outputs, in words."""
    found: dict[str, tuple[tuple[int, str], ...]] = {}
    tolerance = max(without.eps, padded.eps) ** 0.75
    for name, part in without.outputs.items():
        if (other := padded.outputs.get(name)) is None or other.kind != part.kind:
            return found, f"the output {name!r} is not there with padding"
        value, wide = part.value, other.value
        dims = []
        for dim, (short, long) in enumerate(zip(value.shape, wide.shape, strict=False)):
            if short == long:
                continue
            leaves = [leaf for leaf, number in more.items() if number == long - short]
            if part.kind != ROWS or not leaves or value.ndim != wide.ndim:
                return found, f"the output {name!r} has shape {list(value.shape)}, and {list(wide.shape)} with padding"
            leaf = min(leaves, key=lambda each: abs(lengths[each] - short))
            wide = wide.narrow(dim, 0, short)
            dims.append((dim, leaf))
        if dims:
            found[name] = tuple(dims)
        pairs = [(value, wide)]
        pairs += [(torch.as_tensor(part.weight), torch.as_tensor(other.weight))] if part.kind != ROWS else []
        for one, two in pairs:
            scale = float(one.double().abs().max()) if one.numel() else 0.0
            if one.numel() and not float((one.double() - two.double()).abs().max()) <= tolerance * (scale + 1):
                return found, f"the output {name!r} is {_shown(one)}, and {_shown(two)} with padding"
    return found, ""


def _shown(value: Tensor) -> str:
    return f"{float(value):.9g}" if value.numel() == 1 else f"a tensor of norm {float(value.double().norm()):.9g}"


class _NoDropout(TorchFunctionMode):
    """Runs fused attention without dropout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
                del kwargs["dropout_p"]
        return func(*args, **kwargs)


# The number that each kind of draw gives: numbers of other lengths would differ by chance.
_CONSTANT: dict[str, Callable[..., float]] = {
    "bernoulli": lambda p: float(p > 0), "uniform": lambda low, high: (low + high) / 2,
    "normal": lambda mean, std: mean + std / 2, "randint": lambda low, high: (int(low) + int(high) - 1) // 2,
    "exponential": lambda rate: 1 / rate, "geometric": lambda p: 1.0, "cauchy": lambda median, sigma: median + sigma,
    "log_normal": lambda mean, std: 1.0,
}  # fmt: skip


class _WithoutChance(GlobalRandom):
    """Runs eager code in which every random number is the same. `eps` is the coarsest rounding that was seen."""

    def __init__(self) -> None:
        super().__init__(0)
        self.eps = torch.finfo(torch.float64).eps
        self._no_dropout: list[_NoDropout] = []

    def __enter__(self) -> _WithoutChance:
        super().__enter__()
        self._no_dropout.append(_NoDropout())
        self._no_dropout[-1].__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._no_dropout.pop().__exit__(*exception)
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = OP_SPECS.get(func, NO_OP_SPEC).random
        found = func(*args, **(kwargs or {})) if drawn is None else drawn(self._draw, *args, **(kwargs or {}))
        for value in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(value, Tensor) and value.is_floating_point():
                self.eps = max(self.eps, torch.finfo(value.dtype).eps)
        return found

    def _draw(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, kind: str, params: tuple[float, ...]
    ) -> Tensor:
        return torch.full(tuple(shape), _CONSTANT[kind](*params), dtype=dtype, device=device)
