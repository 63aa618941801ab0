"""Find products with the weights of experts, and write them as the calls of compile/ops/experts.py.

A mixture of experts multiplies each row by the weights of the expert that a router chose for it. Models write that as

    weights looked up for each row: bmm(weight[ids], x), whose backward is index_put(zeros, ids, bmm(x, grad))

and rows that these calls have are in the order of the tokens, as those of all other calls, so that whatever cuts
tokens cuts them too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import is_item, is_tensor, op_spec_of, placeholders, tensor_inputs
from plait.compile.ir.node_info import info_of
from plait.compile.ir.rewriting import dims_from, in_shape, root_of, same_order, take_place, write
from plait.compile.ir.views import view_of
from plait.compile.ops import RowAccess
from plait.compile.ops.experts import EXPERT_MM, EXPERT_OUTER, EXPERT_ROWS, EXPERT_SUMS

aten = torch.ops.aten


def find_experts(graph: Graph) -> Graph:
    """Write products with the weights of experts as calls of compile/ops/experts.py. Changes `graph` and returns it."""
    finder = _Finder(graph)
    for node in list(graph.nodes):
        if node.target is aten.bmm.default:
            finder.product(node)
        elif (access := access_of(node)) is not None and access.adds:
            finder.outer(node, access)
    for node in list(graph.nodes):
        if (access := access_of(node)) is not None:
            finder.rows(node, access)
    if finder.found:
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


def access_of(node: Node) -> RowAccess | None:
    """The rows of a table that a call reads or writes by their numbers; None for other calls."""
    if node.op != "call_function" or not is_tensor(node):
        return None
    access = op_spec_of(node).access(*node.args, **node.kwargs)
    if access is None or any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in access.indices):
        return None
    return access


@dataclass(frozen=True)
class _Chain:
    """What a value of [S, a, b] is made of: `source`, in which the last two dims may be swapped, then casts."""

    source: Node
    swapped: bool
    casts: tuple[torch.dtype, ...]


def _chain(node: Node) -> _Chain:
    """Follow a value through casts, swaps of its last two dims, and views that keep these."""
    swapped, casts = False, []
    while node.op == "call_function":
        last = node.meta["val"].shape[-2:]
        if (source := same_order(node)) is not None and source.meta["val"].shape[-2:] == last and source is not node:
            node = source
        elif _swaps(node):
            node, swapped = tensor_inputs(node)[0], not swapped
        elif op_spec_of(node).copies == 0:
            casts.append(node.meta["val"].dtype)
            node = tensor_inputs(node)[0]
        else:
            break
    return _Chain(node, swapped, tuple(reversed(casts)))


def _swaps(node: Node) -> bool:
    """Whether the node is its tensor with the last two dims swapped."""
    if node.op != "call_function" or view_of(node) is None or not is_tensor(node):
        return False
    ndim = node.meta["val"].ndim
    return ndim > 2 and dims_from(node) == [*range(ndim - 2), ndim - 1, ndim - 2]


class _Finder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._from_batch: set[Node] = set()  # what differs from row to row, so that it is no weight
        for node in graph.nodes:
            if info_of(node).kind == "batch" or any(one in self._from_batch for one in node.all_input_nodes):
                self._from_batch.add(node)
        self._ids: dict[tuple[Node, int], Node] = {}  # by what they are read from, and the number of experts
        self._tables: dict[tuple[Node, torch.dtype | None], Node] = {}  # cast, and with the last two dims swapped

    @property
    def found(self) -> bool:
        """Whether there are products with the weights of experts."""
        return bool(self._ids)

    # ---- weights looked up for each row ----

    def product(self, node: Node) -> None:
        """bmm(weight[ids], x[S, k, 1]) or bmm(x[S, 1, k], weight[ids])."""
        left, right = tensor_inputs(node)
        for weight, x, transposed in ((left, right, True), (right, left, False)):
            num_rows, *sizes = x.meta["val"].shape
            if sizes[1 if transposed else 0] != 1:
                continue
            chain = _chain(weight)
            if (found := self._lookup(chain.source, num_rows)) is None:
                continue
            table, ids = found
            with self.graph.inserting_before(node):
                table = self._table(node, table, chain.swapped != transposed, chain.casts)
                rows = in_shape(x, [num_rows, max(sizes)])
                take_place(node, write(node, EXPERT_MM, rows, table, ids))
            return

    def _lookup(self, node: Node, num_rows: int) -> tuple[Node, Node] | None:
        """The table of matrices and the numbers of the experts, of matrices looked up for `num_rows` rows."""
        access = access_of(node)
        if access is None or access.values is not None or len(access.indices) != 1:
            return None
        (index,) = access.indices
        shape = access.table.meta["val"].shape
        if len(shape) != 3 or index.meta["val"].numel() != num_rows or access.table in self._from_batch:
            return None
        return access.table, self._expert_ids(index, shape[0])

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

    def _table(self, like: Node, table: Node, transposed: bool, casts: tuple[torch.dtype, ...]) -> Node:
        while _swaps(table):
            table, transposed = tensor_inputs(table)[0], not transposed
        for dtype in casts:
            if (table, dtype) not in self._tables:
                self._tables[table, dtype] = write(like, aten._to_copy.default, table, dtype=dtype)
            table = self._tables[table, dtype]
        if transposed and (table, None) not in self._tables:
            self._tables[table, None] = write(like, aten.transpose.int, table, 1, 2)
        return self._tables[table, None] if transposed else table

    def outer(self, node: Node, access: RowAccess) -> None:
        """index_put(zeros, ids, bmm(x[S, k, 1], grad[S, 1, n])), added."""
        shape = access.table.meta["val"].shape
        if len(shape) != 3 or len(access.indices) != 1 or access.values.meta["val"].ndim < 3:
            return
        chain = _chain(access.values)
        product, (index,) = chain.source, access.indices
        if product.target is not aten.bmm.default:
            return
        left, right = tensor_inputs(product)
        num_rows, k, one = left.meta["val"].shape
        ids = self._ids.get((root_of(index), shape[0]))
        if one != 1 or ids is None or ids.meta["val"].numel() != num_rows:
            return
        n = right.meta["val"].shape[2]
        with self.graph.inserting_before(node):
            rows = [in_shape(left, [num_rows, k]), in_shape(right, [num_rows, n])]
            total = write(node, EXPERT_OUTER, *(reversed(rows) if chain.swapped else rows), ids, shape[0])
            for dtype in chain.casts:
                total = write(node, aten._to_copy.default, total, dtype=dtype)
            node.replace_all_uses_with(self._added(node, access.table, total))

    def _added(self, node: Node, table: Node, total: Node) -> Node:
        return total if op_spec_of(table).fills == 0 else write(node, aten.add.Tensor, table, total)

    # ---- other tables of experts: biases ----

    def rows(self, node: Node, access: RowAccess) -> None:
        """Rows of a table, or sums into its rows, by the numbers that a product with experts has."""
        shape = access.table.meta["val"].shape
        if len(access.indices) != 1 or not shape or not access.table.meta["val"].dtype.is_floating_point:
            return
        ids = self._ids.get((root_of(access.indices[0]), shape[0]))
        if ids is None or (access.values is not None and not access.adds):
            return
        with self.graph.inserting_before(node):
            if access.values is None:
                if access.table not in self._from_batch:
                    take_place(node, write(node, EXPERT_ROWS, access.table, ids))
                return
            values = access.values
            wanted = [*access.indices[0].meta["val"].shape, *shape[1:]]
            if list(values.meta["val"].shape) != wanted:
                values = write(node, aten.expand.default, values, wanted)
            values = in_shape(values, [ids.meta["val"].numel(), *shape[1:]])
            total = write(node, EXPERT_SUMS, values, ids, shape[0])
            node.replace_all_uses_with(self._added(node, access.table, total))


def _counts_from_zero(node: Node) -> bool:
    """Whether the integers are certainly none below zero."""
    while True:
        if (source := same_order(node)) is not None:
            node = source
        elif is_item(node):
            (source, output) = node.args
            return isinstance(source, Node) and op_spec_of(source).picks == output
        elif op_spec_of(node).copies == 0 and not tensor_inputs(node)[0].meta["val"].dtype.is_floating_point:
            node = tensor_inputs(node)[0]
        else:
            return op_spec_of(node).picks == 0


def expert_weights(graph: Graph) -> dict[str, int]:
    """The parameters whose first dim is that of experts: for each the number of experts, by placeholder name.

    They are the tables of the calls of compile/ops/experts.py, as they are or through views and casts that keep the
    first dim, and matrices that multiply a batch of rows for each expert (bmm), where each expert has room for as many
    rows as the others.
    """
    found: dict[str, int] = {}
    parameters = {node for node in placeholders(graph) if info_of(node).kind == "parameter"}
    from_batch: set[Node] = set()
    for node in graph.nodes:
        if info_of(node).kind == "batch" or any(one in from_batch for one in node.all_input_nodes):
            from_batch.add(node)
        tables: list[Node] = []
        if node.target is EXPERT_MM:
            tables = [node.args[1]]
        elif node.target is EXPERT_ROWS:
            tables = [node.args[0]]
        elif node.target in (aten.bmm.default, aten.baddbmm.default):
            operands = tensor_inputs(node)
            if any(one in from_batch for one in operands):
                tables = [one for one in operands if one not in from_batch and one.meta["val"].ndim == 3]
        for table in tables:
            for source in _with_first_dim(table):
                if source in parameters:
                    found[source.name] = source.meta["val"].shape[0]
    return found


def _with_first_dim(node: Node) -> list[Node]:
    """The inputs of the graph of which views and casts that keep the first dim make the value."""
    num = node.meta["val"].shape[0]
    while node.op == "call_function":
        inputs = tensor_inputs(node)
        if len(inputs) != 1 or not inputs[0].meta["val"].ndim or inputs[0].meta["val"].shape[0] != num:
            return []
        if same_order(node) is None and op_spec_of(node).copies != 0 and dims_from(node)[0] != 0:
            return []
        node = inputs[0]
    return [node]
