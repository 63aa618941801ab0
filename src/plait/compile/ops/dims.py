"""Dims and placements: what the families of rules share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch._ops import OpOverload

from plait.compile.ops.base import REPLICATE, Args, Call, Factor, Placement, Shard, Strategy, TensorSpec, by_number
from plait.spec.layout import Blocks

aten = torch.ops.aten
Dims = int | Sequence[int] | None  # of a reduction, as a graph has them
HALF = (torch.bfloat16, torch.float16)


def overloads(*names: str) -> list[OpOverload]:
    """ATen overloads by name (`add.Tensor`; `.default` may be left out), without those that this torch lacks."""
    found = []
    for name in names:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None)
        if op is not None:
            found.append(op)
    return found


def positive(dim: int, ndim: int) -> int:
    """A dim counted from the left."""
    return dim % ndim if ndim else 0


def dims_of(dims: Dims, ndim: int) -> tuple[int, ...]:
    """Dims counted from the left; all of them for None or an empty list."""
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return tuple(range(ndim))
    return tuple(positive(d, ndim) for d in (dims if isinstance(dims, Iterable) else (dims,)))


def broadcast_dim(shape: Sequence[int], dim: int, out: Sequence[int]) -> int | None:
    """The dim of an operand of `shape` that corresponds to `dim` of the result `out`; None if it is broadcast."""
    own = dim - len(out) + len(shape)
    return own if own >= 0 and shape[own] == out[dim] else None


def broadcast_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of tensors broadcast together; cheaper than torch's own function, as it is called for every node."""
    if len(shapes) == 1:
        return shapes[0]
    padded = [(1,) * (max(map(len, shapes)) - len(shape)) + shape for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


def pointwise_factors(call: Call) -> list[Factor]:
    """One factor per dim of the output; operands are broadcast."""
    first = call.outputs[0]
    assert first is not None
    out = first.shape
    return [
        Factor(tuple([broadcast_dim(s.shape, d, out) for s in call.inputs]), (d,) * len(call.outputs))
        for d, n in enumerate(out)
        if n > 1
    ]


def placed(spec: TensorSpec | None, dim: int | None, blocks: Blocks, absent: Placement = REPLICATE) -> Placement:
    """Shard(dim, blocks); `absent` for a tensor without the dim; Replicate if there is no tensor."""
    if spec is None:
        return REPLICATE
    return absent if dim is None else Shard(dim, blocks)


def sharded_strategy(
    call: Call,
    inputs: Sequence[int | None],
    outputs: Sequence[int | None],
    blocks: Blocks = 1,
    absent: Placement = REPLICATE,
) -> Strategy:
    """A strategy that shards one factor, given by its dims; outputs without it are `absent`."""
    return Strategy(
        tuple([placed(s, d, blocks) for s, d in zip(call.inputs, inputs, strict=True)]),
        tuple([placed(s, d, blocks, absent) for s, d in zip(call.outputs, outputs, strict=True)]),
    )


def blocks_of(given: Sequence[Placement], dims: Sequence[int | None]) -> list[Blocks]:
    """Blocks to try: 1, and those that the inputs have on these dims."""
    found = {p.blocks for p, d in zip(given, dims, strict=True) if isinstance(p, Shard) and p.dim == d}
    return sorted({1} | found, key=by_number)


def equal_blocks_of(given: Sequence[Placement], dims: Sequence[int | None]) -> list[int]:
    """The numbers of equal blocks to try."""
    return [b for b in blocks_of(given, dims) if isinstance(b, int)]


def first_operand(call: Call) -> list[tuple[int, ...]]:
    """The linear group of an op that is linear in its first tensor for fixed others."""
    return [(0,)]


def each_operand(call: Call) -> list[tuple[int, ...]]:
    """The linear groups of a product: linear in each tensor for fixed others."""
    return [(i,) for i in range(len(call.inputs))]


def all_operands(call: Call) -> list[tuple[int, ...]]:
    """The linear group of a sum or a concatenation: linear in all tensors jointly."""
    return [tuple(range(len(call.inputs)))] if call.inputs else []


def put(args: Args, position: int, value: object) -> Args:
    """The arguments with one replaced."""
    return (*args[:position], value, *args[position + 1 :])


def is_floating(spec: TensorSpec | None) -> bool:
    """Whether there is a tensor, and its dtype is floating-point or complex."""
    return spec is not None and (spec.dtype.is_floating_point or spec.dtype.is_complex)


def widened(x: torch.Tensor) -> torch.Tensor:
    """The tensor in the precision in which sums are accumulated."""
    return x.float() if x.dtype in HALF else x
