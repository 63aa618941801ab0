"""Local tensors and their layouts: a rank's part of a whole tensor, and the whole from the parts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plait.backends.eager.collectives import all_gather, broadcast
from plait.comm.protocol import World
from plait.compile.ops.comm_ops import take
from plait.spec.layout import Layout, Only, Replicate, Shard, part_bounds


def lies_here(layout: Layout, world: World) -> bool:
    """Whether this rank holds any part of the tensor."""
    return layout.lies_at(world.mesh.coordinates(world.rank))


def counts_here(layout: Layout, world: World) -> bool:
    """Whether a sum over ranks includes this rank's part: of ranks that hold the same part, only the first counts."""
    here = world.mesh.coordinates(world.rank)
    return all(here[axis] == p.index for axis, p in layout.placements if isinstance(p, Only))


def is_whole(layout: Layout) -> bool:
    """Whether every rank holds the whole tensor."""
    return all(isinstance(p, Replicate) for _, p in layout.placements)


def local_part(whole: Tensor, layout: Layout, world: World) -> Tensor:
    """This rank's part of a whole tensor, in memory of its own unless it is the whole."""
    here = world.mesh.coordinates(world.rank)
    part = whole
    for axis, placement in layout.placements:
        if isinstance(placement, Shard):
            part = _take(part, here[axis], world.mesh.axis_size(axis), placement)
    return part if part is whole else part.clone(memory_format=torch.contiguous_format)


def gather_whole(local: Tensor | None, layout: Layout, world: World, dtype: torch.dtype) -> Tensor:
    """The whole tensor on every rank, from the parts; `local` is None on a rank without a part. All ranks must call
    it."""
    tensor = local
    here = world.mesh.coordinates(world.rank)
    for index, (axis, placement) in reversed(list(enumerate(layout.placements))):
        if isinstance(placement, Shard):
            if tensor is not None:  # otherwise the ranks along this axis have nothing either
                tensor = _gather(world, tensor, axis, placement, layout)
        elif isinstance(placement, Only):
            if tensor is None:
                outer = Layout(layout.dtype, layout.shape, layout.placements[:index])
                tensor = torch.zeros(outer.local_shape(world.mesh, here), dtype=dtype, device=world.device)
            tensor = broadcast(world, tensor, axis, placement.index)
    assert tensor is not None
    return tensor


def _take(whole: Tensor, rank: int, size: int, placement: Shard) -> Tensor:
    """Part `rank` of `size`. A dim that does not divide evenly is cut as spec.layout.part_bounds says."""
    num = whole.shape[placement.dim]
    if num % (size * placement.num_units) == 0:
        return take(whole, rank, size, placement.dim, placement.blocks)
    start, stop = part_bounds(num, size, rank)
    return whole.narrow(placement.dim, start, stop - start)


def _gather(world: World, part: Tensor, axis: str, placement: Shard, layout: Layout) -> Tensor:
    """The inverse of `_take`, on every rank. No other axis may cut an uneven dim."""
    dim, size, num = placement.dim, world.mesh.axis_size(axis), layout.shape[placement.dim]
    if num % (size * placement.num_units) == 0:
        return all_gather(world, part, axis, dim, placement.blocks)
    longest = part_bounds(num, size, 0)[1]
    padding = part.new_zeros((*part.shape[:dim], longest - part.shape[dim], *part.shape[dim + 1 :]))
    rows = world.comm(axis).all_gather(torch.cat([part, padding], dim)).wait()
    return torch.cat(list(rows), dim).narrow(dim, 0, num)


def summed_square_axes(layouts: Mapping[str, Layout]) -> dict[str, tuple[str, ...]]:
    """For each parameter, the axes over which the squares of local parts are added to get those of the whole."""
    return {
        name: tuple(axis for axis, p in layout.placements if isinstance(p, (Shard, Only)))
        for name, layout in layouts.items()
    }
