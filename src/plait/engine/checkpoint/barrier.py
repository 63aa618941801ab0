"""Ranks that come together on the board: what one says counts for all, and one that fails, fails for all.

No collective is involved, so it works in a background thread while the ranks train.
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

_num_matters: WeakKeyDictionary[World, int] = WeakKeyDictionary()


class Barrier:
    """One matter, such as one save. Every rank makes it at the same point, and goes through the same stages."""

    def __init__(self, world: World) -> None:
        _num_matters[world] = number = _num_matters.get(world, 0) + 1
        self._world = world
        self._board: KeyValueStore = world.board.clone() if world.mesh.size > 1 else world.board
        self._name = f"barrier/{number}"
        self._awaited: Mapping[int, str] = {}

    def first_says(self, stage: str, work: Callable[[], str]) -> str:
        """Do `work` on rank 0; every rank gets its text once it is done, or raises what it raised."""
        text, error = _tried(work) if self._world.rank == 0 else ("", "")
        if self._world.mesh.size > 1:
            key = f"{self._name}/{stage}"
            if self._world.rank == 0:
                self._board.set(key, json.dumps([text, error]))
            else:
                text, error = json.loads(self._read({0: key})[0])
        if error:
            raise CheckpointError(error)
        return text

    def all_do(self, stage: str, work: Callable[[], object]) -> None:
        """Do `work` on every rank; go on once all are done, or raise what the first of those that failed raised."""
        _, error = _tried(lambda: str(work() or ""))
        if self._world.mesh.size > 1:
            self._board.set(f"{self._name}/{stage}/{self._world.rank}", error)
            keys = {rank: f"{self._name}/{stage}/{rank}" for rank in range(self._world.mesh.size)}
            self.first_says(f"{stage}/all", lambda: _raise_first(self._read(keys)))
        elif error:
            raise CheckpointError(error)

    def leave(self) -> None:
        """The end of the matter: rank 0, which may hold the board, waits until the others have read the last word."""
        if self._world.mesh.size == 1:
            return
        self._board.set(f"{self._name}/left/{self._world.rank}", "")
        if self._world.rank == 0:
            keys = {rank: f"{self._name}/left/{rank}" for rank in range(self._world.mesh.size)}
            with contextlib.suppress(WorldError):  # one that has died meanwhile is found by who needs it
                wait_for_notes(self._world, keys, "the end of a save or load", self._board)

    def raise_together(self, step: int) -> bool:
        """Asked before every step once this matter has failed: whether all ranks raise it before this step.

        They do so once all of them know, before step max(what they posted) + 1: see comm/stop.py.
        """
        size = self._world.mesh.size
        if size == 1:
            return True
        self._world.board.first(f"{self._name}/raise/{self._world.rank}", str(step))
        posts = [self._world.board.get(f"{self._name}/raise/{rank}") for rank in range(size)]
        return None not in posts and step > max(int(post or 0) for post in posts)

    def waiting(self) -> AbstractContextManager[object]:
        """Within it this thread waits for another of this process, that waits for the ranks of this matter."""
        monitor = self._world.monitor
        return nullcontext() if monitor is None else monitor.waiting("a save under way", self._late)

    def _late(self) -> list[int]:
        return [rank for rank, key in self._awaited.items() if self._board.get(key) is None]

    def _read(self, keys: Mapping[int, str]) -> list[str]:
        self._awaited = keys
        wait_for_notes(self._world, keys, "a save or load", self._board)
        self._awaited = {}
        return [self._board.get(key) or "" for key in keys.values()]


def _tried(work: Callable[[], str]) -> tuple[str, str]:
    """What it returns, and the message of what it raised."""
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
