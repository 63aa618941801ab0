"""The part of each tensor that a rank holds, and the pieces of it that the rank writes: each element has one writer."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm.protocol import World
from plait.engine.slices import Fragment, TensorSlice, copies, fragments
from plait.spec.layout import Layout, part_bounds
from plait.spec.mesh import Mesh

_SHARED = 64 << 10  # bytes from which the ranks that hold the same each write a part of it


@dataclass(frozen=True)
class Kept:
    """A tensor that is stored outside memory; `get` reads it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    get: Callable[[], Tensor]


def is_away(tensor: Tensor) -> bool:
    """Whether the tensor has no memory, because its values are stored elsewhere."""
    return tensor.is_meta or tensor.untyped_storage().nbytes() < tensor.element_size() * (tensor.numel() > 1) * 2


@dataclass(frozen=True)
class LocalShard:
    """A rank's part of a tensor of `shape`.

    data        the part; None if the rank has none
    fragments   the blocks of the tensor that `data` consists of
    num_copies  the number of ranks that hold the same part
    copy        this rank's index among them
    """

    shape: tuple[int, ...]
    data: Tensor | Kept | None
    fragments: tuple[Fragment, ...]
    num_copies: int = 1
    copy: int = 0

    @classmethod
    def laid_out(cls, data: Tensor | Kept | None, layout: Layout, world: World) -> LocalShard:
        """This rank's part of a tensor with this layout."""
        found, num_copies, copy = _part(layout, world.mesh, world.rank)
        return cls(layout.shape, data, found if data is not None else (), num_copies, copy)

    @classmethod
    def whole(cls, data: Tensor) -> LocalShard:
        """A whole tensor that only this rank has."""
        shape = tuple(data.shape)
        return cls(shape, data, (Fragment(TensorSlice.whole(shape), (0,) * len(shape)),) if data.numel() else ())


@functools.lru_cache(maxsize=1 << 14)  # the same for every save
def _part(layout: Layout, mesh: Mesh, rank: int) -> tuple[tuple[Fragment, ...], int, int]:
    here = mesh.coordinates(rank)
    return fragments(layout, mesh, here), *copies(layout, mesh, here)


@dataclass(frozen=True)
class WrittenPiece:
    """A block of a tensor that this rank writes. `take` returns its values, in memory of any kind and order."""

    name: str
    dtype: torch.dtype
    block: TensorSlice
    take: Callable[[], Tensor]
    in_memory: bool


def pieces(name: str, shard: LocalShard) -> list[list[WrittenPiece]]:
    """The pieces of a tensor that this rank writes, one list per file, because a file has each name only once."""
    data = shard.data
    found: list[list[WrittenPiece]] = []
    if data is None:
        return found
    for fragment in shard.fragments:
        block, at = fragment.block, fragment.at
        if shard.num_copies > 1:
            rows = block.shape[0] if block.shape else 1
            shared = rows >= shard.num_copies and block.num_elements * data.dtype.itemsize >= _SHARED
            if shared:
                start, stop = part_bounds(rows, shard.num_copies, shard.copy)
                block, at = block.rows(start, stop), (at[0] + start, *at[1:])
            elif zlib.crc32(name.encode()) % shard.num_copies != shard.copy:
                continue
        if block.num_elements:
            slices = Fragment(block, at).slices
            found.append([WrittenPiece(name, data.dtype, block, _taker(data, slices), torch.is_tensor(data))])
    return found


def _taker(data: Tensor | Kept, slices: tuple[slice, ...]) -> Callable[[], Tensor]:
    if isinstance(data, Kept):
        return lambda: data.get()[slices]
    view = data.detach()[slices]
    return lambda: view
