"""Central storage: the whole parameters in host memory that the data ranks of a host have in common, one copy of each.

Each rank updates its part of every one in place, where the others read it. In half precision the tensors in common are
the narrow ones that the graph reads, and a rank's part in full precision is its own. What is trained and cannot be cut
over `data` as well is a copy of each rank: single numbers, biases that `tensor` cuts, what lies on one rank of an axis
only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm.protocol import World
from plait.compile.rank_program import RankProgram
from plait.compile.sharding.flat_shards import Cut
from plait.engine.state import lies_here
from plait.errors import PlanError
from plait.plan.legality import no_common_memory

_ALIGN = 64


@dataclass(frozen=True)
class Common:
    """A parameter in common: `whole` over the data ranks, and how it is cut; None of one that is not trained."""

    whole: Tensor
    cut: Cut | None
    narrow: bool  # of a type narrower than the optimizer's

    def part(self, rank: int) -> Tensor:
        """The view of what that data rank updates; of one that is not trained, the whole."""
        return self.whole if self.cut is None else self.cut.part(self.whole, rank)


def common_parameters(program: RankProgram, world: World) -> dict[str, Common]:
    """Those of a plan with central=host, by name; values are still to be filled in. Every rank calls it.

    PlanError where the data ranks have no memory in common.
    """
    sharding = program.plan.sharding
    if not sharding.shares_parameters:
        return {}
    cuts = program.cuts
    forms: dict[str, tuple[Tensor, Cut | None, bool]] = {}
    here = world.mesh.coordinates(world.rank)
    for name in program.states:
        layout = program.layouts[name]
        cut = cuts.get(name)
        if not lies_here(layout, world) or (cut is None and (layout.placements or name not in program.captured.frozen)):
            continue
        narrow = program.dtypes.get(name)
        dtype = program.dtype_of(name) if narrow is None else getattr(torch, narrow)
        shape = layout.local_shape(world.mesh, here)
        forms[name] = (_form(shape, dtype, cut if narrow is None else None), cut, narrow is not None)
    sizes = [-(-form.nbytes // _ALIGN) * _ALIGN for form, _, _ in forms.values()]
    memory = _memory(sum(sizes), world, sharding.axis)
    pieces = memory.split(sizes)
    return {
        name: Common(_laid_in(piece, form), cut, narrow)
        for piece, (name, (form, cut, narrow)) in zip(pieces, forms.items(), strict=True)
    }


def _form(shape: tuple[int, ...], dtype: torch.dtype, cut: Cut | None) -> Tensor:
    """How it lies in memory: the dim that is cut outermost, so that parts are dense, as fused optimizers want them."""
    dim = 0 if cut is None else cut.dim
    outermost = (*shape[dim : dim + 1], *shape[:dim], *shape[dim + 1 :])
    form = torch.empty(outermost, dtype=dtype, device="meta")
    return form.movedim(0, dim) if shape else form


def _laid_in(memory: Tensor, form: Tensor) -> Tensor:
    return memory[: form.nbytes].view(form.dtype).as_strided(form.shape, form.stride())


def _memory(num_bytes: int, world: World, axis: str) -> Tensor:
    memory = world.comm(axis).shared(num_bytes)
    if memory is None:
        raise PlanError(no_common_memory(world.mesh.axis_size(axis)))
    return memory
