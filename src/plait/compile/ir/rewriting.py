"""Shared by the passes that rewrite a graph: new calls with their values, the order of a value's elements, and a pause
of garbage collection, in which a graph is built.
"""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.node import map_arg

from plait.compile.ir.calls import call_of, is_tensor, op_spec_of, output_values, tensor_inputs
from plait.compile.ir.node_info import describe, info_of
from plait.compile.ops import View

aten = torch.ops.aten


def write(like: Node, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Insert a call at the graph's insertion point. Its NodeInfo is that of `like`, and its value is computed."""
    node = like.graph.call_function(op, args, kwargs)
    (mode,) = {value.fake_mode for value in output_values(like) if isinstance(value, FakeTensor)}
    given = map_arg((args, kwargs), lambda source: source.meta["val"])
    with mode, torch.no_grad():
        value = op(*given[0], **given[1])
    describe(node, info_of(like)._replace(formats=None), value)
    return node


def same_order(node: Node) -> Node | None:
    """The input of which the node's value has all elements in the same order, in any shape; None if there is none."""
    row = op_spec_of(node)
    if node.op != "call_function" or not is_tensor(node) or (row.view is None and row.copies != 0):
        return None
    inputs = tensor_inputs(node)
    if len(inputs) != 1 or any(_kind(source) != _kind(node) for source in inputs):
        return None
    if row.view in (View.RESHAPE, View.ALIAS) or row.copies == 0:
        return inputs[0]
    shape, sources = inputs[0].meta["val"].shape, dims_from(node)
    kept = [source for source, n in zip(sources, node.meta["val"].shape, strict=True) if n > 1]
    return inputs[0] if kept == [d for d, n in enumerate(shape) if n > 1] else None


def _kind(node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.dtype, value.device, value.numel()


def dims_from(node: Node) -> list[int | None]:
    """For each dim of a view, the dim of its tensor that it is; None for a dim that the tensor does not have. All are
    None if the op's row does not say."""
    factors = op_spec_of(node).factors(call_of(node))
    found = {factor.outputs[0]: factor.inputs[0] for factor in factors}
    return [found.get(d) for d in range(node.meta["val"].ndim)]


def in_shape(node: Node, shape: Sequence[int]) -> Node:
    """The elements of a value, in their order, in another shape: an earlier value that has it, or a view."""
    source: Node | None = node
    while source is not None:
        if tuple(source.meta["val"].shape) == tuple(shape):
            return source
        source = same_order(source)
    return write(node, aten.reshape.default, node, list(shape))


def swaps(node: Node) -> bool:
    """Whether the node is a view of its tensor with the last two dims swapped."""
    if node.op != "call_function" or op_spec_of(node).view is None or not is_tensor(node):
        return False
    ndim = node.meta["val"].ndim
    return ndim > 1 and dims_from(node) == [*range(ndim - 2), ndim - 1, ndim - 2]


def root_of(node: Node) -> Node:
    """The first value that has all elements of the node's value in the same order."""
    while (source := same_order(node)) is not None:
        node = source
    return node


def take_place(node: Node, value: Node) -> None:
    """Let the readers of a node read `value`, which has the same elements in the same order, perhaps in another shape.

    Readers that only reshape it are removed. The insertion point must be after `value` and before all readers."""
    for user in list(node.users):
        if same_order(user) is node:
            if user.meta["val"].shape == value.meta["val"].shape:
                user.replace_all_uses_with(value)
            else:
                take_place(user, value)
    if any(user.users or user.op == "output" for user in node.users):
        node.replace_all_uses_with(in_shape(value, node.meta["val"].shape))


class Axes:
    """The dims of a view, and those of the value that it is a view of through several views, followed backwards.

    Each dim is a tuple of ranges, outermost first, without ranges of one element. `start` has the dims of the view,
    `dims` those of the value that was reached. A dim that one of the views merges or splits is split in both."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.sizes = dict(enumerate(shape))
        self.start: list[tuple[int, ...]] = [(d,) if n > 1 else () for d, n in enumerate(shape)]
        self.dims = list(self.start)

    def back(self, node: Node) -> bool:
        """Go from a view to its tensor. Returns False, and changes nothing, if the node is not a view of all of one."""
        row = op_spec_of(node)
        if node.op != "call_function" or not is_tensor(node) or row.view is None:
            return False
        (source,) = tensor_inputs(node)[:1]
        shape = source.meta["val"].shape
        if _kind(source) != _kind(node):
            return False
        if row.view in (View.RESHAPE, View.ALIAS):
            return self._regroup(shape)
        found: list[tuple[int, ...]] = [()] * len(shape)
        for dim, origin in zip(self.dims, dims_from(node), strict=True):
            if origin is not None:
                found[origin] = dim
            elif dim:
                return False
        if any(self.size(dim) != n for dim, n in zip(found, shape, strict=True)):
            return False
        self.dims = found
        return True

    def size(self, dim: Sequence[int]) -> int:
        """The number of elements of the ranges."""
        return math.prod(self.sizes[one] for one in dim)

    def _regroup(self, shape: Sequence[int]) -> bool:
        rest = [one for dim in self.dims for one in dim]
        splits: dict[int, tuple[int, int]] = {}
        sizes, found = dict(self.sizes), list[tuple[int, ...]]()
        for n in shape:
            dim: list[int] = []
            while n > 1:
                if not rest:
                    return False
                one = rest.pop(0)
                if sizes[one] > n:
                    if sizes[one] % n:
                        return False
                    parts = splits[one] = len(sizes), len(sizes) + 1
                    sizes |= {parts[0]: n, parts[1]: sizes[one] // n}
                    one, rest = parts[0], [parts[1], *rest]
                elif n % sizes[one]:
                    return False
                dim.append(one)
                n //= sizes[one]
            found.append(tuple(dim))
        self.sizes, self.dims = sizes, found
        for one, parts in splits.items():
            self.start = [tuple(p for each in dim for p in (parts if each == one else (each,))) for dim in self.start]
        return True


_lock = threading.Lock()
_num_inside = 0
_was_enabled = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause it within the context; if several threads are inside, until the last one leaves."""
    global _num_inside, _was_enabled
    with _lock:
        if _num_inside == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0 and _was_enabled:
                gc.enable()
