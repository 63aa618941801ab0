"""Replace a call by simpler ops that compute the same, if its rule says how."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from plait.compile.ir.calls import is_item, is_tensor, output_values
from plait.compile.ir.shapes import StepMode, fake_of, frozen, spec_of
from plait.compile.ir.views import view_of
from plait.compile.ops import View

tracing = threading.RLock()  # make_fx changes torch itself while it traces


def decompose_node(node: Node, function: Callable[..., Any]) -> Node:
    """Write the ops of `function` in place of `node`. Returns the first node to visit next."""
    graph = node.graph
    sources: list[Node] = []

    def collect(arg: Node) -> Node:
        if is_tensor(arg) and arg not in sources:
            sources.append(arg)
        return arg

    map_arg((node.args, node.kwargs), collect)
    traced = _traced(node, function, sources)
    inner: dict[Node, Any] = {}
    holders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    inner.update(zip(holders, sources, strict=True))
    first: Node | None = None
    with graph.inserting_before(node):
        for old in traced.graph.nodes:
            if old.op == "call_function":
                new = graph.node_copy(old, lambda n: inner[n])
                new.meta = {**{k: v for k, v in node.meta.items() if k != "val"}, "val": old.meta["val"]}
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
    """The ops of `function` on the node's arguments. The same call on tensors like these has been traced only once."""
    mode = sources[0].meta["val"].fake_mode
    # Tracing tells inputs apart by identity, and nodes of equal shape may share one value.
    values = [fake_of(spec_of(source.meta["val"]), mode) for source in sources]
    if not isinstance(mode, StepMode):
        return _trace(node, function, sources, values)
    numbers = {source: (number, spec_of(source.meta["val"])) for number, source in enumerate(sources)}
    args = map_arg((node.args, node.kwargs), lambda n: numbers.get(n, n))
    key = (node.target, function, frozen(args, spec_of))
    if key not in mode.decompositions:
        mode.decompositions[key] = _trace(node, function, sources, values)
    return mode.decompositions[key]


def _trace(node: Node, function: Callable[..., Any], sources: list[Node], values: list[Any]) -> torch.fx.GraphModule:
    def run(*tensors: torch.Tensor) -> Any:
        by_source = dict(zip(sources, tensors, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: by_source.get(n, n))
        return function(*args, **kwargs)

    mode = values[0].fake_mode
    with tracing, mode, torch.no_grad():
        traced = make_fx(torch.func.functionalize(run), tracing_mode="real", _allow_non_fake_inputs=True)(*values)
    for old in list(traced.graph.nodes):
        if old.op == "call_function" and view_of(old) is View.ALIAS:
            old.replace_all_uses_with(old.args[0])
            traced.graph.erase_node(old)
    traced.graph.eliminate_dead_code()
    return traced
