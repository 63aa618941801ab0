"""Convolution, pooling, resampling and other ops on planes.

Convolution, forward and backward, is sharded over samples, filters, input channels and groups; the other ops over
samples and channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from plait.compile.ops.base import (
    REPLICATE,
    Args,
    Builder,
    Call,
    Emit,
    Emitted,
    Factor,
    Kwargs,
    OpSpec,
    Partial,
    Placement,
    Placements,
    Shard,
    Strategy,
    by_number,
    no_groups,
    register,
    state,
)
from plait.compile.ops.dims import aten, blocks_of, first_operand, overloads, put, sharded_strategy
from plait.spec.layout import Blocks, divides

BATCH, FILTERS, CHANNELS, GROUPS = "batch", "filters", "channels", "groups"
# Dims of (input, weight, output) that each factor runs through, for a weight of [filters, channels, ...].
_DIMS = {BATCH: (0, None, 0), FILTERS: (None, 0, 1), CHANNELS: (1, 1, None), GROUPS: (1, 0, 1)}


def _dims(kind: str, transposed: bool) -> tuple[int | None, int | None, int | None]:
    """The dims of a factor. The weight of a transposed convolution is [channels, filters, ...]."""
    x, weight, out = _DIMS[kind]
    return x, (1 - weight if transposed and weight is not None and kind != GROUPS else weight), out


def _part(dim: int | None, blocks: Blocks) -> Placement:
    return REPLICATE if dim is None else Shard(dim, blocks)


def _kinds(groups: int, size: int, blocks: Blocks) -> Sequence[str]:
    if groups == 1:
        return (BATCH, FILTERS, CHANNELS)
    return (BATCH, GROUPS) if divides((groups,), Shard(0, blocks), size) else (BATCH,)


def _forward(call: Call, given: Placements, size: int) -> list[Strategy]:
    """(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    transposed, groups = call.args[6], call.args[8]
    found = []
    for b in sorted({1} | {p.blocks for p in given if isinstance(p, Shard)}, key=by_number):
        for kind in _kinds(groups, size, b):
            x, weight, out = _dims(kind, transposed)
            inputs: list[Placement] = [_part(x, b), _part(weight, b)]
            if len(call.inputs) == 3:
                inputs.append(_part(None if kind in (BATCH, CHANNELS) else 0, b))
            result = Partial() if out is None else Shard(out, b)
            found.append(Strategy(tuple(inputs), (result,), _emit_of(kind)))
    return found


def _emit_of(kind: str) -> Emit | None:
    return {CHANNELS: _emit_terms, GROUPS: _emit_groups}.get(kind)


def _emit_terms(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    """Partial sums over input channels; the bias is divided among the ranks, so that it counts once."""
    if args[2] is not None:
        args = put(args, 2, builder.call(aten.div.Scalar, args[2], builder.size))
    return builder.call(call.op, *args)


def _emit_groups(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    return builder.call(call.op, *put(args, 8, args[8] // builder.size))


def _groups_linear(call: Call) -> list[tuple[int, ...]]:
    """With a bias, linear in the bias and either operand jointly."""
    return [(0, 2), (1, 2)] if len(call.inputs) == 3 else [(0,), (1,)]


def _backward(call: Call, given: Placements, size: int) -> list[Strategy]:
    """(grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask)."""
    transposed, groups = call.args[7], call.args[9]
    found = []
    for b in sorted({1} | {p.blocks for p in given if isinstance(p, Shard)}, key=by_number):
        for kind in _kinds(groups, size, b):
            x, weight, out = _dims(kind, transposed)
            # A gradient without the factor is a sum over it, except the bias's, which does not depend on channels.
            dx = Partial() if x is None else Shard(x, b)
            dw = Partial() if weight is None else Shard(weight, b)
            db: Placement = Partial() if kind == BATCH else _part(None if kind == CHANNELS else 0, b)
            outputs = tuple(
                REPLICATE if spec is None else p for spec, p in zip(call.outputs, (dx, dw, db), strict=True)
            )
            inputs = (_part(out, b), _part(x, b), _part(weight, b))
            found.append(Strategy(inputs, outputs, _emit_backward_of(kind)))
    return found


def _emit_backward_of(kind: str) -> Emit | None:
    return {FILTERS: _emit_filters_backward, GROUPS: _emit_groups_backward}.get(kind)


def _emit_filters_backward(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    sizes = None if args[3] is None else [n // builder.size for n in args[3]]
    return builder.call(call.op, *put(args, 3, sizes))


def _emit_groups_backward(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    return _emit_filters_backward(builder, call, strategy, put(args, 9, args[9] // builder.size), kwargs)


register(*overloads("convolution"), spec=OpSpec(strategies=_forward, linear=_groups_linear, weighted=True))
register(*overloads("convolution_backward"), spec=OpSpec(strategies=_backward, linear=first_operand))


def _of_a_library(transposed: bool, bias: bool) -> Callable[..., Tensor]:
    """At capture: a convolution of cuDNN or MIOpen, (x, weight, [bias], padding, [output_padding], stride, dilation,
    groups, ...), without its way of choosing a kernel."""

    def convolution(x: Tensor, weight: Tensor, *rest: Any) -> Any:
        b, rest = (rest[0], rest[1:]) if bias else (None, rest)
        padding, rest = list(rest[0]), rest[1:]
        wider, rest = (list(rest[0]), rest[1:]) if transposed else ([0] * len(padding), rest)
        stride, dilation, groups = rest[:3]
        return aten.convolution.default(x, weight, b, stride, padding, dilation, transposed, wider, groups)

    return convolution


for _name, _transposed, _bias in (
    ("cudnn_convolution", False, False), ("cudnn_convolution_transpose", True, False),
    ("miopen_convolution", False, True), ("miopen_convolution_transpose", True, True),
    ("miopen_depthwise_convolution", False, True),
):  # fmt: skip
    state(*overloads(_name), instead=_of_a_library(_transposed, _bias))


def _planes(num_dims: int) -> Callable[[Call], Sequence[Factor]]:
    """Factors of all dims before the last `num_dims`, the same in every tensor."""

    def factors(call: Call) -> list[Factor]:
        tensors = len(call.inputs), len(call.outputs)
        return [Factor((d,) * tensors[0], (d,) * tensors[1]) for d in range(call.inputs[0].ndim - num_dims)]

    return factors


def _samples(call: Call) -> list[Factor]:
    return [Factor((0,) * len(call.inputs), (0,) * len(call.outputs))]


_UPSAMPLE = {
    1: ("nearest1d", "_nearest_exact1d", "linear1d"),
    2: ("nearest2d", "_nearest_exact2d", "bilinear2d", "bicubic2d", "_bilinear2d_aa", "_bicubic2d_aa"),
    3: ("nearest3d", "_nearest_exact3d", "trilinear3d"),
}
for _n, _modes in _UPSAMPLE.items():
    for _mode in _modes:
        _name = f"_upsample{_mode}" if _mode.startswith("_") else f"upsample_{_mode}"
        _forward_spec = OpSpec(factors=_planes(_n), linear=first_operand, by_device=True)
        register(*overloads(_name, f"{_name}.vec"), spec=_forward_spec)
        # (grad, output_size, input_size, ...): input_size is the whole shape of the result.
        register(*overloads(f"{_name}_backward"), spec=OpSpec(factors=_planes(_n), linear=first_operand, sizes=2))

for _n in (2, 3):
    _averages = (f"avg_pool{_n}d", f"_adaptive_avg_pool{_n}d")
    register(
        *overloads(*_averages, *(f"{name}_backward" for name in _averages)),
        spec=OpSpec(factors=_planes(_n), linear=first_operand),
    )
    _maxima = (f"max_pool{_n}d_with_indices", f"adaptive_max_pool{_n}d")
    register(*overloads(*_maxima), spec=OpSpec(factors=_planes(_n)))
    register(
        *overloads(*(f"{name}_backward" for name in _maxima)),
        spec=OpSpec(factors=_planes(_n), linear=first_operand, formats=True),
    )
    register(*overloads(f"max_unpool{_n}d"), spec=OpSpec(factors=_planes(_n)))

register(*overloads("im2col", "col2im"), spec=OpSpec(factors=_samples, linear=first_operand))
register(
    *overloads("grid_sampler_2d", "grid_sampler_3d"),
    spec=OpSpec(factors=_samples, linear=first_operand, by_device=True),
)


def _samples_of_each(call: Call, given: Placements, size: int) -> list[Strategy]:
    """As `_samples`, for an op of which not every result is asked for."""
    inputs, outputs = [0] * len(call.inputs), [0] * len(call.outputs)
    return [sharded_strategy(call, inputs, outputs, b) for b in blocks_of(given, inputs)]


register(
    *overloads("grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    spec=OpSpec(strategies=_samples_of_each, linear=first_operand, by_device=True),
)


def _shuffled(call: Call) -> list[Factor]:
    return [Factor((d,), (d,)) for d in range(call.inputs[0].ndim) if d != 1]


register(*overloads("channel_shuffle"), spec=OpSpec(factors=_shuffled, linear=first_operand))


def _with_random_places(call: Call) -> list[Factor]:
    """Fractional pooling: samples and channels, for each of which random numbers are given."""
    x, *others = call.inputs
    return [
        Factor((d,) * len(call.inputs), (d,) * len(call.outputs))
        for d in (0, 1)
        if all(s.shape[d] == x.shape[d] for s in others)
    ]


for _n in (2, 3):
    register(*overloads(f"fractional_max_pool{_n}d"), spec=OpSpec(factors=_with_random_places))
    register(
        *overloads(f"fractional_max_pool{_n}d_backward"),
        spec=OpSpec(factors=_with_random_places, linear=first_operand, formats=True),
    )
register(
    *overloads("pixel_shuffle", "pixel_unshuffle"),
    spec=OpSpec(factors=_planes(3), linear=first_operand, by_device=True),
)


def _spectrum(call: Call) -> list[Factor]:
    """Fourier transforms: factors of the dims that are not transformed."""
    busy = {d % call.inputs[0].ndim for d in call.args[1]}
    return [Factor((d,), (d,)) for d in range(call.inputs[0].ndim) if d not in busy]


for _op in overloads("_fft_r2c", "_fft_c2c", "_fft_c2r"):
    _groups = first_operand if _op is aten._fft_c2c.default else no_groups
    register(_op, spec=OpSpec(factors=_spectrum, linear=_groups, by_device=True))
