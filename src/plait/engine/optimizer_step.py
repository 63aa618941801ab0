"""The optimizer's step over offloaded state: chunk after chunk of parameters, through three buffers.

    buffer 0 | read 0 | step 0 | write 0 | read 3 | step 3 | ...
    buffer 1 |        | read 1 | step 1  | write 1 | read 4 | ...
    buffer 2 |                 | read 2  | step 2  | write 2 | ...

While the user's optimizer, fused or not, steps one chunk, threads read the next chunk and write the last one
(Rajbhandari et al. 2021, "ZeRO-Infinity"). For the optimizer it is one step, with the options and hooks of one.

Random numbers that an optimizer draws, such as noise, are equal on all ranks, whatever else a rank has drawn before:
replicas that drew others would drift apart.
"""

from __future__ import annotations

import math
import random
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.backends.eager.offload.disk import DiskPlace, Transfer
from plait.backends.eager.offload.store import Offload, hollow
from plait.comm.device import page_memory, random_devices, synchronize
from plait.comm.hidden_group import without_process_group
from plait.comm.protocol import World
from plait.cost.memory_model import padded
from plait.engine.optimizer_trials import tried
from plait.engine.rank_optimizers import refuse_some_at_a_time
from plait.optim.combined import each_parameter, optimizers_within, title_of
from plait.plan.sharding_plan import DEVICE, ShardingPlan, is_large
from plait.spec.layout import Shard

_drawing = threading.RLock()  # ranks that are threads have one generator


@contextmanager
def equal_draws(optimizer: torch.optim.Optimizer, key: int) -> Iterator[None]:
    """Context for a step of the optimizer, in which torch, numpy and Python draw what `key` determines.

    Their states are as before afterwards. Optimizers of torch draw nothing. Those that communicate between ranks, with
    a method bind(parts), are left alone: they cannot step one rank after the other.
    """
    members = optimizers_within(optimizer).values()
    of_torch = all(type(each).__module__.startswith("torch.optim.") for each in members)
    if of_torch or any(hasattr(each, "bind") for each in members):
        yield
        return
    devices = {p.device for each in members for group in each.param_groups for p in group["params"]}
    with _drawing, torch.random.fork_rng(devices=random_devices(*devices)):
        before = random.getstate(), np.random.get_state(legacy=False)
        torch.manual_seed(key)
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


_CHUNK_BYTES = 16 << 20
_NUM_BUFFERS = 3
_VALUE, _GRADIENT = "parameter", "gradient"  # kinds of tensors, beside "state"
_Forms = list[tuple[tuple[int, ...], torch.dtype]]  # (shape, dtype) of tensors
_Key = tuple[str, str]  # ("state", key), (_VALUE, "") or (_GRADIENT, "")


class _Buffer:
    """Page memory for one chunk.

    members  the parameters of the chunk
    found    (parameter, key, place on disk, page memory) of each tensor that is read
    """

    def __init__(self) -> None:
        self._memory = page_memory(0)
        self._writing: list[Transfer] = []
        self._reading: list[Transfer] = []
        self.members: list[nn.Parameter] = []
        self.found: list[tuple[nn.Parameter, _Key, DiskPlace, Tensor]] = []

    def read(self, members: list[nn.Parameter], places: list[tuple[nn.Parameter, _Key, DiskPlace]]) -> None:
        """Begin to read from the places, after all writes from the buffer are done."""
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
        """Wait until everything is read."""
        for transfer in self._reading:
            transfer.wait()

    def written(self, transfers: list[Transfer]) -> None:
        """Add writes from the buffer that are in flight."""
        self._writing += transfers

    def drop(self) -> None:
        """Free the memory; writes in flight keep theirs."""
        self._memory, self.members, self.found = page_memory(0), [], []


class OptimizerStep:
    """Steps an optimizer over a rank's `parameters`. State on disk is represented by tensors without memory.

    `sharding` decides the chunks, so that they are equal on every rank: an optimizer may sum over ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        sharding: ShardingPlan,
        world: World,
        offload: Offload,
    ) -> None:
        self._optimizer = optimizer
        self._offload = offload
        self._names = {p: name for name, p in parameters.items()}
        self._places: dict[nn.Parameter, dict[str, DiskPlace]] = {}  # by key of the state on disk
        self._chunks: list[list[nn.Parameter]] = []
        self._buffers = [_Buffer() for _ in range(_NUM_BUFFERS)]
        self._next_buffer = 0
        self._sharding = sharding
        self._shared_by = world if offload.plan.shares_parameters else None
        if not offload.plan.uses_disk:
            return
        refuse_some_at_a_time(optimizer, offload.plan)
        estimate = StateEstimate(optimizer)
        self._chunks = self._cut(estimate, world)
        if offload.plan.home_optimizer != "disk":
            return
        needed = 0
        for group, p in self._own():
            self._places[p] = {}
            needed += sum(padded(n) for n in estimate.state_bytes(group, tuple(p.shape), p.dtype))
        offload.file.reserve(needed, "the optimizer's state")
        for p in self._places:
            self.settle(p)  # some optimizers make their state when they are created

    @property
    def can_skip(self) -> bool:
        """Whether `step` takes `skipped`: the optimizer is one of torch's fused ones, and all of it on the device."""
        away = bool(self._chunks) or self._shared_by is not None or self._sharding.updates_on_host
        return not away and bool(getattr(self._optimizer, "_step_supports_amp_scaling", False))

    def step(self, key: int, skipped: Tensor | None = None) -> None:
        """Step the optimizer once on the current gradients, in the parameters or offloaded.

        `key` determines what it draws.

        With `skipped`, a 0-d float32 tensor, nothing changes where it is 1, which the host need not know. It is for an
        optimizer that `can_skip`.
        """
        offload = self._offload
        if self._shared_by is not None:
            self._wait_for_readers(self._shared_by)
        for p, name in self._names.items():
            if name in offload.norms and offload.place(f"{_GRADIENT}/{name}") is None:
                kept = offload.in_memory(f"{_GRADIENT}/{name}")
                assert kept is not None
                p.grad = kept if offload.factor == 1 else kept.mul_(offload.factor)
        optimizer = self._optimizer
        with without_process_group(lambda _: title_of(optimizer)), equal_draws(optimizer, key):
            if skipped is not None:
                with _told(self._optimizer, skipped):
                    self._optimizer.step()
            elif self._chunks:
                self._step_chunks()
            else:
                self._optimizer.step()

    def _step_chunks(self) -> None:
        with self._set_aside() as (gradients, chunks):
            ahead = self._read(chunks[0]) if chunks else None
            for index in range(len(chunks)):
                buffer, ahead = ahead, None
                assert buffer is not None
                self._attach(buffer)
                if index + 1 < len(chunks):
                    ahead = self._read(chunks[index + 1])
                for p in buffer.members:
                    p.grad = gradients.get(p, p.grad)
                self._step(set(buffer.members), index == 0, index == len(chunks) - 1)
                self._write_back(buffer)
        for each in self._buffers:
            each.drop()

    def state_of(self, parameter: nn.Parameter) -> dict[str, object]:
        """A parameter's optimizer state by key; tensors on disk are read into new memory."""
        state = dict(self._optimizer.state.get(parameter, {}))
        places = self._places.get(parameter, {})
        return {key: places[key].get() if _is_offloaded(value) else value for key, value in state.items()}

    def settle(self, parameter: nn.Parameter) -> None:
        """Move a parameter's state, which was set in `optimizer.state`, to where the plan keeps it."""
        if parameter in self._places:
            for transfer in self._put_state(parameter, {}):
                transfer.wait()

    def _wait_for_readers(self, world: World) -> None:
        """Wait until no rank reads the shared parameters any more."""
        synchronize(world.device)
        world.comm(self._sharding.axis).barrier()

    @contextmanager
    def _set_aside(self) -> Iterator[tuple[dict[nn.Parameter, Tensor], list[list[nn.Parameter]]]]:
        """Context that takes the gradients out of the parameters. Gives the gradients, and the chunks of parameters
        that have one."""
        optimizer = self._optimizer
        self._groups = list(optimizer.param_groups)
        self._params = [group["params"] for group in self._groups]
        self._options = [{key: value for key, value in group.items() if key != "params"} for group in self._groups]
        self._hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        norms = self._offload.norms
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
        """Step these parameters only, with the groups' original options, and the hooks of one step over all chunks."""
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
        """Begin to read what is on disk of these parameters."""
        places: list[tuple[nn.Parameter, _Key, DiskPlace]] = []
        for p in members:
            for kind in (_VALUE, _GRADIENT):
                place = self._offload.place(f"{kind}/{self._names[p]}")
                if place is not None:
                    places.append((p, (kind, ""), place))
            state = self._optimizer.state.get(p, {})
            found = self._places.get(p, {})
            places += [(p, ("state", key), place) for key, place in found.items() if _is_offloaded(state.get(key))]
        buffer = self._buffers[self._next_buffer]
        self._next_buffer = (self._next_buffer + 1) % _NUM_BUFFERS
        buffer.read(members, places)
        return buffer

    def _attach(self, buffer: _Buffer) -> None:
        """Wait for the read tensors, and put them where the optimizer looks for them."""
        buffer.wait()
        for p, (kind, key), place, memory in buffer.found:
            tensor = place.view(memory)
            if kind == _VALUE:
                p.data = tensor
            elif kind == _GRADIENT:
                p.grad = tensor if self._offload.factor == 1 else tensor.mul_(self._offload.factor)
            else:
                self._optimizer.state[p][key] = tensor

    def _write_back(self, buffer: _Buffer) -> None:
        """Begin to write what was stepped; the parameters keep no memory for what is on disk."""
        in_memory: dict[int, Tensor] = {}
        for p, (kind, _), place, memory in buffer.found:
            in_memory[memory.data_ptr()] = memory
            if kind == _VALUE:
                buffer.written([place.write(memory)])
                p.data = hollow(place.form)
        for p in buffer.members:
            p.grad = None
            if p in self._places:
                buffer.written(self._put_state(p, in_memory))

    def _put_state(self, parameter: nn.Parameter, in_memory: Mapping[int, Tensor]) -> list[Transfer]:
        """Begin to write a parameter's state. `in_memory` is the page memory that some of it is in, by address."""
        state, places = self._optimizer.state.get(parameter, {}), self._places[parameter]
        transfers = []
        for key, value in list(state.items()):
            if not torch.is_tensor(value) or value.is_meta or not is_large(value.numel()):
                continue
            form = self._offload.forms.get(self._names[parameter], parameter)
            if value.shape == form.shape and value.stride() != form.stride():  # fused optimizers need equal strides
                value = torch.empty_like(form, dtype=value.dtype, device=value.device).copy_(value)
            place = places.get(key)
            if place is None or not place.fits(torch.empty_like(value, device="meta")):
                place = places[key] = self._offload.file.place(value, "the optimizer's state")
            memory = in_memory.get(value.data_ptr()) if place.fits(value) else None
            transfers.append(place.put(value) if memory is None else place.write(memory))
            state[key] = place.form
        return transfers

    def _cut(self, estimate: StateEstimate, world: World) -> list[list[nn.Parameter]]:
        """The parameters in the optimizer's order, in chunks whose tensors on disk fit a buffer."""
        found: list[list[nn.Parameter]] = []
        held = 0
        for group, p in self._own():
            each = self._sharding.parameters[self._names[p]]
            layout = each.state
            axes = [axis for axis, where in layout.placements if isinstance(where, Shard)]
            size = sum(estimate.state_bytes(group, layout.shape, p.dtype))
            size += 2 * math.prod(layout.shape) * p.dtype.itemsize if each.memory != DEVICE else 0
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


@contextmanager
def _told(optimizer: Any, skipped: Tensor) -> Iterator[None]:
    """Context in which a fused optimizer knows of an overflow, as torch.amp.GradScaler tells it."""
    optimizer.grad_scale, optimizer.found_inf = None, skipped
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _is_offloaded(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


class StateEstimate:
    """Estimates the size of an optimizer's state before it exists, by trying the optimizer once per kind of
    parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._found: dict[Hashable, _Forms] = {}

    def state_bytes(self, group: dict[str, object], shape: tuple[int, ...], dtype: torch.dtype) -> list[int]:
        """The bytes of each large tensor of a parameter's state; empty for an optimizer that cannot be tried."""
        small = tuple(min(n, 2 + dim) for dim, n in enumerate(shape))
        key = (id(group), small, dtype)
        if key not in self._found:
            self._found[key] = self._try(group, small, dtype)
        found = [(math.prod(_enlarged(form, small, shape)), d) for form, d in self._found[key]]
        return [num * d.itemsize for num, d in found if is_large(num)]

    def _try(self, group: dict[str, object], small: tuple[int, ...], dtype: torch.dtype) -> _Forms:
        toy = torch.zeros(small, dtype=dtype)
        try:
            state = tried(self._optimizer, group, [toy])[toy]
        except Exception:  # an optimizer of the user's; disk space is then reserved as its state appears
            return []
        return [(tuple(value.shape), value.dtype) for value in state.values() if torch.is_tensor(value)]


def _enlarged(found: tuple[int, ...], small: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a state tensor for a parameter of `shape`, given its shape `found` for one of shape `small`."""
    if len(found) != len(shape):
        return found
    return tuple(n if f == s else f for f, s, n in zip(found, small, shape, strict=True))
