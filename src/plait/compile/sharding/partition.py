"""Partition: turn the graph of all ranks of an axis into the graph that each of them runs.

Shapes become local, and every change of placement becomes a collective of compile/ops/comm_ops.py. The result is a
graph that the next mesh axis partitions in the same way; collectives of earlier axes are ops like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import Target, map_arg

from plait.compile.ir.calls import (
    append_call,
    call_of,
    drop_dead_calls,
    is_item,
    op_spec_of,
    output_node,
    placeholders,
    tensor_inputs,
)
from plait.compile.ir.node_info import NodeInfo, describe, info_of, set_info
from plait.compile.ir.shapes import ShapeMemo, StepMode
from plait.compile.ops import Call, Strategy, comm_ops, op_spec
from plait.compile.ops.base import Args, Kwargs
from plait.compile.sharding.propagate import Propagation
from plait.spec.layout import REPLICATE, Only, Partial, Placement, Replicate, Shard, local_shape


class LocalBuilder:
    """Appends local nodes to `graph` and computes their values on fake tensors (see `ops.base.Builder`)."""

    def __init__(self, axis: str, size: int, memo: ShapeMemo, context_kind: str = "auto") -> None:
        self.graph = Graph()
        self.axis = axis
        self.size = size
        self.context_kind = context_kind
        self.info = NodeInfo()  # of the node being written
        self._coordinate: Node | None = None
        self._converted: dict[tuple[Node, Placement, Placement], Node] = {}
        self._memo = memo

    def call(self, op: Target, *args: Any, **kwargs: Any) -> Node:
        real = map_arg((args, kwargs), lambda n: n.meta["val"])
        run: Any = op_spec(op).fake or op
        schema = getattr(op, "_schema", None)
        value = run(*real[0], **real[1]) if schema is None else self._memo.call(op, *real, run)
        return self.node(op, args, kwargs, value)

    def node(self, op: Target, args: Args, kwargs: Kwargs, value: object, num_bytes: int = 0, what: str = "") -> Node:
        node = append_call(self.graph, op, args, kwargs)
        describe(node, self.info._replace(num_bytes=num_bytes, what=what) if num_bytes else self.info, value)
        return node

    def collective(self, op: Target, tensor: Node, shape: tuple[int, ...], *args: Any, axis: str = "") -> Node:
        value = self.empty(tensor.meta["val"], shape)
        return self.node(op, (tensor, axis or self.axis, *args), {}, value)

    @contextmanager
    def on_rank(self, index: int) -> Iterator[None]:
        """Context in which calls are appended that only one rank of the axis runs."""
        saved = self.info
        self.info = saved._replace(owner={**saved.owner, self.axis: index})
        yield
        self.info = saved

    def empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A fake tensor of that shape."""
        return self._memo.call("empty", (like, shape), {}, torch.Tensor.new_empty)  # type: ignore[no-any-return]

    def value(self, node: Node) -> torch.Tensor:
        return node.meta["val"]  # type: ignore[no-any-return]

    def shape(self, node: Node) -> tuple[int, ...]:
        return tuple(node.meta["val"].shape)

    def dtype(self, node: Node) -> torch.dtype:
        return node.meta["val"].dtype  # type: ignore[no-any-return]

    def coordinate(self) -> Node:
        if self._coordinate is None:
            with self.graph.inserting_after(placeholders(self.graph)[-1]):
                self._coordinate = self.graph.call_function(comm_ops.coordinate, (self.axis,))
            describe(self._coordinate, NodeInfo(), 0)
        return self._coordinate

    def convert(self, node: Node, have: Placement, want: Placement) -> Node:
        """Append the collectives that change the placement of a value along the axis. Returns the new value."""
        key = (node, have, want)
        if have == want:
            return node
        if isinstance(have, Only):  # what is written next then has another owner
            return self._convert(node, have, want)
        if key not in self._converted:
            made = self._converted[key] = self._convert(node, have, want)
            if isinstance(have, Shard) and isinstance(want, Shard):
                self._converted[made, want, have] = node
        return self._converted[key]

    def _convert(self, node: Node, have: Placement, want: Placement) -> Node:
        axis, size = self.axis, self.size

        def emit(op: Target, shape: tuple[int, ...], *args: Any) -> Node:
            return self.collective(op, node, shape, *args)

        shape = tuple(node.meta["val"].shape)
        match have, want:
            case Replicate(), Only():
                return node
            case Only(), Partial(op="sum"):
                return node  # ranks that do not have it use zeros: see graph_of_rank
            case Replicate(), Shard(dim=dim, blocks=blocks):
                return emit(comm_ops.shard, local_shape(shape, want, size), dim, blocks)
            case Partial(op="sum"), Shard(dim=dim, blocks=blocks):
                return emit(comm_ops.reduce_scatter, local_shape(shape, want, size), dim, blocks)
            case Partial(op=op), Replicate():
                return emit(comm_ops.all_reduce, shape, op)
            case Only(index=root), Replicate():
                owner = {a: index for a, index in self.info.owner.items() if a != axis}
                self.info = self.info._replace(owner=owner)  # every rank of the axis has the result
                return emit(comm_ops.broadcast, shape, root)
            case Shard(dim=dim, blocks=blocks), Replicate():
                if node.target is comm_ops.shard and node.args[1:] == (axis, dim, blocks):
                    return node.args[0]  # type: ignore[return-value]
                return emit(comm_ops.all_gather, _whole_shape(shape, have, size), dim, blocks)
            case Shard(dim=a, blocks=b), Shard(dim=c, blocks=d) if a != c:
                return emit(comm_ops.all_to_all, local_shape(_whole_shape(shape, have, size), want, size), a, b, c, d)
            case _, Partial():
                raise AssertionError(f"{have} cannot become {want}")
            case _:
                return self.convert(self.convert(node, have, REPLICATE), REPLICATE, want)


def memo_of(graph: Graph) -> ShapeMemo:
    """The memo that all plans of a step share."""
    modes = (getattr(node.meta["val"], "fake_mode", None) for node in placeholders(graph))
    return next((mode.shapes for mode in modes if isinstance(mode, StepMode)), ShapeMemo())


def _whole_shape(shape: tuple[int, ...], placement: Shard, size: int) -> tuple[int, ...]:
    return tuple(n * size if dim == placement.dim else n for dim, n in enumerate(shape))


class Partitioner:
    """Writes the local graph of one rank from the placements that propagation has found."""

    def __init__(self, found: Propagation, axis: str, context_kind: str) -> None:
        self.found = found
        self.axis = axis
        self.builder = LocalBuilder(axis, found.size, memo_of(found.graph), context_kind)
        self.local: dict[Node, Any] = {}  # old node -> new node, or a tuple of new nodes
        self.forms: dict[tuple[Node, Placement], Node] = {}

    def run(self) -> Graph:
        for node in self.found.graph.nodes:
            self.builder.info = info_of(node)
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._call(node)
                self._remember_layout(node)
        (results,) = output_node(self.found.graph).args
        self.builder.info = NodeInfo(phase="backward")
        outputs = [self._output(i, result) for i, result in enumerate(results)]  # type: ignore[arg-type]
        graph = self.builder.graph
        graph.output(tuple(outputs))
        return graph

    def _output(self, index: int, result: object) -> Any:
        if not isinstance(result, Node):
            return result
        node = self.form(result, self.found.required[index])
        if index in self.found.broadcast_outputs:
            args = (node, self.axis, 0)
            node = self.builder.node(comm_ops.broadcast, args, {}, node.meta["val"])
        return node

    def _placeholder(self, node: Node) -> None:
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            shape = local_shape(tuple(value.shape), self.found.placement(node), self.found.size)
            value = self.builder.empty(value, shape) if shape != tuple(value.shape) else value
        new = self.builder.graph.placeholder(node.name)
        describe(new, self.builder.info, value)
        placement = self.found.placement(node)
        if isinstance(placement, Only):
            set_info(new, owner={**info_of(new).owner, self.axis: placement.index})
        self.local[node] = new

    def form(self, node: Node, want: Placement) -> Node:
        """The local node that has the value of the global `node` in the placement `want`."""
        have = self.found.placement(node)
        local: Node = self.local[node]
        if have == want:
            return local
        key = (node, want)
        if key not in self.forms:
            whole = self.forms.get((node, REPLICATE))
            saved = self.builder.info
            origin = whole if whole is not None and isinstance(want, Shard) else local
            self.builder.info = info_of(node)._replace(source=node.name, owner=info_of(origin).owner)
            if whole is not None and isinstance(want, Shard):
                self.forms[key] = self.builder.convert(whole, REPLICATE, want)
            elif want == REPLICATE and (source := self._whole_source(node)) is not None:
                owner = info_of(self.forms[source, REPLICATE]).owner
                self.builder.info = self.builder.info._replace(owner=owner)
                self.forms[key] = self._view_of(source, node)
            else:
                self.forms[key] = self.builder.convert(local, have, want)
            self.builder.info = saved
        return self.forms[key]

    def _whole_source(self, node: Node) -> Node | None:
        """The value that this one is a view of, through other views perhaps, if that exists whole; else None."""
        while node.op == "call_function" and op_spec_of(node).view is not None and not is_item(node):
            node = tensor_inputs(node)[0]
            if (node, REPLICATE) in self.forms:
                return node
        return None

    def _view_of(self, source: Node, node: Node) -> Node:
        """The whole value of `node`, from the whole value of what it is a view of."""
        if node is source:
            return self.forms[source, REPLICATE]
        first, *rest = tensor_inputs(node)
        assert not rest
        whole = self._view_of(source, first)
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: whole if n is first else self.local[n])
        return self.builder.node(node.target, args, kwargs, node.meta["val"])

    def _call(self, node: Node) -> None:
        if is_item(node):
            maker, index = node.args
            assert isinstance(maker, Node) and isinstance(index, int)
            source = self.local[maker]
            if isinstance(source, tuple):
                self.local[node] = source[index]
                if info_of(node).gathered and isinstance(source[index], Node):
                    set_info(source[index], gathered=info_of(node).gathered)
            else:
                self.local[node] = self.builder.node(node.target, (source, index), {}, source.meta["val"][index])
                set_info(self.local[node], owner=info_of(source).owner)
            return
        strategy = self.found.strategies[node]
        wants = iter(strategy.inputs)
        inputs = set(tensor_inputs(node))
        args, kwargs = map_arg(
            (node.args, node.kwargs), lambda n: self.form(n, next(wants)) if n in inputs else self.local[n]
        )
        info, origin = info_of(node), self.found.origin.get(node, "")
        if info.origin != origin:
            info = info._replace(origin=origin)
        place = next((p for p in strategy.outputs if isinstance(p, Only)), None)
        if place is not None:
            info = info._replace(owner={**info.owner, self.axis: place.index})
        self.builder.info = info
        whole = all(isinstance(p, (Replicate, Only)) for p in (*strategy.inputs, *strategy.outputs))
        if whole and node.target is not comm_ops.constrain:
            self.local[node] = self.builder.node(node.target, args, kwargs, node.meta["val"])
            return
        rule = op_spec_of(node)
        call = call_of(node)
        emit = strategy.emit or rule.emit
        if emit is not None:
            result: Any = emit(self.builder, call, strategy, args, kwargs)
        else:
            if rule.sizes is not None:
                args = _localise_sizes(call, strategy, args, rule.sizes, self.found.size)
            result = self.builder.call(node.target, *args, **kwargs)
        if isinstance(result, tuple) and not isinstance(node.meta["val"], (tuple, list)):
            (result,) = result
        self.local[node] = result

    def _remember_layout(self, node: Node) -> None:
        """Record the global shape and the placement on the local node of a value that is not whole, for `explain`."""
        local, value, placement = self.local[node], node.meta["val"], self.found.placement(node)
        if isinstance(local, Node) and isinstance(value, torch.Tensor) and not isinstance(placement, Replicate):
            shape = info_of(local).global_shape or tuple(value.shape)
            set_info(local, global_shape=shape, placements=(*info_of(node).placements, (self.axis, placement)))


def _localise_sizes(call: Call, strategy: Strategy, args: Any, position: int, size: int) -> tuple[Any, ...]:
    shape = local_shape(call.outputs[0].shape, strategy.outputs[0], size)  # type: ignore[union-attr]
    return (*args[:position], list(shape), *args[position + 1 :])


def partition(found: Propagation, axis: str, context_kind: str = "auto") -> Graph:
    """Write the graph of one rank from the placements `found` along an axis. Attention whose sequence is cut is of the
    given kind (see `ops.base.Builder`)."""
    graph = Partitioner(found, axis, context_kind).run()
    drop_dead_calls(graph)
    graph.lint()
    return graph
