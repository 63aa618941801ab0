"""A dry run: one training step of one rank on tensors without memory, which predicts how much memory the step takes.

It runs the Engine that trains, in a world without other ranks (comm/dry_run_world.py). So it counts what the program
does: gradients, buckets and gathers, microbatch after microbatch, and the user's own optimizer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from plait.backends.eager.eager_backend import EagerBackend
from plait.backends.eager.metered import with_memory_marks
from plait.backends.eager.offload.disk import DryRunFile
from plait.backends.eager.offload.store import Offload
from plait.backends.eager.passes import eager_graphs
from plait.backends.eager.schedule_executor import ScheduleExecutor
from plait.comm.dry_run_world import DryRunWorld
from plait.compile.capture.batch import map_batch, row_dims
from plait.compile.capture.captured import Captured
from plait.compile.compiled import Compiled
from plait.compile.memory_meter import Meter
from plait.compile.rank_program import RankProgram
from plait.compile.stages.split import Pipeline
from plait.cost.memory_model import ACTIVATIONS, BUFFERS, OPTIMIZER, PARAMETERS, RankMemory
from plait.engine.compiler import Captures, Compiler
from plait.engine.engine import Engine
from plait.engine.local_batch import LocalBatch, num_rows
from plait.engine.optimizer_step import OptimizerStep
from plait.engine.rank_optimizers import OptimizerFactory
from plait.errors import PlanError
from plait.optim.combined import title_of
from plait.plan.axes import stage_axis
from plait.plan.plan import Plan
from plait.schedule.in_flight import most_bytes_in_flight

_NUM_MICRO = 3  # microbatches of a dry run: those between the first and the last all take the same memory


def dry_run(
    program: RankProgram,
    model: nn.Module,
    batch: Any,
    optimizer: OptimizerFactory,
    device: torch.device,
    rank: int,
    shared_memory: bool,
) -> RankMemory:
    """The memory that a step on a global batch takes on the rank.

    device         where the rank computes
    shared_memory  whether the ranks exchange through shared memory, rather than through torch.distributed

    Raises PlanError for an optimizer whose step fails on tensors without values.
    """
    plan = program.plan
    graphs = {
        name: with_memory_marks(graph, program.graphs[name].gradients) for name, graph in eager_graphs(program).items()
    }
    meter = Meter(device)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    world = DryRunWorld(plan.mesh, rank, device, plan.allreduce, shared_memory, meter)
    with _without_memory(fake, meter):
        twin = _skeleton(model, device)
        model_bytes = meter.total
        few = _with_few_microbatches(program, device)
        offload = Offload(plan, world, file=DryRunFile())
        first = _local(batch, plan, few.plan.micro, device)
        backend = _Marked(offload, graphs)
        engine = Engine(_Known(few, twin), few.plan, world, optimizer, adopt=True, offload=offload, backend=backend)
        engine.hold(first)
        executor = engine.executor
        executor.release()
        del first
        meter.claim_all(PARAMETERS)
        adopted = sum(t.nbytes for t in [*twin.parameters(), *twin.buffers()] if not t.is_meta)
        start = model_bytes + meter.total - adopted
    engine.make_optimizer()  # which is tried on tensors with values
    updates = engine.state.optimizer
    assert updates is not None
    with _without_memory(fake, meter):
        _make_state(updates, engine.state.update, executor.parameters, program)
        for state in updates.state.values():
            meter.count(list(state.values()), OPTIMIZER)
        updates.register_step_pre_hook(lambda *_: meter.at("the optimizer's step", BUFFERS))
        updates.register_step_post_hook(lambda *_: meter.at("the gathering of parameters after the step", BUFFERS))
        meter.at("", ACTIVATIONS)
        local = _local(batch, plan, few.plan.micro, device)
        rest = torch.empty(_batch_bytes(batch, plan) - meter.live[ACTIVATIONS], dtype=torch.uint8, device=device)
        meter.begin()
        result = engine.run(local, 0)
        executor.set_gradients(result.gradients)
        del result
        engine.update()
        del rest
    if program.pipeline is not None:
        world.expect(stage_axis(), _most_bytes_in_flight(program.pipeline, world))
    updated = sum(p.numel() for p in executor.parameters.values() if p.requires_grad)
    most, at_peak = Counter(meter.most), Counter(meter.at_peak)
    most[BUFFERS] += world.arena_bytes
    at_peak[BUFFERS] += world.arena_bytes
    return RankMemory(most, at_peak, meter.peak_moment, meter.saved, start, updated, world.arena_bytes)


def _most_bytes_in_flight(pipeline: Pipeline, world: DryRunWorld) -> int:
    """Bytes that a rank's stages may have sent, and others not taken."""
    cells, schedule, comm = pipeline.cells, pipeline.schedule, world.comm(stage_axis())
    executor = ScheduleExecutor(schedule, cells.values, list(cells.graphs), comm, world.mesh.coordinates(world.rank))
    return most_bytes_in_flight(schedule, cells.edges(), comm.rank, functools.partial(executor.sent, comm.rank))


@contextmanager
def _without_memory(fake: FakeTensorMode, meter: Meter) -> Iterator[None]:
    with warnings.catch_warnings(), fake, meter:
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


class _Known(Compiler):
    """A compiler that has compiled already."""

    def __init__(self, program: RankProgram, model: nn.Module) -> None:
        super().__init__(Captures(model, lambda *_: None), program.plan)
        self._known = program

    def captured(self, batch: Any, train: bool = True) -> Captured:
        return self._known.captured

    def compiled_from(self, captured: Captured, train: bool = True, num_micro: int = 1) -> Compiled:
        return Compiled(self._known, {}, frozenset())


class _Marked(EagerBackend):
    """Runs these graphs, whatever the program."""

    def __init__(self, offload: Offload, graphs: dict[str, Graph]) -> None:
        super().__init__(offload)
        self._graphs = graphs

    def graphs(self, program: RankProgram) -> dict[str, Graph]:
        return self._graphs


def _with_few_microbatches(program: RankProgram, device: torch.device) -> RankProgram:
    """The program with constants without memory, of few microbatches; a pipeline has as many in flight as its schedule
    says, and keeps all."""
    captured = program.captured
    constants = {
        name: torch.empty(value.shape, dtype=value.dtype, device=device) for name, value in captured.constants.items()
    }
    plan = program.plan
    if program.pipeline is None:
        plan = dataclasses.replace(plan, micro=min(plan.micro, _NUM_MICRO))
    return dataclasses.replace(
        program,
        captured=dataclasses.replace(captured, constants=constants),
        plan=plan,
    )


def _skeleton(model: nn.Module, device: torch.device) -> nn.Module:
    """A model with the same module names, and with parameters and buffers of the same shapes and strides."""
    twin = nn.Module()
    made: dict[int, Tensor] = {}

    def form(real: Tensor) -> Tensor:
        return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)

    for path, module in model.named_modules(remove_duplicate=False):
        place = twin
        if path:
            parent, _, key = path.rpartition(".")
            place = nn.Module()
            twin.get_submodule(parent).add_module(key, place)
        for name, real in module._parameters.items():
            if real is not None and id(real) not in made:
                made[id(real)] = nn.Parameter(form(real), requires_grad=real.requires_grad)
            place.register_parameter(name, None if real is None else made[id(real)])  # type: ignore[arg-type]
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in made:
                made[id(buffer)] = form(buffer)
            place.register_buffer(name, None if buffer is None else made[id(buffer)])
    return twin


def _local(batch: Any, plan: Plan, num_micro: int, device: torch.device) -> LocalBatch:
    """The rows of one rank of the given number of the plan's microbatches."""
    rows = num_rows(batch)
    each = rows // (plan.num_batch_parts * plan.micro)
    dims = row_dims(batch, rows)

    def part(name: str, leaf: Any) -> Any:
        if not torch.is_tensor(leaf):
            return leaf
        shape = [each * num_micro if dims.get(name) == dim else num for dim, num in enumerate(leaf.shape)]
        return torch.empty(shape, dtype=leaf.dtype, device=device)

    return LocalBatch(map_batch(part, batch), each * num_micro, rows // plan.micro * num_micro)


def _batch_bytes(batch: Any, plan: Plan) -> int:
    """The bytes of all rows of one rank."""
    local = _local(batch, plan, plan.micro, torch.device("meta")).tree
    total = 0

    def add(_: str, leaf: Any) -> Any:
        nonlocal total
        total += math.prod(leaf.shape) * leaf.element_size() if torch.is_tensor(leaf) else 0
        return leaf

    map_batch(add, local)
    return total


def _make_state(
    optimizer: torch.optim.Optimizer, update: OptimizerStep, parameters: Mapping[str, Tensor], program: RankProgram
) -> None:
    """Make the optimizer create its state, as in its first step."""
    trained = {output.name for output in program.captured.outputs if output.kind == "gradient"}
    for name, parameter in parameters.items():
        if name in trained:
            parameter.grad = torch.empty_like(parameter, requires_grad=False)
    try:
        update.step(0)
    except Exception as error:
        raise PlanError(
            f"the memory of {title_of(optimizer)} cannot be predicted: its step failed on tensors without values"
            f" ({type(error).__name__}: {error})"
        ) from error
    optimizer.zero_grad(set_to_none=True)
