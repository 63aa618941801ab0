"""Batches: any nesting of mappings, lists, tuples, dataclasses and registered pytrees around tensors.

This is the one place that knows how to walk a batch. Each tensor gets a name: its path.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.compile.ir.dtypes import torch_name
from plait.errors import BatchError

_PLAIN = (int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, np.number, np.bool_)
_MOST_NUMBERS = 64  # of a batch that are inputs of a step


def map_batch(function: Callable[[str, Any], Any], batch: Any) -> Any:
    """A batch of the same structure and types, each leaf replaced by function(name, leaf), in order.

    Names are paths: `x`, `inputs.ids`, `0`; a batch that is one tensor is called `batch`.
    """
    return _map(function, "", batch)


def batch_tensors(batch: Any) -> list[Tensor]:
    """The tensors of the batch, in order, whatever else it holds."""
    found: list[Tensor] = []
    map_batch(lambda _, leaf: found.append(leaf) if torch.is_tensor(leaf) else leaf, batch)
    return found


def is_container(value: Any) -> bool:
    """Whether a value is a tensor or holds a batch's leaves, rather than being one of them, or yielding batches."""
    return torch.is_tensor(value) or _children(value) is not None


def common_size(tensors: Iterable[Tensor]) -> int | None:
    """The first dim that most of the tensors share; None where none has one."""
    sizes = Counter(tensor.shape[0] for tensor in tensors if tensor.ndim)
    return sizes.most_common(1)[0][0] if sizes else None


def count_rows(batch: Any) -> int:
    """Rows of a batch: the first dim that most of its tensors share; 1 where none has one."""
    found = common_size(batch_tensors(batch))
    return 1 if found is None else found


def map_rows(function: Callable[[Tensor], Any], batch: Any, rows: int) -> Any:
    """The batch with function(tensor) in place of every tensor that has a row for each of its `rows`."""

    def change(_: str, leaf: Any) -> Any:
        return function(leaf) if torch.is_tensor(leaf) and leaf.ndim and leaf.shape[0] == rows else leaf

    return map_batch(change, batch)


def take_rows(batch: Any, rows: int, start: int, num: int) -> Any:
    """`num` rows from `start` on of a batch of `rows`."""
    return map_rows(lambda leaf: leaf[start : start + num], batch, rows)


def join_rows(batches: Sequence[Any]) -> Any:
    """The rows of several batches of one structure, one after the other; what has no rows is the first one's."""
    first = batches[0]
    sizes = [count_rows(batch) for batch in batches]
    leaves = [batch_leaves(batch) for batch in batches]

    def join(name: str, leaf: Any) -> Any:
        if not torch.is_tensor(leaf) or not leaf.ndim or leaf.shape[0] != sizes[0]:
            return leaf
        return torch.cat([found[name] for found in leaves])

    return map_batch(join, first)


def batch_leaves(batch: Any) -> dict[str, Tensor]:
    """The tensors of the batch by name, in order. Raises BatchError for a leaf that is neither tensor nor constant."""
    found: dict[str, Tensor] = {}

    def collect(name: str, leaf: Any) -> Any:
        if torch.is_tensor(leaf):
            found[name] = leaf
        else:
            _check_plain(name, leaf)
        return leaf

    map_batch(collect, batch)
    return found


def batch_numbers(batch: Any) -> dict[str, int | float]:
    """The Python numbers of the batch by name, which a step may take in; none where there are very many."""
    found: dict[str, int | float] = {}

    def collect(name: str, leaf: Any) -> Any:
        if type(leaf) in (int, float):
            found[name] = leaf
        elif isinstance(leaf, np.number) and not isinstance(leaf, np.complexfloating):
            found[name] = leaf.item()
        return leaf

    map_batch(collect, batch)
    return found if len(found) <= _MOST_NUMBERS else {}


def batch_signature(batch: Any) -> str:
    """Structure, shapes and dtypes, and the values of what is not a tensor.

    >>> batch_signature({"x": torch.zeros(2, 3), "n": 4})
    'dict(n=4, x=float32[2, 3])'
    """
    return _signature("", batch, {})


def batch_form(batch: Any) -> str:
    """The same, with the types of its numbers in the place of their values: batches of one form may share a graph.

    >>> batch_form({"x": torch.zeros(2, 3), "n": 4})
    'dict(n=int, x=float32[2, 3])'
    """
    return _signature("", batch, batch_numbers(batch))


def batch_structure(batch: Any) -> str:
    """What batches of one data set have in common: keys, dtypes and numbers of dims; a list is as good as a tuple.

    >>> batch_structure([torch.zeros(2, 3), 4])
    'tuple(float32[2], int)'
    """
    if torch.is_tensor(batch):
        return f"{torch_name(batch.dtype)}[{batch.ndim}]"
    children = _children(batch)
    if children is None:
        return type(batch).__name__
    if type(batch) in (list, tuple):
        return f"tuple({', '.join(batch_structure(child) for _, child in children)})"
    inside = ", ".join(sorted(f"{key}={batch_structure(child)}" for key, child in children))
    return f"{type(batch).__qualname__}({inside})"


def _signature(name: str, batch: Any, numbers: Mapping[str, int | float]) -> str:
    if torch.is_tensor(batch):
        return f"{torch_name(batch.dtype)}{list(batch.shape)}"
    children = _children(batch)
    if children is None:
        _check_plain(name or "batch", batch)
        number = numbers.get(name or "batch")
        return repr(batch) if number is None else type(number).__name__
    if isinstance(batch, Mapping):  # the order in which a dict was filled changes nothing
        children = sorted(children, key=lambda item: repr(item[0]))
    inside = ", ".join(f"{key}={_signature(_join(name, key), child, numbers)}" for key, child in children)
    return f"{type(batch).__qualname__}({inside})"


def _map(function: Callable[[str, Any], Any], name: str, batch: Any) -> Any:
    children = _children(batch)
    if children is None:
        return function(name or "batch", batch)
    new = [(key, _map(function, _join(name, key), child)) for key, child in children]
    if isinstance(batch, MutableMapping):  # keeps the class, and what else the object holds (BatchEncoding)
        made = copy.copy(batch)
        for key, child in new:
            made[key] = child
        return made
    values = [child for _, child in new]
    if isinstance(batch, Mapping):
        return type(batch)(dict(zip([key for key, _ in new], values, strict=True)))  # type: ignore[call-arg]
    if dataclasses.is_dataclass(batch):
        made: Any = copy.copy(batch)  # type: ignore[no-redef]
        for key, child in new:
            object.__setattr__(made, key, child)  # also where the dataclass is frozen
        return made
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*values)
    if isinstance(batch, (list, tuple)):
        return type(batch)(values)
    _, spec = pytree.tree_flatten(batch, is_leaf=lambda node: node is not batch)
    return pytree.tree_unflatten(values, spec)


def _children(batch: Any) -> list[tuple[Any, Any]] | None:
    """The parts of a container with their keys, None for a leaf."""
    if torch.is_tensor(batch) or isinstance(batch, type):
        return None
    if isinstance(batch, Mapping):
        return list(batch.items())
    if dataclasses.is_dataclass(batch):
        return [(f.name, getattr(batch, f.name)) for f in dataclasses.fields(batch)]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return list(zip(batch._fields, batch, strict=True))
    if isinstance(batch, (list, tuple)):
        return list(enumerate(batch))
    leaves, spec = pytree.tree_flatten(batch, is_leaf=lambda node: node is not batch)
    return None if spec.is_leaf() else list(enumerate(leaves))


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _check_plain(name: str, leaf: Any) -> None:
    if not isinstance(leaf, _PLAIN):
        raise BatchError(
            f"{name} of the batch is a {type(leaf).__module__}.{type(leaf).__qualname__}; a batch holds tensors, and"
            " numbers, strings or None that stay the same: turn it into a tensor in the data loader"
        )
