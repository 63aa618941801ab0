"""A worker's side of tables: the rows of a batch are its parameters for one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.integrations.servers.tables.module import SparseTable, ids_in, tables_of, unique_ids
from plait.integrations.servers.tables.row_index import Ids, by_server

# (server, of every table its ids) -> of every table their rows
Pull = Callable[[int, Sequence[Ids]], Any]


@dataclass(frozen=True)
class RowLookup:
    """The ids of a batch, by table, and which of them are on each server."""

    ids: dict[str, Ids]
    parts: dict[str, list[np.ndarray]]

    def wanted(self, server: int) -> list[Ids]:
        """The ids of every table that a server has."""
        return [ids[self.parts[name][server]] for name, ids in self.ids.items()]


class LocalTables:
    """The tables of a worker's model, whose weights are as many rows as a batch has ids."""

    def __init__(self, model: nn.Module, num_servers: int) -> None:
        self.tables: dict[str, SparseTable] = tables_of(model)
        self._num_servers = num_servers

    @property
    def names(self) -> dict[str, str]:
        """By parameter the table that it stands for."""
        return {f"{name}.weight": name for name in self.tables}

    def size_for(self, batch: Any) -> None:
        """Give the weights the rows that a batch of this shape may have."""
        for table in self.tables.values():
            table.weight = nn.Parameter(torch.zeros(ids_in(batch, table).numel(), table.spec.dim))

    def localised(self, batch: Any) -> tuple[Any, RowLookup]:
        """The batch with ids that number its own rows, and which rows these are."""
        found, lookup = batch, RowLookup({}, {})
        for name, table in self.tables.items():
            lookup.ids[name], numbers = unique_ids(ids_in(batch, table))
            lookup.parts[name] = by_server(lookup.ids[name], self._num_servers)
            found = {**found, table.ids: numbers}
        return found, lookup

    def weights(self, lookup: RowLookup, rows: Sequence[Sequence[np.ndarray]]) -> dict[str, Tensor]:
        """The weights by parameter from the rows of every server, of every table; beyond the rows they are zeros."""
        found = {}
        for index, (name, table) in enumerate(self.tables.items()):
            weight = torch.zeros(table.weight.shape, dtype=table.weight.dtype)
            for server, places in enumerate(lookup.parts[name]):
                weight.numpy()[places] = rows[server][index]
            found[f"{name}.weight"] = weight
        return found

    def pushes(self, lookup: RowLookup, gradients: dict[str, Tensor]) -> list[list[np.ndarray]]:
        """For every server, of every table, its ids and their gradients; they are taken out of `gradients`."""
        found: list[list[np.ndarray]] = [[] for _ in range(self._num_servers)]
        for name in self.tables:
            gradient = gradients.pop(f"{name}.weight")[: len(lookup.ids[name])].cpu().numpy()
            for server, places in enumerate(lookup.parts[name]):
                found[server] += [lookup.ids[name][places], gradient[places]]
        return found
