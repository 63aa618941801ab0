"""A server's rows of one sparse table: made at first touch, and updated row by row.

adagrad  of each row one number, the sum of the mean squares of its gradients (row-wise Adagrad, as in Naumov et al.
         2019, "Deep Learning Recommendation Model")
adam     of each row its mean gradient, one number for the mean square, and how often it was updated: a row that is not
         touched does not move

Rows that were not touched take no memory: what is set aside for a table is only touched as rows come.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.errors import PlanError
from plait.integrations.servers.tables.row_index import Ids, RowIndex, first_values

OPTIMIZERS = ("adagrad", "adam")
_FIRST = 1024  # rows that there is room for at the beginning


@dataclass(frozen=True)
class TableSpec:
    """A table of rows of `dim` float32, by any 64-bit ids: how rows begin, and how they are updated."""

    name: str
    dim: int
    optimizer: str = "adagrad"
    lr: float = 0.01
    scale: float = 0.05  # rows begin evenly drawn from -scale to scale
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
    """The rows that one server has. Ids given together are all different."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.index = RowIndex()
        self._values = torch.empty(_FIRST, spec.dim)
        self._squares = torch.zeros(_FIRST)
        self._means = torch.zeros(_FIRST, spec.dim) if spec.optimizer == "adam" else torch.empty(0, spec.dim)
        self._counts = torch.zeros(_FIRST) if spec.optimizer == "adam" else torch.empty(0)

    @property
    def num_rows(self) -> int:
        return self.index.num_rows

    @property
    def num_bytes(self) -> int:
        """Of the rows that there are, with what the optimizer keeps of them."""
        each = self.spec.dim * 4 + 4 + ((self.spec.dim * 4 + 4) if self.spec.optimizer == "adam" else 0)
        return each * self.num_rows

    def pull(self, ids: Ids) -> NDArray[np.float32]:
        """The rows, [number of ids, dim]; those that nobody has touched are made."""
        places = self._places(ids)  # which may make room
        found: NDArray[np.float32] = self._values.index_select(0, places).numpy()
        return found

    def push(self, ids: Ids, gradients: NDArray[np.float32]) -> None:
        """Update the rows by their gradients, [number of ids, dim]. PlanError for another shape or type."""
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
        """Ids, values and what the optimizer keeps, by place."""
        num = self.num_rows
        kept = {"values": self._values, "squares": self._squares}
        if self.spec.optimizer == "adam":
            kept |= {"means": self._means, "counts": self._counts}
        return {"ids": self.index.ids()} | {key: value[:num].numpy() for key, value in kept.items()}

    def load(self, state: dict[str, NDArray[np.float32] | Ids]) -> None:
        """Take over what `state` gave."""
        self.index = RowIndex(len(state["ids"]))
        self.index.find_or_give(np.ascontiguousarray(state["ids"], dtype=np.int64))
        self._make_room()
        for key, into in (
            ("values", self._values), ("squares", self._squares), ("means", self._means), ("counts", self._counts),
        ):  # fmt: skip
            if key in state:
                into[: self.num_rows].copy_(torch.from_numpy(np.array(state[key])))

    def _adam(self, places: Tensor, gradient: Tensor, square: Tensor) -> None:
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
        places, new = self.index.find_or_give(ids)
        if len(new):
            self._make_room()
            spec = self.spec
            values = torch.from_numpy(first_values(ids[new], spec.dim, spec.scale, spec.seed))
            self._values[int(places[new].min()) : self.num_rows] = values  # places are given in order
        return torch.from_numpy(places)

    def _make_room(self) -> None:
        """Twice the rows each time: memory that is not touched is not there yet."""
        room = len(self._values)
        if self.num_rows <= room:
            return
        room = max(self.num_rows, 2 * room)
        self._values = _larger(self._values, room)
        self._squares = _larger(self._squares, room)
        if self.spec.optimizer == "adam":
            self._means, self._counts = _larger(self._means, room), _larger(self._counts, room)


def _larger(old: Tensor, rows: int) -> Tensor:
    """The same rows, followed by zeros that take no memory before they are written to."""
    size = math.prod((rows, *old.shape[1:]))
    new = torch.from_numpy(np.zeros(size, dtype=np.float32)).view(rows, *old.shape[1:])
    new[: len(old)] = old
    return new
