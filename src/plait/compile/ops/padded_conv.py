"""Convolution of stride 1 with zeros beyond both ends of each dim, as one call that may be cut along such a dim.

Calls of convolution, padding and slices become these before an axis cuts the sequence (compile/sharding/paddings.py). A
rank then needs the edges of the parts of its neighbours: a halo (as of Dryden et al. 2019, "Improving Strong-Scaling of
CNN Training by Exploiting Finer-Grained Parallelism").
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import Tensor
from torch.fx import Node
from torch.fx.node import Target

from plait.compile.ops import comm_ops
from plait.compile.ops.base import (
    REPLICATE,
    Args,
    Builder,
    Call,
    Emitted,
    Kwargs,
    OpSpec,
    Partial,
    Placement,
    Placements,
    Shard,
    Strategy,
    register,
)
from plait.compile.ops.dims import aten

Pads = Sequence[int]  # widths before and after each dim, from the last dim on, as constant_pad_nd takes them


def padded_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, pads: Pads, dilation: Sequence[int], groups: int
) -> Tensor:
    """A convolution of stride 1 of [samples, channels, *dims], of which `pads` zeros lie beyond the ends.

    Widths may be negative, as those of constant_pad_nd: so many positions are then left out.
    """
    inside = _inside(pads)
    wide = x if inside else aten.constant_pad_nd.default(x, list(pads))
    ones, zeros = [1] * len(dilation), [0] * len(dilation)
    return aten.convolution.default(wide, weight, bias, ones, inside or zeros, dilation, False, zeros, groups)  # type: ignore[no-any-return]


def padded_convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    pads: Pads,
    dilation: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of `padded_convolution` with respect to x, weight and bias: those that `mask` asks for."""
    inside = _inside(pads)
    wide = x if inside else aten.constant_pad_nd.default(x, list(pads))
    ones, zeros = [1] * len(dilation), [0] * len(dilation)
    dx, dw, db = aten.convolution_backward.default(
        grad, wide, weight, bias_sizes, ones, inside or zeros, dilation, False, zeros, groups, list(mask)
    )
    return dx if inside or dx is None else aten.constant_pad_nd.default(dx, [-n for n in pads]), dw, db


def _inside(pads: Pads) -> list[int]:
    """The widths of each dim, from the first on, if a convolution takes such as its padding; else nothing."""
    alike = all(before == after >= 0 for before, after in zip(pads[::2], pads[1::2], strict=True))
    return list(reversed(pads[::2])) if alike else []


def _pads_of(pads: Pads, dim: int, ndim: int) -> tuple[int, int]:
    """The widths before and after a dim."""
    at = 2 * (ndim - 1 - dim)
    before, after = pads[at : at + 2]
    return before, after


def _cuts(x: Placements, shape: Sequence[int], out: Sequence[int], pads: Pads, size: int) -> list[Shard]:
    """The parts of x that ranks can have: of a dim that stays as long as it is, and that is cut once into parts which
    are as long as the halo."""
    found = []
    for part in dict.fromkeys(p for p in x if isinstance(p, Shard) and p.dim >= 2 and p.blocks == 1):
        before, after = _pads_of(pads, part.dim, len(shape))
        fits = min(before, after) >= 0 and max(before, after) * size <= shape[part.dim]
        found += [part] if fits and shape[part.dim] == out[part.dim] else []
    return found


def _forward(call: Call, given: Placements, size: int) -> list[Strategy]:
    (out,) = call.outputs
    assert out is not None
    rest = (REPLICATE,) * (len(call.inputs) - 1)
    parts = _cuts(given[:1], call.inputs[0].shape, out.shape, call.args[3], size)
    return [Strategy((part, *rest), (part,), _emit, sends=True) for part in parts]


def _emit(b: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    (part,) = strategy.outputs
    assert isinstance(part, Shard)
    x, weight, bias, pads, dilation, groups = args
    wide = _halo(b, x, part, pads)
    return b.call(padded_convolution, wide, weight, bias, _without(pads, part, b.shape(x)), dilation, groups)


def _backward(call: Call, given: Placements, size: int) -> list[Strategy]:
    parts = _cuts(given[:2], call.inputs[1].shape, call.inputs[0].shape, call.args[4], size)
    found = []
    for part in parts:
        outputs: tuple[Placement, ...] = (part, Partial(), Partial())
        kept = tuple(REPLICATE if spec is None else p for spec, p in zip(call.outputs, outputs, strict=True))
        found.append(Strategy((part, part, REPLICATE), kept, _emit_backward, sends=True))
    return found


def _emit_backward(b: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    part = strategy.inputs[0]
    assert isinstance(part, Shard)
    grad, x, weight, sizes, pads, dilation, groups, mask = args
    wide, rest = _halo(b, x, part, pads), _without(pads, part, b.shape(x))
    made = b.call(padded_convolution_backward, grad, wide, weight, sizes, rest, dilation, groups, mask)
    dx, dw, db = (b.call(operator.getitem, made, i) for i in range(3))
    return _halo_sum(b, dx, part, pads) if mask[0] else dx, dw, db


def _without(pads: Pads, part: Shard, shape: Sequence[int]) -> list[int]:
    """The widths without those of the dim that is cut."""
    at = 2 * (len(shape) - 1 - part.dim)
    return [0 if i in (at, at + 1) else n for i, n in enumerate(pads)]


def _halo(b: Builder, x: Node, part: Shard, pads: Pads) -> Node:
    """A part with the edges of its neighbours."""
    before, after = _pads_of(pads, part.dim, len(b.shape(x)))
    return x if before == after == 0 else _edges(b, comm_ops.halo, x, part.dim, before, after, before + after)


def _halo_sum(b: Builder, grad: Node, part: Shard, pads: Pads) -> Node:
    """The gradient of a part: the neighbours' terms for its edges are added."""
    before, after = _pads_of(pads, part.dim, len(b.shape(grad)))
    if before == after == 0:
        return grad
    return _edges(b, comm_ops.halo_sum, grad, part.dim, before, after, -before - after)


def _edges(b: Builder, op: Target, x: Node, dim: int, before: int, after: int, more: int) -> Node:
    shape = list(b.shape(x))
    each = b.value(x).numel() // shape[dim] * b.value(x).element_size()
    shape[dim] += more
    num = before + after if b.size > 2 else max(before, after)  # the first rank and the last have one neighbour
    return b.node(op, (x, b.axis, dim, before, after), {}, b.value(x).new_empty(shape), each * num, "edges")


register(padded_convolution, spec=OpSpec(strategies=_forward, weighted=True))
register(padded_convolution_backward, spec=OpSpec(strategies=_backward))
