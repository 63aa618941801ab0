"""Layout: how a tensor is placed on a mesh, as a pure value that prints and parses.

    f32[8@data, 128, 768@tensor/3] +data only:tensor=1

`8@data`        the dim is cut into equal parts, one per rank of axis `data`
`768@tensor/3`  the dim is three equal blocks laid end to end (a fused q, k, v); each block is cut by itself
`768@tensor/4+1+1`  the same with unequal blocks, in these proportions (more query heads than key and value heads)
`+data`         partial sums, still to be summed over `data` (`^data` for maxima, `_data` for minima)
`only:tensor=1` the whole tensor lies on rank 1 of `tensor` and nowhere else (a parallel branch, a pipeline's stage);
                `only:pipeline=0,3` on ranks 0 and 3 (tied weights)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.errors import LayoutError
from plait.spec.mesh import Mesh


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the whole tensor."""


Blocks = int | tuple[int, ...]  # the number of equal blocks, or the proportions of unequal ones


def blocks_of_lengths(lengths: Sequence[int]) -> Blocks:
    """Blocks of these lengths: their number if all are equal, else their proportions."""
    unit = math.gcd(*lengths)
    if unit == 0 or len(set(lengths)) == 1:
        return len(lengths)
    return tuple(length // unit for length in lengths)


def num_units(blocks: Blocks) -> int:
    """The number of equal units of a dim of these blocks. N ranks can shard the dim if N times this number divides
    it."""
    return blocks if isinstance(blocks, int) else sum(blocks)


def block_lengths(num: int, blocks: Blocks) -> tuple[int, ...]:
    """The lengths of the blocks of a dim of length `num`."""
    unit = num // num_units(blocks)
    return (unit,) * blocks if isinstance(blocks, int) else tuple(unit * part for part in blocks)


def parse_blocks(text: str) -> Blocks | None:
    """Parse `3`, or proportions such as `4+1+1`. Returns None for anything else."""
    if re.fullmatch(r"\d+(\+\d+)*", text) is None or 0 in (parts := [int(part) for part in text.split("+")]):
        return None
    return parts[0] if len(parts) == 1 else blocks_of_lengths(parts)


@dataclass(frozen=True)
class Shard:
    """Every rank holds an equal part of `dim`; with several `blocks`, an equal part of each block."""

    dim: int
    blocks: Blocks = 1

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, int):  # equal values compare equal
            object.__setattr__(self, "blocks", blocks_of_lengths(self.blocks))

    @property
    def num_units(self) -> int:
        return num_units(self.blocks)

    def blocks_text(self) -> str:
        """The text after the axis: `/3`, `/4+1+1`, or nothing for one block."""
        if isinstance(self.blocks, int):
            return f"/{self.blocks}" if self.blocks > 1 else ""
        return "/" + "+".join(map(str, self.blocks))


@dataclass(frozen=True)
class Partial:
    """Every rank holds one term; the tensor is their `op`: sum, max or min."""

    op: str = "sum"


@dataclass(frozen=True)
class Only:
    """Rank `index` of the axis holds the whole tensor, and so do the ranks `others`. No other rank has any part."""

    index: int
    others: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.index, *self.others)


Placement = Replicate | Shard | Partial | Only

REPLICATE = Replicate()
_MARK = {"sum": "+", "max": "^", "min": "_"}
_OP = {mark: op for op, mark in _MARK.items()}


def part_bounds(num: int, size: int, index: int) -> tuple[int, int]:
    """The half-open range of part `index` when `num` rows are cut into `size` parts.

    The parts are equal if `size` divides `num`. Otherwise the first parts have ceil(num / size) rows, and the last ones
    fewer or none, as with torch.chunk and DTensor.
    """
    length = -(-num // size)
    return min(index * length, num), min((index + 1) * length, num)


def local_shape(shape: tuple[int, ...], placement: Placement, size: int) -> tuple[int, ...]:
    """The shape of one rank's part of a tensor of `shape` along one axis of `size` ranks."""
    if not isinstance(placement, Shard):
        return shape
    check_shard(shape, placement, size)
    return tuple(n // size if dim == placement.dim else n for dim, n in enumerate(shape))


def divides(shape: tuple[int, ...], placement: Shard, size: int) -> bool:
    """Whether `size` ranks can cut the dim evenly, block by block."""
    dim = placement.dim
    return 0 <= dim < len(shape) and shape[dim] % (placement.num_units * size) == 0 and shape[dim] > 0


def check_shard(shape: tuple[int, ...], placement: Shard, size: int, axis: str = "axis", name: str = "tensor") -> None:
    """Raise LayoutError, which names axis, size and shape, unless `size` ranks can cut the dim evenly."""
    if not 0 <= placement.dim < len(shape):
        raise LayoutError(f"{name} of shape {list(shape)} has no dim {placement.dim} to shard over {axis}")
    if not divides(shape, placement, size):
        blocks = f" in blocks of {placement.blocks_text()[1:]}" if placement.blocks != 1 else ""
        raise LayoutError(
            f"{axis}={size} does not divide dim {placement.dim} of {name}: {shape[placement.dim]}{blocks}"
            f" (shape {list(shape)}); choose a size of {axis} that divides it, or leave the dim whole with '-'"
        )


@dataclass(frozen=True)
class Layout:
    """A tensor's dtype and global shape, and its placement along each mesh axis, outermost axis first.

    The tensor is replicated along axes that are not named. If two axes shard one dim, the later axis cuts the parts of
    the earlier one. Raises LayoutError for an axis that is named twice and for a shard of a dim that does not exist.
    """

    dtype: str
    shape: tuple[int, ...]
    placements: tuple[tuple[str, Placement], ...] = ()

    def __post_init__(self) -> None:
        axes = [axis for axis, _ in self.placements]
        if len(set(axes)) != len(axes):
            raise LayoutError(f"a layout names each axis once, not {', '.join(axes)}")
        for axis, placement in self.placements:
            if isinstance(placement, Shard) and not 0 <= placement.dim < len(self.shape):
                raise LayoutError(f"shape {list(self.shape)} has no dim {placement.dim} to shard over {axis}")

    def on(self, axis: str) -> Placement:
        """The placement along an axis."""
        return dict(self.placements).get(axis, REPLICATE)

    def lies_at(self, coordinates: Mapping[str, int]) -> bool:
        """Whether the rank at these coordinates holds any part of the tensor."""
        return all(coordinates[axis] in p.ranks for axis, p in self.placements if isinstance(p, Only))

    def local_shape(self, mesh: Mesh, coordinates: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """The shape of the part at these coordinates. Without coordinates all parts must be equal, else LayoutError."""
        shape = self.shape
        for axis, placement in self.placements:
            size = mesh.axis_size(axis)
            if isinstance(placement, Shard) and coordinates is not None and not divides(shape, placement, size):
                start, stop = part_bounds(shape[placement.dim], size, coordinates[axis])
                shape = tuple(stop - start if dim == placement.dim else n for dim, n in enumerate(shape))
                continue
            if isinstance(placement, Shard):
                check_shard(shape, placement, size, axis)
            shape = local_shape(shape, placement, size)
        return shape

    def __str__(self) -> str:
        dims = []
        for dim, n in enumerate(self.shape):
            text = str(n)
            for axis, p in self.placements:
                if isinstance(p, Shard) and p.dim == dim:
                    text += f"@{axis}{p.blocks_text()}"
            dims.append(text)
        tail = "".join(f" {_MARK[p.op]}{axis}" for axis, p in self.placements if isinstance(p, Partial))
        tail += "".join(
            f" only:{axis}={','.join(map(str, p.ranks))}" for axis, p in self.placements if isinstance(p, Only)
        )
        return f"{self.dtype}[{', '.join(dims)}]{tail}"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The inverse of `str`, except that axes which shard different dims may change places. Raises LayoutError."""
        match = re.fullmatch(r"\s*(\w+)\[([^\]]*)\]((?:\s+\S+)*)\s*", text)
        if match is None:
            raise LayoutError(f"cannot read the layout {text!r}; one looks like f32[8@data, 512@tensor] +tensor")
        dtype, inside, tail = match.groups()
        shape: list[int] = []
        placements: list[tuple[str, Placement]] = []
        for dim, entry in enumerate(part.strip() for part in inside.split(",") if part.strip()):
            size, *marks = entry.split("@")
            if not size.strip().isdigit():
                raise LayoutError(f"cannot read dim {dim} of {text!r}: {entry!r} does not start with a size")
            shape.append(int(size))
            for mark in marks:
                axis, _, blocks = mark.partition("/")
                parsed = parse_blocks(blocks or "1")
                if parsed is None:
                    raise LayoutError(f"cannot read dim {dim} of {text!r}: {blocks!r} is no number of blocks")
                placements.append((axis, Shard(dim, parsed)))
        for word in tail.split():
            if word[0] in _OP:
                placements.append((word[1:], Partial(_OP[word[0]])))
            elif found := re.fullmatch(r"only:(\w+)=(\d+(?:,\d+)*)", word):
                first, *others = map(int, found[2].split(","))
                placements.append((found[1], Only(first, tuple(others))))
            else:
                raise LayoutError(f"cannot read {word!r} in the layout {text!r}")
        return cls(dtype, tuple(shape), tuple(placements))
