"""A hash map from ids to row numbers, with vectorised lookup and insertion.

Open addressing with linear probing. A step of the search is a few numpy operations on all ids that are still searched.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

_EMPTY = np.int64(np.iinfo(np.int64).min)  # the key of an empty slot
_FULL = 0.5  # largest part of the slots that is used


class RowIndex:
    """The places 0, 1, 2... of ids, in the order in which the ids were inserted."""

    def __init__(self, expected: int = 1024) -> None:
        self.num_rows = 0
        self._size(max(1024, int(expected / _FULL)))

    def find(self, ids: Ids) -> NDArray[np.int64]:
        """The place of each id; -1 if it has none."""
        slots = self._search(ids)
        return np.where(self._keys[slots] == ids, self._places[slots], -1)

    def find_or_insert(self, ids: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The place of each of these unique ids, and the indices into `ids` of those that were inserted by this
        call."""
        if self.num_rows + len(ids) > _FULL * len(self._keys):
            self._grow(self.num_rows + len(ids))
        slots = self._search(ids)
        new = np.flatnonzero(self._keys[slots] != ids)
        if len(new):
            self._insert(ids[new], slots[new])
            slots[new] = self._search(ids[new])
        return self._places[slots], new

    def ids(self) -> Ids:
        """All ids, in the order of their places."""
        used = np.flatnonzero(self._keys != _EMPTY)
        found = np.empty(self.num_rows, dtype=np.int64)
        found[self._places[used]] = self._keys[used]
        return found

    def _search(self, ids: Ids) -> NDArray[np.int64]:
        """The slot of each id, or the empty slot at which its search ends."""
        slots = (mixed(ids.view(np.uint64)) & self._mask).astype(np.int64)
        searching = np.flatnonzero((self._keys[slots] != ids) & (self._keys[slots] != _EMPTY))
        while len(searching):
            slots[searching] = (slots[searching] + 1) & int(self._mask)
            keys = self._keys[slots[searching]]
            searching = searching[(keys != ids[searching]) & (keys != _EMPTY)]
        return slots

    def _insert(self, ids: Ids, slots: NDArray[np.int64]) -> None:
        """Insert new ids at the empty slots where their searches ended. Ids that collide on a slot continue with the
        next one."""
        places = np.arange(self.num_rows, self.num_rows + len(ids))
        self.num_rows += len(ids)
        while len(ids):
            free = self._keys[slots] == _EMPTY
            self._keys[slots[free]] = ids[free]
            mine = free & (self._keys[slots] == ids)
            self._places[slots[mine]] = places[mine]
            ids, places, slots = ids[~mine], places[~mine], (slots[~mine] + 1) & int(self._mask)

    def _grow(self, needed: int) -> None:
        ids = self.ids()
        self._size(int(2 * needed / _FULL))
        self.num_rows = 0
        self._insert(ids, self._search(ids))

    def _size(self, slots: int) -> None:
        size = 1 << (slots - 1).bit_length()
        self._mask = np.uint64(size - 1)
        self._keys = np.full(size, _EMPTY, dtype=np.int64)
        self._places = np.zeros(size, dtype=np.int64)


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hashes in which every bit depends on every bit of the value (splitmix64: Steele et al. 2014)."""
    found = values + np.uint64(0x9E3779B97F4A7C15)
    found ^= found >> np.uint64(30)
    found *= np.uint64(0xBF58476D1CE4E5B9)
    found ^= found >> np.uint64(27)
    found *= np.uint64(0x94D049BB133111EB)
    found ^= found >> np.uint64(31)
    return found


def server_of(ids: Ids, num_servers: int) -> NDArray[np.int64]:
    """The server of each row: ids [n] -> servers [n]."""
    if num_servers == 1:
        return np.zeros(len(ids), dtype=np.int64)
    return (mixed(ids.view(np.uint64)) >> np.uint64(33)).astype(np.int64) % num_servers


def by_server(ids: Ids, num_servers: int) -> list[NDArray[np.int64]]:
    """For each server, the positions in `ids` of the rows that it has, in order."""
    owner = server_of(ids, num_servers)
    return [np.flatnonzero(owner == server) for server in range(num_servers)]


def first_values(ids: Ids, dim: int, scale: float, seed: int) -> NDArray[np.float32]:
    """Initial values of rows, [len(ids), dim]: uniform from -scale to scale, the same wherever they are computed."""
    start = mixed(ids.view(np.uint64) ^ np.uint64(seed * 0x9E3779B1 & (2**63 - 1)))
    columns = np.arange(dim, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
    bits = mixed(start[:, None] + columns[None, :]) >> np.uint64(40)
    found: NDArray[np.float32] = bits.astype(np.float32)
    found *= np.float32(2 * scale / 2**24)
    found -= np.float32(scale)
    return found
