"""The module that marks a large embedding, whose rows stay on the servers, and a worker's side of it.

A worker looks up the unique ids of a batch. The rows of these ids are a parameter of the worker's model for one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.engine.arguments import check_arguments
from plait.errors import BatchError, PlanError
from plait.integrations.ray_servers.tables.table_shard import Ids, TableSpec, by_server, first_values

_away: ContextVar[bool] = ContextVar("tables are away", default=False)


@contextmanager
def tables_away() -> Iterator[None]:
    """Context in which models are built with empty tables, because servers hold the rows."""
    token = _away.set(True)
    try:
        yield
    finally:
        _away.reset(token)


class SparseTable(nn.Module):
    """An embedding of `num_rows` rows of `dim` float32, of which a batch uses few.

    ids        the key of the batch, a mapping, under which the ids are: integers from 0 to num_rows - 1, of any shape.
               The model looks up all of them in this table, and no other ids
    optimizer  "adagrad" or "adam", both row-wise, with learning rate `lr`; the job's optimizer trains all else
    scale      initial values are uniform in [-scale, scale], drawn with `seed`

    Under a plan with servers, a worker only ever has the rows of its batch. Under any other plan this is a plain
    embedding whose weight has all rows, and the job's optimizer trains it. Raises PlanError for values that
    TableSpec refuses, and for no rows.
    """

    def __init__(
        self, num_rows: int, dim: int, *, ids: str, optimizer: str = "adagrad", lr: float = 0.01, scale: float = 0.05,
        seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        check_arguments(num_rows=num_rows, dim=dim, ids=ids, seed=seed)
        self.num_rows, self.ids = num_rows, ids
        self.spec = TableSpec("", dim, optimizer, lr, scale, seed)
        here = 0 if _away.get() else num_rows
        values = first_values(np.arange(here, dtype=np.int64), dim, scale, seed)
        self.weight = nn.Parameter(torch.from_numpy(values))

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of the ids, [*ids.shape, dim]."""
        return nn.functional.embedding(ids, self.weight)


def tables_of(model: nn.Module) -> dict[str, SparseTable]:
    """The sparse tables of a model, by module name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseTable)}


def specs_of(model: nn.Module) -> tuple[TableSpec, ...]:
    """The specification of each table, for the servers. Raises PlanError if two tables use the same key of the
    batch."""
    found = tables_of(model)
    keys = [table.ids for table in found.values()]
    if len(set(keys)) < len(keys):
        raise PlanError(
            f"tables {', '.join(found)} look up ids of {', '.join(keys)}; give each table a key of the batch of its own"
        )
    return tuple(replace(table.spec, name=name) for name, table in found.items())


def ids_in(batch: Any, table: SparseTable) -> Tensor:
    """The ids that a batch looks up in a table. Raises BatchError if the batch has none, or if one is out of range."""
    found = batch.get(table.ids) if isinstance(batch, Mapping) else None
    if not torch.is_tensor(found) or found.is_floating_point():
        raise BatchError(
            f"the batch has no whole numbers under {table.ids!r}, where a SparseTable looks for its ids; give it the"
            " key that they are under"
        )
    if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < table.num_rows:
        low, high = int(found.min()), int(found.max())
        raise BatchError(f"{table.ids!r} has ids from {low} to {high}, and the table has {table.num_rows} rows")
    return found


def unique_ids(ids: Tensor) -> tuple[Ids, Tensor]:
    """The unique ids, and for each of `ids` its index among them, in the shape of `ids`."""
    found, places = np.unique(ids.numpy().astype(np.int64, copy=False).ravel(), return_inverse=True)
    return found, torch.from_numpy(places).view(ids.shape)


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
