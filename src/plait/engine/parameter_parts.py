"""A rank's parameters as parts of whole tensors, for optimizers that need to know the whole (interface in
optim/parts.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plait.comm.protocol import World
from plait.engine.state import local_part
from plait.spec.layout import Layout, Shard


class LaidOutParts:
    """Parts of tensors as their layouts say. `layouts` has every parameter that this rank holds a part of."""

    def __init__(self, layouts: Mapping[Tensor, Layout], world: World) -> None:
        self._layouts = layouts
        self._world = world
        self._axes = [axis for axis in world.mesh.names if world.mesh.axis_size(axis) > 1]
        self._found: dict[tuple[Tensor, int], Tensor] = {}

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self._layouts[parameter].shape

    def sums(self, terms: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        # Ranks along an axis have the same parameters: a parameter that an axis cuts is on all of its ranks.
        """For each (parameter, term), the sum of the term over the ranks that hold other parts of the parameter."""
        found = [term for _, term in terms]
        for axis in self._axes:
            cut = [i for i, (p, _) in enumerate(terms) if isinstance(self._layouts[p].on(axis), Shard)]
            for dtype in dict.fromkeys(found[i].dtype for i in cut):
                members = [i for i in cut if found[i].dtype == dtype]
                flat = torch.cat([found[i].reshape(-1) for i in members])
                flat = self._world.comm(axis).all_reduce(flat, consume=True).wait()
                sizes = [found[i].numel() for i in members]
                for i, total in zip(members, torch.split(flat, sizes), strict=True):
                    found[i] = total.view(found[i].shape)
        return found

    def place(self, parameter: Tensor, part: Tensor, summed: tuple[int, ...] = ()) -> Tensor:
        """The part at its place in a tensor of zeros of the parameter's shape; `summed` are negative dims that are
        left alone."""
        whole = part
        for dim, here in self._cuts(parameter, summed):
            shape = (*whole.shape[:dim], self.shape(parameter)[dim], *whole.shape[dim + 1 :])
            whole = whole.new_zeros(shape).index_copy_(dim, here, whole)
        return whole

    def take(self, parameter: Tensor, whole: Tensor, summed: tuple[int, ...] = ()) -> Tensor:
        """This rank's part of a whole tensor; `summed` are negative dims that are left alone."""
        part = whole
        for dim, here in self._cuts(parameter, summed):
            part = part.index_select(dim, here)
        return part

    def _cuts(self, parameter: Tensor, summed: tuple[int, ...]) -> list[tuple[int, Tensor]]:
        """The cut dims that are not in `summed`, each with the indices of this rank's elements along it."""
        layout = self._layouts[parameter]
        cut = {p.dim for _, p in layout.placements if isinstance(p, Shard)}
        dims = sorted(cut - {dim + len(layout.shape) for dim in summed})
        return [(dim, self._places(parameter, dim)) for dim in dims]

    def _places(self, parameter: Tensor, dim: int) -> Tensor:
        if (parameter, dim) not in self._found:
            layout, num = self._layouts[parameter], self.shape(parameter)[dim]
            cuts = [(axis, p) for axis, p in layout.placements if isinstance(p, Shard) and p.dim == dim]
            along = Layout("i64", (num,), tuple((axis, Shard(0, p.blocks)) for axis, p in cuts))
            self._found[parameter, dim] = local_part(torch.arange(num, device=self._world.device), along, self._world)
        return self._found[parameter, dim]
