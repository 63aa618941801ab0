"""A loader of which each rank reads only its own rows of the global batch, ahead of the step that uses them."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from plait.comm.protocol import World
from plait.errors import BatchError, DataError, PlanError
from plait.run.environment import rank, resolve_plan
from plait.run.feeding.gauge import Waited, WaitGauge
from plait.run.feeding.order import Order, check_batch_size
from plait.run.feeding.prefetch import Feed
from plait.run.feeding.reading import Reader
from plait.run.local_batch import LocalBatch
from plait.spec.plan import Plan

_END_SECONDS = 5.0  # to wait for an item that is being read when the loader is let go


class Loader:
    """Yields `LocalBatch`es over a map-style dataset; see `loader`.

    Iterating once gives what is left of the current epoch; the next iteration is the next epoch. `state_dict` after a
    batch was yielded says that it was used, so that a run which goes on from there gets the batch after it; what was
    read ahead does not count. `waited_seconds` is (last, total) of the time that batches were waited for.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        plan: Plan | str | None = None,
        world: World | None = None,
        num_workers: int = 0,
        prefetch: int = 2,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        iterable = isinstance(dataset, IterableDataset)
        if iterable or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise DataError(
                f"plait.loader needs a dataset with a length and items by index, not {type(dataset).__name__};"
                " of any other, give the trainer a plain DataLoader, whose batch is the global batch"
            )
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise BatchError(f"batch_size={batch_size!r}: a batch has a whole number of rows, 1 or more")
        for name, value in (("num_workers", num_workers), ("prefetch", prefetch)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise DataError(f"{name}={value!r}: give a whole number, 0 or more")
        resolved = _plan_of(plan, world)
        self._rank = world.rank if world is not None else rank()
        part = resolved.batch_part(resolved.mesh.coordinates(self._rank))
        check_batch_size(batch_size, resolved, f"the global batch of {batch_size}")
        if len(dataset) < batch_size:
            raise DataError(f"the dataset has {len(dataset)} items, fewer than one global batch of {batch_size}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.epoch = 0
        self._position = 0  # batches of this epoch that were yielded
        self._order = Order(
            len(dataset), batch_size, shuffle, seed, resolved.micro, resolved.num_batch_parts, part
        )  # fmt: skip
        self._num_workers, self._prefetch = num_workers, prefetch
        device = world.device if world is not None else _device()
        self._feed = Feed(Reader(dataset, collate, seed, num_workers), num_workers, prefetch, device)
        self._gauge = WaitGauge()
        self._has_warned = False
        self._loaded = 0  # states that were loaded
        weakref.finalize(self, self._feed.close, _END_SECONDS)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self._order.num_batches

    def __iter__(self) -> Iterator[LocalBatch]:
        if self._position >= len(self):
            self.epoch, self._position = self.epoch + 1, 0
        loaded = self._loaded
        order = f"shuffled by seed {self._order.seed}" if self._order.shuffle else "in order"
        while self._position < len(self) and self._loaded == loaded:
            tree = self._next()
            self._position += 1
            place = f"batch {self._position} of epoch {self.epoch}, {order}, of {self._order.size} items"
            yield LocalBatch(tree, self.batch_size // self._order.num_parts, self.batch_size, place)

    @property
    def waited_seconds(self) -> Waited:
        """How long the last batch, and all batches so far, were waited for."""
        return self._gauge.waited

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, in items, so that it holds under any plan."""
        return {
            "epoch": self.epoch,
            "items": self._position * self.batch_size,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
            "size": self._order.size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader of the same data stood; DataError where the order would be another one.

        An iteration that is under way ends; the next one begins at the new place.
        """
        if not isinstance(state, Mapping):
            raise DataError(f"this is no state of a loader: {state!r:.80}")
        if missing := sorted({"epoch", "items", "seed", "shuffle", "size"} - set(state)):
            raise DataError(f"this is no state of a loader: it lacks {', '.join(missing)}")
        for key in ("epoch", "items"):
            if type(state[key]) is not int or not 0 <= state[key] < 1 << 62:
                raise DataError(f"this is no state of a loader: {key} is {state[key]!r:.80}")
        for key, here in (("seed", self._order.seed), ("shuffle", self._order.shuffle), ("size", self._order.size)):
            if state[key] != here:
                raise DataError(
                    f"the data is not that of the saved run: {key} was {state[key]} and is now {here};"
                    " use the same data and seed, or start anew"
                )
        if state["items"] % self.batch_size:
            raise DataError(
                f"the saved run stopped after {state['items']} items of its epoch, which is no whole number of"
                f" batches of {self.batch_size}; use the batch size of the saved run"
            )
        self._feed.stop()
        self._loaded += 1
        self.epoch, self._position = int(state["epoch"]), int(state["items"]) // self.batch_size

    def close(self) -> None:
        """End the workers and the thread that reads ahead. An iteration after it starts them again."""
        self._feed.close()

    def _next(self) -> Any:
        """The batch at the position."""
        self._gauge.asked()
        if not self._feed.started:
            self._feed.start(self._order.rows_from(self.epoch, self._position))
        tree = self._feed.next()
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
        return tree


def loader(
    dataset: Any,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    plan: Plan | str | None = None,
    world: World | None = None,
    num_workers: int = 0,
    prefetch: int = 2,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Loader:
    """Batches of a map-style dataset, of which each rank reads only its own part.

    batch_size  rows of the GLOBAL batch; the plan's batch axes (data, replica) and micro must divide it
    shuffle     a new order each epoch, which follows from (seed, epoch) alone: it is the same on any number of ranks
    plan        by default the command line's, or data parallel over all processes; as the Trainer resolves it
    world       where the ranks are threads: the rank's world; give `plan` too if it has micro
    num_workers processes that read, of the kind that a DataLoader has; 0: this process reads, in a thread
    prefetch    batches that are made ready, on the device, ahead of the step, also those of the next epoch; 0: each is
                read when it is asked for, in the thread that asks
    collate     list of items -> a batch's tree of tensors, each with the rows as dim 0

    A short last batch is dropped. The loader has `state_dict`, `load_state_dict` and `close`. Where steps wait for data
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
    )


def _plan_of(plan: Plan | str | None, world: World | None) -> Plan:
    """The plan that the trainer has; of a world alone one with its axes."""
    if world is None:
        return resolve_plan(plan)
    if plan is None and "PLAIT_PLAN" not in os.environ:
        return Plan.parse(" ".join(f"{axis}={size}" for axis, size in world.mesh.axes))
    resolved = resolve_plan(plan)
    mine, there = ([(axis, n) for axis, n in mesh.axes if n > 1] for mesh in (resolved.mesh, world.mesh))
    if mine != there:
        raise PlanError(f"the plan {resolved.title!r} is not for the ranks of this world: its mesh is {world.mesh}")
    return resolved


def _device() -> torch.device:
    """Where the trainer of this process will compute, as comm.process chooses it."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
