"""A worker's side of tables: the rows of a batch are its parameters for one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.decide.rowhash import Ids, by_server
from plait.serve.tables.module import SparseTable, ids_in, tables_of, unique_ids

# (server, of every table its ids) -> of every table their rows
Pull = Callable[[int, Sequence[Ids]], Any]


class LocalTables:
    """The tables of a worker's model, whose weights are as many rows as a batch has ids."""

    def __init__(self, model: nn.Module, num_servers: int) -> None:
        self.tables: dict[str, SparseTable] = tables_of(model)
        self._num_servers = num_servers
        self._ids: dict[str, Ids] = {}
        self._parts: dict[str, list[np.ndarray]] = {}

    @property
    def names(self) -> dict[str, str]:
        """By parameter the table that it stands for."""
        return {f"{name}.weight": name for name in self.tables}

    def size_for(self, batch: Any) -> None:
        """Give the weights the rows that a batch of this shape may have."""
        for table in self.tables.values():
            table.weight = nn.Parameter(torch.zeros(ids_in(batch, table).numel(), table.spec.dim))

    def localised(self, batch: Any) -> Any:
        """The batch with ids that number its own rows. Its rows are those to pull next."""
        if not self.tables:
            return batch
        found = dict(batch)
        for name, table in self.tables.items():
            self._ids[name], found[table.ids] = unique_ids(ids_in(batch, table))
            self._parts[name] = by_server(self._ids[name], self._num_servers)
        return found

    def wanted(self, server: int) -> list[Ids]:
        """The ids of every table that a server has."""
        return [self._ids[name][self._parts[name][server]] for name in self.tables]

    def weights(self, rows: Sequence[Sequence[np.ndarray]]) -> dict[str, Tensor]:
        """The weights by parameter from the rows of every server, of every table; beyond the rows they are zeros."""
        found = {}
        for index, (name, table) in enumerate(self.tables.items()):
            weight = torch.zeros_like(table.weight, device="cpu", requires_grad=False)
            for server, places in enumerate(self._parts[name]):
                weight.numpy()[places] = rows[server][index]
            found[f"{name}.weight"] = weight
        return found

    def pushes(self, gradients: dict[str, Tensor]) -> list[list[np.ndarray]]:
        """For every server, of every table, its ids and their gradients; they are taken out of `gradients`."""
        found: list[list[np.ndarray]] = [[] for _ in range(self._num_servers)]
        for name in self.tables:
            gradient = gradients.pop(f"{name}.weight")[: len(self._ids[name])].cpu().numpy()
            for server, places in enumerate(self._parts[name]):
                found[server] += [self._ids[name][places], gradient[places]]
        return found
