"""The parameters of one rank: what the optimizer updates, what the graph reads, and the way from one to the other.

zero=0  the same tensors
zero=1  the graph reads whole tensors; the optimizer has this rank's part of each, a view of the whole where that
zero=2  is possible; after an update the parts are gathered
zero=3  the same tensors: this rank's parts, which the graph gathers
central=host  as zero=2, but the whole tensors are in memory that the data ranks have in common
              (engine/shared_parameters.py), so that nothing is gathered: before and after an update all wait for all.
              An accelerator has copies of its own

Large parameters whose home is elsewhere are kept there (backends/eager/offload/store.py): the optimizer's have the form
of the tensor but no memory, and the graph fetches what it reads. Where the update runs on the host beside an
accelerator, the optimizer has copies of its own in host memory, which go back after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from plait.backends.eager.offload.store import Offload, hollow
from plait.backends.eager.rewrites.gather_ahead import Gathering
from plait.backends.eager.rewrites.offload_ops import large
from plait.comm.protocol import World
from plait.compile.rank_program import RankProgram
from plait.compile.sharding.flat_shards import Cut, FlatShards
from plait.cost.memory_model import padded
from plait.engine.initialise import initial_parameters
from plait.engine.model_weights import release, where
from plait.engine.shared_parameters import common_parameters
from plait.engine.state import is_whole, lies_here
from plait.schedule.buckets import bucket_limit, split_buckets
from plait.spec.layout import Layout


class Variables:
    """`parameters` are the optimizer's, `inputs` the graph's, both by name; absent where another rank has them, and of
    the inputs those that the graph fetches.

    With `adopt`, tensors that are whole are the model's own; `release` lets the model's copies of others go.
    """

    def __init__(
        self, model: nn.Module, program: RankProgram, world: World, homes: Offload, seed: int, adopt: bool
    ) -> None:
        sharding = program.plan.sharding
        self._world = world
        self._axis = sharding.axis
        self._homes = homes
        self._away = large(program.states) if homes.fetches_parameters else frozenset()
        self._common = common_parameters(program, world)
        self._bucket_bytes = program.plan.bucket_bytes
        # Of parameters whose parts are gathered after an update: how they are cut, the form of what the graph reads.
        self._cuts: dict[str, Cut] = {}
        self._wholes: dict[str, Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.inputs: dict[str, Tensor] = {}
        own = dict(model.named_parameters())
        changing = program.captured.changing
        self.changing: dict[str, Tensor] = {}  # parameters that do not train, and that the step itself changes; whole
        states = program.layouts | (program.states if sharding.cuts_parameters else {})
        held = {name: states[name] for name in own}
        cuts = program.cuts if sharding.gathers_updates else {}
        adopted: set[str] = set()
        self._promise(program)
        for name, value in initial_parameters(model, held, world, seed):
            if name in changing:
                assert value is not None
                self.changing[name] = own[name].detach() if adopt else _apart(value.to(world.device), own[name])
                adopted.add(name)
            elif value is not None:
                can_adopt = adopt and is_whole(held[name]) and not own[name].is_meta
                if can_adopt and value.data_ptr() != own[name].data_ptr():
                    own[name].data = value  # of rank 0
                if self._hold(name, value, own[name], cuts.get(name), program.dtypes.get(name), can_adopt):
                    adopted.add(name)
        self._buckets = list(self._make_buckets())
        if self._common:
            world.comm(self._axis).barrier()  # all have put their values there
        self._released = own.keys() - adopted if adopt else set()
        self._model = model

    def release(self, states: Mapping[str, Layout]) -> None:
        """Let go of the model's own copy of what lives elsewhere. Until then the model is as it was, for a start that
        fails."""
        plan = self._homes.plan
        whys = {name: where(name, states[name], plan, name in self._away) for name in self._released}
        release(self._model, self._released, whys)

    def _hold(
        self, name: str, value: Tensor, own: nn.Parameter, cut: Cut | None, narrow: str | None, adopt: bool
    ) -> bool:
        """Keep a parameter where the plan wants it. With `adopt` the model's own tensor if it can be; whether it is."""
        device = self._world.device
        if name in self._common:
            return self._hold_in_common(name, value, own, adopt)
        if name in self._away or self._homes.updates_on_host:
            self._keep_elsewhere(name, value.to(device), cut, narrow, own.requires_grad)
            return False
        if cut is not None:
            adopt = adopt and narrow is None
            self._split(name, own.detach().to(device) if adopt else _apart(value.to(device), own), cut, narrow)
            return adopt
        kept = own if adopt else nn.Parameter(_apart(value.to(device), own), requires_grad=own.requires_grad)
        self.inputs[name] = self.parameters[name] = kept
        return adopt

    def _split(self, name: str, whole: Tensor, cut: Cut, narrow: str | None) -> None:
        part = cut.part(whole, self._world.comm(self._axis).rank)
        if narrow is not None:
            part = part.clone(memory_format=torch.contiguous_format)
            whole = whole.to(getattr(torch, narrow))
        self._cuts[name] = cut
        self.inputs[name] = whole
        self._wholes[name] = torch.empty_like(whole, device="meta")
        self.parameters[name] = nn.Parameter(part.contiguous())

    def _hold_in_common(self, name: str, value: Tensor, own: nn.Parameter, adopt: bool) -> bool:
        """Put this rank's part where all have it; with `adopt` let the model's own parameter lie there if it can."""
        common, rank, homes = self._common[name], self._world.comm(self._axis).rank, self._homes
        part = common.part(rank)
        mine = value if common.cut is None else common.cut.part(value, rank)
        if common.cut is not None or rank == 0:
            part.copy_(mine)
        if common.narrow:
            part = mine.to("cpu").clone(memory_format=torch.contiguous_format)
        if homes.fetches_parameters or homes.updates_on_host:
            homes.forms[name] = torch.empty_like(part, device="meta")
        self.parameters[name] = nn.Parameter(part, requires_grad=own.requires_grad)
        if name in self._away:
            homes.lend(f"parameter/{name}", part)
            homes.lend(f"input/{name}", common.whole)
        elif homes.updates_on_host:
            self.inputs[name] = value.to(common.whole.dtype)
        else:
            self.inputs[name] = common.whole
            if adopt and not common.narrow:
                own.data = common.whole
                return True
        return False

    def _keep_elsewhere(self, name: str, value: Tensor, cut: Cut | None, narrow: str | None, trains: bool) -> None:
        """The optimizer's tensor on the host or on disk, the graph's on the device or fetched from there."""
        homes = self._homes
        part = value if cut is None else cut.part(value, self._world.comm(self._axis).rank).contiguous()
        homes.forms[name] = torch.empty_like(part, device="meta")
        whole = value if narrow is None else value.to(getattr(torch, narrow))
        if cut is not None:
            self._cuts[name] = cut
            self._wholes[name] = torch.empty_like(whole, device="meta")
        if name not in self._away:
            kept = homes.lane.host_like(part).copy_(part)
            self.inputs[name] = whole
        else:
            homes.put(f"parameter/{name}", part)
            there = homes.in_memory(f"parameter/{name}")
            kept = hollow(part) if there is None else there
            if cut is not None:
                homes.put(f"input/{name}", whole)
            else:
                homes.share(f"input/{name}", f"parameter/{name}")
        self.parameters[name] = nn.Parameter(kept, requires_grad=trains)

    def _promise(self, program: RankProgram) -> None:
        """Set room aside for what will be on disk, before anything is written."""
        plan, here = program.plan, self._world.mesh.coordinates(self._world.rank)
        sharding, cuts = plan.sharding, program.cuts
        if not self._away or plan.home_parameters != "disk":
            return
        num_bytes = 0
        for name in self._away:
            if not lies_here(program.states[name], self._world):
                continue
            size = program.dtype_of(name).itemsize
            part = padded(math.prod(program.states[name].local_shape(self._world.mesh, here)) * size)
            whole = padded(math.prod(program.layouts[name].local_shape(self._world.mesh, here)) * size)
            num_bytes += 2 * part + (whole if name in cuts and sharding.gathers_updates else 0)
            num_bytes += whole if plan.micro > 1 and not sharding.sums_each_microbatch else 0
        self._homes.file.promise(num_bytes, "parameters and gradients")

    def _make_buckets(self) -> Iterator[tuple[FlatShards, list[str]]]:
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name in self._cuts:
            by_dtype.setdefault(self._wholes[name].dtype, []).append(name)
        for names in by_dtype.values():
            sizes = [self._wholes[name].nbytes for name in names]
            limit = bucket_limit(sum(sizes), self._bucket_bytes)
            for members in split_buckets(sizes, limit, limit):
                bucket = [names[i] for i in members]
                yield FlatShards(tuple(self._cuts[name] for name in bucket)), bucket

    def local(self, name: str) -> Tensor | None:
        """This rank's part of a parameter, wherever it is; from disk as a copy. None where another rank has it."""
        parameter = self.parameters.get(name)
        if parameter is None or name not in self._away:
            return None if parameter is None else parameter.detach()
        return self._homes.get(f"parameter/{name}")

    def set_local(self, name: str, part: Tensor) -> None:
        """Give this rank's part of a parameter new values. `updated` makes the graph read them."""
        if name in self._away and self._homes.in_memory(f"parameter/{name}") is None:
            self._homes.put(f"parameter/{name}", part)
        else:
            self.parameters[name].detach().copy_(part)

    def updated(self) -> None:
        """The optimizer has changed its parts: gather them, so that the graph reads the new values."""
        self._updated_in_common()
        if self._homes.updates_on_host:
            for name in self.inputs.keys() - self._cuts.keys() - self._common.keys():
                self.inputs[name].copy_(self.parameters[name].detach(), non_blocking=True)
        ahead: list[tuple[Gathering, list[str]]] = []
        for rows, names in self._buckets:
            ahead.append((self._gathering(rows, names), names))
            if len(ahead) > 1:
                self._gathered(*ahead.pop(0))
        for each in ahead:
            self._gathered(*each)

    def _updated_in_common(self) -> None:
        if not self._common:
            return
        comm = self._world.comm(self._axis)
        for name, common in self._common.items():
            if common.narrow:
                common.part(comm.rank).copy_(self.parameters[name].detach())
        comm.barrier()  # nobody reads before all have updated
        for name, common in self._common.items():
            if self._homes.updates_on_host and name in self.inputs:
                self.inputs[name].copy_(common.whole)

    def _gathering(self, rows: FlatShards, names: list[str]) -> Gathering:
        device = self._world.device
        forms = [self._wholes[name] for name in names]
        wholes = [
            self.inputs[name] if name in self.inputs else torch.empty_like(form, device=device)
            for name, form in zip(names, forms, strict=True)
        ]
        held = [part for name in names if (part := self.local(name)) is not None]
        parts = tuple(part.to(device, non_blocking=True) for part in held)
        return Gathering(self._world.comm(self._axis), rows.plain, tuple(form.dtype for form in forms), parts, wholes)

    def _gathered(self, gathering: Gathering, names: list[str]) -> None:
        for name, whole in zip(names, gathering.wait(), strict=True):
            if name in self._away:
                self._homes.put(f"input/{name}", whole)


def _apart(value: Tensor, own: Tensor) -> Tensor:
    """The value in memory that is not the model's own."""
    return value.clone() if value.data_ptr() == own.data_ptr() else value
