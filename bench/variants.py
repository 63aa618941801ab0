"""How each contender sets up its step: `build(workload, ...)` in a process with torchrun's variables."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench import split_sequence
from bench.megatron import split_gpt
from bench.stages import torch_pipeline
from bench.workloads import LONG, WORKLOADS, loss_fn, optimizer
from plait import Plan, Trainer
from plait.comm.process_world import process_world

Step = Callable[[], Any]
JOBS = WORKLOADS | LONG


def independent(workload: str, fused: bool | None = None) -> Step:
    """No communication at all: each rank trains its half of the batch alone. The ideal of data parallelism."""
    rank, size = _place()
    return _eager(JOBS[workload].model(), JOBS[workload].batch(rank, size), fused)


def one_device(workload: str) -> Step:
    """The whole batch on one rank."""
    return _eager(JOBS[workload].model(), JOBS[workload].batch())


def torch_ddp(workload: str, fused: bool | None = None) -> Step:
    """torch's DistributedDataParallel with its default settings."""
    rank, size = _join()
    return _eager(DistributedDataParallel(JOBS[workload].model()), JOBS[workload].batch(rank, size), fused)


def torch_fsdp2(workload: str, reshard: bool = True, half: bool = False) -> Step:
    """torch's fully_shard, each block and the whole; without `reshard` parameters stay whole till backward, and `half`
    has them in bfloat16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank, size = _join()
    model = JOBS[workload].model()
    mesh = init_device_mesh("cpu", (size,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return _eager(model, JOBS[workload].batch(rank, size))


def torch_zero1(workload: str) -> Step:
    """torch's DistributedDataParallel with ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank, size = _join()
    model = DistributedDataParallel(JOBS[workload].model())
    updates = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=optimizer.keywords["lr"])
    return _eager(model, JOBS[workload].batch(rank, size), updates=updates)


def torch_autocast(workload: str) -> Step:
    """torch's DistributedDataParallel under bf16 autocast."""
    rank, size = _join()
    model = DistributedDataParallel(JOBS[workload].model())
    return _eager(model, JOBS[workload].batch(rank, size), autocast=True)


def torch_compiled(workload: str, autocast: bool = False) -> Step:
    """torch.compile of its DistributedDataParallel, which compiles the graph in parts, one for each bucket."""
    rank, size = _join()
    model = torch.compile(DistributedDataParallel(JOBS[workload].model()))
    return _eager(model, JOBS[workload].batch(rank, size), autocast=autocast)  # type: ignore[arg-type]


def torch_parallelize(workload: str) -> Step:
    """torch's parallelize_module: column and row parallel linears on DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    _, size = _join()
    model = JOBS[workload].model()
    mesh = init_device_mesh("cpu", (size,))
    columns, rows = ("query", "key", "value", "up"), ("out", "down")
    for block in model.blocks:
        parallelize_module(
            block, mesh, {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        )
    return _eager(model, JOBS[workload].batch())


def megatron(workload: str) -> Step:
    """The split written by hand (bench/megatron.py)."""
    rank, size = _join()
    return _eager(split_gpt(JOBS[workload].model(), rank, size), JOBS[workload].batch())


def megatron_sequence(workload: str) -> Step:
    """The split written by hand, with the sequence split between split weights (bench/split_sequence.py)."""
    rank, size = _join()
    return split_sequence.megatron_step(JOBS[workload], rank, size, optimizer)


def context(workload: str, kind: str) -> Step:
    """The sequence cut through the whole model, with attention written by hand (bench/split_sequence.py)."""
    rank, size = _join()
    return split_sequence.context_step(JOBS[workload], kind, rank, size, optimizer)


def torch_pipelining(workload: str, schedule: str, num_micro: int) -> Step:
    """torch.distributed.pipelining, cut by hand (bench/stages.py)."""
    rank, size = _join()
    fused = functools.partial(optimizer, fused=True)
    return torch_pipeline(JOBS[workload], schedule, num_micro, rank, size, fused)


class PlaitStep:
    """A step of plait's Trainer; every rank gives the global batch."""

    def __init__(self, workload: str, plan: str, shared_memory: bool) -> None:
        given = Plan.parse(plan)
        gloo = None if shared_memory else process_world(given.mesh, algorithm=given.allreduce, shared_memory=False)
        self.trainer = Trainer(JOBS[workload].model(), loss_fn, optimizer, given, world=gloo)
        self.batch = JOBS[workload].batch()

    def __call__(self) -> Tensor:
        return self.trainer.step(self.batch)


def plait(workload: str, plan: str, shared_memory: bool = True) -> Step:
    """plait; without `shared_memory` over Gloo, as between hosts."""
    return PlaitStep(workload, plan, shared_memory)


def _eager(
    model: nn.Module,
    batch: dict[str, Tensor],
    fused: bool | None = None,
    updates: Any = None,
    autocast: bool = False,
) -> Step:
    updates = updates or optimizer(model.parameters(), fused=fused)

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_fn(model, batch)
        loss.backward()
        updates.step()
        updates.zero_grad()
        return loss

    return step


def _place() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _join() -> tuple[int, int]:
    dist.init_process_group("gloo")
    return _place()
