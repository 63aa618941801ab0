"""Mesh: an arrangement of ranks along named axes. A mesh needs no devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from numbers import Integral

from plait.errors import PlanError

JOIN = "*"  # between the names of axes that are joined


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes, outermost first: ranks that differ only along the last axis are neighbours.

    Ranks of axes that follow each other may be one group, by the name `data*context`; `joined` are those that
    communicate as one. Raises PlanError for an axis that is named twice and for a size below 1.

    >>> Mesh((("data", 2), ("tensor", 2))).coordinates(2)
    {'data': 1, 'tensor': 0}
    """

    axes: tuple[tuple[str, int], ...]
    joined: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _is_axes(self.axes):
            raise PlanError(
                f"a mesh has pairs of an axis and its size, as (('data', 2), ('tensor', 2)), not {self.axes!r}"
            )
        names = self.names
        if len(set(names)) != len(names):
            raise PlanError(f"a mesh names each axis once, not {', '.join(names)}")
        for name, size in self.axes:
            if size < 1:
                raise PlanError(f"axis {name} has size {size}; a size is 1 or more")

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.axes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def spread(self) -> str:
        """The axes with more than one rank, as text: `data=2 tensor=4`."""
        return " ".join(f"{name}={size}" for name, size in self.axes if size > 1)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    @property
    def communicators(self) -> tuple[str, ...]:
        """The axes, and the joined axes, along which a rank has a group."""
        return (*self.names, *self.joined)

    def axis_size(self, axis: str) -> int:
        """The number of ranks along an axis, or along axes that are joined."""
        for name, size in self.axes:
            if name == axis:
                return size
        if JOIN in axis:
            return math.prod(self.axis_size(name) for name in axis.split(JOIN))
        raise PlanError(f"unknown axis {axis!r}; the mesh has {', '.join(self.names) or 'no axes'}")

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's index along each axis."""
        return dict(_coordinates(self, rank))

    def rank(self, coordinates: dict[str, int]) -> int:
        """The rank at these coordinates: the inverse of `coordinates`."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinates[name]
        return rank

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axis`, in order; `rank` is one of them."""
        size, stride = self.axis_size(axis), self.stride(axis)
        first = rank - rank // stride % size * stride
        return tuple(range(first, first + size * stride, stride))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Every group of ranks along `axis`, in the order of their first ranks. Takes time linear in the ranks."""
        within, stride = self.axis_size(axis), self.stride(axis)
        return tuple(
            tuple(range(first, first + within * stride, stride))
            for start in range(0, self.size, within * stride)
            for first in range(start, start + stride)
        )

    def stride(self, axis: str) -> int:
        """The distance between neighbours along `axis`: the product of the sizes of the axes inside it."""
        self.axis_size(axis)
        last = axis.split(JOIN)[-1]
        return math.prod(size for _, size in self.axes[self.names.index(last) + 1 :])


def _is_axes(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(map(_is_axis, value))


def _is_axis(value: object) -> bool:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    return isinstance(value[0], str) and isinstance(value[1], Integral)


@lru_cache(maxsize=4096)
def _coordinates(mesh: Mesh, rank: int) -> Mapping[str, int]:
    if not 0 <= rank < mesh.size:
        raise PlanError(f"rank {rank} is not on the mesh {mesh} of {mesh.size} ranks")
    found = {}
    rest = rank
    for name, size in reversed(mesh.axes):
        rest, found[name] = divmod(rest, size)
    return {name: found[name] for name in mesh.names}
