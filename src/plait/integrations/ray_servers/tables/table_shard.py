"""A server's rows of the sparse tables, created on first use and updated row by row.

adagrad  keeps one number per row, the sum of the mean squares of its gradients (row-wise Adagrad, as in Naumov et al.
         2019, "Deep Learning Recommendation Model")
adam     keeps per row the mean gradient, one number for the mean square, and the number of updates: a row that is not
         used does not change

Unused rows take no physical memory, because the reserved memory is only written as rows are created. A hash map with
open addressing and linear probing finds a row by its id: a step of the search is a few numpy operations on all ids that
are still searched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.errors import PlanError

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


TableArrays = Sequence[object]  # for each table its ids, then their gradients

OPTIMIZERS = ("adagrad", "adam")
_FIRST = 1024  # initial capacity, in rows


@dataclass(frozen=True)
class TableSpec:
    """A table of rows of `dim` float32 with any 64-bit ids: how rows are initialised and updated.

    lr     learning rate
    scale  initial values are uniform in [-scale, scale]
    betas  decay rates of the adam moments

    Raises PlanError for an unknown optimizer or a value out of range.
    """

    name: str
    dim: int
    optimizer: str = "adagrad"
    lr: float = 0.01
    scale: float = 0.05
    seed: int = 0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise PlanError(
                f"table {self.name}: optimizer={self.optimizer!r}; rows are updated by {' or '.join(OPTIMIZERS)}"
            )
        if self.dim < 1 or not self.lr > 0 or self.scale < 0:
            raise PlanError(
                f"table {self.name}: dim={self.dim} lr={self.lr} scale={self.scale}; dim is 1 or more, lr above 0,"
                " scale 0 or more"
            )


class TableShard:
    """The rows of one table that one server holds. The ids of one call must be unique."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.index = RowIndex()
        self._values = torch.empty(_FIRST, spec.dim)
        self._squares = torch.zeros(_FIRST)
        self._means = torch.zeros(_FIRST, spec.dim) if spec.optimizer == "adam" else torch.empty(0, spec.dim)
        self._counts = torch.zeros(_FIRST) if spec.optimizer == "adam" else torch.empty(0)

    @property
    def num_rows(self) -> int:
        """The number of existing rows."""
        return self.index.num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of the existing rows with their optimizer state."""
        each = self.spec.dim * 4 + 4 + ((self.spec.dim * 4 + 4) if self.spec.optimizer == "adam" else 0)
        return each * self.num_rows

    def pull(self, ids: Ids) -> NDArray[np.float32]:
        """The rows of the ids, [number of ids, dim] float32. Missing rows are created."""
        places = self._places(ids)  # may reallocate the values
        found: NDArray[np.float32] = self._values.index_select(0, places).numpy()
        return found

    def push(self, ids: Ids, gradients: NDArray[np.float32]) -> None:
        """Update the rows by their gradients, [number of ids, dim] float32. Raises PlanError for another shape or
        dtype."""
        spec = self.spec
        if gradients.shape != (len(ids), spec.dim) or gradients.dtype != np.float32:
            raise PlanError(
                f"table {spec.name} is pushed {gradients.dtype}{list(gradients.shape)} for {len(ids)} rows of"
                f" float32[{spec.dim}]"
            )
        places, gradient = self._places(ids), torch.from_numpy(gradients)
        square = torch.linalg.vector_norm(gradient, dim=1).square_().div_(spec.dim)
        if spec.optimizer == "adagrad":
            sums = self._squares.index_select(0, places).add_(square)
            self._squares.index_copy_(0, places, sums)
            scale = sums.sqrt_().add_(spec.eps).reciprocal_().mul_(-spec.lr)
            self._values.index_add_(0, places, gradient * scale[:, None])
        else:
            self._adam(places, gradient, square)

    def state(self) -> dict[str, NDArray[np.float32] | Ids]:
        """Ids, values and optimizer state, in the order of the rows' places."""
        num = self.num_rows
        kept = {"values": self._values, "squares": self._squares}
        if self.spec.optimizer == "adam":
            kept |= {"means": self._means, "counts": self._counts}
        return {"ids": self.index.ids()} | {key: value[:num].numpy() for key, value in kept.items()}

    def load(self, state: dict[str, NDArray[np.float32] | Ids]) -> None:
        """Load what `state` returned."""
        self.index = RowIndex(len(state["ids"]))
        self.index.find_or_insert(np.ascontiguousarray(state["ids"], dtype=np.int64))
        self._make_room()
        for key, into in (
            ("values", self._values), ("squares", self._squares), ("means", self._means), ("counts", self._counts),
        ):  # fmt: skip
            if key in state:
                into[: self.num_rows].copy_(torch.from_numpy(np.array(state[key])))

    def _adam(self, places: Tensor, gradient: Tensor, square: Tensor) -> None:
        """Update rows by Adam (Kingma and Ba 2015), with one second moment per row."""
        first, second = self.spec.betas
        counts = self._counts.index_select(0, places).add_(1)
        self._counts.index_copy_(0, places, counts)
        means = self._means.index_select(0, places).mul_(first).add_(gradient, alpha=1 - first)
        self._means.index_copy_(0, places, means)
        squares = self._squares.index_select(0, places).mul_(second).add_(square, alpha=1 - second)
        self._squares.index_copy_(0, places, squares)
        root = (squares / (1 - second**counts)).sqrt_().add_(self.spec.eps)
        scale = (1 - first**counts).mul_(root).reciprocal_().mul_(-self.spec.lr)
        self._values.index_add_(0, places, means * scale[:, None])

    def _places(self, ids: Ids) -> Tensor:
        """The places of the ids; missing rows are created."""
        places, new = self.index.find_or_insert(ids)
        if len(new):
            self._make_room()
            spec = self.spec
            values = torch.from_numpy(first_values(ids[new], spec.dim, spec.scale, spec.seed))
            self._values[int(places[new].min()) : self.num_rows] = values  # new places are consecutive
        return torch.from_numpy(places)

    def _make_room(self) -> None:
        """Double the capacity if it is exceeded. Reserved memory that was not written takes no physical memory."""
        room = len(self._values)
        if self.num_rows <= room:
            return
        room = max(self.num_rows, 2 * room)
        self._values = _larger(self._values, room)
        self._squares = _larger(self._squares, room)
        if self.spec.optimizer == "adam":
            self._means, self._counts = _larger(self._means, room), _larger(self._counts, room)


class Tables:
    """All tables of one server, in the order of `specs`, which is also their order in a push."""

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        self.rows = {spec.name: TableShard(spec) for spec in specs}
        self._next: list[tuple[TableShard, Ids, NDArray[np.float32]]] = []

    @property
    def num_arrays(self) -> int:
        """The number of arrays in a push that belong to tables."""
        return 2 * len(self.rows)

    def misfit(self, arrays: TableArrays) -> str:
        """Why the arrays are not valid gradients of rows; empty if they are."""
        for rows, ids, gradient in self._pairs(arrays):
            name, dim = rows.spec.name, rows.spec.dim
            if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
                return f"the ids of table {name} are not a 1-d array of int64"
            if not isinstance(gradient, np.ndarray):
                return f"the gradients of table {name} are a {type(gradient).__name__}, not an array"
            if gradient.dtype != np.float32 or gradient.shape != (len(ids), dim):
                there = f"{gradient.dtype}{list(gradient.shape)}"
                return f"table {name} is pushed {there} for {len(ids)} rows of float32[{dim}]"
            if len(np.unique(ids)) != len(ids):
                return f"the ids of table {name} are not all different"
        return ""

    def set_gradients(self, pushes: Sequence[TableArrays], shares: Sequence[float]) -> float:
        """Set the weighted sum of the pushed gradients, with `shares` as weights. Returns its squared 2-norm."""
        self._next = []
        of_tables = [self._pairs(arrays) for arrays in pushes]
        for index, rows in enumerate(self.rows.values()):
            some = [pairs[index] for pairs in of_tables]
            if len(some) == 1 and shares[0] == 1.0:
                self._next.append((rows, some[0][1], some[0][2]))
                continue
            ids, places = np.unique(np.concatenate([ids for _, ids, _ in some]), return_inverse=True)
            total = torch.zeros(len(ids), rows.spec.dim)
            weighted = [torch.tensor(gradient) * share for (_, _, gradient), share in zip(some, shares, strict=True)]
            total.index_add_(0, torch.from_numpy(places), torch.cat(weighted))
            self._next.append((rows, ids, total.numpy()))
        return sum(float(np.square(np.linalg.norm(gradient))) for _, _, gradient in self._next)

    def step(self, scale: float = 1.0) -> None:
        """Update the rows by the gradients that are set, scaled by `scale`."""
        for rows, ids, gradient in self._next:
            rows.push(ids, gradient if scale == 1.0 else gradient * np.float32(scale))
        self._next = []

    def state(self) -> dict[str, dict[str, Any]]:
        """For each table its ids, values and optimizer state, as copies."""
        return {
            name: {key: torch.tensor(value) for key, value in rows.state().items()} for name, rows in self.rows.items()
        }

    def load(self, state: Mapping[str, Mapping[str, object]]) -> None:
        """Load what `state` returned."""
        for name, kept in state.items():
            self.rows[name].load({key: np.asarray(value) for key, value in kept.items()})

    def _pairs(self, arrays: TableArrays) -> list[tuple[TableShard, Any, Any]]:
        assert len(arrays) == self.num_arrays
        return [(rows, arrays[2 * i], arrays[2 * i + 1]) for i, rows in enumerate(self.rows.values())]


def _larger(old: Tensor, rows: int) -> Tensor:
    """The same rows, followed by zeros that take no physical memory until they are written."""
    size = math.prod((rows, *old.shape[1:]))
    new = torch.from_numpy(np.zeros(size, dtype=np.float32)).view(rows, *old.shape[1:])
    new[: len(old)] = old
    return new
