"""Rows read and written by numbers that are known before the step runs: row i // n for each i.

Experts take each token several times, by numbers such as arange(tokens * n) // n. Written as a repetition and a sum of
neighbours, rows stay where they are, whatever cuts them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import is_tensor, op_spec_of
from plait.compile.ir.rewriting import dims_from, in_shape, take_place, write
from plait.compile.ir.samples import known_value
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
    memo: dict[Node, Any] = {}
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


def _times(access: RowAccess, index: tuple[Node, ...], memo: dict[Node, Any]) -> int | None:
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
