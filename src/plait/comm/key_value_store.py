"""The key-value store: short texts that ranks leave for each other, outside every collective.

It works while ranks are stuck in a collective, as failures, stops and checks across ranks require.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Condition
from typing import Protocol

from plait.errors import WorldError


class KeyValueStore(Protocol):
    def set(self, key: str, text: str) -> None: ...

    def get(self, key: str) -> str | None:
        """The text of the key, or None while it is not set."""

    def first(self, key: str, text: str) -> str:
        """Set the key unless it is set. Returns its text then: of several callers exactly one gets its own."""

    def missing(self, keys: Sequence[str], seconds: float) -> list[str]:
        """Wait until all keys are set, at most `seconds`. Returns the keys that are not."""

    def clone(self) -> KeyValueStore:
        """The same store for another thread of this process."""


class LocalStore:
    """The store of ranks that share a process."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._changed = Condition()
        self._stopped: WorldError | None = None

    def set(self, key: str, text: str) -> None:
        with self._changed:
            self._texts[key] = text
            self._changed.notify_all()

    def get(self, key: str) -> str | None:
        return self._texts.get(key)

    def first(self, key: str, text: str) -> str:
        with self._changed:
            found = self._texts.setdefault(key, text)
            self._changed.notify_all()
        return found

    def missing(self, keys: Sequence[str], seconds: float) -> list[str]:
        end = time.monotonic() + seconds
        with self._changed:
            while (absent := [key for key in keys if key not in self._texts]) and self._stopped is None:
                if (left := end - time.monotonic()) <= 0:
                    break
                self._changed.wait(left)
            if absent and self._stopped is not None:
                raise self._stopped
        return absent

    def clone(self) -> LocalStore:
        return self

    def stop(self, error: WorldError) -> None:
        """Raise the error in every wait, present or future."""
        with self._changed:
            self._stopped = error
            self._changed.notify_all()
