"""A small job with parameter servers for the tests, and the serial programs that its modes are compared with."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import plait
from plait.integrations.ray_servers.server_job import Job, make_job
from plait.integrations.ray_servers.tables.sparse_table import SparseTable
from plait.plan.plan import Plan

NUM_ITEMS = 48
NUM_IDS = 40


class Points(Dataset[dict[str, Tensor]]):
    """Random points with labels, some of which do not count."""

    def __len__(self) -> int:
        return NUM_ITEMS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator)
        return {"x": x, "y": x[:3].sin(), "counts": torch.tensor(float(index % 3 + 1))}


def make_model(width: int = 10) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)), weighted


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(sum, weight): rows count differently, so that workers' gradients do too."""
    errors = (model(batch["x"]) - batch["y"]).square().sum(1)
    return plait.Weighted((errors * batch["counts"]).sum(), batch["counts"].sum())


def make_data() -> tuple[Any, Any]:
    return Points(), Points()


class Clicks(Dataset[dict[str, Tensor]]):
    """Ids of three fields, some of them often."""

    def __len__(self) -> int:
        return NUM_ITEMS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = (torch.rand(3, generator=generator).pow(3) * NUM_IDS).long()
        return {"ids": ids, "clicked": (ids.sum() % 2).float()}


class ClickModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = SparseTable(NUM_IDS, 4, ids="ids", lr=0.1)
        self.top = nn.Linear(12, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.table(ids).flatten(1))[:, 0]


def make_click() -> tuple[nn.Module, Any]:
    return ClickModel(), clicked


def clicked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(batch["ids"]), batch["clicked"])


def make_clicks() -> tuple[Any, Any]:
    return Clicks(), None


class Slow(Dataset[dict[str, Tensor]]):
    """Items that take a while to read: workers that wait for them leave the processor to processes that start."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(0.01)
        return self.dataset[index]


def make_slow_data() -> tuple[Any, Any]:
    return Slow(Points()), None


def make_slow_clicks() -> tuple[Any, Any]:
    return Slow(Clicks()), None


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def job_of(plan: str, out: Path, **changes: Any) -> Job:
    given: dict[str, Any] = {
        "optimizer": functools.partial(torch.optim.AdamW, lr=0.05),
        "batch_size": 12,
        "steps": 4,
        "scheduler": halved,
        "make_model": make_model,
        "make_data": make_data,
        "folder": str(out / "checkpoints"),
        "num_items": NUM_ITEMS,
    }
    return make_job(Plan.parse(plan), out=str(out), **(given | changes))


class Serial:
    """A parameter server in a few lines: versions of the values, and gradients on any of them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model, self.loss_fn = job.make_model()
        self.optimizer = job.optimizer(list(self.model.parameters()))
        self.scheduler = job.scheduler(self.optimizer) if job.scheduler else None
        self.data = job.make_data()[0]

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def gradient(self, values: dict[str, Tensor], piece: int) -> tuple[dict[str, Tensor], float]:
        """Of the mean loss on a piece of the data, and the piece's weight."""
        rows = self.rows(piece)
        for name, p in self.model.named_parameters():
            p.data, p.grad = values[name].clone(), None
        found = self.loss_fn(self.model, rows)
        total, weight = found if isinstance(found, tuple) else (found, torch.ones(()))
        (total / weight).backward()
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}, float(weight)

    def update(self, values: dict[str, Tensor], gradients: Sequence[tuple[dict[str, Tensor], float]]) -> None:
        """Step by the weighted mean; afterwards the model has the new values."""
        whole = sum(weight for _, weight in gradients)
        for name, p in self.model.named_parameters():
            p.data = values[name].clone()
            p.grad = sum((g[name] * (weight / whole) for g, weight in gradients), torch.zeros_like(p))
        self.optimizer.step()

    def rows(self, piece: int) -> dict[str, Tensor]:
        batch, part = divmod(piece, self.job.num_parts)
        epoch, index = divmod(batch, NUM_ITEMS // self.job.batch_size)
        key = (self.job.seed * 0x9E3779B1 + epoch) & ((1 << 62) - 1)
        order = torch.randperm(NUM_ITEMS, generator=torch.Generator().manual_seed(key)).tolist()
        size = self.job.batch_size // self.job.num_parts
        first = index * self.job.batch_size + part * size
        items = [self.data[i] for i in order[first : first + size]]
        return {key: torch.stack([item[key] for item in items]) for key in items[0]}
