"""The board of ranks that are processes: a store of torch.distributed, which works beside every collective."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_PREFIX = "plait"
_LONGEST_PAUSE = 0.02  # seconds between two looks


class StoreBoard:
    """Texts in the store that the process group was started with. `name` keeps the worlds of one run apart."""

    def __init__(self, name: str, store: Any = None) -> None:
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
        """By looking again and again: a store's own wait warns of each time that it was for nothing."""
        end, pause = time.monotonic() + seconds, 0.5e-3
        absent = list(keys)
        while absent := [key for key in absent if not self._store.check([self._key(key)])]:
            left = end - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return absent

    def clone(self) -> StoreBoard:
        return StoreBoard(self._name, self._store.clone())

    def _key(self, key: str) -> str:
        return f"{_PREFIX}/{self._name}/{key}"
