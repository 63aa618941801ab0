"""Flat shard buffers: one collective moves several tensors, each of which is cut over the ranks of an axis.

    rank 0 | part 0 of a | part 0 of b | part 0 of c |
    rank 1 | part 1 of a | part 1 of b | part 1 of c |

All rows are as long as the first, whose parts are the largest. The unused end of a row is not read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from plait.compile.ops.comm_ops import PlainCut
from plait.plan.sharding_plan import ShardingPlan
from plait.spec.layout import part_bounds


@dataclass(frozen=True)
class Cut:
    """How a tensor of `shape` is cut along `dim` into `size` parts, one per rank (see `spec.layout.part_bounds`)."""

    shape: tuple[int, ...]
    dim: int
    size: int

    def part_shape(self, rank: int) -> tuple[int, ...]:
        start, stop = part_bounds(self.shape[self.dim], self.size, rank)
        return (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """Part `rank` of a whole tensor, as a view."""
        start, stop = part_bounds(self.shape[self.dim], self.size, rank)
        return whole.narrow(self.dim, start, stop - start)

    def equal_parts(self, whole: Tensor) -> Tensor:
        """The parts of a whole tensor that are as large as the first, as a view [ranks, *part shape]."""
        length = self.part_shape(0)[self.dim]
        equal = whole.narrow(self.dim, 0, self.num_equal * length)
        parts: Tensor = equal.unflatten(self.dim, (self.num_equal, length)).movedim(self.dim, 0)
        return parts

    @property
    def num_equal(self) -> int:
        """The number of parts that are as large as the first. At most one part is smaller, and others are empty."""
        length = self.part_shape(0)[self.dim]
        return self.shape[self.dim] // length if length else 0

    @property
    def plain(self) -> PlainCut:
        """The same as tuples of numbers, which can be arguments of a call in a graph."""
        return self.shape, self.dim, self.size


def cuts_of(sharding: ShardingPlan) -> dict[str, Cut]:
    """By name, how each parameter is cut that a rank has only a part of."""
    return {
        name: Cut(each.compute.local_shape(sharding.mesh), each.cut_dim, sharding.mesh.axis_size(each.cut_axis))
        for name, each in sharding.parameters.items()
        if each.cut_dim is not None
    }


PlainRows = tuple[PlainCut, ...]  # one for each member of a buffer


@dataclass(frozen=True)
class FlatShards:
    """The layout of one buffer [ranks, length]: the cuts of its members, in order."""

    cuts: tuple[Cut, ...]

    @cached_property
    def num_ranks(self) -> int:
        return self.cuts[0].size

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each member in a row, and at the end the length of a row."""
        found = [0]
        for cut in self.cuts:
            found.append(found[-1] + math.prod(cut.part_shape(0)))
        return tuple(found)

    @property
    def length(self) -> int:
        return self.offsets[-1]

    @property
    def plain(self) -> PlainRows:
        """The same as tuples of numbers, which can be arguments of a call in a graph."""
        return tuple(cut.plain for cut in self.cuts)

    def put(self, buffer: Tensor, index: int, whole: Tensor) -> None:
        """Write every part of the whole tensor `index` into the buffer [ranks, length]."""
        for place, part in self._pairs(buffer, index, whole):
            place.copy_(part)

    def _pairs(self, buffer: Tensor, index: int, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of parts of tensor `index` in the buffer [ranks, length], each with the same parts of the whole tensor:
        those that are as large as the first together, and the one that is smaller, if there is one."""
        cut, offset = self.cuts[index], self.offsets[index]
        num = cut.num_equal
        if num:
            equal = buffer[:num].narrow(1, offset, self.offsets[index + 1] - offset)
            yield equal.view(num, *cut.part_shape(0)), cut.equal_parts(whole)
        if num < self.num_ranks and 0 not in cut.part_shape(num):
            yield self.place(buffer[num], index, num), cut.part(whole, num)

    def place(self, row: Tensor, index: int, rank: int) -> Tensor:
        """Part `rank` of tensor `index`, as a view of that rank's row [length]."""
        shape = self.cuts[index].part_shape(rank)
        return row.narrow(0, self.offsets[index], math.prod(shape)).view(shape)

    def take(self, row: Tensor, rank: int, wholes: list[Tensor]) -> None:
        """Copy the parts in the row [length] of a rank into the whole tensors."""
        for index, (cut, whole) in enumerate(zip(self.cuts, wholes, strict=True)):
            cut.part(whole, rank).copy_(self.place(row, index, rank))

    def take_all(self, buffer: Tensor, wholes: list[Tensor]) -> None:
        """Copy all parts in the buffer [ranks, length] into the whole tensors: one copy for each, or two where the
        ranks do not divide it."""
        for index, whole in enumerate(wholes):
            for place, part in self._pairs(buffer, index, whole):
                part.copy_(place)


@functools.cache
def rows_of(plain: PlainRows) -> FlatShards:
    """The inverse of `FlatShards.plain`."""
    return FlatShards(tuple(Cut(tuple(shape), dim, size) for shape, dim, size in plain))
