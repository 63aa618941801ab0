"""Memory that the ranks of a group share: every rank reads and writes the same bytes.

Processes of one host open a memory file of the group's first rank through /proc, whatever transport they use. The file
has no name, and is gone when the last process has freed its tensors.
"""

from __future__ import annotations

import os
import platform
import socket
import zlib
from contextlib import closing

import torch

from plait.comm.protocol import Comm
from plait.comm.segment import Segment

_NUM_WORDS = 1
_NOT_HERE = -1


def share_file(comm: Comm, num_bytes: int, device: torch.device) -> torch.Tensor | None:
    """Flat uint8 of zeros, [num_bytes], in a file that all processes of the group map; None on all if one cannot.

    Every rank of the group calls it with the same size. `device` is the one of tensors that the group communicates.
    """
    note, segment = [_NOT_HERE] * 4, None
    if comm.rank == 0:
        try:
            segment = Segment.create(_NUM_WORDS, num_bytes)
            segment.words[0] = os.getpid()
            note = [_host_number(), os.getpid(), segment.fd, num_bytes]
        except (OSError, AttributeError):
            pass
    note = comm.broadcast(torch.tensor(note, device=device), 0).wait().tolist()
    if segment is None:
        segment = _opened(note, num_bytes)
    everyone = comm.all_reduce(torch.tensor([int(segment is not None)], device=device), "min").wait()
    if segment is not None:
        segment.close()  # the mapping stays
    if segment is None or not int(everyone[0]):
        return None
    return segment.view(segment.arena_start, num_bytes, torch.uint8)


def _opened(note: list[int], num_bytes: int) -> Segment | None:
    host, pid, fd, size = note
    if host == _NOT_HERE or host != _host_number() or size != num_bytes:
        return None
    try:
        segment = Segment.open(pid, fd, _NUM_WORDS)
    except OSError:
        return None
    if segment.words[0] == pid:
        return segment
    segment.close()
    return None


def can_share() -> bool:
    """Whether processes of this host can share a file, as far as one process can tell."""
    if not host_name():
        return False
    try:
        own = Segment.create(_NUM_WORDS, 1)
        with closing(own), closing(Segment.open(os.getpid(), own.fd, _NUM_WORDS)):
            return True
    except (OSError, AttributeError):
        return False


def host_name() -> str:
    """A text that is equal on processes that can open each other's files; "" if that is unknown."""
    if platform.system() != "Linux":
        return ""
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


def _host_number() -> int:
    name = host_name()
    return zlib.crc32(name.encode()) if name else _NOT_HERE


def alive(pid: int) -> bool:
    """Whether the process runs. A process that has ended does not, even if its parent has not reaped it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
