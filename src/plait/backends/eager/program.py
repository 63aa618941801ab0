"""A program: the graph of one rank as a Python function, and the values it is called with."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from plait.backends.eager.offload.store import Offload
from plait.backends.eager.unsupported import missing_kernel
from plait.backends.recorder import TraceRecorder
from plait.comm.protocol import World
from plait.compile.capture.capture import Captured, Output
from plait.compile.capture.loss_values import LossPart, Outputs
from plait.compile.capture.precision import Precision
from plait.compile.ir.calls import placeholders
from plait.compile.ir.node_info import info_of
from plait.compile.lowered import Lowered
from plait.compile.passes.stash import stashed_bytes
from plait.compile.sharding.partition import WORLD
from plait.compile.stages.specialise import specialise


@dataclass(frozen=True)
class StepResult:
    """What one run of the graph gave: local tensors by name. A gradient that lies on another rank is absent, and one
    that has left the device, which is still to be multiplied by `factor`."""

    loss: Tensor
    parts: tuple[Tensor, Tensor] | None  # (sum, weight) where the loss was given so
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    factor: float = 1.0
    aux: tuple[Outputs, ...] | None = None  # of each microbatch, where the loss came with outputs beside it


_NAMED = ("parameter", "buffer", "batch", "constant", "sum")
_RESULTS = ("loss", "sum", "weight", "aux", "aux_weight", "gradient", "buffer", "value")


class Program:
    """One lowered step, ready to run on one rank."""

    def __init__(self, lowered: Lowered, world: World, homes: Offload, recorder: TraceRecorder | None = None) -> None:
        self.lowered = lowered
        self.world = world
        self._recorder = recorder
        self._homes = homes
        homes.make_room(max(stashed_bytes(graph) for graph in lowered.graphs.values()))
        captured = lowered.captured
        self._outputs = captured.outputs
        self._constants = {name: value.to(world.device) for name, value in captured.constants.items()}
        self._coordinates = world.mesh.coordinates(world.rank)
        self._turns: dict[str, tuple[Any, Graph, list[tuple[str, str]]]] = {}

    def run(
        self,
        key: int,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        *,
        turn: str = "alone",
        sums: Mapping[str, Tensor] | None = None,
        scale: Tensor | None = None,
    ) -> StepResult:
        """Run on local tensors; `key` seeds the random draws and is the same on every rank.

        `turn` is one of compile/passes/accumulation.py, `sums` are the gradients so far, which are taken over; `scale`
        multiplies the loss that is differentiated.
        """
        found = self.call(
            turn, self._outputs, parameter=parameters, buffer=buffers, batch=batch, sum=sums or {}, key=key, scale=scale
        )
        parts = None
        if found["sum"]:
            parts = (next(iter(found["sum"].values())), next(iter(found["weight"].values())))
        (loss,) = found["loss"].values()
        aux = outputs_of(self.lowered.captured, found["aux"], found["aux_weight"])
        return StepResult(loss, parts, found["gradient"], found["buffer"], aux=None if aux is None else (aux,))

    def call(self, graph: str, outputs: Sequence[Output], **given: Any) -> dict[str, dict[str, Any]]:
        """Run one of the lowered graphs; its results by kind and name. `given` has its inputs by kind: of those that
        have names a mapping, of others the value."""
        forward, local, inputs = self._turn(graph)
        given |= {"constant": self._constants, "homes": self._homes}
        args = [given[kind].get(name) if kind in _NAMED else given[kind] for kind, name in inputs]
        try:
            with torch.no_grad():
                values = forward(None, self.world, *args)
        except RuntimeError as error:
            plan = self.lowered.plan
            refusal = missing_kernel(error, local, Precision(plan.precision, plan.exceptions))
            if refusal is None:
                raise
            raise refusal from error
        found: dict[str, dict[str, Any]] = {kind: {} for kind in _RESULTS}
        for output, value in zip(outputs, values, strict=True):
            if value is not None:
                found[output.kind][output.name] = value
        return found

    def _turn(self, turn: str) -> tuple[Any, Graph, list[tuple[str, str]]]:
        """The turn's function, its graph, and (kind, name) of what it takes after the world."""
        if turn not in self._turns:
            graph = specialise(self.lowered.graphs[turn], self._coordinates)
            if self._recorder is not None and self.lowered.pipeline is None:
                graph = self._recorder.marked(graph)
            captured = {i.node: (i.kind, i.name) for i in self.lowered.captured.inputs}
            inputs = [
                captured.get(node.name) or (info_of(node).kind, info_of(node).name)
                for node in placeholders(graph)
                if node.name != WORLD
            ]
            self._turns[turn] = (_compile(graph), graph, inputs)
        return self._turns[turn]


def outputs_of(captured: Captured, values: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Outputs | None:
    """The outputs beside the loss, of one microbatch."""
    if captured.aux is None:
        return None
    rows = float(captured.rows)
    return {name: LossPart(kind, values[name], weights.get(name, rows)) for name, kind in captured.aux.items()}


_one_at_a_time = threading.Lock()  # torch.fx writes code with the help of globals
_functions: WeakKeyDictionary[Graph, Any] = WeakKeyDictionary()  # of ranks that are threads, and have one graph


def _compile(graph: Graph) -> Any:
    """The graph as a Python function that lets go of each value at its last use; its first argument is not used."""
    with _one_at_a_time:
        if graph not in _functions:
            if not any(node.op == "placeholder" and node.name == WORLD for node in graph.nodes):
                with graph.inserting_before(next(iter(graph.nodes))):
                    graph.placeholder(WORLD)
            _functions[graph] = type(GraphModule({}, graph)).forward
        return _functions[graph]
