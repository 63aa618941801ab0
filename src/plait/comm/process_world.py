"""The World of ranks that are processes, as torchrun starts them, and the choice of their transport.

Ranks on CPUs of one x86-64 host communicate through shared memory, all others through torch.distributed.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh

from plait.comm.agree import agree, wait_for_notes
from plait.comm.algorithms import choose
from plait.comm.device import is_host, make_current, own_device
from plait.comm.failure import at_exit, leave
from plait.comm.group import AloneComm
from plait.comm.key_value_store import KeyValueStore, LocalStore, SocketStore
from plait.comm.launch import SOCKET, rank_and_size, ranks_folder
from plait.comm.monitor import Monitor, timeout
from plait.comm.process_group_transport import ProcessGroupComm
from plait.comm.protocol import CHANNELS, Comm, World, channel_key, find_comm
from plait.comm.rendezvous import DistributedStore, join
from plait.comm.segment import Segment
from plait.comm.shared_memory_collectives import create_segment, num_words
from plait.comm.shared_memory_transport import SharedMemoryComm
from plait.comm.sharing import host_name
from plait.errors import WorldError
from plait.plan.axes import axis_kind
from plait.spec.mesh import Mesh

_ROOM = 1 << 26  # bytes of free memory, per rank and group, below which shared memory is not used
_num_worlds = 0


class ProcessWorld:
    """The World of a rank that is a process. `process_world` makes it."""

    def __init__(self, mesh: Mesh, rank: int, device: torch.device, store: KeyValueStore, owns_group: bool) -> None:
        self.mesh = mesh
        self.rank = rank
        self.device = device
        self.store = store
        self.monitor: Monitor | None = None
        if mesh.size > 1:
            self.monitor = Monitor(store, rank, mesh.size, functools.partial(leave, store, rank))
            at_exit(self.monitor)
        self._comms: dict[str, Comm] = {}
        self._everyone: Comm = AloneComm(rank)
        self._shared: list[SharedMemoryComm] = []
        self._device_mesh: DeviceMesh | None = None
        self._owns_group = owns_group

    def comm(self, axis: str, channel: str = "") -> Comm:
        return find_comm(self._comms, self.mesh, axis, channel)

    def everyone(self) -> Comm:
        return self._everyone

    def abort(self) -> None:
        """Tell the other ranks of this host at once that this one has failed."""
        for comm in self._shared:
            comm.abort()

    def close(self) -> None:
        """Leave the process group; all ranks do so together."""
        if self.monitor is not None:
            self.monitor.close()
        for comm in self._shared:
            comm.close()
        self._shared.clear()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()


def process_world(
    mesh: Mesh, *, device: str | None = None, algorithm: str = "backend", shared_memory: bool = True
) -> ProcessWorld:
    """The world of this process, from the environment that torchrun sets. Every rank passes the same arguments.

    Args:
        mesh: the mesh of all ranks.
        device: `cpu` or `cuda`; by default cuda if there is one. The rank takes the device of its LOCAL_RANK.
        algorithm: the all-reduce algorithm, a name of comm/algorithms.py.
        shared_memory: whether ranks of one host may use shared memory.

    Without torchrun's environment the world has one rank. Raises WorldError if the mesh has another number of ranks
    than the environment, or if ranks pass different arguments.
    """
    global _num_worlds
    started = dist.is_initialized()
    size = dist.get_world_size() if started else rank_and_size()[1]
    if mesh.size != size:
        there = "is 1 process" if size == 1 else f"are {size} processes"
        raise WorldError(
            f"the plan's mesh ({mesh or 'one rank'}) is of {mesh.size} ranks but there {there}; start it"
            f" with `plait run --processes {mesh.size}` or `torchrun --nproc-per-node {mesh.size}`, or change the plan"
        )
    where = own_device(device)
    make_current(where)
    if size == 1 and not started:
        world = ProcessWorld(mesh, 0, where, LocalStore(), owns_group=False)
        world._comms = {axis: AloneComm(0) for axis in mesh.communicators}
        return world
    if not started:
        join(where)
    elif (bound := getattr(dist.group.WORLD, "bound_device_id", None)) is not None:
        _check_messages(mesh, bound)
    rank = dist.get_rank()
    _num_worlds += 1
    world = ProcessWorld(mesh, rank, where, _store(str(_num_worlds)), owns_group=not started)
    groups = {axis: mesh.groups(axis) for axis in mesh.communicators} | {"": (tuple(range(size)),)}
    remedy = "give every rank the same plan and the same arguments"
    agree(world, f"{mesh}, {where.type}, allreduce={algorithm}", "mesh, device and transport", remedy=remedy)
    shared = _share_memory(world, groups) if shared_memory and is_host(where) else {}
    world._shared = list(shared.values())
    for one in world._shared:
        one.siblings = [other for other in world._shared if other is not one]
    for axis, all_ranks in groups.items():
        ranks = next(ranks for ranks in all_ranks if rank in ranks)
        if len(ranks) == 1:
            comm: Comm = AloneComm(rank)
        else:
            comm = choose(shared[axis] if axis in shared else _group_comm(world, axis, ranks), algorithm)
        if axis:
            world._comms[axis] = comm
        else:
            world._everyone = comm
    return world


def _group_comm(world: ProcessWorld, axis: str, ranks: tuple[int, ...]) -> ProcessGroupComm:
    """A Comm of these ranks through torch.distributed, with groups for messages and channels if it is of an axis."""
    if axis in world.mesh.joined:
        group = _new_group(ranks)
    else:
        group = device_mesh(world).get_group(axis) if axis else dist.group.WORLD
    _allow_time(group)
    comm = ProcessGroupComm(ranks, ranks.index(world.rank), group, world.device, world.monitor)
    if axis:
        comm.message_groups = (_new_group(ranks), _new_group(ranks))
        for channel in CHANNELS:
            world._comms[channel_key(axis, channel)] = comm.channel(_new_group(ranks))
    return comm


def _check_messages(mesh: Mesh, bound: torch.device) -> None:
    """Raise WorldError if ranks exchange messages through groups that are bound to a device."""
    kinds = [axis_kind(axis) for axis in mesh.names if mesh.axis_size(axis) > 1]
    if any(kind.has_stages or kind.cuts_sequence for kind in kinds):
        raise WorldError(
            f"torch.distributed was started with device_id={bound}, with which messages of a group run one after the"
            " other, so that stages of a pipeline, or ranks of a ring, wait for each other; call init_process_group"
            " without device_id, or leave it to plait"
        )


def _new_group(ranks: tuple[int, ...]) -> Any:
    """A process group of these ranks besides that of their axis. They alone call it, all in the same order.

    NCCL makes the communicators of a group when they are first used: one for its collectives, and one for each pair of
    its ranks that exchange messages.
    """
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    _allow_time(group)
    return group


def _allow_time(group: dist.ProcessGroup | None) -> None:
    """Set the timeout of a group; each group of torch.distributed has its own."""
    set_timeout = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if set_timeout is not None:
        set_timeout(timedelta(seconds=timeout()), group)


def has_process_group(world: World) -> bool:
    """Whether the ranks are processes of a torch.distributed process group."""
    return isinstance(world, ProcessWorld) and world.mesh.size > 1


def device_mesh(world: World) -> DeviceMesh:
    """The mesh as a DeviceMesh, for DTensor in state dicts, optimizers and checkpoints. All ranks call it together."""
    assert isinstance(world, ProcessWorld)
    if world._device_mesh is None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            world._owns_group = True
        names = world.mesh.names or ("world",)
        sizes = [world.mesh.axis_size(axis) for axis in world.mesh.names] or [1]
        ranks = torch.arange(world.mesh.size).view(sizes)
        world._device_mesh = DeviceMesh(world.device.type, ranks, mesh_dim_names=names)
    return world._device_mesh


def _store(name: str) -> KeyValueStore:
    """The launcher's store if `plait` has started the ranks, else the one of the process group."""
    folder = ranks_folder()
    return DistributedStore(name) if folder is None else SocketStore(folder / SOCKET, name)


def _share_memory(world: ProcessWorld, groups: dict[str, tuple[tuple[int, ...], ...]]) -> dict[str, SharedMemoryComm]:
    """A SharedMemoryComm for every axis whose groups each lie within one host; the same axes on every rank."""
    rank, size = world.rank, world.mesh.size
    mine = {axis: next(ranks for ranks in found if rank in ranks) for axis, found in groups.items()}
    own: dict[str, Segment] = {}
    note: dict[str, Any] = {"host": _host(), "pid": os.getpid(), "fds": {}, "why": ""}
    try:
        _check_room(size * len(groups))
        for axis, ranks in mine.items():
            if len(ranks) > 1:
                own[axis] = create_segment(len(ranks))
                note["fds"][axis] = own[axis].fd
    except (OSError, AttributeError) as error:
        note["why"] = f"{error}"
    notes = _exchange(world, "shm", note)
    hosts = [each["host"] for each in notes]
    axes = [axis for axis, found in groups.items() if all(len({hosts[i] for i in ranks}) == 1 for ranks in found)]
    axes = [axis for axis in axes if len(mine[axis]) > 1 and hosts[0]]
    opened: dict[str, list[Segment]] = {}
    why = next((each["why"] for each in notes if each["why"]), "")
    try:
        for axis in axes if not why else []:
            opened[axis] = [
                own[axis]
                if i == rank
                else Segment.open(notes[i]["pid"], notes[i]["fds"][axis], num_words(len(mine[axis])))
                for i in mine[axis]
            ]
    except OSError as error:
        why = f"{error}"
    why = next((each for each in _exchange(world, "shm opened", why) if each), "")
    if why:
        if rank == 0 and axes:
            warnings.warn(f"no shared memory between the ranks of a host ({why}): slower Gloo is used", stacklevel=3)
        for segment in own.values():
            segment.close()
        return {}
    for axis in own.keys() - opened.keys():
        own[axis].close()
    num_local = hosts.count(hosts[rank])
    limit = max(_available_memory() // (4 * num_local), _ROOM)
    crowded = num_local > len(os.sched_getaffinity(0))
    shared = {}
    for axis in axes:
        pids = [notes[i]["pid"] for i in mine[axis]]
        shared[axis] = SharedMemoryComm(
            mine[axis], mine[axis].index(rank), opened[axis], pids, limit, crowded, world.monitor
        )
    return shared


def _exchange(world: World, key: str, note: object) -> list[Any]:
    """The note of every rank, in rank order."""
    store, rank = world.store, world.rank
    store.set(f"{key}/{rank}", json.dumps(note))
    keys = {i: f"{key}/{i}" for i in range(world.mesh.size)}
    wait_for_notes(world, keys, "joining the run")
    return [json.loads(store.get(key) or "null") for key in keys.values()]


def _host() -> str:
    """The same text on ranks that can share memory; "" on processors that do not keep stores to memory in order."""
    return host_name() if platform.machine() in ("x86_64", "AMD64") else ""


def _available_memory() -> int:
    with open("/proc/meminfo", encoding="utf-8") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))


def _check_room(num_segments: int) -> None:
    free = _available_memory()
    if free < num_segments * _ROOM:
        raise OSError(f"{free >> 20} MiB of memory are free, {num_segments * _ROOM >> 20} MiB are wanted")
