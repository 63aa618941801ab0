"""A loader that gives each rank its own rows of the global batch, read ahead of the step."""

from __future__ import annotations

import copy
import math
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from plait.comm.device import own_device
from plait.comm.protocol import World
from plait.compile.capture.batch import count_rows, row_sizes
from plait.engine.arguments import check_arguments
from plait.engine.data.batch_reader import BatchReader
from plait.engine.data.prefetch import Prefetcher, Waited, WaitGauge
from plait.engine.data.sample_order import BatchRows, Order, Sampled, Split, Stream, check_batch_size
from plait.engine.environment import rank, resolve_plan
from plait.engine.local_batch import LocalBatch
from plait.errors import BatchError, DataError, PlanError
from plait.plan.axes import axis_kind
from plait.plan.plan import Plan

_END_SECONDS = 5.0  # how long to wait for an item being read when the loader is freed


class Loader:
    """Yields `LocalBatch`es over a dataset; see `loader` for the arguments.

    One iteration yields the rest of the current epoch; the next iteration is the next epoch. `state_dict` counts the
    batches that were yielded, not those that were read ahead: a resumed run gets the batch after the last yielded one.
    `waited_seconds` is (last, total) of the time spent waiting for batches.

    Raises DataError, BatchError or PlanError for arguments that do not fit each other or the plan.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool | None = None,
        seed: int = 0,
        plan: Plan | str | None = None,
        world: World | None = None,
        num_workers: int = 0,
        prefetch: int = 2,
        collate: Callable[[list[Any]], Any] = default_collate,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        drop_last: bool = True,
        row_weights: str = "",
    ) -> None:
        indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        stream = isinstance(dataset, IterableDataset) or (not indexed and isinstance(dataset, Iterable))
        _check_dataset(dataset, indexed or stream)
        for name, value in (("num_workers", num_workers), ("prefetch", prefetch)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise DataError(f"{name}={value!r}: give a whole number, 0 or more")
        check_arguments(seed=seed, world=world)
        if stream:
            _check_stream(dataset, shuffle, num_workers, batch_sampler)
        resolved = _plan_of(plan, world)
        mesh = resolved.process_mesh if world is None else world.mesh
        self._rank = world.rank if world is not None else rank()
        if row_weights and resolved.sync != 1:
            raise PlanError(
                f"row_weights={row_weights!r} pads a batch of all replicas, which under sync={resolved.sync} train"
                " apart: leave it out, with drop_last=True"
            )
        split = Split(
            resolved.micro, resolved.num_process_parts, resolved.batch_part(mesh.coordinates(self._rank)),
            bool(row_weights),
        )  # fmt: skip
        self._shuffle = not stream and shuffle is not False
        self._size: int | None = None if stream else len(dataset)
        if batch_sampler is not None:
            if batch_size is not None or shuffle:
                raise BatchError("a batch sampler says which items a batch has: give no batch_size and no shuffle")
            self._shuffle = False
            self._order: Order | Sampled | Stream = Sampled(batch_sampler, split)
        else:
            size = _check_size(batch_size)
            check_batch_size(size, resolved, f"the global batch of {size}")
            if self._size is not None and self._size < (size if drop_last else 1):
                raise DataError(f"the dataset has {self._size} items, fewer than one global batch of {size}")
            if self._size is None:
                self._order = Stream(dataset, size, split, drop_last)
            else:
                self._order = Order(self._size, size, self._shuffle, seed, split, drop_last)
                if not drop_last and (rest := self._size % size) and not row_weights:
                    split.rows(0, range(rest), f"the last batch of {self._size} items")
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0
        self._position = 0  # batches of this epoch that were yielded
        self._items = 0  # items of this epoch that were yielded
        self._epoch_over = False  # whether the end of the epoch was reached
        self._row_weights = row_weights
        self._num_workers, self._prefetch = num_workers, prefetch
        device = world.device if world is not None else _device()
        self._feed = Prefetcher(BatchReader(dataset, collate, seed, num_workers, stream), num_workers, prefetch, device)
        self._requested: deque[BatchRows] = deque()  # rows given to the feed
        self._gauge = WaitGauge()
        self._has_warned = False
        self._loaded = 0  # how many states were loaded
        weakref.finalize(self, self._feed.close, _END_SECONDS)

    def __len__(self) -> int:
        """The number of batches in an epoch. Raises TypeError if it is only known at the end of the epoch."""
        if isinstance(self._order, Order):
            return self._order.num_batches
        if isinstance(self._order, Sampled) and isinstance(self._order.sampler, Sized):
            return len(self._order.sampler)
        raise TypeError(f"the batches of {type(self.dataset).__name__} are known only when they have been read")

    def __iter__(self) -> Iterator[LocalBatch]:
        if self._ended():
            self.epoch, self._position, self._items, self._epoch_over = self.epoch + 1, 0, 0, False
        loaded, first = self._loaded, True
        while not self._ended() and self._loaded == loaded:
            tree, rows = self._next()
            if not rows.items and first and self._position:  # the last iteration ended with the epoch
                self.epoch, self._position, self._items, first = self.epoch + 1, 0, 0, False
                continue
            if not rows.items:
                self._epoch_over = True
                break
            first = False
            self._position += 1
            self._items += rows.total - rows.padding
            yield self._local(tree, rows)

    def _local(self, tree: Any, rows: BatchRows) -> LocalBatch:
        """The rows of a batch as a LocalBatch. A collate function that packs items into fewer rows does so on every
        rank alike."""
        num, here = len(rows.items), count_rows(tree)
        if here == num or num in (size for _, size in row_sizes(tree)):
            return LocalBatch(tree, num, rows.total, self._place(rows), rows.padding)
        return LocalBatch(tree, here, here * (rows.total // num), self._place(rows))

    def _ended(self) -> bool:
        return self._epoch_over or (isinstance(self._order, Order) and self._position >= self._order.num_batches)

    def _place(self, rows: BatchRows) -> str:
        """The position of a batch in the data, in words."""
        if rows.note:
            return f"batch {self._position} of epoch {self.epoch}, {rows.note}"
        order = f"shuffled by seed {self.seed}" if self._shuffle else "in order"
        return f"batch {self._position} of epoch {self.epoch}, {order}, of {self._size} items"

    @property
    def waited_seconds(self) -> Waited:
        """Seconds spent waiting for the last batch, and for all batches so far."""
        return self._gauge.waited

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, in items, so that it is valid under any plan."""
        found: dict[str, Any] = {"epoch": self.epoch, "items": self._items, "seed": self.seed}
        found |= {"shuffle": self._shuffle, "size": self._size}
        return found | ({"batches": self._position} if isinstance(self._order, Sampled) else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of another loader of the same data.

        A running iteration ends; the next one begins at the new position. A stream is read again up to there. Raises
        DataError for an invalid state, or one of other data or another order.
        """
        if not isinstance(state, Mapping):
            raise DataError(f"this is no state of a loader: it is a {type(state).__name__}, not a mapping")
        needed = {"epoch", "items", "seed", "shuffle", "size"}
        needed |= {"batches"} if isinstance(self._order, Sampled) and state.get("items") else set()
        if missing := sorted(needed - set(state)):
            raise DataError(f"this is no state of a loader: it lacks {', '.join(missing)}")
        for key in ("epoch", "items", "batches"):
            if type(state.get(key, 0)) is not int or state.get(key, 0) < 0:
                raise DataError(f"this is no state of a loader: its {key} is {state[key]!r}, not a count")
        for key, here in (("seed", self.seed), ("shuffle", self._shuffle), ("size", self._size)):
            if type(state[key]) is not type(here) or state[key] != here:
                raise DataError(
                    f"the data is not that of the saved run: {key} was {state[key]} and is now {here};"
                    " use the same data and seed, or start anew"
                )
        items = state["items"]
        if isinstance(self._order, Sampled):
            position = state.get("batches", 0)
        else:
            position, rest = divmod(items, self._order.batch_size)
            if rest and (self._order.drop_last or items != (self._size or items)):
                raise DataError(
                    f"the saved run stopped after {items} items of its epoch, which is no whole number of"
                    f" batches of {self.batch_size}; use the batch size of the saved run"
                )
            position += rest > 0
        self._feed.stop()
        self._requested.clear()
        self._loaded += 1
        self.epoch, self._position, self._items, self._epoch_over = state["epoch"], position, items, False

    def close(self) -> None:
        """End the workers and the reading thread. A later iteration starts them again."""
        self._feed.close()

    def _next(self) -> tuple[Any, BatchRows]:
        """The batch at the current position, and its rows."""
        self._gauge.asked()
        if not self._feed.started:
            self._requested.clear()
            self._feed.start(_recorded(self._order.rows_from(self.epoch, self._position), self._requested))
        tree = self._feed.next()
        rows = self._requested.popleft()
        if rows.items and self._row_weights:
            tree = self._weighted(tree, rows)
        self._gauge.got()
        if not self._has_warned and self._rank == 0 and (share := self._gauge.share_if_too_much()):
            self._has_warned = True
            more = max(self._num_workers, 1) / (1 - min(share, 0.9))
            warnings.warn(
                f"the last steps waited for data for {share:.0%} of their time: raise num_workers (data.workers), now"
                f" {self._num_workers}, to {math.ceil(more)}; or, where only some batches take long to read, prefetch"
                f" (data.prefetch), now {self._prefetch}",
                stacklevel=3,
            )
        return tree, rows

    def _weighted(self, tree: Any, rows: BatchRows) -> Any:
        """The batch with a weight for each row, 0 for padding."""
        if not isinstance(tree, MutableMapping):
            raise BatchError(
                f"row_weights={self._row_weights!r} is an entry of the batch, and the batch is a {type(tree).__name__};"
                " give the loader a `collate` that makes a dict"
            )
        if self._row_weights in tree:
            raise BatchError(f"row_weights={self._row_weights!r}: the batch has an entry of that name; choose another")
        if len(rows.items) not in (size for _, size in row_sizes(tree)):
            raise BatchError(
                f"row_weights={self._row_weights!r} weighs rows, and the collate function makes {count_rows(tree)} of"
                f" {len(rows.items)} items; leave it out, with drop_last=True"
            )
        weights = torch.ones(len(rows.items))
        weights[len(rows.items) - rows.here :] = 0
        made = copy.copy(tree)
        made[self._row_weights] = weights
        return made


def loader(
    dataset: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    plan: Plan | str | None = None,
    world: World | None = None,
    num_workers: int = 0,
    prefetch: int = 2,
    collate: Callable[[list[Any]], Any] = default_collate,
    batch_sampler: Iterable[Sequence[int]] | None = None,
    drop_last: bool = True,
    row_weights: str = "",
) -> Loader:
    """The batches of a dataset. Each rank gets its own part of each batch.

    dataset         with a length and items by index, such as a `datasets.Dataset`: each rank reads only its own items.
                    Or an IterableDataset, or any iterable, of rows: every rank reads all rows and keeps its own, so
                    that batches are the same on any number of ranks; the dataset must not shard itself
    batch_size      rows of the GLOBAL batch; the plan's batch axes (data, replica) and micro must divide it
    shuffle         a new order each epoch, which depends on (seed, epoch) alone, not on the number of ranks. The
                    default is True for items by index. An iterable shuffles itself, seeded alike on every rank, and is
                    told the epoch if it has `set_epoch`
    plan            by default the command line's, or data parallel over all processes, as in the Trainer
    world           the rank's world, if ranks are threads; give `plan` too if it has micro
    num_workers     reading processes, as in a DataLoader; 0: this process reads, in a thread
    prefetch        batches that are prepared on the device ahead of the step, also those of the next epoch; 0: each
                    batch is read on request, by the thread that requests it
    collate         list of items -> a batch's tree of tensors, with the rows as dim 0, or where the batch's attribute
                    `batch_spec` says. It may pack a rank's items into fewer rows, as many on every rank, such as one
                    (transformers' DataCollatorWithFlattening); rows of different lengths need shapes=bucket:N
    batch_sampler   in place of batch_size and shuffle: yields the indices of each GLOBAL batch, equal on every rank
    drop_last       whether a short last batch is dropped; if not, the plan must divide it, or `row_weights` pads it
    row_weights     the key of a new entry of the batch, [rows] float32: a short batch is padded to a size that the plan
                    divides, with rows of weight 0, and the loss must be plait.Weighted((losses * batch[NAME]).sum(),
                    batch[NAME].sum()). Outputs do not contain padding rows; batch norm counts them

    The loader has `state_dict`, `load_state_dict` and `close`. It warns once if steps wait for data for over a tenth of
    their time. A dataset that draws random numbers draws the same ones on any number of ranks, and after a resume, if
    workers read it. Raises DataError for an item that cannot be read, and the errors of `Loader`.
    """
    return Loader(
        dataset,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        plan=plan,
        world=world,
        num_workers=num_workers,
        prefetch=prefetch,
        collate=collate,
        batch_sampler=batch_sampler,
        drop_last=drop_last,
        row_weights=row_weights,
    )


def _recorded(order: Iterator[BatchRows], requested: deque[BatchRows]) -> Iterator[BatchRows]:
    """The rows of `order`; each is also appended to `requested`."""
    for rows in order:
        requested.append(rows)
        yield rows


def _check_dataset(dataset: Any, readable: bool) -> None:
    splits = [key for key, value in dataset.items() if hasattr(value, "__len__")] if isinstance(dataset, dict) else []
    if splits and all(isinstance(key, str) for key in splits):
        raise DataError(f"the dataset is a dict, of {', '.join(map(repr, splits))}: give the loader one of these")
    if not readable:
        raise DataError(
            f"plait.loader needs a dataset with a length and items by index, or one that can be iterated, not"
            f" {type(dataset).__name__}"
        )


def _check_stream(dataset: Any, shuffle: bool | None, num_workers: int, batch_sampler: object) -> None:
    name = type(dataset).__name__
    if shuffle:
        raise DataError(f"{name} has no items by index to shuffle: let it shuffle itself, seeded alike on every rank")
    if num_workers:
        raise DataError(
            f"num_workers={num_workers}: the rows of {name} come one after the other, and are read ahead by a thread"
            " (prefetch); leave num_workers out, and let the dataset itself read side by side"
        )
    if batch_sampler is not None:
        raise DataError(f"{name} has no items by index for a batch sampler; give a batch_size")


def _check_size(batch_size: object) -> int:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise BatchError(f"batch_size={batch_size!r}: a batch has a whole number of rows, 1 or more")
    return batch_size


def _plan_of(plan: Plan | str | None, world: World | None) -> Plan:
    """The trainer's plan; from a world alone, a plan that cuts the batch as it does."""
    if world is None:
        return resolve_plan(plan)
    if plan is None and "PLAIT_PLAN" not in os.environ:
        return Plan.parse(" ".join(f"{axis}={n}" for axis, n in world.mesh.axes if axis_kind(axis).cuts_rows))
    resolved = resolve_plan(plan)
    mine, there = ([(axis, n) for axis, n in mesh.axes if n > 1] for mesh in (resolved.process_mesh, world.mesh))
    if mine != there:
        raise PlanError(f"the plan {resolved.title!r} is not for the ranks of this world: its mesh is {world.mesh}")
    return resolved


def _device() -> torch.device:
    """The device on which this process's trainer will compute, as comm.process_world chooses it."""
    return own_device()
