"""A rank's own part of a global batch, as a type: it can not be taken for the whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from plait.errors import BatchError


@dataclass(frozen=True)
class LocalBatch:
    """`tree` holds this rank's rows; `global_size` is the number of rows over all ranks, `local_size` of these here.

    `place` says in words which global batch it is a part of, so that ranks can compare.
    """

    tree: Any
    local_size: int
    global_size: int
    place: str = ""

    def __post_init__(self) -> None:
        sizes = [leaf.shape[0] for leaf in pytree.tree_leaves(self.tree) if torch.is_tensor(leaf) and leaf.ndim]
        if self.local_size not in sizes:
            raise BatchError(f"a local batch of {self.local_size} rows holds no tensor of that size: {sizes}")


def global_like(batch: LocalBatch) -> Any:
    """A stand-in for the global batch that has its shapes and takes no memory."""

    def widen(leaf: Any) -> Any:
        if torch.is_tensor(leaf) and leaf.ndim and leaf.shape[0] == batch.local_size:
            return leaf[:1].expand(batch.global_size, *leaf.shape[1:])
        return leaf

    return pytree.tree_map(widen, batch.tree)


def num_rows(batch: Any) -> int:
    """Rows of the global batch: the first dim that most of its tensors share."""
    if isinstance(batch, LocalBatch):
        return batch.global_size
    sizes = Counter(leaf.shape[0] for leaf in pytree.tree_leaves(batch) if torch.is_tensor(leaf) and leaf.ndim)
    return sizes.most_common(1)[0][0] if sizes else 1


def take_rows(tree: Any, rows: int, start: int, num: int) -> Any:
    """`num` rows from `start` on of every tensor that has the batch's `rows` as its first dim; the rest as it is."""

    def take(leaf: Any) -> Any:
        return leaf[start : start + num] if torch.is_tensor(leaf) and leaf.ndim and leaf.shape[0] == rows else leaf

    return pytree.tree_map(take, tree)


def batch_part(batch: Any, index: int, count: int) -> Any:
    """Part `index` of `count` of a global batch's rows; the last may be smaller, BatchError where it would be empty."""
    rows = num_rows(batch)
    step = -(-rows // count)
    if step * (count - 1) >= rows:
        raise BatchError(f"a batch of {rows} rows does not make {count} parts; give at least a row for each")
    return take_rows(batch, rows, index * step, step)
