"""Measures what a step takes that no call takes when it is measured alone, on steps with next to no arithmetic."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.api.simulate_step import describe_program
from plait.api.trainer import Trainer
from plait.comm.device import synchronize
from plait.comm.process_world import ProcessWorld
from plait.comm.thread_world import alone
from plait.cost.step_program import OpCall
from plait.plan.plan import Plan

_DEPTHS = (2, 34)  # of two models, of which the deeper has calls more and nothing else
_STEPS, _RUNS = 5, 9
_VIEWS = 2000
_TOGETHER_SECONDS = 0.15
_SIDE = 512  # of the matrices that ranks multiply side by side


class StepOverhead(NamedTuple):
    """Seconds that every call, every view and every step take at least: what Python does, and what starts a kernel."""

    op_seconds: float
    view_seconds: float
    step_seconds: float


class _Chain(nn.Module):
    """One layer, again and again: how deep it is changes neither parameters nor the update."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layer, self.depth = nn.Linear(8, 8), depth

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = F.gelu(self.layer(x))
        return x


def measure_overhead(device: torch.device) -> StepOverhead:
    """What calls and steps take at least on this device, while one rank runs alone.

    Two steps of a Trainer that differ in nothing but the number of their calls give the time of a call, and that of
    what is left.
    """
    ones = torch.ones(64, device=device)
    view = functools.partial(torch.ops.aten.view.default, ones, [8, 8])
    begin = time.perf_counter()
    for _ in range(_VIEWS):
        view()
    view_seconds = (time.perf_counter() - begin) / _VIEWS
    (few, few_views, short), (many, many_views, long) = (_tiny_step(depth, device) for depth in _DEPTHS)
    op_seconds = max((long - short - view_seconds * (many_views - few_views)) / (many - few), 1e-9)
    return StepOverhead(op_seconds, view_seconds, max(short - op_seconds * few - view_seconds * few_views, 1e-9))


def _tiny_step(depth: int, device: torch.device) -> tuple[int, int, float]:
    """The calls that compute in a step of a chain, those that are views, and its seconds."""
    plan, batch = Plan(), torch.ones(8, 8, device=device)
    optimizer = functools.partial(torch.optim.SGD, lr=0.0)
    trainer = Trainer(
        _Chain(depth), lambda model, x: model(x).sum(), optimizer, plan, world=alone(plan.process_mesh, device)
    )
    try:
        trainer.step(batch)
        times = []
        for _ in range(_RUNS):
            synchronize(device)
            begin = time.perf_counter()
            for _ in range(_STEPS):
                trainer.step(batch)
            synchronize(device)
            times.append((time.perf_counter() - begin) / _STEPS)
        compiled = trainer.executor.compiled
        assert compiled is not None  # after a step
        program = describe_program(compiled.program, batch, optimizer)
    finally:
        trainer.close()
    calls = [call for name in program.micro_graphs for call in program.graphs[name] if isinstance(call, OpCall)]
    views = sum(not call.num_bytes and not call.flops for call in calls)
    return len(calls) - views, views, statistics.median(times)


def measure_together(world: ProcessWorld, num_local: int) -> Sequence[tuple[int, float]]:
    """How fast a rank on cores of a host is while so many of the host's ranks compute, in units of its speed while all
    of them do: points (ranks, speed)."""
    everyone = world.everyone()
    left, long = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE * _SIDE)
    rates = []
    for num in range(1, num_local + 1):
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
    for at in reversed(range(num_local - 1)):  # a rank is never slower while fewer compute: what looks so is noise
        speeds[at] = max(speeds[at : at + 2])
    return list(enumerate(speeds, 1))
