"""Rank programs: functional under every plan, and what they say is what runs, whoever executes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter
from torch.nn import functional as F

import plait
from plait.backends.backend import Executable, StepResult, Update
from plait.backends.eager import passes
from plait.backends.eager.collectives import function_of
from plait.backends.eager.passes import EAGER_PASSES, make_eager
from plait.comm.protocol import World
from plait.compile.ir.calls import copy_graph, op_spec_of, output_node, output_values, placeholders, writes_in_place
from plait.compile.ir.node_info import info_of
from plait.compile.ops import comm_ops
from plait.compile.ops.comm_ops import CommOp
from plait.compile.passes.zero import gives_part, is_sum
from plait.compile.rank_program import RankProgram, StepGraph, graph_of_rank
from plait.compile.step_collectives import collective_order
from plait.engine.compiler import Captures, Compiler
from plait.engine.local_batch import microbatches
from plait.engine.rank_executor import RankExecutor
from plait.errors import PlanError
from plait.plan.axes import stage_axis
from plait.plan.plan import Plan


class Tied(nn.Module):
    """A table that the first stage and the last read, a number, a parameter that no two ranks cut evenly, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(3, 5))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x) * self.scale + self.shift.sum()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
        for layer in self.layers:
            h = h + F.dropout(layer(h), 0.1)
        return h @ self.table.weight.t()


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def rows() -> Tensor:
    return torch.randint(0, 32, (24, 6), generator=torch.Generator().manual_seed(0))


@functools.cache
def captures() -> Captures:
    torch.manual_seed(0)
    return Captures(Tied(), loss_fn)


def program_of(plan: str) -> RankProgram:
    found = Plan.parse(plan)
    return Compiler(captures(), found).compiled(microbatches(rows(), found.micro)[0]).program


AXES = ["data=2", "tensor=2", "data=2 tensor=2", "replica=2 data=2"]
SCHEDULES = ["gpipe", "1f1b", "zb-h1", "interleaved chunks=2", "dualpipe-v", "pipedream", "pipedream-2bw"]
TIMES = ["", "micro=4", *(f"pipeline=2 micro=4 schedule={schedule}" for schedule in SCHEDULES)]
CASES = [(AXES[0], time) for time in TIMES] + [(axes, time) for axes in AXES[1:] for time in (*TIMES[:2], TIMES[4])]
OFFLOAD = "home.parameters=disk home.activations=disk"


@pytest.mark.parametrize(("axes", "time"), CASES)
def test_programs_are_functional(axes: str, time: str) -> None:
    for more in ("", "zero=1", "zero=2", "precision=bf16 zero=3 recompute=layer", OFFLOAD):
        if axes == "tensor=2" and "zero" in more:
            continue
        try:
            program = program_of(f"{axes} {time} {more}")
        except PlanError:
            continue
        before = {name: str(part.graph) for name, part in program.graphs.items()}
        for part in program.graphs.values():
            assert_functional(part)
        make_eager(program)
        assert {name: str(part.graph) for name, part in program.graphs.items()} == before


def assert_functional(part: StepGraph) -> None:
    """No call writes in place, begins or awaits a collective, or knows of a World, a bucket, a box or a home."""
    kinds = {"parameter", "buffer", "batch", "constant", "value", "sum", "key", "scale"}
    for node in part.graph.nodes:
        if node.op == "placeholder":
            assert info_of(node).kind in kinds, node
        if node.op != "call_function":
            continue
        does = op_spec_of(node).communicates
        assert not writes_in_place(node), node
        assert "plait.backends" not in str(getattr(node.target, "__module__", "")), node
        assert does is None or (does.part == "whole" and isinstance(node.target, CommOp)), node
        assert all(isinstance(value, (Tensor, int, float)) for value in output_values(node)), node


@pytest.mark.parametrize(
    "plan",
    ["", "data=2", "data=2 tensor=2 zero=1", "replica=2 data=2 zero=3", "tensor=2", "data=2 zero=2 micro=4",
     "pipeline=2 data=2 micro=4", "pipeline=2 data=2 zero=3 micro=4"],
)  # fmt: skip
def test_the_sharding_plan_has_the_axes_of_the_sums_in_the_graphs(plan: str) -> None:
    program = program_of(plan)
    parameters = program.sharding.parameters
    expected = {name: {*each.reduce_axes} - {stage_axis()} for name, each in parameters.items()}
    found = {}
    for part in program.graphs.values():
        results: Any = output_node(part.graph).args[0]
        for index, name in part.gradients.items() if part.accumulation in ("alone", "last") else ():
            found[name], node = set[str](), results[index]
            while is_sum(node) or gives_part(node):
                found[name] |= {node.args[1]} if is_sum(node) or node.target is comm_ops.scatter_part else set()
                node = node.args[0]
    assert found == expected
    tied = [name for name, each in parameters.items() if stage_axis() in each.reduce_axes]
    assert tied == (["table.weight"] if program.pipeline else [])


class _OnRank(Interpreter):
    """Runs a graph as it stands, with the collectives of one rank."""

    def __init__(self, graph: Graph, world: World) -> None:
        super().__init__(GraphModule({}, graph))
        self._world = world

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        function = function_of(target)
        return super().call_function(target, args, kwargs) if function is None else function(self._world, *args)


class Plain:
    """A Backend without passes of its own, of steps without a pipeline."""

    def build(self, program: RankProgram, world: World, recorder: object = None) -> Executable:
        return _PlainStep(program, world)


class _PlainStep:
    def __init__(self, program: RankProgram, world: World) -> None:
        self.program, self._world = program, world

    @property
    def collective_order(self) -> str:
        return collective_order({name: each.graph for name, each in self.program.graphs.items()})

    def run(
        self,
        key: int,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        batches: Iterable[Mapping[str, Tensor]],
        scale: Tensor | None = None,
        update: Update | None = None,
    ) -> list[StepResult]:
        captured, results, sums = self.program.captured, [], dict[str, Tensor]()
        nodes = {i.node: (i.kind, i.name) for i in captured.inputs}
        for name, batch in zip(self.program.micro_graphs, batches, strict=True):
            part = self.program.graphs[name]
            given = {"parameter": parameters, "buffer": buffers, "batch": batch, "sum": sums}
            given |= {"constant": captured.constants, "key": {"key": key}, "scale": {"scale": scale}}
            graph = graph_of_rank(part.graph, self._world.mesh.coordinates(self._world.rank))
            named = [nodes.get(n.name) or (info_of(n).kind, info_of(n).name) for n in placeholders(graph)]
            with torch.no_grad():
                made = _OnRank(graph, self._world).run(*(given[kind][name or kind] for kind, name in named))
            found = {(output.kind, output.name): value for output, value in zip(part.outputs, made, strict=True)}
            for (kind, name), value in found.items():
                if kind == "buffer":
                    buffers[name].copy_(value)
            sums = {name: value for (kind, name), value in found.items() if kind == "gradient"}
            (loss,) = (value for (kind, _), value in found.items() if kind == "loss")
            results.append(StepResult(loss, None, sums, {}))
        return results


class Deterministic(nn.Module):
    """No dropout, so that the loss and the gradients are those of autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.odd = nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x) + self.odd.sum()
        return (h + self.down(torch.tanh(self.up(h)))) @ self.table.weight.t()


@functools.cache
def deterministic() -> Captures:
    torch.manual_seed(0)
    return Captures(Deterministic().double(), loss_fn)


def step(plan: str, backend: Callable[[], Any]) -> tuple[Tensor, dict[str, Tensor]]:
    found = Plan.parse(plan)
    compiler = Compiler(deterministic(), found)

    def rank(world: World) -> tuple[Tensor, dict[str, Tensor]]:
        executor = RankExecutor(compiler, world, rows(), backend=backend())
        result = executor.run(rows(), 0)
        executor.set_gradients(result.gradients)
        return result.loss, executor.whole_gradients()

    return plait.run_ranks(found.mesh, rank)[0]


@pytest.mark.parametrize(
    "plan",
    ["data=2 zero=3", "data=3 zero=3 micro=2", "data=2 zero=1 micro=3", "data=2 zero=2 micro=3", "tensor=2",
     "data=2 tensor=2 zero=3 micro=2"],
)  # fmt: skip
def test_a_program_run_as_it_stands_gives_the_numbers_of_one_device(plan: str) -> None:
    torch.manual_seed(0)
    model = Deterministic().double()
    expected = loss_fn(model, rows())
    expected.backward()  # type: ignore[no-untyped-call]
    loss, gradients = step(plan, Plain)
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


class OneOrderARank(Plain):
    """A Backend that puts the collectives of rank 1 in another order."""

    def build(self, program: RankProgram, world: World, recorder: object = None) -> Executable:
        graphs = {name: replace(each, graph=copy_graph(each.graph)) for name, each in program.graphs.items()}
        *_, first, second = (node for node in graphs["alone"].graph.nodes if is_sum(node))
        if world.rank == 1:
            first.prepend(second)
        return _PlainStep(replace(program, graphs=graphs), world)


def test_ranks_compare_the_order_of_their_collectives_before_they_run() -> None:
    with pytest.raises(
        plait.RankFailed, match=r"do not agree on the result of laying out the step: rank 0: 8 collectives, checksum"
    ):
        step("data=2", OneOrderARank)


_NEEDED = ("bind-world", "take-values")


@pytest.mark.parametrize("left_out", [each.name for each in EAGER_PASSES if each.name not in _NEEDED])
@pytest.mark.parametrize("plan", ["data=2 zero=3 micro=2", "data=2 pipeline=2 zero=2 micro=4"])
def test_eager_passes_change_how_a_program_runs_but_not_what_it_gives(
    plan: str, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = step(plan, lambda: None)
    monkeypatch.setattr(passes, "EAGER_PASSES", [each for each in EAGER_PASSES if each.name != left_out])
    torch.testing.assert_close(step(plan, lambda: None), whole)


def test_graphs_that_run_eagerly_are_not_functional() -> None:
    program = program_of("data=2 zero=3 micro=4")
    for name, graph in make_eager(program).items():
        with pytest.raises(AssertionError):
            assert_functional(replace(program.graphs[name], graph=graph))
