"""Random ops, each written with one function, `draw(shape, dtype, device, kind, params) -> Tensor`.

The captured graph and eager code both use that function, so that they draw the same numbers. A rank can draw any part
of a tensor, because an element's number depends on its global position only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import Target
from torch.types import Device
from torch.utils._python_dispatch import TorchDispatchMode

from plait.compile.ops.base import (
    NO_OP_SPEC,
    OP_SPECS,
    Args,
    Builder,
    Call,
    Kwargs,
    OpSpec,
    Placements,
    Shard,
    Strategy,
    register,
    state,
)
from plait.compile.ops.draw import draw
from plait.compile.ops.dropped_attention import DrawnDropout
from plait.compile.ops.higher_order import WrittenOut
from plait.errors import CaptureError

aten = torch.ops.aten
Draw = Callable[..., Tensor]


def check_random(op: Target, args: Args, kwargs: Kwargs) -> None:
    """Raise CaptureError for an op that draws random numbers without a row that says how."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return
    if (position := OP_SPECS.get(op, NO_OP_SPEC).dropout) is not None:
        rate = args[position] if len(args) > position else kwargs.get("dropout_p", 0.0)
        if not rate:
            return
    raise CaptureError(
        f"the random op {op} is not supported: its numbers would depend on the plan; draw with torch.rand, randn,"
        " randint, bernoulli or dropout and compute from that"
    )


def _fill(kind: str, *defaults: float) -> Callable[..., Tensor]:
    """x.kind_(*params)"""

    def fill(draw: Draw, x: Tensor, *params: float, generator: torch.Generator | None = None, **named: float) -> Tensor:
        values = (*params, *named.values(), *defaults[len(params) + len(named) :])
        return x.copy_(draw(x.shape, x.dtype, x.device, kind, tuple(float(v) for v in values)))

    return fill


def _functional(kind: str, *defaults: float) -> Callable[..., Tensor]:
    """kind(x, *params): random numbers in the shape of x"""

    def functional(
        draw: Draw, x: Tensor, *params: float, generator: torch.Generator | None = None, **named: float
    ) -> Tensor:
        values = (*params, *named.values(), *defaults[len(params) + len(named) :])
        return draw(x.shape, x.dtype, x.device, kind, tuple(float(v) for v in values))

    return functional


def _created(kind: str, params: tuple[float, ...]) -> Callable[..., Tensor]:
    """rand(size), randn(size)"""

    def create(
        draw: Draw, size: Sequence[int], *, dtype: torch.dtype | None = None, device: Device = None, **_: object
    ) -> Tensor:
        return draw(size, dtype or torch.get_default_dtype(), _device(device), kind, params)

    return create


def _alike(kind: str, params: tuple[float, ...]) -> Callable[..., Tensor]:
    """rand_like(x), randn_like(x)"""

    def create(
        draw: Draw, x: Tensor, *, dtype: torch.dtype | None = None, device: Device = None, **_: object
    ) -> Tensor:
        return draw(x.shape, dtype or x.dtype, device or x.device, kind, params)

    return create


def _device(device: Device) -> torch.device:
    return torch.device(device) if device is not None else torch.get_default_device()


def _randint(
    draw: Draw, high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, device: Device = None, **_: object
) -> Tensor:
    return draw(size, dtype or torch.int64, _device(device), "randint", (0, high))


def _randint_low(
    draw: Draw, low: int, high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, device: Device = None,
    **_: object,
) -> Tensor:  # fmt: skip
    return draw(size, dtype or torch.int64, _device(device), "randint", (low, high))


def _randint_like(
    draw: Draw, x: Tensor, *ends: int, dtype: torch.dtype | None = None, device: Device = None, **_: object
) -> Tensor:
    low, high = ends if len(ends) == 2 else (0, ends[0])
    return draw(x.shape, dtype or x.dtype, device or x.device, "randint", (low, high))


def _random(draw: Draw, x: Tensor, *ends: int | None, **_: object) -> Tensor:
    low = ends[0] if len(ends) == 2 and ends[0] is not None else 0
    high = ends[-1] if ends else None
    if high is None:
        limit = 1 << {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}.get(x.dtype, 0)
        high = limit + 1 if x.dtype.is_floating_point else 2 if x.dtype == torch.bool else torch.iinfo(x.dtype).max
    return x.copy_(draw(x.shape, x.dtype, x.device, "randint", (low, high)))


def _where_below(draw: Draw, shape: Sequence[int], p: Tensor) -> Tensor:
    return draw(shape, p.dtype if p.dtype.is_floating_point else torch.float32, p.device, "uniform", (0.0, 1.0)) < p


def _bernoulli(draw: Draw, p: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    return _where_below(draw, p.shape, p).to(p.dtype)


def _bernoulli_p(draw: Draw, x: Tensor, p: float | Tensor = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    if isinstance(p, Tensor):
        return _where_below(draw, x.shape, p).to(x.dtype)
    return draw(x.shape, x.dtype, x.device, "bernoulli", (p,))


def _bernoulli_inplace(
    draw: Draw, x: Tensor, p: float | Tensor = 0.5, *, generator: torch.Generator | None = None
) -> Tensor:
    return x.copy_(_bernoulli_p(draw, x, p))


def _normal(draw: Draw, mean: Tensor | float, std: Any = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    like = mean if isinstance(mean, Tensor) else std
    shape: torch.Size = torch.broadcast_shapes(getattr(mean, "shape", ()), getattr(std, "shape", ()))
    found: Tensor = draw(shape, like.dtype, like.device, "normal", (0.0, 1.0)) * std + mean
    return found


def _normal_sized(
    draw: Draw, mean: float, std: float, size: Sequence[int], *, dtype: torch.dtype | None = None,
    device: Device = None, **_: object,
) -> Tensor:  # fmt: skip
    return draw(size, dtype or torch.get_default_dtype(), _device(device), "normal", (mean, std))


def _native_dropout(draw: Draw, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = draw(x.shape, torch.bool, x.device, "bernoulli", (1 - p,))
    return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept


def _rrelu(
    draw: Draw, x: Tensor, noise: Tensor, low: float = 1 / 8, high: float = 1 / 3, training: bool = False,
    _: object = None,
) -> Tensor:  # fmt: skip
    if not training:
        return torch.where(x > 0, x, x * ((low + high) / 2))
    slope = torch.where(x > 0, 1.0, draw(x.shape, x.dtype, x.device, "uniform", (low, high)))
    noise.copy_(slope)
    return x * slope


def _randperm(draw: Draw, n: int, *, dtype: torch.dtype | None = None, device: Device = None, **_: object) -> Tensor:
    order = torch.argsort(draw((n,), torch.float64, _device(device), "uniform", (0.0, 1.0)))
    return order.to(dtype or torch.int64)


def _multinomial(
    draw: Draw, p: Tensor, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> Tensor:
    """Without replacement by an exponential race (Efraimidis and Spirakis 2006), with it by inverting the sums."""
    if not replacement or num_samples == 1:
        arrivals = draw(p.shape, p.dtype, p.device, "exponential", (1.0,))
        return torch.topk(p / arrivals, num_samples, dim=-1).indices
    sums = p.cumsum(-1)
    drawn = draw((*p.shape[:-1], num_samples), p.dtype, p.device, "uniform", (0.0, 1.0)) * sums[..., -1:]
    return (drawn.unsqueeze(-1) >= sums.unsqueeze(-2)).sum(-1).clamp(max=p.shape[-1] - 1)


_RANDOM: dict[OpOverload, Callable[..., Any]] = {
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli_p,
    aten.bernoulli.Tensor: _bernoulli_p,
    aten.bernoulli_.Tensor: _bernoulli_inplace,
    aten.bernoulli_.float: _bernoulli_inplace,
    aten.uniform.default: _functional("uniform", 0.0, 1.0),
    aten.uniform_.default: _fill("uniform", 0.0, 1.0),
    aten.normal_functional.default: _functional("normal", 0.0, 1.0),
    aten.normal_.default: _fill("normal", 0.0, 1.0),
    aten.exponential.default: _functional("exponential", 1.0),
    aten.exponential_.default: _fill("exponential", 1.0),
    aten.geometric.default: _functional("geometric"),
    aten.geometric_.default: _fill("geometric"),
    aten.cauchy_.default: _fill("cauchy", 0.0, 1.0),
    aten.log_normal_.default: _fill("log_normal", 1.0, 2.0),
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.normal.float_float: _normal_sized,
    aten.rand.default: _created("uniform", (0.0, 1.0)),
    aten.rand.generator: _created("uniform", (0.0, 1.0)),
    aten.randn.default: _created("normal", (0.0, 1.0)),
    aten.randn.generator: _created("normal", (0.0, 1.0)),
    aten.rand_like.default: _alike("uniform", (0.0, 1.0)),
    aten.randn_like.default: _alike("normal", (0.0, 1.0)),
    aten.randint.default: _randint,
    aten.randint.generator: _randint,
    aten.randint.low: _randint_low,
    aten.randint.low_generator: _randint_low,
    aten.randperm.default: _randperm,
    aten.randperm.generator: _randperm,
    aten.multinomial.default: _multinomial,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like,
    getattr(aten.random_, "from"): _random,
    aten.random_.to: _random,
    aten.random_.default: _random,
    aten.native_dropout.default: _native_dropout,
    aten.rrelu_with_noise.default: _rrelu,
}
for _op, _drawn in _RANDOM.items():
    state(_op, random=_drawn)


_BLOCKS = (1, 2, 3, 4)  # numbers of blocks that a reader may want


def _parts(call: Call, given: Placements, size: int) -> Sequence[Strategy]:
    """Sharded along any dim, in any number of blocks."""
    local = list(call.arg(2))
    for _, parts, dim, _ in call.arg(7, "cuts", ()):
        local[dim] //= parts
    return [Strategy((), (Shard(d, b),)) for d, n in enumerate(local) for b in _BLOCKS if n and n % (b * size) == 0]


def emit_draw(b: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Node:
    """The same draw with one more cut."""
    (placement,) = strategy.outputs
    *head, cuts = args if len(args) == 8 else (*args, ())
    if isinstance(placement, Shard):
        cuts = (*cuts, (b.coordinate(), b.size, placement.dim, placement.blocks))
    return b.call(draw, *head, cuts)


register(draw, spec=OpSpec(strategies=_parts, emit=emit_draw))


class GlobalRandom(TorchDispatchMode):
    """Runs eager code with the random numbers of the captured graph: the same ops, in the same order, under `key`."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self._key = key
        self._index = 0
        self._modes: list[ExitStack] = []

    def __enter__(self) -> GlobalRandom:
        self._modes.append(ExitStack())
        self._modes[-1].enter_context(DrawnDropout())
        self._modes[-1].enter_context(WrittenOut())
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._modes.pop().close()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing here is compiled, and torch's guard against that takes as long as the call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replace = OP_SPECS.get(func, NO_OP_SPEC).random
        if replace is not None:
            return replace(self._draw, *args, **kwargs)
        check_random(func, args, kwargs)
        return func(*args, **kwargs)

    def _draw(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, kind: str, params: tuple[float, ...]
    ) -> Tensor:
        self._index += 1
        return draw(self._key, self._index - 1, tuple(shape), dtype, device, kind, params)
