"""Replace a call by simpler ops that compute the same, if its rule says how."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from plait.compile.ir.calls import is_item, is_tensor, output_values, view_of
from plait.compile.ir.shapes import ProcessMemo, fake_of, fakes_of, frozen, spec_of, specs_of
from plait.compile.ops import View

tracing = threading.RLock()  # make_fx changes torch itself while it traces
_decompositions: dict[Any, torch.fx.GraphModule] = ProcessMemo(
    1 << 10
)  # graphs of the simpler ops of a call, by the call


def decompose_node(node: Node, function: Callable[..., Any]) -> Node:
    """Write the ops of `function` in place of `node`. Returns the first node to visit next."""
    graph = node.graph
    sources: list[Node] = []

    def collect(arg: Node) -> Node:
        if is_tensor(arg) and arg not in sources:
            sources.append(arg)
        return arg

    map_arg((node.args, node.kwargs), collect)
    mode = sources[0].meta["val"].fake_mode
    traced = _traced(node, function, sources)
    inner: dict[Node, Any] = {}
    holders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    inner.update(zip(holders, sources, strict=True))
    first: Node | None = None
    with graph.inserting_before(node):
        for old in traced.graph.nodes:
            if old.op == "call_function":
                new = graph.node_copy(old, lambda n: inner[n])
                new.meta = {**node.meta, "val": fakes_of(old.meta["val"], mode)}
                inner[old] = new
                first = first or new
            elif old.op == "get_attr":
                raise AssertionError(f"the decomposition of {node.target} holds a tensor constant")
            elif old.op == "output":
                results = map_arg(old.args[0], lambda n: inner[n])
    follower = node.next
    if len(output_values(node)) == 1 and not isinstance(node.meta["val"], (tuple, list)):
        result = results[0] if isinstance(results, (tuple, list)) else results
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            assert is_item(user), f"{node} gives a tuple that {user} does not pick from"
            user.replace_all_uses_with(results[user.args[1]])
            if follower is user:
                follower = user.next
            graph.erase_node(user)
    graph.erase_node(node)
    return first if first is not None else follower


def _traced(node: Node, function: Callable[..., Any], sources: list[Node]) -> torch.fx.GraphModule:
    """The ops of `function` on the node's arguments, with geometry for values. In this process the same call on tensors
    like these is traced only once."""
    numbers = {source: (number, spec_of(source.meta["val"])) for number, source in enumerate(sources)}
    args = map_arg((node.args, node.kwargs), numbers.__getitem__)
    key = (node.target, function, frozen(args, spec_of), torch.get_default_dtype())
    if key not in _decompositions:
        # Tracing tells inputs apart by identity, and nodes of equal shape may share one value.
        mode = sources[0].meta["val"].fake_mode
        values = [fake_of(spec, mode) for _, spec in numbers.values()]
        _decompositions[key] = _trace(node, function, sources, values)
    return _decompositions[key]


def _trace(node: Node, function: Callable[..., Any], sources: list[Node], values: list[Any]) -> torch.fx.GraphModule:
    def run(*tensors: torch.Tensor) -> Any:
        by_source = dict(zip(sources, tensors, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), by_source.__getitem__)
        return function(*args, **kwargs)

    mode = values[0].fake_mode
    with tracing, mode, torch.no_grad():
        traced = make_fx(torch.func.functionalize(run), tracing_mode="real", _allow_non_fake_inputs=True)(*values)
    for old in list(traced.graph.nodes):
        if old.op == "call_function" and view_of(old) is View.ALIAS:
            old.replace_all_uses_with(old.args[0])
            traced.graph.erase_node(old)
    traced.graph.eliminate_dead_code()
    for old in traced.graph.nodes:  # its tensors would keep their step
        old.meta = {"val": specs_of(old.meta["val"])} if old.op == "call_function" else {}
    return traced
