"""A rank's part of a global batch, as a type of its own, so that it cannot be mistaken for the whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.compile.capture.batch import (
    at_rows,
    batch_structure,
    count_rows,
    is_container,
    map_rows,
    row_sizes,
    take_rows,
)
from plait.errors import BatchError


@dataclass(frozen=True)
class LocalBatch:
    """This rank's rows of a global batch.

    tree         the rows, a tree of tensors
    local_size   the number of rows here
    global_size  the number of rows over all ranks
    place        which global batch this is a part of, in words, for ranks to compare
    padding      the number of rows of weight zero at the end of the global batch

    Raises BatchError if no tensor has `local_size` rows.
    """

    tree: Any
    local_size: int
    global_size: int
    place: str = ""
    padding: int = 0

    def __post_init__(self) -> None:
        sizes = [num for _, num in row_sizes(self.tree)]
        if self.local_size not in sizes:
            raise BatchError(f"a local batch of {self.local_size} rows holds no tensor of that size: {sizes}")


def global_like(batch: LocalBatch) -> Any:
    """Tensors of the shapes of the global batch that take no memory."""

    def stretched(leaf: Tensor, dim: int) -> Tensor:
        shape = (*leaf.shape[:dim], batch.global_size, *leaf.shape[dim + 1 :])
        return at_rows(leaf, dim, slice(0, 1)).expand(shape)

    return map_rows(stretched, batch.tree, batch.local_size)


def num_rows(batch: Any) -> int:
    """The number of rows of the global batch."""
    return batch.global_size if isinstance(batch, LocalBatch) else count_rows(batch)


def batch_part(batch: Any, index: int, count: int) -> Any:
    """Part `index` of `count` equal parts of a global batch's rows; the last part may be smaller.

    Raises BatchError if the last part would be empty.
    """
    rows = num_rows(batch)
    step = -(-rows // count)
    if step * (count - 1) >= rows:
        raise BatchError(f"a batch of {rows} rows does not make {count} parts; give at least a row for each")
    return take_rows(batch, rows, index * step, step)


def batches_of(data: Any, known: str | None) -> Iterable[Any]:
    """The batches of a loader or of a list; a batch alone gives itself. `known` is the structure of the batches so
    far.

    Raises BatchError for a list that may be either one batch or several, and has the structure of neither.
    """
    if is_loader(data):
        return data  # type: ignore[no-any-return]
    if type(data) not in (list, tuple) or not data or batch_structure(data) == known:
        return [data]
    if any(isinstance(one, LocalBatch) for one in data):
        return data  # type: ignore[no-any-return]
    each = {batch_structure(one) for one in data}
    if each == {known}:
        return data  # type: ignore[no-any-return]
    if not all(is_container(one) and not torch.is_tensor(one) for one in data):  # such as [x, y]
        if known is None or known.startswith("tuple("):
            return [data]
    elif known is None or not known.startswith("tuple("):
        return data  # type: ignore[no-any-return]
    raise BatchError(
        f"a {type(data).__name__} of {len(data)} may be one batch, or that many batches, and the trainer has seen"
        f" batches like {known}: as one it is {batch_structure(data)}, and its elements {' and '.join(sorted(each))}"
        "; give batches of that form, one alone as it is and several as iter([...])"
    )


def is_loader(data: Any) -> bool:
    """Whether `data` yields batches, rather than being one."""
    return isinstance(data, Iterable) and not isinstance(data, LocalBatch) and not is_container(data)
