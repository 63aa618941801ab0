"""The graphs of one rank as Python functions, called with the rank's values."""

from __future__ import annotations

import linecache
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from plait.backends.backend import StepResult, Update
from plait.backends.eager import ring_attention  # noqa: F401  carries out calls of comm_ops
from plait.backends.eager.collectives import WORLD, world_of
from plait.backends.eager.offload.store import Offload
from plait.backends.eager.rewrites.offload_rewrites import stashed_bytes
from plait.backends.recorder import TraceRecorder
from plait.comm.protocol import World
from plait.compile.capture.captured import Captured, Output
from plait.compile.capture.loss_values import LossPart, Outputs
from plait.compile.capture.parts_left_out import COUNTS
from plait.compile.capture.precision import Precision
from plait.compile.ir.calls import placeholders
from plait.compile.ir.node_info import info_of
from plait.compile.ops.draw import micro_key
from plait.compile.rank_program import RankProgram, graph_of_rank
from plait.compile.step_collectives import collective_order
from plait.errors import PlanError

_NAMED = ("parameter", "buffer", "batch", "constant", "sum")
_RESULTS = ("loss", "sum", "weight", "aux", "aux_weight", "gradient", "buffer", "value")


class Program:
    """The Executable of a step without a pipeline; PipelineProgram uses its `call` for the graphs of cells.

    `graphs` are those that the eager passes made, by name.
    """

    def __init__(
        self,
        program: RankProgram,
        graphs: Mapping[str, Graph],
        world: World,
        offload: Offload,
        recorder: TraceRecorder | None = None,
    ) -> None:
        self.program = program
        self.world = world
        self._graphs = graphs
        self._recorder = recorder
        self._offload = offload
        offload.make_room(max(stashed_bytes(graph) for graph in graphs.values()))
        captured = program.captured
        self._outputs = captured.outputs
        self._constants = {name: value.to(world.device) for name, value in captured.constants.items()}
        self._coordinates = world.mesh.coordinates(world.rank)
        self._compiled: dict[str, tuple[Any, Graph, list[tuple[str, str]]]] = {}

    @property
    def collective_order(self) -> str:
        """The order of this rank's collectives, as Executable defines it."""
        return collective_order(self._graphs, self.program.pipeline)

    def run(
        self,
        key: int,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        batches: Iterable[Mapping[str, Tensor]],
        scale: Tensor | None = None,
        update: Update | None = None,
    ) -> list[StepResult]:
        """Run one step as Executable.run says: every microbatch goes through the whole graph."""
        results: list[StepResult] = []
        sums: dict[str, Tensor] = {}
        for index, (name, batch) in enumerate(zip(self.program.micro_graphs, batches, strict=True)):
            given = {"parameter": parameters, "buffer": buffers, "batch": batch, "sum": sums, "scale": scale}
            with nullcontext() if self._recorder is None else self._recorder.microbatch(index):
                found = self.call(name, self._outputs, key=micro_key(key, index), **given)
            for name, value in found["buffer"].items():
                buffers[name].copy_(value)
            sums = found["gradient"]
            results.append(self._result(found))
        return results

    def _result(self, found: Mapping[str, dict[str, Any]]) -> StepResult:
        parts = None
        if found["sum"]:
            parts = (next(iter(found["sum"].values())), next(iter(found["weight"].values())))
        (loss,) = found["loss"].values()
        aux = outputs_of(self.program.captured, found["aux"], found["aux_weight"])
        return StepResult(loss, parts, found["gradient"], found["buffer"], aux=None if aux is None else (aux,))

    def call(self, graph: str, outputs: Sequence[Output], **given: Any) -> dict[str, dict[str, Any]]:
        """Run one of the graphs and return its results by kind and name.

        `given` has the graph's inputs by kind: a mapping by name for parameters, buffers, batch leaves and sums, and a
        single value for every other kind. PlanError if an op has no kernel for the plan's precision.
        """
        forward, local, inputs = self._compiled_graph(graph)
        given |= {"constant": self._constants, "offload": self._offload}
        args = [given[kind].get(name) if kind in _NAMED else given[kind] for kind, name in inputs]
        try:
            with torch.no_grad():
                values = forward(None, self.world, *args)
        except RuntimeError as error:
            plan = self.program.plan
            refusal = missing_kernel(error, local, Precision(plan.precision, plan.exceptions))
            if refusal is None:
                raise
            raise refusal from error
        found: dict[str, dict[str, Any]] = {kind: {} for kind in _RESULTS}
        for output, value in zip(outputs, values, strict=True):
            if value is not None:
                found[output.kind][output.name] = value
        return found

    def _compiled_graph(self, name: str) -> tuple[Any, Graph, list[tuple[str, str]]]:
        """The function of a graph, the graph, and (kind, name) of each argument after the World."""
        if name not in self._compiled:
            graph = graph_of_rank(self._graphs[name], self._coordinates)
            if self._recorder is not None:
                graph = self._recorder.with_expert_counts(graph)
                if self.program.pipeline is None:
                    graph = self._recorder.with_backward_mark(graph)
            captured = {i.node: (i.kind, i.name) for i in self.program.captured.inputs}
            inputs = [
                captured.get(node.name) or (info_of(node).kind, info_of(node).name)
                for node in placeholders(graph)
                if node.name != WORLD
            ]
            self._compiled[name] = (_compile(graph), graph, inputs)
        return self._compiled[name]


def outputs_of(captured: Captured, values: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Outputs | None:
    """The outputs of one microbatch beside its loss, and counts of what it left out, by name; None without any."""
    kinds = {**(captured.aux or {}), **({COUNTS: "sum"} if COUNTS in values else {})}
    if captured.aux is None and not kinds:
        return None
    rows = float(captured.rows)
    return {name: LossPart(kind, values[name], weights.get(name, rows)) for name, kind in kinds.items()}


_codegen_lock = threading.Lock()  # torch.fx generates code with the help of globals
_functions: WeakKeyDictionary[Graph, Callable[..., Any]] = WeakKeyDictionary()  # shared by ranks that are threads


def _compile(graph: Graph) -> Callable[..., Any]:
    """The graph as a Python function, which frees each value after its last use. Its first argument is not used."""
    with _codegen_lock:
        if graph not in _functions:
            world_of(graph)
            _functions[graph] = type(GraphModule({}, graph)).forward
        return _functions[graph]


_GENERATED = "<eval_with_key>"  # the name that torch.fx gives to files of generated code


def missing_kernel(error: Exception, graph: Graph, precision: Precision) -> PlanError | None:
    """The PlanError for an op that the device lacks in this precision; None if `error` is about something else."""
    node = _failed(error.__traceback__, graph)
    module = info_of(node).module if node is not None else ""
    return precision.refusal(error, module, str(node.target) if node is not None else "")


def _failed(traceback: TracebackType | None, graph: Graph) -> Node | None:
    """The node whose line of generated code raised."""
    line = ""
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if name.startswith(_GENERATED):
            line = linecache.getline(name, traceback.tb_lineno)
        traceback = traceback.tb_next
    target = line.partition("=")[0].partition(":")[0].strip()
    return next((node for node in graph.nodes if node.name == target), None)
