"""The calls that plait adds to a graph: collectives along one mesh axis, and changes of memory format.

Each collective takes the rank's World first (a placeholder of the graph, named `world`): nothing is reached through a
global. Tensors are local; `blocks` is as in `spec.layout.Shard`. What comes out is dense, as the values of one device
are: some kernels read an input's memory without asking for its strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plait.spec.layout import Blocks, block_lengths

World = Any  # comm.protocol.World; compile/ lies below comm/ and knows it only by its methods


def coordinate(world: World, axis: str) -> int:
    """This rank's index along the axis."""
    return world.comm(axis).rank  # type: ignore[no-any-return]


def all_reduce(world: World, tensor: Tensor, axis: str, op: str = "sum") -> Tensor:
    return world.comm(axis).all_reduce(tensor.contiguous(), op).wait()  # type: ignore[no-any-return]


def all_reduce_start(world: World, tensor: Tensor, axis: str, op: str = "sum") -> Any:
    """Begin an all-reduce; `wait` ends it. Between the two the rank computes on."""
    return world.comm(axis).all_reduce(tensor.contiguous(), op)


def wait(work: Any) -> Tensor:
    return work.wait()  # type: ignore[no-any-return]


def all_gather(world: World, tensor: Tensor, axis: str, dim: int, blocks: Blocks) -> Tensor:
    """Shard(dim, blocks) -> whole."""
    rows = world.comm(axis).all_gather(tensor.contiguous()).wait()
    return _join(rows, dim, blocks)


def reduce_scatter(world: World, tensor: Tensor, axis: str, dim: int, blocks: Blocks) -> Tensor:
    """Partial sums -> Shard(dim, blocks)."""
    comm = world.comm(axis)
    return comm.reduce_scatter(_parts(tensor, comm.size, dim, blocks)).wait()  # type: ignore[no-any-return]


def shard(world: World, tensor: Tensor, axis: str, dim: int, blocks: Blocks) -> Tensor:
    """Whole -> Shard(dim, blocks): this rank's part, nothing is sent."""
    comm = world.comm(axis)
    part = take(tensor, comm.rank, comm.size, dim, blocks)
    # A part of outer rows lies in one piece as it is; of a tensor with gaps the copy has none, in the same order.
    return part if part.is_contiguous() else part.clone(memory_format=torch.preserve_format)


def all_to_all(
    world: World, tensor: Tensor, axis: str, dim: int, blocks: Blocks, to_dim: int, to_blocks: Blocks
) -> Tensor:
    """Shard(dim, blocks) -> Shard(to_dim, to_blocks), on another dim."""
    comm = world.comm(axis)
    rows = comm.all_to_all(_parts(tensor, comm.size, to_dim, to_blocks)).wait()
    return _join(rows, dim, blocks)


def broadcast(world: World, tensor: Tensor, axis: str, root: int) -> Tensor:
    """Only(root) -> whole. The other ranks give any tensor of the shape."""
    return world.comm(axis).broadcast(tensor.contiguous(), root).wait()  # type: ignore[no-any-return]


def in_format(tensor: Tensor, order: Sequence[int], dense: bool) -> Tensor:
    """The same numbers, their dims in this order in memory, from the widest stride to the narrowest: the tensor itself,
    or a copy. What is not to be `dense` may have holes, but not between the numbers of the last dim."""
    laid_out = tensor.permute(*order)
    if laid_out.stride() == _dense(laid_out.shape) or (not dense and _ordered(laid_out)):
        return tensor
    back = sorted(range(len(order)), key=order.__getitem__)
    # Through one dim, after which dims of size 1 have the stride that kernels expect of them.
    return laid_out.contiguous().view(-1).view(laid_out.shape).permute(*back)


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * max(n, 1))
    return tuple(reversed(strides))


def _ordered(tensor: Tensor) -> bool:
    strides = [step for step, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    return strides[-1] == 1 and strides == sorted(strides, reverse=True)


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


def _parts(tensor: Tensor, size: int, dim: int, blocks: Blocks) -> Tensor:
    """Every rank's part, stacked: [size, *local shape]."""
    if not isinstance(blocks, int):
        return torch.stack([take(tensor, rank, size, dim, blocks) for rank in range(size)])
    split = tensor.unflatten(dim, (blocks, size, tensor.shape[dim] // (blocks * size)))
    return split.movedim(dim + 1, 0).flatten(dim + 1, dim + 2).contiguous()  # type: ignore[no-any-return]


def _join(rows: Tensor, dim: int, blocks: Blocks) -> Tensor:
    """The inverse of `_parts`."""
    size = rows.shape[0]
    if not isinstance(blocks, int):
        pieces = rows.split(block_lengths(rows.shape[dim + 1], blocks), dim + 1)
        return torch.cat([_join(piece, dim, 1) for piece in pieces], dim)
    split = rows.unflatten(dim + 1, (blocks, rows.shape[dim + 1] // blocks))
    return split.movedim(0, dim + 1).flatten(dim, dim + 2).contiguous() if size > 1 else rows[0]
