"""What the ranks of test_memory.py run: training steps whose allocations are counted."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import plait
from plait.api.job.gpt import BytesGPT, loss_fn
from plait.comm.protocol import World
from plait.compile.ops.experts import expert_mm
from plait.engine.compiler import Captures, Compiler
from plait.engine.local_batch import LocalBatch
from plait.plan.axes import batch_part

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
ROWS, SEQUENCE = 16, 32


def gpt() -> BytesGPT:
    torch.manual_seed(0)
    return BytesGPT(layers=2, width=64, heads=4, sequence=SEQUENCE)


class Experts(nn.Module):
    """An MLP for each of four experts; two of them have each token, all of them the same number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, width, 4 * width) * 0.1)
        self.down = nn.Parameter(torch.randn(4, 4 * width, width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1).unsqueeze(1).expand(-1, 2, -1).reshape(-1, x.shape[-1])
        ids = torch.arange(len(rows), device=x.device) % 4
        y: Tensor = expert_mm(nn.functional.gelu(expert_mm(rows, self.up, ids)), self.down, ids)
        return y.view(*x.shape[:2], 2, -1).sum(2)


def mixture() -> BytesGPT:
    model = gpt()
    for block in model.blocks:
        block.up, block.down = nn.Identity(), Experts(64)
    return model


def batch() -> dict[str, torch.Tensor]:
    symbols = torch.randint(0, 256, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(7))
    return {"x": symbols[:, :-1].contiguous(), "y": symbols[:, 1:].contiguous()}


def peaks(world: World, plans: list[str], model: Callable[[], BytesGPT] = gpt) -> list[tuple[int, int]]:
    """The most bytes of tensors that this rank has at a time in a step after the first, under each plan; and how
    much of the shared memory from which it sends is used in a step: that depends on how far the others are."""
    captures = Captures(model(), loss_fn, world.device)
    return [_peak(world, Compiler(captures, plait.Plan.parse(plan))) for plan in plans]


def _peak(world: World, compiler: Compiler) -> tuple[int, int]:
    arenas = [_Arena(world.comm(axis)) for axis in world.mesh.communicators] + [_Arena(world.everyone())]
    trainer = plait.Trainer(compiler.model, loss_fn, ADAMW, compiler.plan, world=world, compiler=compiler)
    rows = ROWS // compiler.plan.num_batch_parts
    index = batch_part(world.mesh, world.mesh.coordinates(world.rank))
    part = {key: value[index * rows :][:rows].clone() for key, value in batch().items()}
    local = LocalBatch(part, rows, ROWS)
    trainer.step(local)
    replica, optimizer = trainer.executor, trainer.optimizer
    assert optimizer is not None
    held: list[Any] = [*part.values(), *replica.parameters.values(), *replica.rank_parameters.inputs.values()]
    held += [value for state in optimizer.state.values() for value in state.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if torch.is_tensor(t)}
    del held
    # What torch.distributed's own thread happens to let go last is not seen to go, or goes in the next step.
    steps = [_allocated(trainer, local, arenas) for _ in range(5)]
    most = statistics.median_low([most for most, left, _ in steps if left == 0] or [most for most, *_ in steps])
    return sum(storages.values()) + most, statistics.median_low([shared for *_, shared in steps])


def _allocated(trainer: plait.Trainer, local: LocalBatch, arenas: list[_Arena]) -> tuple[int, int, int]:
    """The most bytes at a time of what one step allocates, what of it is left, and the shared memory it used."""
    for arena in arenas:
        arena.most = 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        trainer.step(local)
    total = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total)
    return most, total, sum(arena.most for arena in arenas)


class _Arena:
    """How much of the shared memory from which this rank sends was used since `most` was set to 0."""

    def __init__(self, comm: Any) -> None:
        self.most = 0
        if not hasattr(comm, "_arena"):
            return
        take, start = comm._arena.take, comm._own.arena_start

        def watched(num_bytes: int) -> int | None:
            offset = take(num_bytes)
            if offset is not None:
                self.most = max(self.most, offset + num_bytes - start)
            return offset

        comm._arena.take = watched
