"""Starts torch.distributed in ranks that are processes, and keeps short texts in its store.

Ranks that `plait` has started meet at a file that only this user can reach. Other ranks meet at the MASTER_ADDR and
MASTER_PORT of their launcher; if that is an address and not a name, rank 0 listens there and nowhere else. Ranks of one
machine communicate over its loopback interface. So nothing listens on an interface that nobody named.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from plait.comm.device import process_group_backend
from plait.comm.launch import STORE, number_of, rank_and_size, ranks_folder
from plait.comm.monitor import notice_after, timeout
from plait.errors import WorldError

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_BACKLOG = 2048
_PORTS = range(1, 1 << 16)
_JOIN = timedelta(minutes=30)  # as long as torch.distributed waits for ranks that come late
_held: dict[tuple[str, int], Store] = {}  # stores by address and port; a process opens each once
_num_stores = 0


def join(where: torch.device) -> None:
    """Start torch.distributed from the environment of a rank. Raises WorldError if a variable is missing."""
    folder = ranks_folder()
    wanted = ("RANK",) if folder is not None else ("RANK", "MASTER_ADDR", "MASTER_PORT")
    if absent := [name for name in wanted if name not in os.environ]:
        raise WorldError(f"WORLD_SIZE is set but {', '.join(absent)} is not; start with `plait run` or torchrun")
    rank, size = rank_and_size()
    if folder is None:
        number_of("MASTER_PORT", 0, _PORTS)
    notice_after()  # raises for a wrong value
    with _telling(rank, size) if folder is None else nullcontext():
        _start(where, folder, rank, size)


def _start(where: torch.device, folder: Path | None, rank: int, size: int) -> None:
    store = _file_store(folder, size) if folder is not None else _port_store(rank, size)
    if folder is not None or _is_loopback(os.environ["MASTER_ADDR"]):
        stay_on_loopback()
    at: dict[str, Any] = {"timeout": timedelta(seconds=timeout())}
    at |= {} if store is None else {"store": store, "rank": rank, "world_size": size}
    # Without a device_id, which would give each group one communicator for everything: messages would wait for others.
    dist.init_process_group(process_group_backend(where), **at)


@contextmanager
def _telling(rank: int, size: int) -> Iterator[None]:
    """Print, after PLAIT_NOTICE seconds within it, which address this rank waits at and for how many others."""
    at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    text = (
        f"plait: rank {rank} has waited {notice_after():.0f} s at {at} (MASTER_ADDR and MASTER_PORT) for {size} ranks"
        f" (WORLD_SIZE) to join; start all of them, with the same address"
    )
    timer = threading.Timer(notice_after(), lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def lead_scripts(folder: Path) -> None:
    """Make a script that starts torch.distributed by itself meet the other ranks in `folder` as well."""
    stay_on_loopback()
    handlers = getattr(sys.modules["torch.distributed.rendezvous"], "_rendezvous_handlers", None)
    if handlers is None:  # the script then fails without MASTER_PORT, rather than listen on every interface
        return

    def meet(url: str, **options: object) -> Iterator[tuple[Store, int, int]]:
        size = int(os.environ["WORLD_SIZE"])
        yield _file_store(folder, size), int(os.environ["RANK"]), size

    handlers["env"] = meet
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # some libraries read them; nobody listens


def stay_on_loopback() -> None:
    """Make Gloo and NCCL listen on the loopback interface, unless the user has named another."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for variable in _INTERFACES if names else ():
        os.environ.setdefault(variable, names[0])


def _file_store(folder: Path, size: int) -> Store:
    """The store of ranks that meet in a folder."""
    return _fresh(FileStore(str(folder / STORE), size))


def _port_store(rank: int, size: int) -> Store | None:
    """A store that rank 0 serves at MASTER_ADDR alone, or None if torch.distributed is to make one: the launcher has
    one already, or the address is a name, which hosts may resolve differently."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    try:
        there = str(ipaddress.ip_address("127.0.0.1" if address == "localhost" else address))
    except ValueError:
        return None
    if (there, port) in _held:
        return _fresh(_held[there, port])
    if rank != 0:
        _held[there, port] = TCPStore(there, port, size, is_master=False, timeout=_JOIN)
        return _fresh(_held[there, port])
    listening = socket.socket(socket.AF_INET6 if ":" in there else socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    handed: dict[str, Any] = {}
    try:
        listening.bind((there, port))
        listening.listen(_BACKLOG)
        handed = {"master_listen_fd": listening.detach()}
    except OSError as error:
        listening.close()
        if _is_loopback(there):
            raise WorldError(f"rank 0 cannot listen at {there}:{port}: {error.strerror}") from None
        # The address is one under which only other hosts know this one: the store listens on every interface.
    _held[there, port] = TCPStore(there, port, size, is_master=True, timeout=_JOIN, **handed)
    return _fresh(_held[there, port])


def _fresh(store: Store) -> Store:
    """The store without the keys of earlier groups of this run. All ranks call it equally often."""
    global _num_stores
    _num_stores += 1
    return PrefixStore(str(_num_stores), store)


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


_PREFIX = "plait"
_LONGEST_PAUSE = 0.02  # seconds between two looks at the store


class DistributedStore:
    """The KeyValueStore in the store of the process group, which works during collectives too.

    `name` separates the worlds of one run.
    """

    def __init__(self, name: str, store: Store | None = None) -> None:
        self._name = name
        self._store: Any = dist.distributed_c10d._get_default_store() if store is None else store

    def set(self, key: str, text: str) -> None:
        self._store.set(self._key(key), text)

    def get(self, key: str) -> str | None:
        if not self._store.check([self._key(key)]):
            return None
        found: bytes = self._store.get(self._key(key))
        return found.decode()

    def first(self, key: str, text: str) -> str:
        found: bytes = self._store.compare_set(self._key(key), "", text)
        return found.decode()

    def missing(self, keys: Sequence[str], seconds: float) -> list[str]:
        """Polls, because a wait of torch's stores prints a warning whenever it times out."""
        end, pause = time.monotonic() + seconds, 0.5e-3
        absent = list(keys)
        while absent := [key for key in absent if not self._store.check([self._key(key)])]:
            left = end - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return absent

    def clone(self) -> DistributedStore:
        return DistributedStore(self._name, self._store.clone())

    def _key(self, key: str) -> str:
        return f"{_PREFIX}/{self._name}/{key}"
