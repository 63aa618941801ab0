"""A program: the graph of one rank as a Python function, and the values it is called with."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from plait.comm.protocol import World
from plait.graph.lower import Lowered
from plait.graph.partition import WORLD
from plait.graph.specialise import specialise


@dataclass(frozen=True)
class StepResult:
    """What one run of the graph gave: local tensors by name. A gradient that lies on another rank is absent."""

    loss: Tensor
    parts: tuple[Tensor, Tensor] | None  # (sum, weight) where the loss was given so
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Program:
    """One lowered step, ready to run on one rank."""

    def __init__(self, lowered: Lowered, world: World) -> None:
        self.lowered = lowered
        self.world = world
        captured = lowered.captured
        self._inputs = [(i.kind, i.name) for i in captured.inputs]
        self._outputs = [(o.kind, o.name) for o in captured.outputs]
        self._constants = {name: value.to(world.device) for name, value in captured.constants.items()}
        coordinates = world.mesh.coordinates(world.rank)
        self._forward = _compile(specialise(lowered.graph, coordinates))

    def run(
        self, key: int, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Mapping[str, Tensor]
    ) -> StepResult:
        """Run on local tensors; `key` seeds the step's random draws and is the same on every rank."""
        sources = {"parameter": parameters, "buffer": buffers, "batch": batch, "constant": self._constants}
        args = [key if kind == "key" else sources[kind].get(name) for kind, name in self._inputs]
        with torch.no_grad():
            values = self._forward(self.world, *args)
        found: dict[str, dict[str, Any]] = {"loss": {}, "sum": {}, "weight": {}, "gradient": {}, "buffer": {}}
        for (kind, name), value in zip(self._outputs, values, strict=True):
            if value is not None:
                found[kind][name] = value
        parts = None
        if found["sum"]:
            parts = (next(iter(found["sum"].values())), next(iter(found["weight"].values())))
        (loss,) = found["loss"].values()
        return StepResult(loss, parts, found["gradient"], found["buffer"])


_one_at_a_time = threading.Lock()  # torch.fx writes code with the help of globals


def _compile(graph: Graph) -> Any:
    """The graph as a Python function that lets go of each value at its last use."""
    with _one_at_a_time:
        if not any(node.op == "placeholder" and node.name == WORLD for node in graph.nodes):
            with graph.inserting_before(next(iter(graph.nodes))):
                graph.placeholder(WORLD)
        return GraphModule({}, graph).forward
