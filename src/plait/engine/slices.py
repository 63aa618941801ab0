"""The blocks of a whole tensor that a rank holds under a layout, and the number of ranks that hold the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from plait.spec.layout import Blocks, Layout, Only, Replicate, Shard, block_lengths, num_units, part_bounds
from plait.spec.mesh import Mesh


@dataclass(frozen=True)
class TensorSlice:
    """A block of a tensor: its start in the whole, and its shape."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> TensorSlice:
        """The block that is a whole tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def num_elements(self) -> int:
        """The number of elements in the block."""
        return math.prod(self.shape)

    def overlap(self, other: TensorSlice) -> TensorSlice | None:
        """The intersection of two blocks; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        if any(b <= a for a, b in zip(start, stop, strict=True)):
            return None
        return TensorSlice(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def within(self, outer: TensorSlice) -> tuple[slice, ...]:
        """The slices of this block in a tensor that holds the block `outer`."""
        return tuple(slice(a - o, a - o + n) for a, o, n in zip(self.start, outer.start, self.shape, strict=True))

    def rows(self, start: int, stop: int) -> TensorSlice:
        """Rows start to stop of this block, along the first dim, counted from the block's own first row."""
        return TensorSlice((self.start[0] + start, *self.start[1:]), (stop - start, *self.shape[1:]))


@dataclass(frozen=True)
class Fragment:
    """A block that a rank holds, and its start in the rank's own tensor."""

    block: TensorSlice
    at: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices of the block in the rank's own tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.at, self.block.shape, strict=True))


def fragments(layout: Layout, mesh: Mesh, coordinates: Mapping[str, int]) -> tuple[Fragment, ...]:
    """The blocks that the rank at these coordinates holds; several if a dim is cut block by block.

    Together they are the tensor that engine.state.local_part returns.
    """
    runs = [[(0, num)] for num in layout.shape]  # per dim: (start in the whole, length) of each run
    for axis, placement in layout.placements:
        if isinstance(placement, Only) and coordinates[axis] not in placement.ranks:
            return ()
        if isinstance(placement, Shard):
            runs[placement.dim] = _cut(runs[placement.dim], mesh.axis_size(axis), coordinates[axis], placement.blocks)
    places = []
    for found in runs:
        ends = itertools.accumulate(num for _, num in found)
        places.append([(start, num, end - num) for (start, num), end in zip(found, ends, strict=True)])
    blocks = []
    for chosen in itertools.product(*places):
        start, shape, at = zip(*chosen, strict=True) if chosen else ((), (), ())
        if math.prod(shape):
            blocks.append(Fragment(TensorSlice(start, shape), at))
    return tuple(blocks)


def copies(layout: Layout, mesh: Mesh, coordinates: Mapping[str, int]) -> tuple[int, int]:
    """The number of ranks that hold the same part as this one, and this rank's index among them."""
    num, index = 1, 0
    for axis, size in mesh.axes:
        placement = layout.on(axis)
        if isinstance(placement, Replicate):
            num, index = num * size, index * size + coordinates[axis]
        elif isinstance(placement, Only) and coordinates[axis] in placement.ranks:
            held_by = placement.ranks
            num, index = num * len(held_by), index * len(held_by) + held_by.index(coordinates[axis])
    return num, index


def _cut(runs: list[tuple[int, int]], size: int, index: int, blocks: Blocks) -> list[tuple[int, int]]:
    """Part `index` of `size` of a dim that is given as runs of (start in the whole, length)."""
    num = sum(length for _, length in runs)
    if num % (size * num_units(blocks)) == 0:
        lengths = block_lengths(num, blocks)
        starts = itertools.accumulate(lengths, initial=0)
        wanted = [(start + index * (n // size), n // size) for start, n in zip(starts, lengths, strict=False)]
    else:
        start, stop = part_bounds(num, size, index)
        wanted = [(start, stop - start)]
    found: list[tuple[int, int]] = []
    for start, length in wanted:
        before = 0
        for first, here in runs:
            low, high = max(start, before), min(start + length, before + here)
            if low < high:
                begin = first + low - before
                if found and sum(found[-1]) == begin:
                    found[-1] = (found[-1][0], found[-1][1] + high - low)
                else:
                    found.append((begin, high - low))
            before += here
    return found or [(0, 0)]
