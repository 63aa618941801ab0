"""Rows that a model sorts by expert, multiplies in groups and brings back: shown to be free of the order, and unsorted.

A sort gives an order, and values read by it have their rows in that order. Computed with any other order of the same
rows, a value in sorted order has the same rows in the other order, as long as each call on the way treats rows alike
(its row has a factor for them), sums over all of them, or brings them back. If every call that the order reaches does,
the step is the same with rows left as they are, and the groups are the experts of each row.

Experts take each token several times, by numbers such as arange(tokens * n) // n, which are known before the step runs.
Written as a repetition and a sum of neighbours, rows stay where they are, whatever cuts them.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from plait.compile.ir.calls import call_of, is_item, is_tensor, op_spec_of, output_values, tensor_inputs
from plait.compile.ir.rewriting import Axes, dims_from, in_shape, same_order, take_place, write
from plait.compile.ir.samples import holds_for_samples, known_value, whole_numbers
from plait.compile.ops import RowAccess

aten = torch.ops.aten


def access_of(node: Node) -> RowAccess | None:
    """The rows of a table that a call reads or writes by their numbers; None for other calls."""
    if node.op != "call_function" or not is_tensor(node):
        return None
    access = op_spec_of(node).access(*node.args, **node.kwargs)
    if access is None or any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in access.indices):
        return None
    return access


def without_row_numbers(graph: Graph) -> None:
    """Write reads and writes of row i // n for each i as views, repetitions and sums of neighbours."""
    memo: dict[Node, object] = {}
    for node in list(graph.nodes):
        access = access_of(node)
        if access is None or (index := _column(access)) is None:
            continue
        if (times := _times(access, index, memo)) is None:
            continue
        table, rows = access.table, [math.prod(access.table.meta["val"].shape[: len(index)])]
        rest = list(table.meta["val"].shape[len(index) :])
        with graph.inserting_before(node):
            if access.values is None:
                found = in_shape(table, [*rows, *rest])
                take_place(node, repeat_rows(node, found, times) if times > 1 else found)
                continue
            values = access.values
            shape = [math.prod(index[0].meta["val"].shape), *rest]
            if not access.by_element:
                shape = [*index[0].meta["val"].shape, *rest]
            if list(values.meta["val"].shape) != shape:
                values = write(node, aten.expand.default, values, shape)
            if times > 1:
                values = write(node, aten.sum.dim_IntList, in_shape(values, [*rows, times, *rest]), [1])
            if access.adds and op_spec_of(table).fills != 0:
                values = write(node, aten.add.Tensor, table, in_shape(values, table.meta["val"].shape))
            take_place(node, values)


def repeat_rows(like: Node, x: Node, times: int) -> Node:
    """Each row of x `times` times, one after the other."""
    num, *rest = x.meta["val"].shape
    wide = write(like, aten.unsqueeze.default, x, 1)
    wide = write(like, aten.expand.default, wide, [num, times, *rest])
    return write(like, aten.reshape.default, wide, [num * times, *rest])


def _column(access: RowAccess) -> tuple[Node, ...] | None:
    """The indices as one number for each row, also if each element of a row has its own, all equal."""
    first, shape = access.indices[0], access.table.meta["val"].shape
    if not access.by_element:
        alike = all(i.meta["val"].shape == first.meta["val"].shape for i in access.indices)
        return access.indices if alike else None
    values = access.values.meta["val"].shape if access.values is not None else first.meta["val"].shape
    if first.meta["val"].shape[1:] != shape[1:] or values != first.meta["val"].shape:
        return None
    while math.prod(first.meta["val"].shape[1:]) > 1:
        if op_spec_of(first).view is None or dims_from(first) != [0, *[None] * (len(shape) - 1)]:
            return None
        (first,) = first.all_input_nodes
    return (first,)


def _times(access: RowAccess, index: tuple[Node, ...], memo: dict[Node, object]) -> int | None:
    """How often each row of the table is meant, one after the other; None if other rows are."""
    values = [known_value(i, {}, memo) for i in index]
    shape = access.table.meta["val"].shape[: len(index)]
    num, total = math.prod(shape), math.prod(index[0].meta["val"].shape)
    if any(v is None for v in values) or not num or total % num:
        return None
    places = torch.zeros_like(values[0].reshape(-1))
    for n, value in zip(shape, values, strict=True):
        places = places * n + value.reshape(-1).remainder(n)
    times = total // num
    written_once = times == 1 or access.values is None or access.adds
    return times if written_once and torch.equal(places, torch.arange(total) // times) else None


_INVERSE = -1  # in place of the dim whose rows are sorted: the place of each row in the order
_FREE = None  # does not depend on the order


@dataclass(frozen=True)
class RowGroups:
    """Grouped products whose groups are those of `ids`, the expert of each row."""

    ids: Node
    products: tuple[Node, ...]


def rows_in_order(sort: Node) -> RowGroups | None:
    """Leave rows that are sorted by expert for grouped products in the order in which they came. Changes the graph.

    None if the sort is for something else, or what reads the rows depends on their order; nothing is then changed.
    """
    reached = _Reached(sort)
    if not reached.all_follow() or not reached.products:
        return None
    (keys,) = tensor_inputs(sort)
    graph, length = sort.graph, keys.meta["val"].shape[0]
    with graph.inserting_before(sort):
        natural = write(sort, aten.arange.default, length, device=keys.meta["val"].device)
    if is_tensor(sort):
        sort.replace_all_uses_with(natural)
    for item in list(sort.users):
        item.replace_all_uses_with(natural if item.args[1] == 1 else keys)
    ids = reached.ids if keys.meta["val"].dtype.is_floating_point else keys
    return RowGroups(ids, tuple(reached.products))


class _Unknown(Exception):
    """A call may depend on the order of the rows."""


class _Reached:
    """The values that a sort reaches, and how each depends on the order: the dim along which it is sorted, _INVERSE, or
    _FREE."""

    def __init__(self, sort: Node) -> None:
        self.sort = sort
        self.products: list[Node] = []
        self.ids = sort
        self._length = 0
        self._status: dict[Node, tuple[int | None, ...]] = {}
        self._orders: set[Node] = set()  # the order itself
        self._constants: dict[Node, object] = {}

    def all_follow(self) -> bool:
        """Whether all that is computed from the sort is known to depend on the order only as its rows do."""
        keys = self.sort.all_input_nodes[0]
        if len(self.sort.all_input_nodes) != 1 or keys.meta["val"].ndim != 1:
            return False
        self.ids = whole_numbers(keys)
        self._length = keys.meta["val"].shape[0]
        self._status[self.sort] = (0,) * len(output_values(self.sort))
        self._orders = {self.sort} if is_tensor(self.sort) else {u for u in self.sort.users if u.args[1] == 1}
        position = {node: i for i, node in enumerate(self.sort.graph.nodes)}
        waiting = [(position[user], user) for user in self.sort.users]
        heapq.heapify(waiting)
        try:
            while waiting:
                _, node = heapq.heappop(waiting)
                if node in self._status:
                    continue
                self._status[node] = self._follow(node)
                if any(status is not _FREE for status in self._status[node]):
                    for user in node.users:
                        heapq.heappush(waiting, (position[user], user))
        except _Unknown:
            return False
        return True

    def _of(self, node: Node) -> int | None:
        return self._status.get(node, (_FREE,))[0]

    def _follow(self, node: Node) -> tuple[int | None, ...]:
        """How the outputs of a call depend on the order. Raises _Unknown if that is not known."""
        if node.op != "call_function":
            raise _Unknown
        if is_item(node):
            source, output = node.args
            return (self._status[source][output],)  # type: ignore[index]
        row, inputs = op_spec_of(node), tensor_inputs(node)
        have = [self._of(one) for one in inputs]
        outputs = output_values(node)
        if row.reads == "shape" or not any(isinstance(v, Tensor) for v in outputs):
            return (_FREE,) * len(outputs)
        if len(inputs) == 1 and inputs[0] in self._orders:
            if row.role == "sort" and self._inverts(node):
                return (_INVERSE,) if len(outputs) == 1 else (_FREE, _INVERSE)
            if (same_order(node) is not None or row.copies == 0) and node.meta["val"].ndim == 1:
                self._orders.add(node)
        if have == [_INVERSE]:
            if row.copies == 0 or (same_order(node) is not None and node.meta["val"].ndim == 1):
                return (_INVERSE,)
            raise _Unknown
        access = access_of(node)
        if access is not None and access.values is not None:
            return (self._written(access),)
        if _INVERSE in have:
            return (self._brought_back(access),)
        if row.role == "grouped product":
            return self._product(node, inputs, have)
        return self._alike(node, inputs, have)

    # ---- calls that treat rows alike ----

    def _alike(self, node: Node, inputs: list[Node], have: list[int | None]) -> tuple[int | None, ...]:
        row = op_spec_of(node)
        if row.random is not None or row.role in ("attention", "sort") or row.batch_statistics:
            raise _Unknown
        if row.view is not None and len(inputs) == 1 and is_tensor(node) and have[0] is not None:
            axes = Axes(node.meta["val"].shape)
            if axes.back(node) and (found := _same_dim(axes, have[0])) is not None:
                return (found,)
        for factor in row.factors(call_of(node)):
            dims = zip(inputs, factor.inputs, have, strict=True)
            if all(dim == had if had is not None else self._repeats(one, dim) for one, dim, had in dims):
                return factor.outputs
        raise _Unknown

    def _repeats(self, node: Node, dim: int | None) -> bool:
        """Whether a value that does not depend on the order is the same all along a dim."""
        while dim is not None and node.meta["val"].shape[dim] > 1:
            if op_spec_of(node).fills is not None:
                return True
            if op_spec_of(node).view is not None and is_tensor(node):
                dim = dims_from(node)[dim]
            elif op_spec_of(node).copies != 0:
                return False
            node = tensor_inputs(node)[0]
        return True

    # ---- rows written and brought back ----

    def _written(self, access: RowAccess) -> int | None:
        indices, table = [self._of(one) for one in access.indices], access.table.meta["val"]
        index, values = access.indices[0].meta["val"], access.values.meta["val"]
        ndim = table.ndim if access.by_element else table.ndim - len(indices) + index.ndim
        has_rows = values.ndim == ndim and values.shape[:1] == index.shape[:1]
        every = len(indices) == index.ndim == 1 and table.shape[0] == self._length
        had = self._of(access.values)
        if self._of(access.table) is not _FREE:
            raise _Unknown
        if indices == [_INVERSE]:
            if had is _FREE and has_rows and every and (not access.adds or self._repeats(access.table, 0)):
                return 0
        elif all(one == 0 for one in indices):
            is_order = every and access.indices[0] in self._orders
            if had is _FREE and is_order and not access.adds and self._counts(access.values):
                return _INVERSE
            alike = had == 0 if has_rows else had is _FREE
            if (alike or (had is _FREE and self._repeats(access.values, 0))) and (access.adds or is_order):
                return _FREE
        raise _Unknown

    def _counts(self, node: Node) -> bool:
        value = known_value(node, {}, self._constants)
        return isinstance(value, Tensor) and torch.equal(value, torch.arange(self._length))

    def _inverts(self, node: Node) -> bool:
        """Whether a sort of the order gives the place of each row in it."""
        place = torch.arange(self._length)
        found = known_value(node, {tensor_inputs(node)[0]: place.roll(1)}, {})
        return torch.equal(found if isinstance(found, Tensor) else found[1], place.roll(-1))

    def _brought_back(self, access: RowAccess | None) -> int | None:
        if access is None or len(access.indices) != 1 or self._of(access.indices[0]) != _INVERSE:
            raise _Unknown
        if self._of(access.table) != 0 or access.indices[0].meta["val"].ndim != 1:
            raise _Unknown
        return _FREE

    # ---- grouped products ----

    def _product(self, node: Node, inputs: list[Node], have: list[int | None]) -> tuple[int | None, ...]:
        if len(inputs) < 3 or any(not isinstance(arg, Node) and arg is not None for arg in node.args):
            raise _Unknown
        if len(inputs) == 3:
            matrices = inputs[1].meta["val"].ndim == 3
            wanted: list[int | None] = [0, None, None] if matrices else [1, 0, None]
            found: list[int | None] = [0] if matrices else [None]
            num = inputs[1 if matrices else 2].meta["val"].shape[0]
        else:
            wanted, found = [0, None, None, 0], [0, None]
            num = inputs[1].meta["val"].shape[0]
        if have != wanted or node.kwargs or not self._are_ends(inputs[2], num):
            raise _Unknown
        self.products.append(node)
        return tuple(found)

    def _are_ends(self, ends: Node, num: int) -> bool:
        """Whether the groups are those of rows sorted by expert."""

        def are_ends(ids: Tensor, given: dict[Node, Tensor]) -> bool:
            found = known_value(ends, given, {})
            return isinstance(found, Tensor) and torch.equal(found.long(), ids.bincount(minlength=num).cumsum(0))

        def rises(ids: Tensor, given: dict[Node, Tensor]) -> bool:
            found = known_value(self.sort, given, {})
            order = found if isinstance(found, Tensor) or found is None else found[1]
            return order is not None and bool((ids[order].diff() >= 0).all())

        return holds_for_samples(self.sort, self.ids, num, rises) and holds_for_samples(ends, self.ids, num, are_ends)


def _same_dim(axes: Axes, dim: int) -> int | None:
    """The dim of a view whose ranges are those of a dim of its tensor."""
    if not axes.dims[dim]:
        return None
    return axes.start.index(axes.dims[dim]) if axes.dims[dim] in axes.start else None
