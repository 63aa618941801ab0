"""Memory of a device: what is predicted is what is taken, and what is said when it ends."""

from __future__ import annotations

import functools
import gc
import re
from typing import Any

import host_gpu
import pytest
import torch
from device_training import ADAMW, DeviceModel, batch, loss_fn
from torch import nn

import plait
from plait.errors import DeviceMemoryError, RankFailed
from plait.plan.plan import Plan

PLANS = ("data=1", "micro=4", "recompute=layer")


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_takes_what_is_predicted(plan: str) -> None:
    model: nn.Module = DeviceModel(torch.float32)
    predicted = plait.memory(model, loss_fn, batch(), plan, optimizer=ADAMW).rank(0).step_peak
    gc.collect()  # what earlier tests left
    before = torch.cuda.memory_allocated()

    def rank(world: Any) -> int:
        trainer = plait.Trainer(model, loss_fn, ADAMW, Plan.parse(plan), world=world)
        for index in range(2):
            trainer.step(batch(index))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        trainer.step(batch())
        return torch.cuda.max_memory_allocated() - before

    assert plait.run_ranks(Plan.parse(plan).mesh, rank, device="cuda")[0] == pytest.approx(predicted, rel=0.1)


class Wide(nn.Module):
    """Its parameters take more than its activations, or the other way round."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(x)))


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


@pytest.mark.parametrize(
    ("width", "rows", "limit", "doing", "remedy"),
    [
        (256, 8, 900_000, "the update of step 1", "add home.optimizer=host, or recompute=layer, or micro=2"),
        (16, 8192, 1_000_000, "forward and backward of step 1", "add recompute=layer, or micro=2, or micro=4"),
    ],
)
def test_when_memory_ends_the_message_has_each_class_and_what_would_take_less(
    width: int, rows: int, limit: int, doing: str, remedy: str
) -> None:
    if not host_gpu.is_here():
        pytest.skip("it would take all of this GPU's memory")
    gc.collect()
    base = torch.cuda.memory_allocated()

    def rank(world: Any) -> None:
        trainer = plait.Trainer(Wide(width), mean, functools.partial(torch.optim.Adam, lr=1e-3), Plan(), world=world)
        trainer.step(torch.ones(rows, width))

    host_gpu.set_limit(base + limit)
    try:
        with pytest.raises(RankFailed) as caught:
            plait.run_ranks(Plan().mesh, rank, device="cuda")
    finally:
        host_gpu.set_limit(0)
    assert isinstance(caught.value.__cause__, DeviceMemoryError)
    message = str(caught.value.__cause__)
    assert re.search(r"of cuda ran out on rank 0 in " + doing, message)
    assert re.search(r"parameters [\d.]+ KiB, gradients .*, optimizer .*, activations, buffers .* of 1.0 GiB", message)
    assert remedy in message and "plait memory" in message
