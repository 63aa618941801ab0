"""Clean up a captured graph: remove mutations, what autograd and tracing leave behind, and calls that compute nothing.

`functionalise` is for a step that changes views in place. `clean` keeps a graph functional and moves no computation, so
that only views may live longer than before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from plait.compile.capture.graph_recorder import GraphRecorder
from plait.compile.ir.calls import drop_dead_calls, is_item, is_view, op_spec_of, output_node
from plait.compile.ir.node_info import info_of
from plait.compile.ir.rewriting import swaps
from plait.compile.ir.shapes import frozen
from plait.compile.ops import View
from plait.compile.ops.draw import draw
from plait.compile.ops.experts import EXPERT_OUTER

aten = torch.ops.aten


def clean(graph: Graph) -> Graph:
    """Clean up `graph` in place, and return it."""
    drop_dead_calls(graph)
    _each(graph, _normal_name)
    _each(graph, _shorter)
    _share(graph)
    _each(graph, _shorter)
    _each(graph, _joined)
    _each(graph, _turned)
    drop_dead_calls(graph)
    graph.lint()
    return graph


def copy_inputs(graph: Graph, own: Mapping[int, str]) -> None:
    """Copy those outputs that are inputs or views of them, which may change before they are read: a step may swap two
    buffers. `own` has the outputs by index, each with the input that gets its value, which need not be copied. Changes
    `graph`."""
    end = output_node(graph)
    outputs = list(end.args[0])  # type: ignore[arg-type]
    for index, name in own.items():
        base = node = outputs[index]
        while base.op == "call_function" and is_view(base):
            base = base.all_input_nodes[0]
        if base.op == "placeholder" and node.name != name:
            with graph.inserting_before(end):
                outputs[index] = graph.call_function(torch.ops.aten.clone.default, (node,))
            outputs[index].meta = {"val": node.meta["val"].clone(), "module": "", "phase": "forward"}
    end.args = (tuple(outputs),)


def _each(graph: Graph, replace: Callable[[Node], Node | None]) -> None:
    """Replace each node for which `replace` returns another node."""
    end = output_node(graph)
    replaced: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function":
            other = replace(node)
            if other is not None and other is not node:
                # Thousands of values leave the graph of a deep model: the output is rewritten once, at the end.
                node.replace_all_uses_with(other, delete_user_cb=lambda user: user is not end)
                replaced[node] = other

    def last(node: Node) -> Node:
        while node in replaced:
            node = replaced[node]
        return node

    end.args = map_arg(end.args, last)
    for node in reversed(replaced):
        graph.erase_node(node)


def _normal_name(node: Node) -> None:
    """Rename ops for which ATen has two names to one of them."""
    if node.target is aten._unsafe_view.default:
        node.target = aten.view.default
    elif node.target is aten.zero.default:
        node.target = aten.zeros_like.default
    elif node.target is aten._efficientzerotensor.default:  # from forward-mode AD: it cannot be written to
        node.target = aten.zeros.default
    elif node.target is aten.fill.Scalar:
        node.target = aten.full_like.default
    elif node.target is aten._conj.default:  # a flag of the tensor, which is lost where its memory is sent or stored
        node.target = aten.conj_physical.default
        if isinstance(number := node.args[0], complex):
            node.target, node.args = aten.full.default, ([], number.conjugate())
            node.kwargs = {"dtype": node.meta["val"].dtype, "device": node.meta["val"].device, "pin_memory": False}
    elif node.target is aten._neg_view.default:
        node.target = aten.neg.default


def _shorter(node: Node) -> Node | None:
    """A node that already has the value of `node`; or `node`, changed to take an earlier input."""
    row = op_spec_of(node)
    if row.view is View.ALIAS:
        return _first(node)
    position = 0 if row.view is not None and row.reads != "memory" else row.copies
    if position is not None and _same(node, node.args[position]):
        return node.args[position]  # type: ignore[return-value]
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or source.op != "call_function":
        return None
    if row.reads == "shape" and source.target is aten.empty_like.default and _same(source, _first(source)):
        node.update_arg(0, _first(source))
    if node.target is aten.t.default and source.target is aten.t.default:
        return _first(source)
    if node.target is aten.view.default and source.target is aten.view.default:
        node.update_arg(0, _first(source))
        return _first(node) if _same(node, _first(node)) else None
    if node.target is aten.transpose.int and source.target is aten.transpose.int:
        ndim = node.meta["val"].ndim
        if {d % ndim for d in node.args[1:]} == {d % ndim for d in source.args[1:]}:
            return _first(source)
    if node.target is aten.permute.default and source.target is aten.permute.default:
        ndim = node.meta["val"].ndim
        inner = [d % ndim for d in source.args[1]]  # type: ignore[union-attr]
        if [inner[d % ndim] for d in node.args[1]] == list(range(ndim)):  # type: ignore[union-attr]
            return _first(source)
    return None


def _share(graph: Graph) -> None:
    """Eliminate common subexpressions. Backward shares only views with forward, whose base lives that long anyway."""
    seen: dict[Hashable, Node] = {}

    def earlier(node: Node) -> Node | None:
        if node.target is draw or _impure(node):
            return None
        phase = "" if is_view(node) or is_item(node) else info_of(node).phase
        return seen.setdefault((phase, node.target, frozen(node.args, id), frozen(node.kwargs, id)), node)

    _each(graph, earlier)


def _impure(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and op_spec_of(node).dropout is None


def _first(node: Node) -> Node:
    first = node.args[0]
    assert isinstance(first, Node)
    return first


def _same(node: Node, other: object) -> bool:
    one, two = node.meta["val"], other.meta["val"] if isinstance(other, Node) else None
    return (
        isinstance(one, Tensor)
        and isinstance(two, Tensor)
        and (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
        and one.stride() == two.stride()
    )


def _joined(node: Node) -> Node | None:
    """Replace a sum of gradients of slices that make up a whole dim, each padded with zeros, by their concatenation."""
    if node.target is not aten.add.Tensor:
        return None
    terms = _summands(node)
    if len(terms) < 2 or any(term.target is not aten.slice_backward.default for term in terms):
        return None
    _, sizes, dim, *_ = terms[0].args
    if any(term.args[1:3] != (sizes, dim) or term.args[5] != 1 for term in terms):
        return None
    dim = dim % len(sizes)  # type: ignore[operator, arg-type]
    num = sizes[dim]  # type: ignore[index]
    pieces = sorted(((slice(*t.args[3:5]).indices(num)[:2], t.args[0]) for t in terms), key=lambda piece: piece[0])  # type: ignore[arg-type]
    ends = [0, *(last for (_, last), _ in pieces)]
    if [first for (first, _), _ in pieces] != ends[:-1] or ends[-1] != num:
        return None
    with node.graph.inserting_before(node):
        joined = node.graph.call_function(aten.cat.default, ([piece for _, piece in pieces], dim))
    joined.meta = dict(node.meta)
    return joined


def _turned(node: Node) -> Node | None:
    """Replace transposed sums of x (outer) grad, the gradient of transposed weights, by sums of grad (outer) x."""
    if not swaps(node) or (outer := _first(node)).target is not EXPERT_OUTER or len(outer.users) > 1:
        return None
    x, grad, *rest = outer.args
    with node.graph.inserting_before(node):
        turned = node.graph.call_function(EXPERT_OUTER, (grad, x, *rest))
    turned.meta = {**outer.meta, "val": node.meta["val"].contiguous()}
    return turned


def _summands(node: Node) -> list[Node]:
    """The summands of nested sums, as far as only this sum reads the inner ones."""
    found: list[Node] = []
    for arg in node.args:
        if not isinstance(arg, Node):
            return []
        inner = arg.target is aten.add.Tensor and len(arg.users) == 1
        found += _summands(arg) if inner else [arg]
    return [] if node.kwargs or len(node.args) != 2 else found


def functionalise(graph: Graph, fake_mode: FakeTensorMode) -> Graph:
    """A graph with the same inputs and outputs in which no op changes its arguments."""
    recorder = GraphRecorder(fake_mode, functionalised=True)
    inner: dict[Node, Any] = {}  # the recorder's values of inputs, and of random numbers, which depend on no input
    key: Node | None = None
    for node in graph.nodes:
        if node.op != "placeholder" and node.target is not draw:
            continue
        value = node.meta["val"]
        if isinstance(value, Tensor):
            with fake_mode:
                value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        inner[node] = value
        if node.op == "placeholder":
            recorder.place_at(info_of(node))
            made = recorder.placeholder(node.name, value)
            key = made if node.name == "key" else key

    def replay(*wrapped: Tensor) -> Any:
        env: dict[Node, Any] = {**inner, **dict(zip(tensors, wrapped, strict=True))}
        for node in graph.nodes:
            if node.op == "output":
                return map_arg(node.args[0], env.__getitem__)
            if node.op == "placeholder":
                continue
            recorder.place_at(info_of(node))
            if node.target is draw:
                recorder.bind(inner[node], recorder.call(draw, (key, *node.args[1:]), {}, inner[node]))
            else:
                env[node] = node.target(*map_arg(node.args, env.__getitem__), **map_arg(node.kwargs, env.__getitem__))
        raise AssertionError("a graph without output")

    tensors = [node for node, value in inner.items() if isinstance(value, Tensor)]
    with fake_mode, recorder, torch.no_grad():
        results = torch.func.functionalize(replay, remove="mutations")(*(inner[node] for node in tensors))
        recorder.output(list(results))
    assert not recorder.mutating
    return recorder.graph
