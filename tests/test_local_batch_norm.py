"""batchnorm=local: statistics of each rank's rows alone, and nothing else of the step changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.errors import PlanError


class Centre(nn.Module):
    """A running mean that is no batch norm's: it is of the whole batch."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.centre.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.centre


class Reshaped(nn.Module):
    """A norm over what a reshape of the batch makes its rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.InstanceNorm1d(2, True, track_running_stats=True) if kind == "sample" else nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.view(-1, 2, 4)
        if self.kind == "sample":
            return self.norm(steps).view(x.shape)  # type: ignore[no-any-return]
        steps = steps.transpose(0, 1) if self.kind == "time first" else steps
        normal = self.norm(steps.reshape(-1, 4)).view(steps.shape)
        return (normal.transpose(0, 1) if self.kind == "time first" else normal).reshape(x.shape)  # type: ignore[no-any-return]


class Reading(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        normal = super().forward(x)
        assert self.running_var is not None
        return normal * self.running_var.mean()


class Rows(nn.Module):
    def __init__(self, *middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.ModuleList(middle), nn.Linear(8, 5)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(torch.tanh(self.first(x)))
        for module in self.middle:
            x = x + torch.tanh(module(x))
        return self.last(x)  # type: ignore[no-any-return]


def masked_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], ignore_index=0)


def verifier(*middle: nn.Module) -> plait.Verifier:
    torch.manual_seed(0)
    batch = {"x": torch.randn(24, 6).double(), "y": torch.randint(0, 5, (24,))}
    return plait.Verifier(Rows(*middle).double(), masked_loss, batch)


@pytest.mark.parametrize(
    "middle",
    [
        lambda: (),  # the key touches batch norm alone: neither the mean over unmasked rows nor dropout
        lambda: (nn.BatchNorm1d(8), Centre(), nn.BatchNorm1d(8).eval()),
        lambda: (nn.BatchNorm1d(8, affine=False), nn.BatchNorm1d(8, track_running_stats=False)),
        lambda: (Reshaped("sample"), Reshaped("batch first")),
    ],
)
def test_all_but_the_statistics_is_of_the_whole_batch(middle: Any) -> None:
    found = verifier(*middle())
    for plan in (
        "data=2 batchnorm=local",
        "data=2 micro=3 pipeline=2 batchnorm=local",
        "data=4 zero=3 batchnorm=local",
    ):
        report = found.verify(plan)
        worst = max((d.relative for d in (report.worst_gradient, *report.buffers)), default=0)
        assert report.ok and worst < 1e-12, report


def test_running_statistics_are_the_first_ranks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6, momentum=1.0), nn.Linear(6, 5)).double()
    batch = {"x": torch.randn(8, 6).double(), "y": torch.randint(1, 5, (8,))}

    def rank(world: Any) -> Tensor:
        trainer = plait.Trainer(model, masked_loss, lambda p: torch.optim.SGD(p, lr=0.1), plan, world=world)
        trainer.step(batch)
        return trainer.executor.buffers["0.running_mean"].clone()

    plan = plait.Plan.parse("data=2 batchnorm=local")
    for mean in plait.run_ranks(plan.mesh, rank):
        torch.testing.assert_close(mean, batch["x"][:4].mean(0))


@pytest.mark.parametrize(
    ("module", "plan", "text"),
    [
        (nn.BatchNorm1d(8), "data=24 batchnorm=local", "a rank has 1 value per channel for the batch norm middle.0"),
        (nn.BatchNorm1d(8), "data=2 micro=12 batchnorm=local", "a smaller micro=, or batchnorm=global"),
        (Reshaped("time first"), "data=2 batchnorm=local", "is not cut into contiguous rows along its first dim"),
        (Reading(8), "data=2 batchnorm=local", "mean.default in middle.0 reads statistics"),
    ],
)
def test_what_has_no_statistics_of_its_own_is_refused(module: nn.Module, plan: str, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        verifier(module).verify(plan)
