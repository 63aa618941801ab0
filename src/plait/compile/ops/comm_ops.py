"""The calls that plait adds to a graph: collectives along one mesh axis, and changes of memory format.

A collective is a `CommOp`, which a graph names and a backend executes. Each has one tensor as input and one as output,
both local to a rank. `blocks` is as in `spec.layout.Shard`. A `cut` is (shape, dim, size): a tensor of that shape, cut
along a dim into `size` parts by `spec.layout.part_bounds`. Results are dense, as the values of one device are, because
some kernels read an input's memory without regard to its strides.

The rows of these calls serve partition by a later mesh axis, which shards other dims of their tensors. A rule may write
collectives itself (`Builder.collective`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node

from plait.compile.ops.base import (
    Args,
    Builder,
    Call,
    CollectiveKind,
    Communication,
    Factor,
    Kwargs,
    MemoryUse,
    OpSpec,
    Placements,
    Strategy,
    View,
    no_groups,
    register,
)
from plait.compile.ops.dims import first_operand
from plait.cost.memory_model import ACTIVATIONS, BUFFERS, GRADIENTS
from plait.spec.layout import Blocks, Shard, block_lengths, local_shape

Ring = tuple[bool, Blocks, float | None]  # (causal, blocks, scale)
PlainCut = tuple[tuple[int, ...], int, int]  # (shape, dim, size)


class CommOp:
    """A call that all ranks of an axis make together. A backend replaces it by its own function."""

    def __init__(self, name: str) -> None:
        self.__name__: Final = name

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, *args: Any) -> Any:
        raise AssertionError(f"{self.__name__} runs only in a backend")


coordinate = CommOp("coordinate")  # (axis) -> int: this rank's index along the axis
all_reduce = CommOp("all_reduce")  # (tensor, axis, op)
all_gather = CommOp("all_gather")  # (tensor, axis, dim, blocks): Shard(dim, blocks) -> whole
reduce_scatter = CommOp("reduce_scatter")  # (tensor, axis, dim, blocks): partial sums -> Shard(dim, blocks)
shard = CommOp("shard")  # (tensor, axis, dim, blocks): whole -> Shard(dim, blocks), this rank's part; nothing is sent
all_to_all = CommOp("all_to_all")  # (tensor, axis, dim, blocks, to_dim, to_blocks): Shard -> Shard on another dim
exchange = CommOp("exchange")  # (tensor, axis): of as many equal parts of dim 0 as there are ranks, part i to rank i
# (tensor, axis, counts, back): rows of dim 0 to each rank, counts[0] of them; counts[1] arrive. `back`: the reverse
exchange_rows = CommOp("exchange_rows")
broadcast = CommOp("broadcast")  # (tensor, axis, root): Only(root) -> whole; other ranks pass any tensor of the shape
constrain = CommOp("constrain")  # (tensor) -> the tensor, in the placement that is fixed for the call
# (query, key, value, axis, ring, mask) -> output, log-sum-exp; each Shard(2, blocks), of a mask the rows of the queries
ring_attention = CommOp("ring_attention")
# (query, key, value, axis, ring, mask, grad_output, output, log-sum-exp) -> gradients of query, key and value
ring_attention_backward = CommOp("ring_attention_backward")
# (tensor, axis, dim, before, after): Shard(dim) -> the same, with the last `before` positions of the rank before this
# one and the first `after` of the next; zeros beyond the ends of the whole
halo = CommOp("halo")
# (tensor, axis, dim, before, after): terms for a part and for such edges -> the part, with its neighbours' terms added
halo_sum = CommOp("halo_sum")
# (term, axis, factor, first, reverse): the state before this rank's steps, which together are factor * state + term.
# That of the first rank is `first`, or zeros; `reverse`: the last rank's. Without a factor the next state is the term
pass_state = CommOp("pass_state")
gather_part = CommOp("gather_part")  # (part, axis, cut): each rank's part -> whole
scatter_part = CommOp("scatter_part")  # (tensor, axis, cut): partial sums -> this rank's part of the sum
take_part = CommOp("take_part")  # (tensor, axis, cut): whole -> this rank's part; nothing is sent


def summed_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ring attention sums terms of this dtype."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def in_format(tensor: Tensor, order: Sequence[int], dense: bool, multiple: int = 1, repeats: bool = False) -> Tensor:
    """The same tensor with its dims in this order in memory, from the widest stride to the narrowest: itself or a copy.

    If it need not be `dense` it may have holes, but not within its last dim; its other strides are then divisible by
    `multiple`. With `repeats` dims of stride 0 stay so.
    """
    sizes, steps = tensor.shape, tensor.stride()
    if repeats and any(step == 0 and n > 1 for step, n in zip(steps, sizes, strict=True)):
        once = tensor
        for dim, step in enumerate(steps):
            once = once.narrow(dim, 0, 1) if step == 0 and sizes[dim] > 1 else once
        found = in_format(once, order, dense, multiple)
        return tensor if found is once else found.expand(sizes)
    shape, strides = [sizes[d] for d in order], tuple(steps[d] for d in order)  # no view: this runs in every step
    if (strides == _dense(shape) and shape[-1] % multiple == 0) or (not dense and _ordered(shape, strides, multiple)):
        return tensor
    laid_out = tensor.permute(*order)
    back = sorted(range(len(order)), key=order.__getitem__)
    if rest := -shape[-1] % multiple:
        padded = torch.nn.functional.pad(laid_out, (0, rest)).narrow(-1, 0, shape[-1])
        return padded.permute(*back)
    # Through one dim, after which dims of size 1 have the stride that kernels expect of them.
    return laid_out.contiguous().view(-1).view(laid_out.shape).permute(*back)


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * max(n, 1))
    return tuple(reversed(strides))


def _ordered(shape: Sequence[int], strides: Sequence[int], multiple: int) -> bool:
    steps = [step for step, n in zip(strides, shape, strict=True) if n > 1]
    even = all(step % multiple == 0 for step in steps[:-1])
    return not steps or (steps[-1] == 1 and even and steps == sorted(steps, reverse=True))


def take(tensor: Tensor, rank: int, size: int, dim: int, blocks: Blocks) -> Tensor:
    """Part `rank` of `size` of a whole tensor under Shard(dim, blocks)."""
    if not isinstance(blocks, int):
        pieces = tensor.split(block_lengths(tensor.shape[dim], blocks), dim)
        return torch.cat([take(piece, rank, size, dim, 1) for piece in pieces], dim)
    if blocks == 1:
        step = tensor.shape[dim] // size
        return tensor.narrow(dim, rank * step, step)
    split = tensor.unflatten(dim, (blocks, size, tensor.shape[dim] // (blocks * size)))
    return split.select(dim + 1, rank).flatten(dim, dim + 1)  # type: ignore[no-any-return]


_ARRIVES = MemoryUse(BUFFERS, ACTIVATIONS)  # a buffer of the transport is allocated, an activation is freed


def _factors(*positions: int) -> Callable[[Call], Sequence[Factor]]:
    """Every dim can be sharded except those that the arguments at these positions name."""

    def factors(call: Call) -> Sequence[Factor]:
        busy = {call.args[position] for position in positions}
        return [Factor((d,), (d,)) for d in range(call.inputs[0].ndim) if d not in busy]

    return factors


def _nested(call: Call, given: Placements, size: int) -> list[Strategy]:
    """The strategies of a call that cuts or gathers the dim that is cut along the later axis too. That axis cuts each
    part of the earlier one, so that N parts of P blocks are, once gathered, N * P blocks of the later axis; or it cuts
    between blocks of the earlier one, of which each rank then has some."""
    (source,), (out,) = call.inputs, call.outputs
    dim, within = call.args[2], call.args[3]
    have = given[0]
    if out is None or not isinstance(have, Shard) or have.dim != dim or 0 in (source.shape[dim], out.shape[dim]):
        return []
    if not isinstance(have.blocks, int) or not isinstance(within, int):
        return []
    if _has_whole_blocks(have, within, size):
        return [Strategy(given, (have,))]
    if call.op is all_gather:
        parts = out.shape[dim] // source.shape[dim]
        return [Strategy(given, (Shard(dim, have.blocks * parts),))] if have.blocks % within == 0 else []
    parts = source.shape[dim] // out.shape[dim]
    return [Strategy(given, (Shard(dim, have.blocks // parts),))] if have.blocks % (within * parts) == 0 else []


def _has_whole_blocks(later: Shard, blocks: Blocks, size: int) -> bool:
    """Whether each of the `size` ranks of a later axis has whole blocks of an earlier one."""
    return isinstance(later.blocks, int) and isinstance(blocks, int) and blocks % (later.blocks * size) == 0


def _summed(call: Call) -> Sequence[tuple[int, ...]]:
    return ((0,),) if call.arg(2, "op", "sum") == "sum" else no_groups(call)


def _emit(b: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Node:
    """The same collective along the earlier axis, on this rank's part of the tensor along the later one."""
    (out,) = call.outputs
    assert out is not None
    tensor, axis, *rest = args
    have = strategy.inputs[0]
    if call.op in (all_gather, reduce_scatter, shard) and isinstance(have, Shard) and have.dim == rest[0]:
        rest[1] //= b.size if _has_whole_blocks(have, rest[1], b.size) else 1
    return b.collective(call.op, tensor, local_shape(out.shape, strategy.outputs[0], b.size), *rest, axis=axis)


register(
    all_reduce,
    spec=OpSpec(
        factors=_factors(),
        linear=_summed,
        emit=_emit,
        communicates=Communication(CollectiveKind.ALL_REDUCE),
        memory=_ARRIVES,
    ),
)
register(
    broadcast,
    spec=OpSpec(
        factors=_factors(),
        linear=first_operand,
        emit=_emit,
        moves=True,
        copies=0,
        communicates=Communication(CollectiveKind.BROADCAST),
        memory=_ARRIVES,
    ),
)
register(
    all_gather,
    spec=OpSpec(
        factors=_factors(2),
        strategies=_nested,
        linear=first_operand,
        emit=_emit,
        moves=True,
        communicates=Communication(CollectiveKind.ALL_GATHER),
        memory=_ARRIVES,
    ),
)
register(
    reduce_scatter,
    spec=OpSpec(
        factors=_factors(2),
        strategies=_nested,
        linear=first_operand,
        emit=_emit,
        communicates=Communication(CollectiveKind.REDUCE_SCATTER),
        memory=_ARRIVES,
    ),
)
register(
    all_to_all,
    spec=OpSpec(
        factors=_factors(2, 4),
        linear=first_operand,
        emit=_emit,
        moves=True,
        communicates=Communication(CollectiveKind.ALL_TO_ALL),
        memory=_ARRIVES,
    ),
)
register(
    exchange,
    spec=OpSpec(
        linear=first_operand,
        moves=True,
        communicates=Communication(CollectiveKind.ALL_TO_ALL),
        memory=_ARRIVES,
    ),
)
register(
    exchange_rows,
    spec=OpSpec(moves=True, communicates=Communication(CollectiveKind.ALL_TO_ALL), memory=_ARRIVES),
)
register(shard, spec=OpSpec(factors=_factors(2), strategies=_nested, linear=first_operand, emit=_emit, moves=True))
register(
    constrain,
    spec=OpSpec(
        linear=first_operand,
        emit=lambda b, call, strategy, args, kwargs: args[0],
        fake=lambda tensor: tensor,
        view=View.ALIAS,
    ),
)
_TRAVELS = OpSpec(communicates=Communication(CollectiveKind.RING, axis=3, counted=True))
register(ring_attention, spec=_TRAVELS)
register(ring_attention_backward, spec=_TRAVELS)
TO_NEIGHBOURS = OpSpec(communicates=Communication(CollectiveKind.HALO, counted=True))
register(halo, spec=TO_NEIGHBOURS)
register(halo_sum, spec=TO_NEIGHBOURS)
register(gather_part, spec=OpSpec(moves=True, communicates=Communication(CollectiveKind.ALL_GATHER)))
register(scatter_part, spec=OpSpec(communicates=Communication(CollectiveKind.REDUCE_SCATTER)))
register(take_part, spec=OpSpec(memory=MemoryUse(BUFFERS, GRADIENTS)))
register(in_format, spec=OpSpec(view=View.PART))  # or a copy
register(coordinate, spec=OpSpec())
