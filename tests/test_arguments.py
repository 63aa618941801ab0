"""Arguments of the public functions that cannot be taken: named, with the remedy, before anything starts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait import PlanError, Trainer

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"]).square().mean()


def rows(num: int = 8) -> dict[str, Tensor]:
    return {"x": torch.randn(num, 4, generator=torch.Generator().manual_seed(num))}


def trainer(**given: Any) -> Trainer:
    return Trainer(**{"model": nn.Linear(4, 2), "loss_fn": loss_fn, "optimizer": SGD, "plan": "", **given})


@pytest.mark.parametrize("on_nan", ["RAISE", "raises", None, 3, ["warn"]])
def test_another_word_for_what_a_loss_that_is_not_finite_does_is_refused(on_nan: Any) -> None:
    with pytest.raises(PlanError, match="^on_nan=.*'raise', .* or 'warn'"):
        trainer(on_nan=on_nan)
