"""All tables of one server: the part of a push that is about them is checked, summed over workers, made an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plait.integrations.servers.tables.row_index import Ids
from plait.integrations.servers.tables.table_shard import TableShard, TableSpec

Arrays = Sequence[Any]  # of each table its ids and their gradients, one after the other


class Tables:
    """`tables` in the order in which pushes have them."""

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        self.rows = {spec.name: TableShard(spec) for spec in specs}
        self._next: list[tuple[TableShard, Ids, NDArray[np.float32]]] = []

    @property
    def num_arrays(self) -> int:
        """How many arrays of a push are about tables."""
        return 2 * len(self.rows)

    def misfit(self, arrays: Arrays) -> str:
        """Why arrays are no gradients of rows; empty where they are."""
        for rows, ids, gradient in self._pairs(arrays):
            name, dim = rows.spec.name, rows.spec.dim
            if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
                return f"the ids of table {name} are no array of int64"
            if not isinstance(gradient, np.ndarray):
                return f"the gradients of table {name} are a {type(gradient).__name__}, not an array"
            if gradient.dtype != np.float32 or gradient.shape != (len(ids), dim):
                there = f"{gradient.dtype}{list(gradient.shape)}"
                return f"table {name} is pushed {there} for {len(ids)} rows of float32[{dim}]"
            if len(np.unique(ids)) != len(ids):
                return f"the ids of table {name} are not all different"
        return ""

    def set_gradients(self, pushes: Sequence[Arrays], shares: Sequence[float]) -> float:
        """Take the sum of gradients by their shares; returns its squared norm."""
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
        """Update by the gradients that are set, times `scale`."""
        for rows, ids, gradient in self._next:
            rows.push(ids, gradient if scale == 1.0 else gradient * np.float32(scale))
        self._next = []

    def state(self) -> dict[str, dict[str, Any]]:
        """Of each table ids, values and what its optimizer keeps, as tensors of their own memory."""
        return {
            name: {key: torch.tensor(value) for key, value in rows.state().items()} for name, rows in self.rows.items()
        }

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        for name, kept in state.items():
            self.rows[name].load({key: np.asarray(value) for key, value in kept.items()})

    def _pairs(self, arrays: Arrays) -> list[tuple[TableShard, Any, Any]]:
        assert len(arrays) == self.num_arrays
        return [(rows, arrays[2 * i], arrays[2 * i + 1]) for i, rows in enumerate(self.rows.values())]
