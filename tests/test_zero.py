"""ZeRO, accumulation, recompute and precision: the numbers of one device under every combination."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait


class SharedGradients(nn.Module):
    """Parameters that are added up have one gradient node between them; `scale` has one that repeats a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.change = nn.Parameter(torch.randn(6, 8) * 0.3), nn.Parameter(torch.randn(48) * 0.3)
        self.bias, self.shift, self.scale = (nn.Parameter(torch.randn(6)) for _ in range(3))
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(x, self.weight + self.change.view(6, 8)) + self.bias + self.shift)
        return self.out(hidden).square().mean() + 0.1 * self.scale.sum()


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


@pytest.mark.parametrize("plan", ["", "micro=2", "data=2", "data=2 micro=3", "data=2 zero=1 micro=2", "data=3 zero=3"])
def test_parameters_that_share_a_gradient(plan: str) -> None:
    report = plait.verify(SharedGradients(), mean_loss, torch.randn(12, 8), plan, clip_norm=0.1, steps=3)
    assert report.ok, report
