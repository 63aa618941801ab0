"""Which tensors of a batch have its rows, and how those are cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.errors import BatchError
from plait.run.local_batch import batch_part
from plait.run.microbatch import microbatches


def batch() -> dict[str, Tensor]:
    """Eight rows, and a weight for each of three classes, which both halves of the rows need whole."""
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 6, generator=draws), torch.randint(3, (8,), generator=draws)
    return {"x": x, "y": y, "weights": torch.tensor([1.0, 2.0, 0.5])}


def test_only_what_has_the_batchs_rows_is_cut() -> None:
    whole = {**batch(), "scale": torch.tensor(2.0), "n": 3}
    for parts in ([batch_part(whole, index, 2) for index in range(2)], microbatches(whole, 2)):
        for name in ("x", "y"):
            assert torch.equal(torch.cat([part[name] for part in parts]), whole[name]), name
            assert len(parts[0][name]) == 4, name
        for part in parts:
            assert all(part[name] is whole[name] for name in ("weights", "scale", "n"))


def test_the_last_part_may_be_smaller_but_not_empty() -> None:
    five = {"x": torch.arange(5), "y": torch.arange(5)}
    assert [batch_part(five, index, 3)["x"].tolist() for index in range(3)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(BatchError, match="5 rows does not make 4 parts"):
        batch_part(five, 0, 4)


@pytest.mark.parametrize("plan", ["data=2", "data=2 batchnorm=local", "data=2 micro=2 batchnorm=local"])
def test_class_weights_of_a_batch_stay_whole(plan: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    report = plait.verify(model, _weighted, batch(), plan)
    assert report.ok, report


def _weighted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    weights = batch["weights"][batch["y"]]
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return plait.Weighted((losses * weights).sum(), weights.sum())
