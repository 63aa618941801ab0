"""Which server has a row of a table, and what a row is before anything was learned: both follow from its id alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Whole numbers whose every bit depends on every bit of the given (splitmix64: Steele et al. 2014)."""
    found = values + np.uint64(0x9E3779B97F4A7C15)
    found ^= found >> np.uint64(30)
    found *= np.uint64(0xBF58476D1CE4E5B9)
    found ^= found >> np.uint64(27)
    found *= np.uint64(0x94D049BB133111EB)
    found ^= found >> np.uint64(31)
    return found


def server_of(ids: Ids, num_servers: int) -> NDArray[np.int64]:
    """The server of each row."""
    if num_servers == 1:
        return np.zeros(len(ids), dtype=np.int64)
    return (mixed(ids.view(np.uint64)) >> np.uint64(33)).astype(np.int64) % num_servers


def by_server(ids: Ids, num_servers: int) -> list[NDArray[np.int64]]:
    """For each server the places, in `ids`, of the rows that it has; in order."""
    owner = server_of(ids, num_servers)
    return [np.flatnonzero(owner == server) for server in range(num_servers)]


def first_values(ids: Ids, dim: int, scale: float, seed: int) -> NDArray[np.float32]:
    """Rows that nobody has touched: evenly drawn from -scale to scale, the same wherever they are made."""
    start = mixed(ids.view(np.uint64) ^ np.uint64(seed * 0x9E3779B1 & (2**63 - 1)))
    columns = np.arange(dim, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
    bits = mixed(start[:, None] + columns[None, :]) >> np.uint64(40)
    found: NDArray[np.float32] = bits.astype(np.float32)
    found *= np.float32(2 * scale / 2**24)
    found -= np.float32(scale)
    return found
