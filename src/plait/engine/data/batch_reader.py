"""Reads items of a dataset and collates them to a batch, in this process or in a worker. Errors name the item."""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from plait.engine.data.sample_order import BatchRows
from plait.errors import DataError


@dataclass(frozen=True)
class Failure:
    """The result of a worker that could not read a batch.

    message  the error
    details  the traceback in the worker
    """

    message: str
    details: str = ""

    def error(self) -> DataError:
        """The DataError to raise in this process."""
        found = DataError(self.message)
        if self.details:
            found.add_note(f"In the worker:\n{self.details}")
        return found


class BatchReader:
    """Reads batches. It acts as the dataset of a DataLoader, whose workers get a copy.

    In workers, which have random generators of their own, an item's random draws depend on (seed, epoch, item) alone.
    They are the same with any number of workers and ranks, and in a resumed run. A dataset that reads several items at
    once, by `__getitems__`, draws for all of them from the first item's seed.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int, num_workers: int, stream: bool = False
    ) -> None:
        self.dataset = dataset
        self._stream = stream  # whether BatchRows has the items themselves
        self._collate = collate
        self._seed = seed
        # [workers, 2]: process id, and the item being read, to report the item at which a worker died
        self._noted = torch.full((num_workers, 2), -1) if num_workers else None
        if self._noted is not None:
            self._noted.share_memory_()

    @property
    def name(self) -> str:
        """The type of the dataset, for messages."""
        return type(self.dataset).__name__

    def read(self, rows: BatchRows) -> Any:
        """The batch of these rows; None for no rows. Raises DataError, which names the item that could not be read."""
        items = list(rows.items)
        if not items:
            return None
        if self._stream:
            found, items = items, []
        elif callable(getattr(self.dataset, "__getitems__", None)):
            self._begin(items[0], rows.epoch)
            try:
                found = self.dataset.__getitems__(items)
            except Exception as error:
                raise self._unreadable(items, error) from error
        else:
            found = [self._item(item, rows.epoch) for item in items]
        try:
            return self._collate(found)
        except Exception as error:
            which = f"items {_few(items)}" if items else "items"
            raise DataError(
                f"{which} of {self.name} do not make a batch: {type(error).__name__}: {error};"
                " give the loader a `collate` that joins them, or make all items of one form"
            ) from error

    def __getitems__(self, rows: BatchRows) -> Any:
        """The same in a worker of a DataLoader: returns the batch or a Failure."""
        try:
            return self.read(rows)
        except Exception as error:
            return Failure(str(error), traceback.format_exc())

    def item_read_by(self, process: int) -> int | None:
        """The item that the worker process began to read last; None if it has read none."""
        noted = [] if self._noted is None else self._noted.tolist()
        return next((item for pid, item in noted if pid == process), None)

    def _begin(self, item: int, epoch: int) -> None:
        """Note the item, and seed the worker's random generators for it."""
        worker = get_worker_info()
        if worker is not None and self._noted is not None:
            self._noted[worker.id, 0], self._noted[worker.id, 1] = os.getpid(), item
            seed = (self._seed * 0x9E3779B1 + epoch) * 0x85EBCA6B + item
            torch.default_generator.manual_seed(seed & ((1 << 62) - 1))
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)

    def _item(self, item: int, epoch: int) -> Any:
        self._begin(item, epoch)
        try:
            return self.dataset[item]
        except Exception as error:
            raise self._unreadable([item], error) from error

    def _unreadable(self, items: list[int], error: Exception) -> DataError:
        """The error for items that could not be read together; it names the item that cannot be read alone, if there
        is one."""
        for item in items if len(items) > 1 else []:
            try:
                self.dataset[item]
            except Exception as one:
                return self._unreadable([item], one)
        which = f"items {_few(items)}" if len(items) > 1 else f"item {items[0]}"
        return DataError(f"{which} of {self.name} cannot be read: {type(error).__name__}: {error}")


def _few(items: list[int]) -> str:
    shown = ", ".join(map(str, items[:8]))
    return shown + (f" and {len(items) - 8} more" if len(items) > 8 else "")
