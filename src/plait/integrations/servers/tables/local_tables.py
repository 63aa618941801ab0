"""A worker's side of sparse tables: the rows of a batch are a parameter for one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.integrations.servers.tables.row_index import Ids, by_server
from plait.integrations.servers.tables.sparse_table import SparseTable, ids_in, tables_of, unique_ids

# (server, ids per table) -> rows per table
Pull = Callable[[int, Sequence[Ids]], Any]


@dataclass(frozen=True)
class RowLookup:
    """The ids of a batch.

    ids    by table: the unique ids
    parts  by table, for each server: the places in `ids` of the ids that the server holds
    """

    ids: dict[str, Ids]
    parts: dict[str, list[np.ndarray]]

    def wanted(self, server: int) -> list[Ids]:
        """For every table, the ids that the server holds."""
        return [ids[self.parts[name][server]] for name, ids in self.ids.items()]


class LocalTables:
    """The tables of a worker's model. Each has a weight of as many rows as a batch has ids."""

    def __init__(self, model: nn.Module, num_servers: int) -> None:
        self.tables: dict[str, SparseTable] = tables_of(model)
        self._num_servers = num_servers

    @property
    def names(self) -> dict[str, str]:
        """The table's name by the name of its weight parameter."""
        return {f"{name}.weight": name for name in self.tables}

    def size_for(self, batch: Any) -> None:
        """Give each weight as many rows as a batch of this shape has ids."""
        for table in self.tables.values():
            table.weight = nn.Parameter(torch.zeros(ids_in(batch, table).numel(), table.spec.dim))

    def localise(self, batch: Any) -> tuple[Any, RowLookup]:
        """The batch with its ids replaced by row numbers of the weights, and the lookup of these rows."""
        found, lookup = batch, RowLookup({}, {})
        for name, table in self.tables.items():
            lookup.ids[name], numbers = unique_ids(ids_in(batch, table))
            lookup.parts[name] = by_server(lookup.ids[name], self._num_servers)
            found = {**found, table.ids: numbers}
        return found, lookup

    def weights(self, lookup: RowLookup, rows: Sequence[Sequence[np.ndarray]]) -> dict[str, Tensor]:
        """The weights by parameter name, from every server's rows of every table. Rows beyond the batch's ids are
        zeros."""
        found = {}
        for index, (name, table) in enumerate(self.tables.items()):
            weight = torch.zeros(table.weight.shape, dtype=table.weight.dtype)
            for server, places in enumerate(lookup.parts[name]):
                weight.numpy()[places] = rows[server][index]
            found[f"{name}.weight"] = weight
        return found

    def pushes(self, lookup: RowLookup, gradients: dict[str, Tensor]) -> list[list[np.ndarray]]:
        """For every server, the ids and gradients of each table in turn. Removes the tables' gradients from
        `gradients`."""
        found: list[list[np.ndarray]] = [[] for _ in range(self._num_servers)]
        for name in self.tables:
            gradient = gradients.pop(f"{name}.weight")[: len(lookup.ids[name])].cpu().numpy()
            for server, places in enumerate(lookup.parts[name]):
                found[server] += [lookup.ids[name][places], gradient[places]]
        return found
