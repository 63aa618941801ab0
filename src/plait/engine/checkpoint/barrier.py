"""A barrier of the ranks through the key-value store, which passes on results and errors: if one rank fails, all
fail.

It uses no collective, so it works in a background thread while the ranks train.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

from plait.comm.agree import wait_for_notes
from plait.comm.key_value_store import KeyValueStore
from plait.comm.protocol import World
from plait.errors import CheckpointError, WorldError

_num_barriers: WeakKeyDictionary[World, int] = WeakKeyDictionary()


class Barrier:
    """The barriers of one operation, such as one save. Every rank makes it at the same point, and passes the same
    stages."""

    def __init__(self, world: World) -> None:
        _num_barriers[world] = number = _num_barriers.get(world, 0) + 1
        self._world = world
        self._store: KeyValueStore = world.store.clone() if world.mesh.size > 1 else world.store
        self._name = f"barrier/{number}"
        self._awaited: Mapping[int, str] = {}

    def on_first_rank(self, stage: str, work: Callable[[], str]) -> str:
        """Do `work` on rank 0. Every rank gets its text, or raises CheckpointError with its error."""
        text, error = _tried(work) if self._world.rank == 0 else ("", "")
        if self._world.mesh.size > 1:
            key = f"{self._name}/{stage}"
            if self._world.rank == 0:
                self._store.set(key, json.dumps([text, error]))
            else:
                text, error = json.loads(self._read({0: key})[0])
        if error:
            raise CheckpointError(error)
        return text

    def on_all_ranks(self, stage: str, work: Callable[[], object]) -> None:
        """Do `work` on every rank, and wait for all. Every rank raises the error of the first rank that failed."""
        _, error = _tried(lambda: str(work() or ""))
        if self._world.mesh.size > 1:
            self._store.set(f"{self._name}/{stage}/{self._world.rank}", error)
            keys = {rank: f"{self._name}/{stage}/{rank}" for rank in range(self._world.mesh.size)}
            self.on_first_rank(f"{stage}/all", lambda: _raise_first(self._read(keys)))
        elif error:
            raise CheckpointError(error)

    def leave(self) -> None:
        """End the operation: rank 0, which may serve the key-value store, waits until the others have read the last
        value."""
        if self._world.mesh.size == 1:
            return
        self._store.set(f"{self._name}/left/{self._world.rank}", "")
        if self._world.rank == 0:
            keys = {rank: f"{self._name}/left/{rank}" for rank in range(self._world.mesh.size)}
            with contextlib.suppress(WorldError):  # a rank that has died meanwhile is reported by the next operation
                wait_for_notes(self._world, keys, "the end of a save or load", self._store)

    def raise_together(self, step: int) -> bool:
        """Whether all ranks raise the failure of this operation before this step. Asked before every step after it
        failed.

        They raise it once all of them know of it, before step max(their posts) + 1 (comm/stop_vote.py).
        """
        size = self._world.mesh.size
        if size == 1:
            return True
        self._world.store.first(f"{self._name}/raise/{self._world.rank}", str(step))
        posts = [self._world.store.get(f"{self._name}/raise/{rank}") for rank in range(size)]
        return None not in posts and step > max(int(post or 0) for post in posts)

    def waiting(self) -> AbstractContextManager[object]:
        """Context in which this thread waits for another thread of the process, which waits for other ranks."""
        monitor = self._world.monitor
        return nullcontext() if monitor is None else monitor.waiting("a save in flight", self._late)

    def _late(self) -> list[int]:
        """The ranks that are still awaited."""
        return [rank for rank, key in self._awaited.items() if self._store.get(key) is None]

    def _read(self, keys: Mapping[int, str]) -> list[str]:
        self._awaited = keys
        wait_for_notes(self._world, keys, "a save or load", self._store)
        self._awaited = {}
        return [self._store.get(key) or "" for key in keys.values()]


def _tried(work: Callable[[], str]) -> tuple[str, str]:
    """(result, "") or ("", message of the error)."""
    try:
        return work(), ""
    except CheckpointError as error:
        return "", str(error) or "failed"
    except Exception as error:
        return "", f"{type(error).__name__}: {error}"


def _raise_first(errors: list[str]) -> str:
    for error in errors:
        if error:
            raise CheckpointError(error)
    return ""
