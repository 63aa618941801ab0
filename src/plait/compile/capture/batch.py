"""Batches: any nesting of mappings, lists, tuples, dataclasses and registered pytrees around tensors.

Only this file traverses a batch. Each tensor is named by its path.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.compile.ir.dtypes import not_dense, other_format, torch_name
from plait.errors import BatchError
from plait.spec.batch_spec import DIM_0, BatchSpec

_PLAIN = (int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, np.number, np.bool_)
_MOST_NUMBERS = 64  # a batch with more numbers than this has none of them as inputs of a step


def map_batch(function: Callable[[str, Any], Any], batch: Any) -> Any:
    """A batch of the same structure and types with each leaf replaced by function(name, leaf), in order.

    Names are paths: `x`, `inputs.ids`, `0`. A batch that is a single tensor is named `batch`.
    """
    return _map(function, "", batch)


def batch_tensors(batch: Any) -> list[Tensor]:
    """The tensors of the batch, in order; other leaves are skipped."""
    return [leaf for _, leaf in _named_tensors(batch)]


def is_container(value: object) -> bool:
    """Whether a value is a tensor or a container of a batch's leaves, and neither another leaf nor a data loader."""
    return torch.is_tensor(value) or _children(value) is not None


def spec_of(batch: Any) -> BatchSpec:
    """The BatchSpec that the batch carries; by default the rows of every tensor are dim 0."""
    found = inspect.getattr_static(batch, "batch_spec", None)
    return found if isinstance(found, BatchSpec) else DIM_0


def row_sizes(batch: Any) -> list[tuple[str, int]]:
    """(name, number of rows) of each tensor of the batch that has a dim of rows. Raises BatchError for a tensor that is
    not dense."""
    lists = row_lists(batch)
    return [(name, num) for name, num in _sizes_along_rows(batch) if not _within(name, lists)]


def count_rows(batch: Any) -> int:
    """The number of rows of a batch: by its spec, or else the size of the first dim that most tensors share; 1 if none
    has one. Raises BatchError for a batch without tensors, and if they have different numbers of rows by the spec."""
    spec, sizes = spec_of(batch), row_sizes(batch)
    names = [name for name, _ in _named_tensors(batch)]
    if not names:
        raise no_tensor(batch)
    if spec.dims and not any(map(spec.names, names)):
        raise BatchError(f"the batch_spec ({spec}) names no tensor of the batch; these are {', '.join(names)}")
    said = {name: num for name, num in sizes if spec.names(name)}
    if len({*said.values()}) > 1:
        rows = ", ".join(f"{num} of {name}" for name, num in said.items())
        raise BatchError(f"the tensors of the batch have different numbers of rows by its batch_spec ({spec}): {rows}")
    counts = Counter([*said.values()] or [num for _, num in sizes])
    return counts.most_common(1)[0][0] if counts else 1


def no_tensor(batch: Any) -> BatchError:
    """The error for a batch without tensors."""
    text = repr(batch)
    return BatchError(f"the batch holds no tensor: it is {text if len(text) <= 60 else f'a {type(batch).__name__}'}")


def row_dims(batch: Any, rows: int) -> dict[str, int]:
    """The dim of the rows, by name, of each tensor that has a row for each of the batch's `rows`."""
    spec = spec_of(batch)
    lists = row_lists(batch)
    dims = [(n, leaf, spec.row_dim(n, leaf.ndim)) for n, leaf in _named_tensors(batch) if not _within(n, lists)]
    return {name: dim for name, leaf, dim in dims if dim is not None and leaf.shape[dim] == rows}


def row_lists(batch: Any) -> tuple[str, ...]:
    """The names of the lists of the batch that hold a mapping for each row, as the targets of a detector do: as many as
    the tensors beside them have rows. Tensors in them have no dim of rows. (Mappings whose tensors all have that many
    rows themselves are taken as several inputs, see `unclear_lists`.)"""
    rows, inside = _lists_as_long_as_rows(batch)
    return tuple(name for name, sizes in inside.items() if any(num != rows for num in sizes))


def unclear_lists(batch: Any) -> tuple[str, ...]:
    """The names of the lists of mappings that could be an entry for each row, or several inputs that all have rows."""
    rows, inside = _lists_as_long_as_rows(batch)
    return tuple(name for name, sizes in inside.items() if rows > 1 and sizes and all(num == rows for num in sizes))


def _lists_as_long_as_rows(batch: Any) -> tuple[int, dict[str, list[int]]]:
    """The rows of the tensors that are in no list of mappings, and for each such list with as many mappings the sizes
    of dim 0 of the tensors in it."""
    lists = {name: found for name, found in _lists_of_mappings("", batch) if name}
    if not lists:
        return 0, {}
    sizes = _sizes_along_rows(batch)
    beside = Counter(num for name, num in sizes if not _within(name, tuple(lists)))
    rows = beside.most_common(1)[0][0] if beside else 0
    long = [name for name, found in lists.items() if len(found) == rows]
    return rows, {name: [num for each, num in sizes if _within(each, (name,))] for name in long}


def _sizes_along_rows(batch: Any) -> list[tuple[str, int]]:
    spec = spec_of(batch)
    dims = [(name, leaf, spec.row_dim(name, leaf.ndim)) for name, leaf in batch_leaves(batch).items()]
    return [(name, leaf.shape[dim]) for name, leaf, dim in dims if dim is not None]


def _lists_of_mappings(name: str, batch: Any) -> list[tuple[str, Sequence[Any]]]:
    if type(batch) in (list, tuple) and batch and all(isinstance(child, Mapping) for child in batch):
        return [(name, batch)]
    children = _children(batch) or []
    return [found for key, child in children for found in _lists_of_mappings(_join(name, key), child)]


def _within(name: str, lists: tuple[str, ...]) -> bool:
    return any(name.startswith(f"{each}.") for each in lists)


def sequence_dims(batch: Any) -> dict[str, int]:
    """The dim of the sequence, by name, of each tensor of the batch that has one.

    The batch's spec says which dims these are. Without a word of it they are dim 1 of tensors of integers, such as
    token ids, and of bools and floats of the same length, or, in a batch without such integers, dim 1 of floats
    [rows, positions, features].
    """
    spec, tensors = spec_of(batch), _named_tensors(batch)
    if spec.has_sequences:
        dims = [(name, spec.sequence_dim(name)) for name, _ in tensors]
        return {name: dim for name, dim in dims if dim is not None}
    ids = [leaf for _, leaf in tensors if leaf.ndim == 2 and not leaf.is_floating_point() and leaf.dtype != torch.bool]
    lengths = {leaf.shape[1] for leaf in ids} or {leaf.shape[1] for _, leaf in tensors if leaf.ndim == 3}
    return {
        name: 1
        for name, leaf in tensors
        if leaf.ndim in (2, 3) and leaf.shape[1] in lengths and spec.row_dim(name, leaf.ndim) == 0
    }


def map_rows(function: Callable[[Tensor, int], Any], batch: Any, rows: int) -> Any:
    """The batch with function(tensor, dim) in place of each tensor that has a row for each of its `rows` along dim."""
    dims = row_dims(batch, rows)
    return map_batch(lambda name, leaf: function(leaf, dims[name]) if name in dims else leaf, batch)


def _named_tensors(batch: Any) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    map_batch(lambda name, leaf: found.append((name, leaf)) if torch.is_tensor(leaf) else leaf, batch)
    return found


def at_rows(leaf: Tensor, dim: int, rows: slice | Tensor) -> Tensor:
    """The given rows of a tensor whose rows are along `dim`."""
    return leaf[(*[slice(None)] * dim, rows)]


def take_rows(batch: Any, rows: int, start: int, num: int) -> Any:
    """`num` rows, from `start` on, of a batch of `rows`."""
    return select_rows(batch, rows, range(start, min(start + num, rows)))


def select_rows(batch: Any, rows: int, places: range | Tensor) -> Any:
    """The rows at these places of a batch of `rows`: of its tensors, and of lists with a mapping for each row."""
    lists = row_lists(batch)
    if isinstance(places, range):
        index = slice(places.start, places.stop)
        found = map_rows(lambda leaf, dim: at_rows(leaf, dim, index), batch, rows)
    else:
        found = map_rows(lambda leaf, dim: at_rows(leaf, dim, places.to(leaf.device)), batch, rows)
    return _map_lists(lambda _, each: type(each)(each[int(i)] for i in places), "", found, lists)


def join_rows(batches: Sequence[Any]) -> Any:
    """Concatenate the rows of batches of one structure; leaves without rows are those of the first batch."""
    first = batches[0]
    lists = row_lists(first)
    if lists:
        several = [dict(_lists_of_mappings("", batch)) for batch in batches]
        whole = {name: [row for found in several for row in found[name]] for name in lists}
    dims = row_dims(first, count_rows(first))
    leaves = [batch_leaves(batch) for batch in batches]

    def join(name: str, leaf: Any) -> Any:
        return torch.cat([found[name] for found in leaves], dims[name]) if name in dims else leaf

    return _map_lists(lambda name, each: type(each)(whole[name]), "", map_batch(join, first), lists)


def batch_leaves(batch: Any) -> dict[str, Tensor]:
    """The tensors of the batch by name, in order. Raises BatchError for a leaf that is neither dense tensor nor
    constant."""
    found: dict[str, Tensor] = {}

    def collect(name: str, leaf: Any) -> Any:
        if torch.is_tensor(leaf):
            _check_dense(name, leaf)
            found[name] = leaf
        else:
            _check_plain(name, leaf)
        return leaf

    map_batch(collect, batch)
    return found


def batch_numbers(batch: Any) -> dict[str, int | float]:
    """The Python numbers of the batch by name, which a step may have as inputs; none if there are more than 64."""
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
    """The structure, shapes and dtypes of a batch, and the values of leaves that are not tensors.

    >>> batch_signature({"x": torch.zeros(2, 3), "n": 4})
    'dict(n=4, x=float32[2, 3])'
    """
    return _said(batch) + _signature("", batch, {})


def batch_form(batch: Any) -> str:
    """The signature with types in place of numbers: batches of one form may share a graph.

    >>> batch_form({"x": torch.zeros(2, 3), "n": 4})
    'dict(n=int, x=float32[2, 3])'
    """
    return _said(batch) + _signature("", batch, batch_numbers(batch))


def batch_structure(batch: Any) -> str:
    """What batches of one data set share: keys, dtypes and numbers of dims. A list counts as a tuple.

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


def _said(batch: Any) -> str:
    spec = spec_of(batch)
    return f"({spec}) " if spec.dims else ""


def _signature(name: str, batch: Any, numbers: Mapping[str, int | float]) -> str:
    if torch.is_tensor(batch):
        _check_dense(name or "batch", batch)
        return f"{torch_name(batch.dtype)}{list(batch.shape)}"
    children = _children(batch)
    if children is None:
        _check_plain(name or "batch", batch)
        number = numbers.get(name or "batch")
        return repr(batch) if number is None else type(number).__name__
    if isinstance(batch, Mapping):  # the order of a dict's keys does not matter
        children = sorted(children, key=lambda item: repr(item[0]))
    inside = ", ".join(f"{key}={_signature(_join(name, key), child, numbers)}" for key, child in children)
    return f"{type(batch).__qualname__}({inside})"


def _map_lists(function: Callable[[str, Any], Any], name: str, batch: Any, lists: tuple[str, ...]) -> Any:
    """The batch with function(name, list) in place of its lists of these names."""
    return _map(lambda _, leaf: leaf, name, batch, dict.fromkeys(lists, function)) if lists else batch


def _map(
    function: Callable[[str, Any], Any],
    name: str,
    batch: Any,
    lists: Mapping[str, Callable[[str, Any], Any]] = MappingProxyType({}),
) -> Any:
    if name in lists:
        return lists[name](name, batch)
    children = _children(batch)
    if children is None:
        return function(name or "batch", batch)
    new = [(key, _map(function, _join(name, key), child, lists)) for key, child in children]
    if isinstance(batch, MutableMapping):  # keeps the class and its other attributes (BatchEncoding)
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
    """The children of a container with their keys; None for a leaf."""
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


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _check_dense(name: str, leaf: Tensor) -> None:
    if other_format(leaf):
        raise BatchError(not_dense(f"{name} of the batch", leaf))


def _check_plain(name: str, leaf: Any) -> None:
    if not isinstance(leaf, _PLAIN):
        raise BatchError(
            f"{name} of the batch is a {type(leaf).__module__}.{type(leaf).__qualname__}; a batch holds tensors, and"
            " numbers, strings or None that stay the same: turn it into a tensor in the data loader"
        )
