"""The parameters of one rank: the optimizer's tensors, the graph's inputs, and the update of one from the other.

zero=0        optimizer and graph have the same tensors
zero=1, 2     the graph reads whole tensors; the optimizer has this rank's part of each, a view of the whole where that
              is possible; after an update the parts are gathered
zero=3        both have this rank's parts, which the graph gathers
central=host  as zero=2, but the whole tensors are in memory that the data ranks share (engine/rank_parameters.py), so
              that nothing is gathered. All ranks wait for each other before and after an update. An accelerator has
              copies of its own

Large parameters that the plan offloads are kept by backends/eager/offload/store.py. The optimizer's tensors then have
the shape but no memory, and the graph fetches what it reads. If the update runs on the host beside an accelerator, the
optimizer has copies in host memory, which are copied to the device after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.backends.eager.offload.store import Offload, hollow
from plait.backends.eager.rewrites.read_ahead import Gathering
from plait.comm.device import Event
from plait.comm.protocol import Comm, World
from plait.compile.ir.dtypes import dtype_named
from plait.compile.rank_program import RankProgram
from plait.compile.sharding.flat_shards import Cut, FlatShards
from plait.cost.memory_model import padded
from plait.engine.initial_values import initial_parameters
from plait.engine.local_tensors import is_whole
from plait.engine.model_weights import release, where
from plait.errors import PlanError
from plait.plan.legality import no_common_memory
from plait.plan.sharding_plan import DISK, Gather
from plait.schedule.buckets import bucket_limit, split_buckets


class RankParameters:
    """The parameters of one rank.

    parameters  the optimizer's tensors, by name, for the parameters that this rank has a part of
    inputs      the graph's inputs, by name, without those that the graph fetches
    changing    untrained parameters that the step itself changes, by name, whole

    With `adopt`, parameters that stay whole are the model's own tensors. `release` frees the model's copies of the
    others.
    """

    def __init__(
        self, model: nn.Module, program: RankProgram, world: World, offload: Offload, seed: int, adopt: bool
    ) -> None:
        sharding = self._sharding = program.sharding
        self._world = world
        self._axis = sharding.axis
        self._offload = offload
        self._away = sharding.away
        self._shared = shared_parameters(program, world)
        self._bucket_bytes = program.plan.bucket_bytes
        # For parameters that are gathered after an update: how they are cut, and meta tensors of the graph's inputs.
        self._cuts: dict[str, Cut] = {}
        self._wholes: dict[str, Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.inputs: dict[str, Tensor] = {}
        own = dict(model.named_parameters())
        changing = program.captured.changing
        self.changing: dict[str, Tensor] = {}
        stored = program.layouts | {name: each.held for name, each in sharding.parameters.items()}
        held = {name: stored[name] for name in own}
        cuts = {name: program.cuts[name] for name in sharding.gathered(Gather.UPDATE)}
        adopted: set[str] = set()
        self._reserve_disk(program)
        for name, value in initial_parameters(model, held, world, seed):
            if value is not None:
                can_adopt = adopt and is_whole(held[name]) and not own[name].is_meta
                if can_adopt and (value.device != world.device or value.data_ptr() != own[name].data_ptr()):
                    own[name].data = value = value.to(world.device)  # the value of rank 0, where it is computed with
                if name in changing:
                    self.changing[name] = value if can_adopt else _unaliased(value.to(world.device), own[name])
                    adopted.add(name)
                elif self._store(name, value, own[name], cuts.get(name), sharding.parameters[name].narrow, can_adopt):
                    adopted.add(name)
        self._buckets = list(self._make_buckets())
        if self._shared:
            world.comm(self._axis).barrier()  # all ranks have written their values
        self._released = own.keys() - adopted if adopt else set()
        self._model = model

    def release(self) -> None:
        """Free the model's own copies of parameters that are stored elsewhere. Before this, a failed start leaves
        the model as it was."""
        plan = self._offload.plan
        whys = {name: where(self._sharding.parameters[name], plan) for name in self._released}
        release(self._model, self._released, whys)

    def _store(
        self, name: str, value: Tensor, own: nn.Parameter, cut: Cut | None, narrow: str | None, adopt: bool
    ) -> bool:
        """Store a parameter where the plan wants it. Returns whether the model's own tensor was adopted."""
        device = self._world.device
        if name in self._shared:
            return self._share(name, value, own, adopt)
        if name in self._away or self._sharding.updates_on_host:
            self._store_offloaded(name, value.to(device), cut, narrow, own.requires_grad)
            return False
        if cut is not None:
            adopt = adopt and narrow is None
            self._split(name, own.detach().to(device) if adopt else _unaliased(value.to(device), own), cut, narrow)
            return adopt
        kept = own if adopt else nn.Parameter(_unaliased(value.to(device), own), requires_grad=own.requires_grad)
        self.inputs[name] = self.parameters[name] = kept
        return adopt

    def _split(self, name: str, whole: Tensor, cut: Cut, narrow: str | None) -> None:
        """Store a parameter whole for the graph, and this rank's part for the optimizer."""
        part = cut.part(whole, self._comm(name).rank)
        if narrow is not None:
            part = part.clone(memory_format=torch.contiguous_format)
            whole = whole.to(dtype_named(narrow))
        self._cuts[name] = cut
        self.inputs[name] = whole
        self._wholes[name] = torch.empty_like(whole, device="meta")
        self.parameters[name] = nn.Parameter(part.contiguous())

    def _share(self, name: str, value: Tensor, own: nn.Parameter, adopt: bool) -> bool:
        """Write this rank's part into shared memory. With `adopt`, use the memory for the model's own parameter if
        possible; returns whether it was."""
        shared, rank, offload = self._shared[name], self._world.comm(self._axis).rank, self._offload
        part = shared.part(rank)
        mine = value if shared.cut is None else shared.cut.part(value, rank)
        if shared.cut is not None or rank == 0:
            part.copy_(mine)
        if shared.narrow:
            part = mine.to("cpu").clone(memory_format=torch.contiguous_format)
        if name in self._away or self._sharding.updates_on_host:
            offload.forms[name] = torch.empty_like(part, device="meta")
        self.parameters[name] = nn.Parameter(part, requires_grad=own.requires_grad)
        if name in self._away:
            offload.lend(f"parameter/{name}", part)
            offload.lend(f"input/{name}", shared.whole)
        elif self._sharding.updates_on_host:
            self.inputs[name] = value.to(self._world.device, shared.whole.dtype)
        else:
            self.inputs[name] = shared.whole
            if adopt and not shared.narrow:
                own.data = shared.whole
                return True
        return False

    def _store_offloaded(self, name: str, value: Tensor, cut: Cut | None, narrow: str | None, trains: bool) -> None:
        """Store the optimizer's tensor on the host or on disk, and the graph's on the device or to be fetched."""
        offload = self._offload
        part = value if cut is None else cut.part(value, self._comm(name).rank).contiguous()
        offload.forms[name] = torch.empty_like(part, device="meta")
        whole = value if narrow is None else value.to(dtype_named(narrow))
        if cut is not None:
            self._cuts[name] = cut
            self._wholes[name] = torch.empty_like(whole, device="meta")
        if name not in self._away:
            kept = offload.copies.host_like(part).copy_(part)
            self.inputs[name] = whole
        else:
            offload.put(f"parameter/{name}", part)
            there = offload.in_memory(f"parameter/{name}")
            kept = hollow(part) if there is None else there
            if cut is not None:
                offload.put(f"input/{name}", whole)
            else:
                offload.share(f"input/{name}", f"parameter/{name}")
        self.parameters[name] = nn.Parameter(kept, requires_grad=trains)

    def _reserve_disk(self, program: RankProgram) -> None:
        """Reserve disk space for offloaded parameters and gradients, before anything is written."""
        mesh, here = self._world.mesh, self._world.mesh.coordinates(self._world.rank)
        on_disk = {name: each for name, each in self._sharding.parameters.items() if each.memory == DISK}
        if not on_disk:
            return
        num_bytes = 0
        for name, each in on_disk.items():
            if not each.state.lies_at(here):
                continue
            size = program.dtype_of(name).itemsize
            part = padded(math.prod(each.state.local_shape(mesh, here)) * size)
            whole = padded(math.prod(each.compute.local_shape(mesh, here)) * size)
            num_bytes += 2 * part + (whole if each.gather is Gather.UPDATE else 0)
            num_bytes += whole if program.plan.micro > 1 and not self._sharding.sums_each_microbatch else 0
        self._offload.file.reserve(num_bytes, "parameters and gradients")

    def _make_buckets(self) -> Iterator[tuple[FlatShards, list[str]]]:
        """The buckets in which updated parts are gathered, with the names of their parameters."""
        alike: dict[tuple[torch.dtype, str], list[str]] = {}
        for name in self._cuts:
            alike.setdefault((self._wholes[name].dtype, self._sharding.parameters[name].cut_axis), []).append(name)
        for names in alike.values():
            sizes = [self._wholes[name].nbytes for name in names]
            limit = bucket_limit(sum(sizes), self._bucket_bytes)
            for members in split_buckets(sizes, limit, limit):
                bucket = [names[i] for i in members]
                yield FlatShards(tuple(self._cuts[name] for name in bucket)), bucket

    def _comm(self, name: str) -> Comm:
        """The ranks over which a parameter is cut."""
        return self._world.comm(self._sharding.parameters[name].cut_axis)

    def local(self, name: str) -> Tensor | None:
        """This rank's part of a parameter; from disk as a copy. None if another rank has it."""
        parameter = self.parameters.get(name)
        if parameter is None or name not in self._away:
            return None if parameter is None else parameter.detach()
        return self._offload.get(f"parameter/{name}")

    def set_local(self, name: str, part: Tensor) -> None:
        """Set this rank's part of a parameter. The graph reads it after `updated`."""
        if name in self._away and self._offload.in_memory(f"parameter/{name}") is None:
            self._offload.put(f"parameter/{name}", part)
        else:
            self.parameters[name].detach().copy_(part)

    def updated(self) -> None:
        """Gather the parts that the optimizer has changed, so that the graph reads the new values."""
        self._update_shared()
        if self._sharding.updates_on_host:
            for name in self.inputs.keys() - self._cuts.keys() - self._shared.keys():
                self.inputs[name].copy_(self.parameters[name].detach(), non_blocking=True)
        ahead: list[tuple[Gathering, list[str]]] = []
        for rows, names in self._buckets:
            ahead.append((self._start_gather(rows, names), names))
            if len(ahead) > 1:
                self._finish_gather(*ahead.pop(0))
        for each in ahead:
            self._finish_gather(*each)
        if self._sharding.updates_on_host:
            Event(self._world.device).synchronize()  # who sets a parameter next writes into what is being copied

    def _update_shared(self) -> None:
        if not self._shared:
            return
        comm = self._world.comm(self._axis)
        for name, shared in self._shared.items():
            if shared.narrow:
                shared.part(comm.rank).copy_(self.parameters[name].detach())
        comm.barrier()  # no rank reads before all ranks have updated
        for name, shared in self._shared.items():
            if self._sharding.updates_on_host and name in self.inputs:
                self.inputs[name].copy_(shared.whole, non_blocking=True)

    def _start_gather(self, rows: FlatShards, names: list[str]) -> Gathering:
        """Start to gather a bucket."""
        device = self._world.device
        forms = [self._wholes[name] for name in names]
        wholes = [
            self.inputs[name] if name in self.inputs else torch.empty_like(form, device=device)
            for name, form in zip(names, forms, strict=True)
        ]
        held = [part for name in names if (part := self.local(name)) is not None]
        parts = tuple(part.to(device, non_blocking=True) for part in held)
        return Gathering(self._comm(names[0]), rows.plain, tuple(form.dtype for form in forms), parts, wholes)

    def _finish_gather(self, gathering: Gathering, names: list[str]) -> None:
        """Finish gathering a bucket."""
        for name, whole in zip(names, gathering.wait(), strict=True):
            if name in self._away:
                self._offload.put(f"input/{name}", whole)


def _unaliased(value: Tensor, own: Tensor) -> Tensor:
    """The value, in memory other than that of the model's own tensor."""
    return value.clone() if value.data_ptr() == own.data_ptr() else value


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
