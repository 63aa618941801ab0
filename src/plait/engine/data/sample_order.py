"""The order in which a run reads its data. It is an order of global batches, which does not depend on the number of
ranks.

epoch 3:  7 0 9 4 | 1 8 2 5      batches of 4 items, from (seed, epoch) alone, from a batch sampler, or from a stream
micro=2:  7 0 , 9 4              a batch is cut into microbatches first,
data=2:   rank 0 reads 7 , 9     and each microbatch over the ranks: a rank's rows are those of
          rank 1 reads 0 , 4     its microbatches, one after the other
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import SequentialSampler

from plait.compile.capture.batch import map_batch
from plait.errors import BatchError, DataError, UnevenBatchError
from plait.plan.legality import uneven_batch
from plait.plan.plan import Plan


@dataclass(frozen=True)
class BatchRows:
    """The items that one rank reads for one batch. No items mean that the epoch is over.

    items    indices into the dataset, or for a stream the items themselves
    total    the number of rows of the global batch, with padding
    padding  the number of padding rows, the last ones of the global batch
    here     the number of padding rows among `items`, the last ones
    note     identifies the data, so that ranks can check that they read the same
    """

    epoch: int
    items: tuple[Any, ...]
    total: int = 0
    padding: int = 0
    here: int = 0
    note: str = ""


@dataclass(frozen=True)
class Split:
    """How a batch is cut: this rank has part `part` of `num_parts` of each of `num_micro` microbatches.

    With `pad`, a batch that these do not divide is padded by repeating its items.
    """

    num_micro: int = 1
    num_parts: int = 1
    part: int = 0
    pad: bool = False

    def rows(self, epoch: int, items: Sequence[Any], what: str, note: str = "") -> BatchRows:
        """This rank's rows of a batch; error messages call the batch `what`.

        Raises BatchError for a batch that cannot be cut evenly, without `pad`.
        """
        multiple, padding = self.num_micro * self.num_parts, -len(items) % (self.num_micro * self.num_parts)
        if padding and not self.pad:
            raise BatchError(
                f"{what} has {len(items)} rows, which do not split into {multiple} parts; make them a multiple of"
                f' {multiple}, drop a short last batch (drop_last=True), or let it be padded (row_weights="weight")'
            )
        whole = [*items, *(items[i % len(items)] for i in range(padding))]
        each = len(whole) // multiple
        starts = [(micro * self.num_parts + self.part) * each for micro in range(self.num_micro)]
        mine = [place for start in starts for place in range(start, start + each)]
        here = sum(place >= len(items) for place in mine)
        return BatchRows(epoch, tuple(whole[place] for place in mine), len(whole), padding, here, note)


@dataclass(frozen=True)
class Order:
    """The batches of a dataset with a length. `split` is the part of each that this rank reads."""

    size: int
    batch_size: int
    shuffle: bool
    seed: int
    split: Split = Split()
    drop_last: bool = True

    @property
    def num_batches(self) -> int:
        """The number of batches in an epoch."""
        return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)

    def rows_from(self, epoch: int, batch: int) -> Iterator[BatchRows]:
        """This rank's rows from the given batch of the given epoch on, through all epochs, without end."""
        while True:
            order = self._epoch(epoch).tolist()
            for index in range(batch, self.num_batches):
                items = order[index * self.batch_size : (index + 1) * self.batch_size]
                yield self.split.rows(epoch, items, f"the last batch of {self.size} items")
            epoch, batch = epoch + 1, 0

    def _epoch(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.size)
        key = (self.seed * 0x9E3779B1 + epoch) & ((1 << 62) - 1)
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(key))


@dataclass
class Sampled:
    """The batches of a batch sampler, which yields the indices of each global batch, equal on every rank.

    The order of an epoch depends on the epoch if the sampler, or the sampler in it, has `set_epoch`; else on the number
    of epochs begun before.
    """

    sampler: Iterable[Sequence[int]]
    split: Split
    num_begun: int = 0

    def rows_from(self, epoch: int, batch: int) -> Iterator[BatchRows]:
        """This rank's rows from the given batch of the given epoch on, through all epochs, without end.

        Raises DataError for a sampler without batches, or without `set_epoch` if it would have to go back.
        """
        while True:
            self._begin(epoch)
            number = -1
            for number, found in enumerate(self.sampler):
                if number >= batch:
                    items = list(found)
                    note = f"items {zlib.crc32(repr(items).encode()):08x}"
                    yield self.split.rows(epoch, items, f"batch {number + 1} of the batch sampler", note)
            if number < 0:
                raise DataError(f"the batch sampler gives no batch in epoch {epoch}")
            yield BatchRows(epoch, ())
            epoch, batch = epoch + 1, 0

    def _begin(self, epoch: int) -> None:
        inner = getattr(self.sampler, "sampler", None)
        told = [begin_epoch(self.sampler, epoch), begin_epoch(inner, epoch)]
        if any(told) or isinstance(self.sampler, Sequence) or isinstance(inner, SequentialSampler):
            return
        if self.num_begun > epoch:
            raise DataError(
                f"{type(self.sampler).__name__} was begun {self.num_begun} times and has no set_epoch(epoch), so it"
                f" does not come back to epoch {epoch}: give it one, or load the state into a loader that has given no"
                " batch yet"
            )
        while self.num_begun < epoch:  # repeat the epochs of the saved run
            for _ in self.sampler:
                pass
            self.num_begun += 1
        self.num_begun += 1


@dataclass(frozen=True)
class Stream:
    """The items of an iterable in their order, in batches. Every rank reads all items, and keeps its rows."""

    items: Iterable[Any]
    batch_size: int
    split: Split
    drop_last: bool = True

    def rows_from(self, epoch: int, batch: int) -> Iterator[BatchRows]:
        """This rank's rows from the given batch of the given epoch on, through all epochs, without end.

        Raises DataError for an iterable without items, or for an item that cannot be read.
        """
        while True:
            begin_epoch(self.items, epoch)
            found: list[Any] = []
            number, skipped = 0, batch * self.batch_size
            for item in self._read():
                number += 1
                if number > skipped:
                    found.append(item)
                if len(found) == self.batch_size:
                    yield self._rows(epoch, found, number)
                    found = []
            if not number:
                raise DataError(
                    f"{type(self.items).__name__} gives no item in epoch {epoch}: give an iterable that begins anew"
                    " each time, not a generator"
                )
            if found and not self.drop_last:
                yield self._rows(epoch, found, number)
            yield BatchRows(epoch, ())
            epoch, batch = epoch + 1, 0

    def _rows(self, epoch: int, items: list[Any], number: int) -> BatchRows:
        return self.split.rows(epoch, items, f"the batch that ends with item {number}", f"items {_checksum(items[0])}")

    def _read(self) -> Iterator[Any]:
        number = 0
        try:
            for item in self.items:
                yield item
                number += 1
        except Exception as error:
            name = type(self.items).__name__
            raise DataError(f"item {number} of {name} cannot be read: {type(error).__name__}: {error}") from error


def begin_epoch(source: Any, epoch: int) -> bool:
    """Call `set_epoch` of a dataset or sampler that has it. Returns whether it has."""
    if callable(getattr(source, "set_epoch", None)):
        source.set_epoch(epoch)
        return True
    return False


def _checksum(item: Any) -> str:
    found = 0

    def add(_: str, leaf: Any) -> Any:
        nonlocal found
        if isinstance(leaf, Tensor):
            text = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        else:
            text = repr(leaf).encode() if isinstance(leaf, (int, float, str, bytes)) else type(leaf).__name__.encode()
        found = zlib.crc32(text, found)
        return leaf

    map_batch(add, item)
    return f"{found:08x}"


def check_batch_size(size: int, plan: Plan, what: str) -> None:
    """Raise UnevenBatchError unless each microbatch splits evenly over the batch axes; the message calls the batch
    `what`."""
    if refusal := uneven_batch(plan, size, what):
        raise UnevenBatchError(refusal)
