"""Pooling, resampling and other ops on planes: samples and channels can be sharded, the last dims stay whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.compile.ops.base import Call, Factor, OpSpec, no_groups, register
from plait.compile.ops.dims import aten, first_operand, overloads


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
        register(*overloads(_name, f"{_name}.vec"), spec=OpSpec(factors=_planes(_n), linear=first_operand))
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
register(*overloads("grid_sampler_2d", "grid_sampler_3d"), spec=OpSpec(factors=_samples, linear=first_operand))
register(*overloads("pixel_shuffle", "pixel_unshuffle"), spec=OpSpec(factors=_planes(3), linear=first_operand))


def _spectrum(call: Call) -> list[Factor]:
    """Fourier transforms: factors of the dims that are not transformed."""
    busy = {d % call.inputs[0].ndim for d in call.args[1]}
    return [Factor((d,), (d,)) for d in range(call.inputs[0].ndim) if d not in busy]


for _op in overloads("_fft_r2c", "_fft_c2c", "_fft_c2r"):
    register(_op, spec=OpSpec(factors=_spectrum, linear=first_operand if _op is aten._fft_c2c.default else no_groups))
