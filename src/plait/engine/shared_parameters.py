"""Central storage: one copy of the whole parameters, in host memory that the data ranks of a host share.

Each rank updates its part of every parameter in place, and the others read it there. In half precision the shared
tensors are the half-precision ones that the graph reads, and each rank has its full-precision part for itself. A
trained parameter that cannot also be cut over `data` is not shared: single numbers, biases that `tensor` cuts, and what
only one rank of an axis has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm.protocol import World
from plait.compile.ir.dtypes import dtype_named
from plait.compile.rank_program import RankProgram
from plait.compile.sharding.flat_shards import Cut
from plait.errors import PlanError
from plait.plan.legality import no_common_memory

_ALIGN = 64


@dataclass(frozen=True)
class SharedParameter:
    """A shared parameter.

    whole   the parameter, whole over the data ranks
    cut     how the data ranks cut it; None if it is not trained
    narrow  whether its dtype is narrower than the optimizer's
    """

    whole: Tensor
    cut: Cut | None
    narrow: bool

    def part(self, rank: int) -> Tensor:
        """The view of the part that a data rank updates; the whole if it is not trained."""
        return self.whole if self.cut is None else self.cut.part(self.whole, rank)


def shared_parameters(program: RankProgram, world: World) -> dict[str, SharedParameter]:
    """The shared parameters of a plan with central=host, by name, uninitialised. All ranks must call it.

    Raises PlanError if the data ranks cannot share memory.
    """
    sharding = program.sharding
    shared = {name: each for name, each in sharding.parameters.items() if each.shared}
    if not shared:
        return {}
    forms: dict[str, tuple[Tensor, Cut | None, bool]] = {}
    here = world.mesh.coordinates(world.rank)
    for name, each in shared.items():
        if each.compute.lies_at(here):
            cut, shape = program.cuts.get(name), each.compute.local_shape(world.mesh, here)
            form = _form(shape, dtype_named(each.compute.dtype), cut if each.narrow is None else None)
            forms[name] = form, cut, each.narrow is not None
    sizes = [-(-form.nbytes // _ALIGN) * _ALIGN for form, _, _ in forms.values()]
    memory = _memory(sum(sizes), world, sharding.axis)
    pieces = memory.split(sizes)
    return {
        name: SharedParameter(_laid_in(piece, form), cut, narrow)
        for piece, (name, (form, cut, narrow)) in zip(pieces, forms.items(), strict=True)
    }


def _form(shape: tuple[int, ...], dtype: torch.dtype, cut: Cut | None) -> Tensor:
    """The memory layout of a tensor, on the meta device. The dim that is cut is outermost, so that parts are
    contiguous, as fused optimizers need them."""
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
