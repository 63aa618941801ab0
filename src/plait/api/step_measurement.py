"""Measures the overhead of a step that does not show when its calls are measured one by one: on steps with hardly any
arithmetic."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.api.simulate_step import describe_program
from plait.api.trainer import Trainer
from plait.comm.device import is_host, synchronize
from plait.comm.process_world import ProcessWorld
from plait.comm.thread_world import alone
from plait.compile.capture.capture import LossFn
from plait.cost.step_program import OpCall, StepProgram
from plait.cost.step_simulation import StepSimulator
from plait.engine.rank_optimizers import OptimizerFactory
from plait.plan.plan import Plan
from plait.spec.cluster import Cluster

_DEPTHS = (2, 34)  # of two models, of which the deeper has calls more and nothing else
_STEPS, _RUNS = 5, 9
_VIEWS = 2000
_PARAMETERS = 64  # of an update with next to no numbers
_TOGETHER_SECONDS = 0.15
_SIDE = 512  # of the matrices that ranks multiply side by side
# Layers, width, heads, positions and rows of the step that predictions are held against, on a CPU and an accelerator.
_YARDSTICK = {True: (4, 256, 8, 128, 4), False: (4, 2048, 16, 1024, 4)}
_LEAST, _MOST = 0.1, 10.0  # of `in_step` in a cluster file
_ADAMW = functools.partial(torch.optim.AdamW, lr=0.0)


class StepOverhead(NamedTuple):
    """The least seconds of a call, of a view, of the update of one parameter and of a step: the time in Python and for
    the start of kernels."""

    op_seconds: float
    view_seconds: float
    update_seconds: float
    step_seconds: float


class _Chain(nn.Module):
    """One layer, applied `depth` times: the depth changes neither the parameters nor the update."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layer, self.depth = nn.Linear(8, 8), depth

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = F.gelu(self.layer(x))
        return x


def measure_overhead(device: torch.device) -> StepOverhead:
    """The least time of calls and steps on this device, while one rank runs alone.

    Two steps of a Trainer that differ only in their number of calls give the time of a call, and the time of the rest
    of a step.
    """
    ones = torch.ones(64, device=device)
    view = functools.partial(torch.ops.aten.view.default, ones, [8, 8])
    begin = time.perf_counter()
    for _ in range(_VIEWS):
        view()
    view_seconds = (time.perf_counter() - begin) / _VIEWS
    (few, few_views, short), (many, many_views, long) = (_tiny_step(depth, device) for depth in _DEPTHS)
    op_seconds = max((long - short - view_seconds * (many_views - few_views)) / (many - few), 1e-9)
    update_seconds = _update_seconds(device)
    return StepOverhead(
        op_seconds, view_seconds, update_seconds, max(short - op_seconds * few - view_seconds * few_views, 1e-9)
    )


def _update_seconds(device: torch.device) -> float:
    """What a Trainer's update by AdamW takes of each of many parameters that have few numbers."""
    batch = torch.ones(8, device=device)
    model = nn.ParameterList(torch.zeros(8, device=device) for _ in range(_PARAMETERS))
    trainer = _trainer(model, lambda model, x: (torch.stack([*model]) * x).sum(), _ADAMW, device)
    times = []
    try:
        trainer.step(batch)
        for _ in range(_RUNS):
            trainer.forward_backward(batch)
            synchronize(device)
            begin = time.perf_counter()
            trainer.optimizer_step()
            synchronize(device)
            times.append((time.perf_counter() - begin) / _PARAMETERS)
    finally:
        trainer.close()
    return statistics.median(times)


def _tiny_step(depth: int, device: torch.device) -> tuple[int, int, float]:
    """The calls that compute in a step of a chain, those that are views, and its seconds."""
    optimizer = functools.partial(torch.optim.SGD, lr=0.0)
    trainer = _trainer(_Chain(depth), lambda model, x: model(x).sum(), optimizer, device)
    program, seconds = _timed(trainer, torch.ones(8, 8, device=device), optimizer, _STEPS)
    calls = [call for name in program.micro_graphs for call in program.graphs[name] if isinstance(call, OpCall)]
    views = sum(not call.num_bytes and not call.flops for call in calls)
    return len(calls) - views, views, seconds


def _trainer(model: nn.Module, loss_fn: LossFn, optimizer: OptimizerFactory, device: torch.device) -> Trainer:
    """A trainer of one rank on this device."""
    plan = Plan()
    return Trainer(model, loss_fn, optimizer, plan, world=alone(plan.process_mesh, device))


def _timed(trainer: Trainer, batch: Any, optimizer: OptimizerFactory, num_steps: int) -> tuple[StepProgram, float]:
    """What a step of the trainer issues, and its seconds; the median of runs of so many steps. Closes the trainer."""
    device = trainer.world.device
    try:
        trainer.step(batch)
        times = []
        for _ in range(_RUNS):
            synchronize(device)
            begin = time.perf_counter()
            for _ in range(num_steps):
                trainer.step(batch)
            synchronize(device)
            times.append((time.perf_counter() - begin) / num_steps)
        compiled = trainer.executor.compiled
        assert compiled is not None  # after a step
        return describe_program(compiled.program, batch, optimizer), statistics.median(times)
    finally:
        trainer.close()


def measure_yardstick(device: torch.device) -> tuple[StepProgram, float]:
    """A step of a small transformer on this device: the program of its calls, and its seconds."""
    layers, width, heads, positions, rows = _YARDSTICK[is_host(device)]
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, device=device)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    trainer = _trainer(model, lambda model, x: model(x).square().mean(), _ADAMW, device)
    return _timed(trainer, torch.ones(rows, positions, width, device=device), _ADAMW, 1)


def in_step_of(cluster: Cluster, program: StepProgram, seconds: float) -> float:
    """How many times longer calls take in a step than the cluster's numbers say.

    `seconds` is the measured time of the step of this program, while all ranks of the host compute."""
    busy = replace(cluster, device=replace(cluster.device, together=(), in_step=1.0))
    besides = cluster.device.step_seconds
    said = StepSimulator(busy).simulate(program).seconds - besides
    return min(max((seconds - besides) / said, _LEAST), _MOST)


def measure_together(world: ProcessWorld, num_local: int) -> Sequence[tuple[int, float]]:
    """The speed of a rank on the cores of a host, by the number of the host's ranks that compute.

    Returns points (ranks, speed), in units of the speed while all of them compute; none for more ranks than cores."""
    everyone = world.everyone()
    left, long = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE * _SIDE)
    rates, cores = [], min(os.cpu_count() or 1, num_local)
    for num in range(1, cores + 1):
        everyone.barrier()
        begin, count = time.perf_counter(), 0
        while (now := time.perf_counter()) < begin + _TOGETHER_SECONDS:
            if world.rank % num_local < num:
                _ = left @ left, long + long
                count += 1
            else:
                time.sleep(_TOGETHER_SECONDS / 10)
        total = everyone.all_reduce(torch.tensor([count / (now - begin)])).wait()
        rates.append(float(total) / num)
    speeds = [rate / rates[-1] for rate in rates]
    for at in reversed(range(cores - 1)):  # a rank is never slower while fewer compute: what looks so is noise
        speeds[at] = max(speeds[at : at + 2])
    speeds += [cores / num for num in range(cores + 1, num_local + 1)]
    return [(num, speed / speeds[-1]) for num, speed in enumerate(speeds, 1)]
