"""The module that marks a large embedding: its rows stay on the servers, and are read by id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.errors import BatchError, PlanError
from plait.integrations.servers.tables.row_index import Ids, first_values
from plait.integrations.servers.tables.table_shard import TableSpec

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
    embedding whose weight has all rows, and the job's optimizer trains it. Raises PlanError for values that TableSpec
    refuses.
    """

    def __init__(
        self, num_rows: int, dim: int, *, ids: str, optimizer: str = "adagrad", lr: float = 0.01, scale: float = 0.05,
        seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
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
