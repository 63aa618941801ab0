"""A loader of which each rank reads only its own rows of the global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from plait.comm.protocol import World
from plait.errors import BatchError, DataError
from plait.run.environment import rank, resolve_plan
from plait.run.local_batch import LocalBatch
from plait.spec.plan import Plan


class Loader:
    """Yields `LocalBatch`es over a map-style dataset; see `loader`.

    Iterating once gives what is left of the current epoch; the next iteration is the next epoch. `state_dict` after a
    batch was yielded says that it was used, so that a run which goes on from there gets the batch after it.
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
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise DataError(
                f"plait.loader needs a dataset with a length and items by index, not {type(dataset).__name__};"
                " of any other, give the trainer a plain DataLoader, whose batch is the global batch"
            )
        mesh = world.mesh if world is not None else resolve_plan(plan).mesh
        self._part = mesh.coordinates(world.rank if world is not None else rank())["data"]
        self._num_parts = mesh.axis_size("data")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise BatchError(f"batch_size={batch_size!r}: a batch has a whole number of rows, 1 or more")
        if batch_size % self._num_parts:
            near = max(batch_size // self._num_parts, 1) * self._num_parts
            raise BatchError(
                f"the global batch of {batch_size} does not split over data={self._num_parts};"
                f" choose a multiple of {self._num_parts}, such as {near}"
            )
        if len(dataset) < batch_size:
            raise DataError(f"the dataset has {len(dataset)} items, fewer than one global batch of {batch_size}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.epoch = 0
        self._position = 0  # batches of this epoch that were yielded
        self._shuffle, self._seed = shuffle, seed
        self._num_workers, self._collate = num_workers, collate

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.dataset) // self.batch_size

    def __iter__(self) -> Iterator[LocalBatch]:
        if self._position >= len(self):
            self.epoch, self._position = self.epoch + 1, 0
        rows = DataLoader(
            self.dataset,
            batch_sampler=self._local_rows(self._position),
            num_workers=self._num_workers,
            collate_fn=self._collate,
            generator=torch.Generator(),  # the user's global generator stays untouched
        )
        for tree in rows:
            self._position += 1
            order = f"shuffled by seed {self._seed}" if self._shuffle else "in order"
            place = f"batch {self._position} of epoch {self.epoch}, {order}, of {len(self.dataset)} items"
            yield LocalBatch(tree, self.batch_size // self._num_parts, self.batch_size, place)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, in items, so that it holds under any plan."""
        return {
            "epoch": self.epoch,
            "items": self._position * self.batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "size": len(self.dataset),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader of the same data stood; DataError where the order would be another one."""
        for key, here in (("seed", self._seed), ("shuffle", self._shuffle), ("size", len(self.dataset))):
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
        self.epoch, self._position = int(state["epoch"]), int(state["items"]) // self.batch_size

    def _local_rows(self, first: int) -> list[list[int]]:
        """The indices of this rank's rows, batch by batch, from batch `first` of the epoch on."""
        order = torch.arange(len(self.dataset))
        if self._shuffle:
            key = (self._seed * 0x9E3779B1 + self.epoch) & ((1 << 62) - 1)
            order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(key))
        whole = order[: len(self) * self.batch_size].view(len(self), self._num_parts, -1)
        rows: list[list[int]] = whole[first:, self._part].tolist()
        return rows


def loader(
    dataset: Any,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    plan: Plan | str | None = None,
    world: World | None = None,
    num_workers: int = 0,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Loader:
    """Batches of a map-style dataset, of which each rank reads only its own part.

    batch_size  rows of the GLOBAL batch; the plan's data axis must divide it
    shuffle     a new order each epoch, which follows from (seed, epoch) alone: it is the same on any number of ranks
    plan        by default the command line's, or data parallel over all processes; as the Trainer resolves it
    world       where the ranks are threads: the rank's world, in place of `plan`
    num_workers processes that read ahead, as in a DataLoader
    collate     list of items -> a batch's tree of tensors, each with the rows as dim 0

    A short last batch is dropped. The loader has `state_dict` and `load_state_dict`.
    """
    return Loader(
        dataset,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        plan=plan,
        world=world,
        num_workers=num_workers,
        collate=collate,
    )
