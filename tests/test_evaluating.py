"""Losses without training: lists of batches, and batches that a plan's ranks do not divide."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_loops import SGD, net
from torch import Tensor, nn

import plait
from plait.errors import BatchError, RankFailed

PLANS = ("", "data=4", "data=2 zero=3", "tensor=2 data=2", "pipeline=2 data=2 micro=2", "data=2 sync=2")


def rows(num: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(num, 16, generator=g, dtype=torch.float64), torch.randint(0, 16, (num,), generator=g)


def loss_fn(m: Any, b: Any) -> Any:
    z = m(b[0])
    return F.cross_entropy(z, b[1]), {"z": z}


def on_ranks(plan: str, run: Callable[[plait.Trainer, nn.Module], None]) -> None:
    parsed = plait.Plan.parse(plan)
    models = [net() for _ in range(parsed.mesh.size)]

    def rank(world: Any) -> None:
        model = models[world.rank]
        run(plait.Trainer(model, loss_fn, SGD, parsed, world=world), model)

    plait.run_ranks(parsed.mesh, rank)


@pytest.mark.parametrize("plan", PLANS)
def test_a_list_of_batches_of_which_the_last_is_short(plan: str) -> None:
    def run(trainer: plait.Trainer, _: nn.Module) -> None:
        trainer.step(rows(8))
        data = [rows(8, 1), rows(8, 2), rows(3, 3)]
        with trainer.gathered() as model, torch.no_grad():
            z = torch.cat([model(x) for x, _ in data])
        expected = F.cross_entropy(z, torch.cat([y for _, y in data]))
        for given in (data, iter(data), tuple(data)):
            loss, aux = trainer.evaluate(given)
            assert loss == pytest.approx(float(expected), rel=1e-12)
            torch.testing.assert_close(aux["z"], z)
        single, _ = trainer.evaluate(list(rows(8, 1)))
        assert single == pytest.approx(float(F.cross_entropy(z[:8], data[0][1])), rel=1e-12)

    on_ranks(plan, run)


def test_a_list_that_looks_like_no_batch_is_named() -> None:
    def run(trainer: plait.Trainer, _: nn.Module) -> None:
        trainer.step(rows(8))
        with pytest.raises(BatchError, match=r"may be one batch, or that many.*like tuple\(float64\[2\], int64\[1\]\)"):
            trainer.evaluate([{"x": rows(8)[0]}, {"x": rows(8)[0]}])

    on_ranks("", run)


def test_a_short_batch_of_which_ranks_have_their_own_rows_is_refused() -> None:
    def run(trainer: plait.Trainer, _: nn.Module) -> None:
        trainer.step(rows(8))
        trainer.evaluate(plait.LocalBatch(rows(2), 2, 5, "the last"))

    with pytest.raises(RankFailed, match="2 parts do not divide the batch of 5 rows"):
        on_ranks("data=2", run)


@pytest.mark.parametrize("plan", ["", "data=2", "tensor=2", "data=2 zero=3"])
def test_before_the_first_step_the_model_is_the_users(plan: str) -> None:
    def run(trainer: plait.Trainer, model: nn.Module) -> None:
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        with trainer.gathered(write=False) as inside:
            assert inside is model
            model[0].weight.detach().zero_()
        with suppress(KeyError), trainer.gathered():
            model[0].weight.detach().zero_()
            raise KeyError
        whole = trainer.full_state_dict()
        for name, value in before.items():
            torch.testing.assert_close(whole[name], value, rtol=0, atol=0)
        with trainer.gathered(rank=0):
            if trainer.world.rank == 0:
                model[0].weight.detach().mul_(2)
        trainer.prepare(rows(8))
        torch.testing.assert_close(trainer.full_state_dict()["0.weight"], before["0.weight"] * 2, rtol=0, atol=0)

    on_ranks(plan, run)


def test_ranks_that_change_the_model_each_in_its_own_way_are_refused() -> None:
    def run(trainer: plait.Trainer, model: nn.Module) -> None:
        with trainer.gathered():
            model[0].weight.detach().mul_(1 + trainer.world.rank)

    with pytest.raises(RankFailed, match=r"weights after gathered\(\)"):
        on_ranks("data=2", run)
