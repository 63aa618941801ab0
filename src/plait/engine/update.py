"""The optimizer's step, wherever what it reads is kept: chunk after chunk of parameters, through three buffers.

    buffer 0 | read 0 | step 0 | write 0 | read 3 | step 3 | ...
    buffer 1 |        | read 1 | step 1  | write 1 | read 4 | ...
    buffer 2 |                 | read 2  | step 2  | write 2 | ...

While one chunk is stepped by the user's optimizer as it is, fused or not, threads read the next and write the last
(Rajbhandari et al. 2021, "ZeRO-Infinity"). The optimizer sees one step: its options and hooks are those of one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait.backends.eager.offload.disk import DiskPlace, Transfer
from plait.backends.eager.offload.store import Offload, hollow
from plait.backends.eager.page_memory import page_memory
from plait.backends.eager.rewrites.offload_ops import is_large
from plait.comm.device import synchronize
from plait.comm.protocol import World
from plait.cost.memory_model import padded
from plait.engine.estimate_state import Foresight
from plait.engine.optimizers import refuse_some_at_a_time
from plait.optim.several import each_parameter
from plait.spec.layout import Layout, Shard

_CHUNK_BYTES = 16 << 20
_NUM_BUFFERS = 3
_VALUE, _GRADIENT = "parameter", "gradient"  # what else is read of a parameter, beside the keys of its state
_Key = tuple[str, str]  # ("state", key), or one of the two and ""


class _Buffer:
    """Page memory for one chunk: what was read into it, and what is being written from it."""

    def __init__(self) -> None:
        self._memory = page_memory(0)
        self._writing: list[Transfer] = []
        self._reading: list[Transfer] = []
        self.members: list[nn.Parameter] = []
        self.found: list[tuple[nn.Parameter, _Key, DiskPlace, Tensor]] = []  # the last is its page memory

    def read(self, members: list[nn.Parameter], places: list[tuple[nn.Parameter, _Key, DiskPlace]]) -> None:
        """Begin to read the places, once nothing is written from the buffer any more."""
        for transfer in self._writing:
            transfer.wait()
        size = sum(place.num_bytes for _, _, place in places)
        if self._memory.numel() < size:
            self.found, self._memory = [], page_memory(0)
            self._memory = page_memory(size)
        pieces = self._memory[:size].split([place.num_bytes for _, _, place in places])
        self.members, self._writing = members, []
        self.found = [(*one, memory) for one, memory in zip(places, pieces, strict=True)]
        self._reading = [place.read(memory) for _, _, place, memory in self.found]

    def wait(self) -> None:
        for transfer in self._reading:
            transfer.wait()

    def written(self, transfers: list[Transfer]) -> None:
        self._writing += transfers

    def drop(self) -> None:
        """Let go of the memory, which those that still write from it hold."""
        self._memory, self.members, self.found = page_memory(0), [], []


class Update:
    """Steps an optimizer over a rank's `parameters`; those whose state is on disk hold tensors without memory for it.

    `layouts` decide on the chunks, so that they are the same on every rank: an optimizer may sum over ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        layouts: Mapping[str, Layout],
        world: World,
        homes: Offload,
    ) -> None:
        self._optimizer = optimizer
        self._homes = homes
        self._names = {p: name for name, p in parameters.items()}
        self._places: dict[nn.Parameter, dict[str, DiskPlace]] = {}  # of states on disk
        self._chunks: list[list[nn.Parameter]] = []
        self._buffers = [_Buffer() for _ in range(_NUM_BUFFERS)]
        self._turn = 0
        self._common = world if homes.plan.sharding.shares_parameters else None
        if not homes.plan.uses_disk:
            return
        refuse_some_at_a_time(optimizer, homes.plan)
        foresight = Foresight(optimizer)
        self._chunks = self._cut(foresight, layouts, world)
        if homes.plan.home_optimizer != "disk":
            return
        needed = 0
        for group, p in self._own():
            self._places[p] = {}
            needed += sum(padded(n) for n in foresight.state_bytes(group, tuple(p.shape), p.dtype))
        homes.file.promise(needed, "the optimizer's state")
        for p in self._places:
            self.settle(p)  # some optimizers make their state at once

    def step(self) -> None:
        """One step of the optimizer on the gradients that are there, of its parameters or left in their homes."""
        homes = self._homes
        if self._common is not None:
            self._wait_for_readers(self._common)
        for p, name in self._names.items():
            if name in homes.norms and homes.place(f"{_GRADIENT}/{name}") is None:
                kept = homes.in_memory(f"{_GRADIENT}/{name}")
                assert kept is not None
                p.grad = kept if homes.factor == 1 else kept.mul_(homes.factor)
        if not self._chunks:
            self._optimizer.step()
            return
        with self._set_aside() as (gradients, chunks):
            ahead = self._read(chunks[0]) if chunks else None
            for index in range(len(chunks)):
                buffer, ahead = ahead, None
                assert buffer is not None
                self._bring(buffer)
                if index + 1 < len(chunks):
                    ahead = self._read(chunks[index + 1])
                for p in buffer.members:
                    p.grad = gradients.get(p, p.grad)
                self._step(set(buffer.members), index == 0, index == len(chunks) - 1)
                self._let_go(buffer)
        for each in self._buffers:
            each.drop()

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """A parameter's state as the optimizer would have it; what is on disk comes in memory of its own."""
        state = dict(self._optimizer.state.get(parameter, {}))
        places = self._places.get(parameter, {})
        return {key: places[key].get() if _is_away(value) else value for key, value in state.items()}

    def settle(self, parameter: nn.Parameter) -> None:
        """Move a parameter's state to its home, after someone has set it in `optimizer.state`."""
        if parameter in self._places:
            for transfer in self._put_state(parameter, {}):
                transfer.wait()

    def _wait_for_readers(self, world: World) -> None:
        """Until no rank reads the parameters that several ranks have in common any more."""
        synchronize(world.device)
        world.comm(self._homes.plan.sharding.axis).barrier()

    @contextmanager
    def _set_aside(self) -> Iterator[tuple[dict[nn.Parameter, Tensor], list[list[nn.Parameter]]]]:
        """Gives the gradients, which the parameters lack inside, and the chunks of those that have one."""
        optimizer = self._optimizer
        self._groups = list(optimizer.param_groups)
        self._params = [group["params"] for group in self._groups]
        self._options = [{key: value for key, value in group.items() if key != "params"} for group in self._groups]
        self._hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        norms = self._homes.norms
        gradients = {p: p.grad for p in self._names if p.grad is not None}
        chunks = [[p for p in chunk if p in gradients or self._names[p] in norms] for chunk in self._chunks]
        for p in gradients:
            p.grad = None
        try:
            yield gradients, [chunk for chunk in chunks if chunk]
        finally:
            optimizer.param_groups = self._groups
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = self._hooks
            for group, params in zip(self._groups, self._params, strict=True):
                group["params"] = params

    def _step(self, members: set[nn.Parameter], first: bool, last: bool) -> None:
        """Step these only, with the options that the groups had before, and the hooks of one step in all."""
        optimizer = self._optimizer
        optimizer.param_groups = []
        for group, params, options in zip(self._groups, self._params, self._options, strict=True):
            if some := [p for p in params if p in members]:
                group.update(options, params=some)
                optimizer.param_groups.append(group)
        before, after = self._hooks
        optimizer._optimizer_step_pre_hooks = before if first else OrderedDict()
        optimizer._optimizer_step_post_hooks = after if last else OrderedDict()
        optimizer.step()

    def _read(self, members: list[nn.Parameter]) -> _Buffer:
        """Begin to read what is on disk for these parameters."""
        places: list[tuple[nn.Parameter, _Key, DiskPlace]] = []
        for p in members:
            for kind in (_VALUE, _GRADIENT):
                place = self._homes.place(f"{kind}/{self._names[p]}")
                if place is not None:
                    places.append((p, (kind, ""), place))
            state = self._optimizer.state.get(p, {})
            found = self._places.get(p, {})
            places += [(p, ("state", key), place) for key, place in found.items() if _is_away(state.get(key))]
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        buffer.read(members, places)
        return buffer

    def _bring(self, buffer: _Buffer) -> None:
        """Wait for what was read and put it where the optimizer looks."""
        buffer.wait()
        for p, (kind, key), place, memory in buffer.found:
            tensor = place.view(memory)
            if kind == _VALUE:
                p.data = tensor
            elif kind == _GRADIENT:
                p.grad = tensor if self._homes.factor == 1 else tensor.mul_(self._homes.factor)
            else:
                self._optimizer.state[p][key] = tensor

    def _let_go(self, buffer: _Buffer) -> None:
        """Begin to write what was stepped; the parameters keep nothing of what is on disk."""
        lying: dict[int, Tensor] = {}
        for p, (kind, _), place, memory in buffer.found:
            lying[memory.data_ptr()] = memory
            if kind == _VALUE:
                buffer.written([place.write(memory)])
                p.data = hollow(place.form)
        for p in buffer.members:
            p.grad = None
            if p in self._places:
                buffer.written(self._put_state(p, lying))

    def _put_state(self, parameter: nn.Parameter, lying: Mapping[int, Tensor]) -> list[Transfer]:
        """Begin to write a parameter's state; page memory that it lies in already is found by its address."""
        state, places = self._optimizer.state.get(parameter, {}), self._places[parameter]
        transfers = []
        for key, value in list(state.items()):
            if not torch.is_tensor(value) or value.is_meta or not is_large(value.numel()):
                continue
            form = self._homes.forms.get(self._names[parameter], parameter)
            if value.shape == form.shape and value.stride() != form.stride():  # fused optimizers walk them side by side
                value = torch.empty_like(form, dtype=value.dtype, device=value.device).copy_(value)
            place = places.get(key)
            if place is None or not place.fits(torch.empty_like(value, device="meta")):
                place = places[key] = self._homes.file.place(value, "the optimizer's state")
            memory = lying.get(value.data_ptr()) if place.fits(value) else None
            transfers.append(place.put(value) if memory is None else place.write(memory))
            state[key] = place.form
        return transfers

    def _cut(self, foresight: Foresight, layouts: Mapping[str, Layout], world: World) -> list[list[nn.Parameter]]:
        """The parameters in the optimizer's order, so many at a time that what is read for them fits a buffer."""
        found: list[list[nn.Parameter]] = []
        held = 0
        for group, p in self._own():
            layout = layouts[self._names[p]]
            axes = [axis for axis, where in layout.placements if isinstance(where, Shard)]
            size = sum(foresight.state_bytes(group, layout.shape, p.dtype))
            size += 2 * math.prod(layout.shape) * p.dtype.itemsize if self._homes.fetches_parameters else 0
            size //= math.prod(world.mesh.axis_size(axis) for axis in axes)
            if not found or held + size > _CHUNK_BYTES:
                found.append([])
                held = 0
            found[-1].append(p)
            held += size
        return found

    def _own(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        """The parameters of this rank, each with its group."""
        return ((group, p) for group, p in each_parameter(self._optimizer) if p in self._names)


def _is_away(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
