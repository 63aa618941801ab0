"""Prepares batches ahead of the step: a thread reads them in this process or by workers, and moves them to the
device."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from plait.comm.device import CopyStream, Event, is_host, keep_for_current_stream, pinned
from plait.compile.capture.batch import batch_tensors, map_batch
from plait.engine.data.batch_reader import BatchReader, Failure
from plait.engine.data.sample_order import BatchRows

_reading = threading.Lock()  # datasets are written for one reader, so that only one loader of a process reads at a time


class Prefetcher:
    """Returns the batches of `rows` in order, with up to `prefetch` batches ready ahead of the requested one.

    Without prefetch and workers, a batch is read by the caller on request, and not moved. Workers live until `close`.
    `start` may be called again with other rows.
    """

    def __init__(self, reader: BatchReader, num_workers: int, prefetch: int, device: torch.device) -> None:
        self._reader = reader
        self._num_workers = num_workers
        self._prefetch = max(prefetch, 1) if num_workers else prefetch
        self._mover = _Mover(device) if not is_host(device) and self._prefetch else None
        self._workers: DataLoader[Any] | None = None
        self._rows: Iterator[BatchRows] | None = None
        self._ahead: _Ahead | None = None

    @property
    def started(self) -> bool:
        """Whether there are rows to read."""
        return self._rows is not None

    def start(self, rows: Iterator[BatchRows]) -> None:
        """Return the batches of these rows from now on."""
        self.stop()
        self._rows = rows
        if self._prefetch:
            self._ahead = _Ahead(self._batches(), self._prefetch)

    def next(self) -> Any:
        """The next batch. After an error, `start` must be called again."""
        assert self._rows is not None
        try:
            if self._ahead is None:
                with _reading:
                    return self._reader.read(next(self._rows))
            found = self._ahead.next()
        except Exception:
            self.close()
            raise
        return self._mover.arrive(*found) if self._mover is not None else found

    def stop(self, seconds: float | None = None) -> None:
        """Stop reading, and keep the workers. Waits for the batch being read, for at most `seconds`."""
        if self._ahead is not None:
            self._ahead.close(seconds)
        self._ahead = self._rows = None

    def close(self, seconds: float | None = None) -> None:
        """Stop reading, and end the workers."""
        self.stop(seconds)
        self._workers = None

    def _batches(self) -> Iterator[Any]:
        """The batches that the thread prepares."""
        for batch in self._from_workers() if self._num_workers else self._from_here():
            yield self._mover.send(batch) if self._mover is not None else batch

    def _from_here(self) -> Iterator[Any]:
        assert self._rows is not None
        for rows in self._rows:
            with _reading:
                batch = self._reader.read(rows)
            yield batch

    def _from_workers(self) -> Iterator[Any]:
        assert self._rows is not None
        if self._workers is None:
            self._workers = DataLoader(
                self._reader,  # type: ignore[arg-type]
                batch_sampler=_Current(self),  # type: ignore[arg-type]
                collate_fn=_as_it_is,
                num_workers=self._num_workers,
                prefetch_factor=-(-self._prefetch // self._num_workers),
                persistent_workers=True,
                generator=torch.Generator(),  # the user's global generator stays untouched
            )
        # Made in the reading thread, where DataLoader sets no signal handler: it would raise in the middle of a step.
        batches: Any = iter(self._workers)
        while True:
            try:
                batch = next(batches)
            except Exception as error:
                batch = self._died(error, getattr(batches, "_workers", ()))
            if isinstance(batch, Failure):
                self._workers = batches = None  # end the workers now, not when the error is freed
                raise batch.error()
            yield batch

    def _died(self, error: Exception, processes: Any) -> Failure:
        """How the workers ended, from an error of DataLoader and the processes that it started."""
        name, text = self._reader.name, str(error).strip() or type(error).__name__
        sentinels = {process.sentinel: process for process in processes}
        for sentinel in wait(sentinels, timeout=1.0):  # a dying worker stops answering before its process ends
            dead = sentinels[sentinel]
            dead.join()
            code, item = dead.exitcode, self._reader.item_read_by(dead.pid)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            where = f"while it read item {item} of {name}" if item is not None else f"before it read any item of {name}"
            return Failure(
                f"worker process {dead.pid} of the loader {how} {where}; if memory ran out, lower num_workers"
                f" (data.workers, now {self._num_workers}) or prefetch (data.prefetch, now {self._prefetch})"
            )
        return Failure(f"the loader's workers could not read {name}: {text.splitlines()[-1]}")


class _Current:
    """A batch sampler that yields the current rows of a prefetcher."""

    def __init__(self, feed: Prefetcher) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[BatchRows]:
        assert self._feed._rows is not None
        return self._feed._rows


class _Ahead:
    """Runs an iterator in a thread, at most `num` items ahead."""

    def __init__(self, items: Iterator[Any], num: int) -> None:
        self._items = items
        self._room = threading.Semaphore(num)
        self._ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="plait data", daemon=True)
        self._thread.start()

    def next(self) -> Any:
        item, error = self._ready.get()
        self._room.release()
        if error is not None:
            raise error
        return item

    def close(self, seconds: float | None) -> None:
        """End the thread after its current item."""
        self._closed = True
        self._room.release()
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while self._room.acquire() and not self._closed:
                self._ready.put((next(self._items), None))
        except BaseException as error:  # raised by `next`
            self._ready.put((None, error))


class _Mover:
    """Moves batches to a GPU, from pinned memory, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: CopyStream | None = None

    def send(self, batch: Any) -> tuple[Any, Event]:
        """Begin to move a batch, in the reading thread."""
        if self._stream is None:
            self._stream = CopyStream(self._device)
        with self._stream.entered():
            moved = map_batch(lambda _, leaf: self._move(leaf) if torch.is_tensor(leaf) else leaf, batch)
            return moved, Event(self._device)

    def arrive(self, batch: Any, event: Event) -> Any:
        """The moved batch, ready for the caller's stream."""
        event.precede(self._device)
        for leaf in batch_tensors(batch):
            keep_for_current_stream(leaf)  # so that its memory is not reused while a step reads it
        return batch

    def _move(self, leaf: Tensor) -> Tensor:
        if is_host(leaf.device) and leaf.numel():
            leaf = pinned(leaf)
        return leaf.to(self._device, non_blocking=True)


def _as_it_is(batch: Any) -> Any:
    return batch


_NUM_STEPS = 20
_TOO_MUCH = 0.1  # share of the time
_FEW_STEPS = 3  # fewest slow steps that count: a single one may be due to a busy machine
_SHORTEST_STEP = 1e-3  # seconds; a loop with shorter steps is not training


class Waited(NamedTuple):
    """Seconds spent waiting for batches: for the last one, and for all."""

    last: float
    total: float


class WaitGauge:
    """Measures waits between `asked`, when a batch is requested, and `got`. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.waited = Waited(0.0, 0.0)
        self._clock = clock
        self._asked = 0.0
        self._got: float | None = None
        self._steps: deque[tuple[float, float]] = deque(maxlen=_NUM_STEPS)  # (waited, worked) seconds

    def asked(self) -> None:
        """A batch is requested."""
        self._asked = self._clock()

    def got(self) -> None:
        """The requested batch is there."""
        now = self._clock()
        waited = now - self._asked
        self.waited = Waited(waited, self.waited.total + waited)
        if self._got is not None:  # the first batch cannot be read ahead
            self._steps.append((waited, self._asked - self._got))
        self._got = now

    def share_if_too_much(self) -> float | None:
        """The share of the last 20 steps' time spent waiting, if it is over a tenth and several steps waited; else
        None."""
        waited, worked = (sum(times) for times in zip(*self._steps, strict=True)) if self._steps else (0.0, 0.0)
        slow = sum(w > _TOO_MUCH * (w + b) for w, b in self._steps)
        if len(self._steps) < _NUM_STEPS or slow < _FEW_STEPS or worked < _NUM_STEPS * _SHORTEST_STEP:
            return None
        share = waited / (waited + worked)
        return share if share > _TOO_MUCH else None
