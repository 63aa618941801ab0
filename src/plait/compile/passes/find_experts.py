"""Find products with the weights of experts, and write them as the calls of compile/ops/experts.py.

A mixture of experts multiplies each row by the weights of the expert that a router chose for it. Models write that as

    weights looked up for each row    bmm(weight[ids], x), whose backward is index_put(zeros, ids, bmm(x, grad))
    rows sorted by expert             grouped products (sorted_rows.py)

and rows that these calls have are in the order of the tokens, as those of all other calls, so that whatever cuts
tokens cuts them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import is_item, op_spec_of, placeholders, tensor_inputs, view_of
from plait.compile.ir.node_info import info_of
from plait.compile.ir.rewriting import Axes, dims_from, in_shape, root_of, same_order, swaps, take_place, write
from plait.compile.ops import RowAccess
from plait.compile.ops.experts import EXPERT_ADDMM, EXPERT_MM, EXPERT_OUTER, EXPERT_ROWS, EXPERT_SUMS
from plait.compile.passes.sorted_rows import RowGroups, access_of, repeat_rows, rows_in_order, without_row_numbers

aten = torch.ops.aten


def find_experts(graph: Graph) -> Graph:
    """Write products with the weights of experts as calls of compile/ops/experts.py. Changes `graph` and returns it."""
    finder = _Finder(graph)
    for node in list(graph.nodes):
        if op_spec_of(node).role == "sort" and (groups := rows_in_order(node)) is not None:
            finder.grouped(groups)
    for node in list(graph.nodes):
        if node.target is aten.bmm.default:
            finder.product(node)
        elif (access := access_of(node)) is not None and access.adds:
            finder.outer(node, access)
        elif node.target in (EXPERT_MM, EXPERT_ADDMM):
            finder.known(node)
    if not finder.found:
        return graph
    without_row_numbers(graph)
    for node in list(graph.nodes):
        if (access := access_of(node)) is not None:
            finder.rows(node, access)
    _without_detours(graph)
    graph.eliminate_dead_code()
    return graph


def _without_detours(graph: Graph) -> None:
    """Let readers of a view of a view that has the shape of its origin again read the origin."""
    for node in graph.nodes:
        if view_of(node) is None or (source := same_order(node)) is None or view_of(source) is None:
            continue
        origin = same_order(source)
        if origin is not None and origin.meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(origin)


@dataclass(frozen=True)
class _Matrices:
    """A value of [batch, m, n] with a matrix [a, b] for each row; or what it becomes, a value with a matrix for each
    row of which [batch, m, n] is made.

    The rows are batch * several. Where there are several for one of the batch, they lie before or behind `a` or `b`
    within m or n.
    """

    source: Node  # the value that was reached
    swapped: bool  # whether b is in m, and a in n
    several: tuple[int, int]  # the number of rows within m, and within n; one of them is 1
    inner: bool  # whether they lie behind a or b
    casts: tuple[torch.dtype, ...]  # on the way


def _matrices(node: Node, lookup: bool) -> _Matrices | None:
    """Follow a value back through views and casts: with `lookup` from the operand [batch, m, n] of a product to the
    matrices [rows..., a, b] that were looked up, else from these to the product of [batch, m, n]."""
    axes, casts = Axes(node.meta["val"].shape), list[torch.dtype]()
    while True:
        if op_spec_of(node).copies == 0:
            if node.meta["val"].dtype != tensor_inputs(node)[0].meta["val"].dtype:
                casts.append(node.meta["val"].dtype)
            node = tensor_inputs(node)[0]
        elif axes.back(node):
            node = tensor_inputs(node)[0]
        else:
            break
    wide, narrow = (axes.dims, axes.start) if lookup else (axes.start, axes.dims)
    if len(wide) < 3 or len(narrow) != 3:
        return None
    *rows, a, b = wide
    index = tuple(one for dim in rows for one in dim)
    batch, m, n = narrow
    several = index[len(batch) :]
    num = axes.size(several)
    if index[: len(batch)] != batch:
        return None
    for swapped, one, two in ((False, a, b), (True, b, a)):
        for inner in (False, True):
            wide_m, wide_n = ((*dim, *several) if inner else (*several, *dim) for dim in (one, two))
            if (m, n) in ((wide_m, two), (one, wide_n)):
                where = (num, 1) if m == wide_m else (1, num)
                return _Matrices(node, swapped, where, inner, tuple(reversed(casts)))
    return None


class _Finder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._from_batch = _from_batch(graph)
        self._ids: dict[tuple[Node, int], Node] = {}  # by what they are read from, and the number of experts
        self._tables: dict[tuple[Node, torch.dtype | None], Node] = {}  # cast, and with the last two dims swapped

    @property
    def found(self) -> bool:
        """Whether there are products with the weights of experts."""
        return bool(self._ids)

    def known(self, node: Node) -> None:
        """Take a product that is a call of compile/ops/experts.py already."""
        *_, weight, ids = tensor_inputs(node)
        self._ids.setdefault((root_of(ids), weight.meta["val"].shape[0]), ids)

    def _expert_ids(self, index: Node, num_experts: int) -> Node:
        """The indices as [S], counted from the first expert."""
        key = (root_of(index), num_experts)
        if key not in self._ids:
            with self.graph.inserting_after(index):
                ids = in_shape(index, [index.meta["val"].numel()])
            if not _counts_from_zero(ids):
                with self.graph.inserting_after(ids):
                    last = write(index, aten.add.Tensor, ids, num_experts)
                with self.graph.inserting_after(last):
                    below = write(index, aten.lt.Scalar, ids, 0)
                with self.graph.inserting_after(below):
                    ids = write(index, aten.where.self, below, last, ids)
            self._ids[key] = ids
        return self._ids[key]

    # ---- rows sorted by expert ----

    def grouped(self, groups: RowGroups) -> None:
        """Grouped products of rows that are in the order of the tokens by now."""
        for node in groups.products:
            with self.graph.inserting_before(node):
                inputs = tensor_inputs(node)
                ids = self._expert_ids(groups.ids, inputs[2].meta["val"].shape[0])
                if len(inputs) == 4:
                    x, weight, _, grad = inputs
                    both = (
                        write(node, EXPERT_MM, grad, self._table(node, weight, True, ()), ids),
                        write(node, EXPERT_OUTER, x, grad, ids, weight.meta["val"].shape[0]),
                    )
                    for user in list(node.users):
                        assert is_item(user)
                        user.replace_all_uses_with(both[user.args[1]])  # type: ignore[index]
                    continue
                x, other, ends = inputs
                if other.meta["val"].ndim == 3:
                    found = write(node, EXPERT_MM, x, self._table(node, other, False, ()), ids)
                else:
                    rows = tensor_inputs(x)[0] if swaps(x) else write(node, aten.t.default, x)
                    found = write(node, EXPERT_OUTER, rows, other, ids, ends.meta["val"].shape[0])
                node.replace_all_uses_with(found)

    # ---- weights looked up for each row ----

    def product(self, node: Node) -> None:
        """bmm(weight[ids], x[batch, k, 1]) or bmm(x[batch, 1, k], weight[ids])."""
        left, right = tensor_inputs(node)
        for weight, x, contracted in ((left, right, 1), (right, left, 0)):
            batch, *sizes = x.meta["val"].shape
            if sizes[contracted] != 1 or (found := self._lookup(weight)) is None:
                continue
            matrices, table, ids = found
            several, num_rows = max(matrices.several), ids.meta["val"].numel()
            with self.graph.inserting_before(node):
                # expert_mm contracts the first dim of the matrices; here it is m or n.
                table = self._table(node, table, matrices.swapped != (contracted == 1), matrices.casts)
                result = write(node, EXPERT_MM, self._rows(node, x, matrices, contracted, num_rows), table, ids)
                if several > 1:
                    result = in_shape(result, [batch, several, table.meta["val"].shape[2]])
                    if matrices.several[contracted] == several:
                        result = write(node, aten.sum.dim_IntList, result, [1])
                    elif matrices.inner:
                        result = write(node, aten.transpose.int, result, 1, 2)
                take_place(node, result)
            return

    def _rows(self, like: Node, x: Node, matrices: _Matrices, side: int, num_rows: int) -> Node:
        """The elements of x, of which each of the batch is or takes several rows, as [num_rows, -1]. They meet m or n
        of the matrices, as `side` says."""
        batch, several = x.meta["val"].shape[0], max(matrices.several)
        if matrices.several[side] < several:
            return repeat_rows(like, in_shape(x, [batch, x.meta["val"].numel() // batch]), several)
        width = x.meta["val"].numel() // num_rows
        if several > 1 and matrices.inner:
            x = write(like, aten.transpose.int, in_shape(x, [batch, width, several]), 1, 2)
        return in_shape(x, [num_rows, width])

    def _lookup(self, operand: Node) -> tuple[_Matrices, Node, Node] | None:
        """Matrices that are looked up, their table and the numbers of the experts."""
        matrices = _matrices(operand, lookup=True)
        access = access_of(matrices.source) if matrices is not None else None
        if matrices is None or access is None or access.values is not None or not _is_by_expert(access):
            return None
        (index,), shape = access.indices, access.table.meta["val"].shape
        if len(shape) != 3 or access.table in self._from_batch:
            return None
        return matrices, access.table, self._expert_ids(index, shape[0])

    def _table(self, like: Node, table: Node, transposed: bool, casts: tuple[torch.dtype, ...]) -> Node:
        while swaps(table):
            table, transposed = tensor_inputs(table)[0], not transposed
        for dtype in casts:
            table = self._written(like, (table, dtype))
        return self._written(like, (table, None)) if transposed else table

    def _written(self, like: Node, key: tuple[Node, torch.dtype | None]) -> Node:
        """A table in another dtype, or with None transposed, that is there before `like`."""
        table, dtype = key
        if key not in self._tables or like < self._tables[key]:  # backward passes come in the reverse order
            if dtype is None:
                self._tables[key] = write(like, aten.transpose.int, table, 1, 2)
            else:
                self._tables[key] = write(like, aten._to_copy.default, table, dtype=dtype)
        return self._tables[key]

    def outer(self, node: Node, access: RowAccess) -> None:
        """index_put(zeros, ids, bmm(x[batch, k, 1], grad[batch, 1, n])), added."""
        shape = access.table.meta["val"].shape
        if len(shape) != 3 or not _is_by_expert(access):
            return
        ids = self._ids.get((root_of(access.indices[0]), shape[0]))
        matrices = _matrices(access.values, lookup=False)
        if ids is None or matrices is None or matrices.source.target is not aten.bmm.default:
            return
        left, right = tensor_inputs(matrices.source)
        batch, _, one = left.meta["val"].shape
        num_rows = ids.meta["val"].numel()
        if one != 1 or batch * max(matrices.several) != num_rows:
            return
        with self.graph.inserting_before(node):
            rows = [self._rows(node, x, matrices, side, num_rows) for side, x in enumerate((left, right))]
            total = write(node, EXPERT_OUTER, *(reversed(rows) if matrices.swapped else rows), ids, shape[0])
            for dtype in matrices.casts:
                total = write(node, aten._to_copy.default, total, dtype=dtype)
            node.replace_all_uses_with(_added(node, access.table, total))

    # ---- other tables of experts: biases ----

    def rows(self, node: Node, access: RowAccess) -> None:
        """Rows of a table, or sums into its rows, by the numbers that a product with experts has."""
        shape = access.table.meta["val"].shape
        if not shape or not _is_by_expert(access) or not access.table.meta["val"].dtype.is_floating_point:
            return
        (index,) = access.indices
        ids = self._ids.get((root_of(index), shape[0]))
        if ids is None or (access.values is not None and not access.adds):
            return
        with self.graph.inserting_before(node):
            if access.values is None:
                if access.table not in self._from_batch:
                    take_place(node, write(node, EXPERT_ROWS, access.table, ids))
                return
            values, wanted = access.values, [*index.meta["val"].shape, *shape[1:]]
            if list(values.meta["val"].shape) != wanted:
                values = write(node, aten.expand.default, values, wanted)
            values = in_shape(values, [ids.meta["val"].numel(), *shape[1:]])
            node.replace_all_uses_with(_added(node, access.table, write(node, EXPERT_SUMS, values, ids, shape[0])))


def _is_by_expert(access: RowAccess) -> bool:
    """Whether one number says which row is meant, as that of an expert does."""
    return len(access.indices) == 1 and not access.by_element


def _added(like: Node, table: Node, total: Node) -> Node:
    return total if op_spec_of(table).fills == 0 else write(like, aten.add.Tensor, table, total)


def _from_batch(graph: Graph) -> set[Node]:
    """The values that are computed from the batch, and so are not weights."""
    found: set[Node] = set()
    for node in graph.nodes:
        if info_of(node).kind == "batch" or any(one in found for one in node.all_input_nodes):
            found.add(node)
    return found


def _counts_from_zero(node: Node) -> bool:
    """Whether it is certain that no integer is below zero."""
    while True:
        if (source := same_order(node)) is not None:
            node = source
        elif is_item(node):
            source, output = node.args  # type: ignore[assignment]
            return isinstance(source, Node) and op_spec_of(source).picks == output
        elif op_spec_of(node).copies == 0 and not tensor_inputs(node)[0].meta["val"].dtype.is_floating_point:
            node = tensor_inputs(node)[0]
        else:
            return op_spec_of(node).picks == 0


def expert_weights(graph: Graph) -> dict[str, int]:
    """The parameters whose first dim is that of experts: for each the number of experts, by placeholder name.

    They are the tables of the calls of compile/ops/experts.py, as they are or through casts and views that keep the
    first dim or divide it ([experts * inner, width]), and matrices that multiply a batch of rows for each expert (bmm),
    where each expert has room for as many rows as the others.
    """
    parameters, found = _parameters(graph), dict[str, int]()
    for table, is_of_rows in _tables(graph):
        source = _with_first_dim(table, divided=is_of_rows)
        if source in parameters:
            found[source.name] = table.meta["val"].shape[0]
    return found


def expert_parameters(graph: Graph) -> dict[str, tuple[int, int]]:
    """The parameters of one expert, as a module of its own has them: for each the number of the expert, and of all
    experts, by placeholder name. They are stacked to become the tables of the calls of compile/ops/experts.py."""
    parameters, found = _parameters(graph), dict[str, tuple[int, int]]()
    for table, _ in _tables(graph):
        stack = _with_first_dim(table)
        if is_stack(stack):
            members = [uncast(each) for each in tensor_inputs(stack)]
            if all(each in parameters for each in members):
                found |= {each.name: (number, len(members)) for number, each in enumerate(members)}
    return found


def is_stack(node: Node) -> bool:
    """Whether the call stacks tensors along a new first dim."""
    return node.target is aten.stack.default and node.args[1:] in ((), (0,))


def uncast(node: Node) -> Node:
    """The value before casts and copies."""
    while node.op == "call_function" and op_spec_of(node).copies == 0:
        node = tensor_inputs(node)[0]
    return node


def _parameters(graph: Graph) -> set[Node]:
    return {node for node in placeholders(graph) if info_of(node).kind == "parameter"}


def _tables(graph: Graph) -> Iterator[tuple[Node, bool]]:
    """The tensors of [experts, ...] that rows are multiplied with, or that are looked up for them; and those that
    multiply a batch of rows for each expert. With each, whether it is one of the first."""
    from_batch = _from_batch(graph)
    for node in graph.nodes:
        inputs = tensor_inputs(node)
        if node.target is EXPERT_MM:
            yield inputs[1], True
        elif node.target is EXPERT_ADDMM:
            yield from ((inputs[0], True), (inputs[2], True))
        elif node.target is EXPERT_ROWS:
            yield inputs[0], True
        elif node.target in (aten.bmm.default, aten.baddbmm.default) and any(one in from_batch for one in inputs):
            yield from ((one, False) for one in inputs if one not in from_batch and one.meta["val"].ndim == 3)


def _with_first_dim(node: Node, divided: bool = False) -> Node:
    """The earliest value of which views and casts that keep the first dim make the node's value; with `divided`, also
    views that divide a first dim, of which this one is the outer part."""
    num = node.meta["val"].shape[0]
    while node.op == "call_function":
        inputs = tensor_inputs(node)
        if len(inputs) != 1 or not inputs[0].meta["val"].ndim:
            break
        length, have = inputs[0].meta["val"].shape[0], node.meta["val"].shape[0]
        if length != have and not (divided and length % num == 0 and same_order(node) is inputs[0]):
            break
        if same_order(node) is None and op_spec_of(node).copies != 0 and dims_from(node)[0] != 0:
            break
        node = inputs[0]
    return node
