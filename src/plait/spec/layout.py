"""Layouts: where the parts of a tensor lie on a mesh, as pure values that print and parse.

    f32[8@data, 128, 768@tensor/3] +data only:tensor=1

`8@data`        the dim is cut into equal parts, one a rank along axis `data`
`768@tensor/3`  the dim is three equal blocks laid end to end (a fused q, k, v); each block is cut on its own
`768@tensor/4+1+1`  the same of unequal blocks, in these proportions (q of more heads than k and v)
`+data`         partial sums, still to be added over `data` (`^data` maxima, `_data` minima)
`only:tensor=1` the whole tensor lies on rank 1 of `tensor` and nowhere else (a parallel branch, a pipeline's stage);
                `only:pipeline=0,3` on these two (tied weights)
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


Blocks = int | tuple[int, ...]  # so many equal blocks, or blocks in these proportions


def blocks_of_lengths(lengths: Sequence[int]) -> Blocks:
    """How blocks of these lengths are written: by their number if they are equal, else by their proportions."""
    unit = math.gcd(*lengths)
    if unit == 0 or len(set(lengths)) == 1:
        return len(lengths)
    return tuple(length // unit for length in lengths)


def num_units(blocks: Blocks) -> int:
    """Into how many equal units the blocks divide a dim: it can be cut over N ranks if N times as many divide it."""
    return blocks if isinstance(blocks, int) else sum(blocks)


def block_lengths(num: int, blocks: Blocks) -> tuple[int, ...]:
    """The lengths of the blocks of a dim of `num`."""
    unit = num // num_units(blocks)
    return (unit,) * blocks if isinstance(blocks, int) else tuple(unit * part for part in blocks)


def parse_blocks(text: str) -> Blocks | None:
    """`3`, or the proportions `4+1+1`; None for anything else."""
    if re.fullmatch(r"\d+(\+\d+)*", text) is None or 0 in (parts := [int(part) for part in text.split("+")]):
        return None
    return parts[0] if len(parts) == 1 else blocks_of_lengths(parts)


@dataclass(frozen=True)
class Shard:
    """Every rank holds an equal part of `dim`; with several `blocks` an equal part of each block."""

    dim: int
    blocks: Blocks = 1

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, int):  # one way to write each
            object.__setattr__(self, "blocks", blocks_of_lengths(self.blocks))

    @property
    def num_units(self) -> int:
        return num_units(self.blocks)

    def blocks_text(self) -> str:
        """As it is written after the axis: nothing for one block."""
        if isinstance(self.blocks, int):
            return f"/{self.blocks}" if self.blocks > 1 else ""
        return "/" + "+".join(map(str, self.blocks))


@dataclass(frozen=True)
class Partial:
    """Every rank holds a term; the tensor is their `op`: sum, max or min."""

    op: str = "sum"


@dataclass(frozen=True)
class Only:
    """The rank with this index along the axis holds the whole tensor, and so do `others`; the rest holds nothing."""

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
    """Where part `index` of `num` rows cut into `size` parts begins and ends.

    Equal parts where that is possible; otherwise the first parts are as long as they would be with the rows rounded up
    and the last ones shorter or empty, which is how torch.chunk and DTensor cut.
    """
    length = -(-num // size)
    return min(index * length, num), min((index + 1) * length, num)


def local_shape(shape: tuple[int, ...], placement: Placement, size: int) -> tuple[int, ...]:
    """The shape of one rank's part of a tensor of `shape` under one axis of `size` ranks."""
    if not isinstance(placement, Shard):
        return shape
    check_shard(shape, placement, size)
    return tuple(n // size if dim == placement.dim else n for dim, n in enumerate(shape))


def divides(shape: tuple[int, ...], placement: Shard, size: int) -> bool:
    """Whether the dim can be cut evenly, block by block."""
    dim = placement.dim
    return 0 <= dim < len(shape) and shape[dim] % (placement.num_units * size) == 0 and shape[dim] > 0


def check_shard(shape: tuple[int, ...], placement: Shard, size: int, axis: str = "axis", name: str = "tensor") -> None:
    """Raise LayoutError naming axis, size and shape unless the shard divides evenly."""
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
    """A tensor's dtype and global shape, and its placement along each mesh axis (outermost first).

    An axis that is absent replicates. Where two axes shard one dim, the later one cuts the earlier one's parts.
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
        return dict(self.placements).get(axis, REPLICATE)

    def local_shape(self, mesh: Mesh, coordinates: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """The shape of the part that the rank at these coordinates holds; without them, where all parts are equal."""
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
        """The inverse of `str`, up to the order of axes that do not meet on one dim."""
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
