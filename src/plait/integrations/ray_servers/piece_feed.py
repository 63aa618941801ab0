"""Reads the pieces of the data, ahead of their use. A piece has the same rows whichever worker it goes to."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import default_collate

from plait.engine.data.batch_reader import BatchReader
from plait.engine.data.sample_order import BatchRows, Order
from plait.engine.local_batch import batch_part
from plait.integrations.ray_servers.server_job import Job


class BatchFeed:
    """A feed that returns the pieces of one batch, which every step trains on. It replaces a PieceFeed in tests and
    `verify`."""

    def __init__(self, batch: Any, num_parts: int) -> None:
        self._batch, self._num_parts = batch, num_parts

    def read(self, piece: int, then: int | None = None) -> Any:
        """The rows of the given piece; `then` is ignored."""
        return batch_part(self._batch, piece % self._num_parts, self._num_parts)

    def close(self) -> None:
        """Nothing to do."""


class PieceFeed:
    """Reads pieces by number (see schedule/work_queue.py). An epoch is in the same order as that of `plait.loader`."""

    def __init__(self, job: Job, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self._job = job
        self._reader = BatchReader(dataset, collate, job.seed, 0)
        self._epoch: tuple[int, torch.Tensor] = (-1, torch.empty(0))
        self._thread = ThreadPoolExecutor(1, "plait feed")
        self._ahead: dict[int, Future[Any]] = {}

    def read(self, piece: int, then: int | None = None) -> Any:
        """Return the batch of a piece, and begin to read the piece `then`."""
        found = self._ahead.pop(piece, None) or self._thread.submit(self._read, piece)
        self._ahead = {} if then is None else {then: self._thread.submit(self._read, then)}
        return found.result()

    def close(self) -> None:
        """Stop the reading thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self, piece: int) -> Any:
        return self._reader.read(self.rows(piece))

    def rows(self, piece: int) -> BatchRows:
        """The items of the dataset that make up the piece."""
        job = self._job
        batch, part = divmod(piece, job.num_parts)
        epoch, index = divmod(batch, job.num_items // job.batch_size)
        if self._epoch[0] != epoch:
            whole = Order(job.num_items, job.num_items, True, job.seed)
            self._epoch = (epoch, torch.tensor(next(whole.rows_from(epoch, 0)).items))
        items = self._epoch[1][index * job.batch_size : (index + 1) * job.batch_size]
        mine = items.view(job.plan.micro, job.num_parts, -1)[:, part]
        return BatchRows(epoch, tuple(mine.flatten().tolist()))
