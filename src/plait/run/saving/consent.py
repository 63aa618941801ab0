"""Ranks that come together on the board: what one says counts for all, and one that fails, fails for all.

No collective is involved, so it works in a background thread while the ranks train.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from weakref import WeakKeyDictionary

from plait.comm.board import Board
from plait.comm.protocol import World
from plait.errors import CheckpointError

_LOOK_SECONDS = 60.0  # for others at a time; a rank that has died is found by other means, and ends this one
_LAST_SECONDS = 60.0
_num_matters: WeakKeyDictionary[World, int] = WeakKeyDictionary()


class Consent:
    """One matter, such as one save. Every rank makes it at the same point, and goes through the same stages."""

    def __init__(self, world: World) -> None:
        _num_matters[world] = number = _num_matters.get(world, 0) + 1
        self._world = world
        self._board: Board = world.board.clone() if world.mesh.size > 1 else world.board
        self._name = f"consent/{number}"

    def first_says(self, stage: str, work: Callable[[], str]) -> str:
        """Do `work` on rank 0; every rank gets its text once it is done, or raises what it raised."""
        text, error = _tried(work) if self._world.rank == 0 else ("", "")
        if self._world.mesh.size > 1:
            key = f"{self._name}/{stage}"
            if self._world.rank == 0:
                self._board.set(key, json.dumps([text, error]))
            else:
                text, error = json.loads(self._read(key))
        if error:
            raise CheckpointError(error)
        return text

    def all_do(self, stage: str, work: Callable[[], object]) -> None:
        """Do `work` on every rank; go on once all are done, or raise what the first of those that failed raised."""
        _, error = _tried(lambda: str(work() or ""))
        if self._world.mesh.size > 1:
            self._board.set(f"{self._name}/{stage}/{self._world.rank}", error)
            keys = [f"{self._name}/{stage}/{rank}" for rank in range(self._world.mesh.size)]
            self.first_says(f"{stage}/all", lambda: _raise_first([self._read(key) for key in keys]))
        elif error:
            raise CheckpointError(error)

    def leave(self) -> None:
        """The end of the matter: rank 0, which may hold the board, waits until the others have read the last word."""
        if self._world.mesh.size == 1:
            return
        self._board.set(f"{self._name}/left/{self._world.rank}", "")
        if self._world.rank == 0:
            self._board.missing([f"{self._name}/left/{rank}" for rank in range(self._world.mesh.size)], _LAST_SECONDS)

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

    def _read(self, key: str) -> str:
        while self._board.missing([key], _LOOK_SECONDS):
            continue
        return self._board.get(key) or ""


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
