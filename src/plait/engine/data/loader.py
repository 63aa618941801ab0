"""A loader that gives each rank its own rows of the global batch, read ahead of the step that uses them."""

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
from plait.engine.data.gauge import Waited, WaitGauge
from plait.engine.data.order import BatchRows, Order, Sampled, Split, Stream, check_batch_size
from plait.engine.data.prefetch import Prefetcher
from plait.engine.data.reading import BatchReader
from plait.engine.environment import rank, resolve_plan
from plait.engine.local_batch import LocalBatch
from plait.errors import BatchError, DataError, PlanError
from plait.plan.axes import axis_kind
from plait.plan.plan import Plan

_END_SECONDS = 5.0  # to wait for an item that is being read when the loader is let go


class Loader:
    """Yields `LocalBatch`es over a dataset; see `loader`.

    Iterating once gives what is left of the current epoch; the next iteration is the next epoch. `state_dict` after a
    batch was yielded says that it was used, so that a run which goes on from there gets the batch after it; what was
    read ahead does not count. `waited_seconds` is (last, total) of the time that batches were waited for.
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
        if stream:
            _check_stream(dataset, shuffle, num_workers, batch_sampler)
        resolved = _plan_of(plan, world)
        mesh = resolved.mesh if world is None else world.mesh
        self._rank = world.rank if world is not None else rank()
        if row_weights and resolved.sync != 1:
            raise PlanError(
                f"row_weights={row_weights!r} pads a batch of all replicas, which under sync={resolved.sync} train"
                " apart: leave it out, with drop_last=True"
            )
        split = Split(
            resolved.micro, resolved.num_batch_parts, resolved.batch_part(mesh.coordinates(self._rank)),
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
        self._items = 0  # the same in items
        self._over = False  # whether the epoch is known to be
        self._row_weights = row_weights
        self._num_workers, self._prefetch = num_workers, prefetch
        device = world.device if world is not None else _device()
        self._feed = Prefetcher(BatchReader(dataset, collate, seed, num_workers, stream), num_workers, prefetch, device)
        self._told: deque[BatchRows] = deque()  # what the feed was told to read
        self._gauge = WaitGauge()
        self._has_warned = False
        self._loaded = 0  # states that were loaded
        weakref.finalize(self, self._feed.close, _END_SECONDS)

    def __len__(self) -> int:
        """Batches in an epoch; TypeError where that is known only at its end."""
        if isinstance(self._order, Order):
            return self._order.num_batches
        if isinstance(self._order, Sampled) and isinstance(self._order.sampler, Sized):
            return len(self._order.sampler)
        raise TypeError(f"the batches of {type(self.dataset).__name__} are known only when they have been read")

    def __iter__(self) -> Iterator[LocalBatch]:
        if self._ended():
            self.epoch, self._position, self._items, self._over = self.epoch + 1, 0, 0, False
        loaded, first = self._loaded, True
        while not self._ended() and self._loaded == loaded:
            tree, rows = self._next()
            if not rows.items and first and self._position:  # it was over where it was left
                self.epoch, self._position, self._items, first = self.epoch + 1, 0, 0, False
                continue
            if not rows.items:
                self._over = True
                break
            first = False
            self._position += 1
            self._items += rows.total - rows.padding
            yield LocalBatch(tree, len(rows.items), rows.total, self._place(rows), rows.padding)

    def _ended(self) -> bool:
        return self._over or (isinstance(self._order, Order) and self._position >= self._order.num_batches)

    def _place(self, rows: BatchRows) -> str:
        if rows.note:
            return f"batch {self._position} of epoch {self.epoch}, {rows.note}"
        order = f"shuffled by seed {self.seed}" if self._shuffle else "in order"
        return f"batch {self._position} of epoch {self.epoch}, {order}, of {self._size} items"

    @property
    def waited_seconds(self) -> Waited:
        """How long the last batch, and all batches so far, were waited for."""
        return self._gauge.waited

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, in items, so that it holds under any plan."""
        found: dict[str, Any] = {"epoch": self.epoch, "items": self._items, "seed": self.seed}
        found |= {"shuffle": self._shuffle, "size": self._size}
        return found | ({"batches": self._position} if isinstance(self._order, Sampled) else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader of the same data stood; DataError where the order would be another one.

        An iteration that is under way ends; the next one begins at the new place. A stream is read up to there again.
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
        self._told.clear()
        self._loaded += 1
        self.epoch, self._position, self._items, self._over = state["epoch"], position, items, False

    def close(self) -> None:
        """End the workers and the thread that reads ahead. An iteration after it starts them again."""
        self._feed.close()

    def _next(self) -> tuple[Any, BatchRows]:
        """The batch at the position, and what was read for it."""
        self._gauge.asked()
        if not self._feed.started:
            self._told.clear()
            self._feed.start(_telling(self._order.rows_from(self.epoch, self._position), self._told))
        tree = self._feed.next()
        rows = self._told.popleft()
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
        """The batch with a weight for each row, 0 of padding."""
        if not isinstance(tree, MutableMapping):
            raise BatchError(
                f"row_weights={self._row_weights!r} is an entry of the batch, and the batch is a {type(tree).__name__};"
                " give the loader a `collate` that makes a dict"
            )
        if self._row_weights in tree:
            raise BatchError(f"row_weights={self._row_weights!r}: the batch has an entry of that name; choose another")
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
    """Batches of a dataset, of which each rank gets its own part.

    dataset     one with a length and items by index, of which each rank reads only its own, such as a
                `datasets.Dataset`; or an IterableDataset (or any iterable) of rows, of which every rank reads all and
                keeps its own, so that the batches are the same on any number of ranks. It is not to shard itself
    batch_size  rows of the GLOBAL batch; the plan's batch axes (data, replica) and micro must divide it
    shuffle     a new order each epoch, which follows from (seed, epoch) alone: it is the same on any number of ranks.
                By default of datasets that have items by index; one that is only iterated shuffles itself, seeded alike
                on every rank, and is told the epoch if it has `set_epoch`
    plan        by default the command line's, or data parallel over all processes; as the Trainer resolves it
    world       where the ranks are threads: the rank's world; give `plan` too if it has micro
    num_workers processes that read, of the kind that a DataLoader has; 0: this process reads, in a thread
    prefetch    batches that are made ready, on the device, ahead of the step, also those of the next epoch; 0: each is
                read when it is asked for, in the thread that asks
    collate     list of items -> a batch's tree of tensors, each with the rows as dim 0, or where its `batch_spec` says

    batch_sampler  in place of batch_size and shuffle: yields the indices of each GLOBAL batch, alike on every rank
    drop_last   whether a short last batch is dropped. If not, it is given as it is where the plan divides it
    row_weights the name of an entry of the batch, a float for each row: a short batch is then padded to what the plan
                divides, with rows of weight 0, so that the loss is to be
                plait.Weighted((losses * batch[NAME]).sum(), batch[NAME].sum()). Outputs have no rows of the padding;
                batch norm counts them

    The loader has `state_dict`, `load_state_dict` and `close`. Where steps wait for data
    for over a tenth of their time it warns once. DataError names an item that cannot be read. A dataset that draws
    random numbers draws the same ones on any number of ranks, and after a resume, if workers read it.
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


def _telling(order: Iterator[BatchRows], told: deque[BatchRows]) -> Iterator[BatchRows]:
    for rows in order:
        told.append(rows)
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


def _check_stream(dataset: Any, shuffle: bool | None, num_workers: int, batch_sampler: Any) -> None:
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


def _check_size(batch_size: Any) -> int:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise BatchError(f"batch_size={batch_size!r}: a batch has a whole number of rows, 1 or more")
    return batch_size


def _plan_of(plan: Plan | str | None, world: World | None) -> Plan:
    """The plan that the trainer has; of a world alone one that cuts the batch as it does."""
    if world is None:
        return resolve_plan(plan)
    if plan is None and "PLAIT_PLAN" not in os.environ:
        return Plan.parse(" ".join(f"{axis}={n}" for axis, n in world.mesh.axes if axis_kind(axis).cuts_rows))
    resolved = resolve_plan(plan)
    mine, there = ([(axis, n) for axis, n in mesh.axes if n > 1] for mesh in (resolved.mesh, world.mesh))
    if mine != there:
        raise PlanError(f"the plan {resolved.title!r} is not for the ranks of this world: its mesh is {world.mesh}")
    return resolved


def _device() -> torch.device:
    """Where the trainer of this process will compute, as comm.process chooses it."""
    return own_device()
