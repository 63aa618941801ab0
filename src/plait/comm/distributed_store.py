"""The key-value store of ranks that are processes: a store of torch.distributed, which works during collectives too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_PREFIX = "plait"
_LONGEST_PAUSE = 0.02  # seconds between two looks at the store


class DistributedStore:
    """The store that the process group was started with. `name` separates the worlds of one run."""

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
        """By polling, because a wait of torch's stores prints a warning each time that it ends in vain."""
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
