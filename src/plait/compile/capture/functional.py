"""The second pass of a capture, for a step that changes views in place: the same graph without mutation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from plait.compile.capture.record import GraphRecorder
from plait.compile.ir.node_info import info_of
from plait.compile.ops.draw import draw


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
