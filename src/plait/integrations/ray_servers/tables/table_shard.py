"""A server's rows of the sparse tables, created on first use and updated row by row.

adagrad  keeps one number per row, the sum of the mean squares of its gradients (row-wise Adagrad, as in Naumov et al.
         2019, "Deep Learning Recommendation Model")
adam     keeps per row the mean gradient, one number for the mean square, and the number of updates: a row that is not
         used does not change

Unused rows take no physical memory, because the reserved memory is only written as rows are created.
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
from plait.integrations.ray_servers.tables.row_index import Ids, RowIndex, first_values

TableArrays = Sequence[Any]  # for each table its ids, then their gradients

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

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
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
