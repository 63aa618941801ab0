"""Batches on their way to the device: from the loader, from pinned memory, and those that are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_training import batch, captures, counted, loss_fn, train
from torch import Tensor
from torch.utils.data import Dataset

import plait
from plait.comm.protocol import World
from plait.engine.compiler import Compiler
from plait.plan.plan import Plan


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {name: torch.randint(0, 32, (12,), generator=generator) for name in ("x", "y")}


def losses_of(device: str, prefetch: int) -> tuple[list[float], list[str], set[str]]:
    """Losses of an epoch, the waits of its steps but the first, and where the loader's batches are."""
    plan = Plan.parse("data=2")
    compiler = Compiler(captures(device), plan)

    def rank(world: World) -> tuple[list[float], list[str], set[str]]:
        trainer = plait.Trainer(compiler.model, loss_fn, torch.optim.SGD, plan, world=world, compiler=compiler)
        loader = plait.loader(Rows(), 8, plan=plan, world=world, seed=1, prefetch=prefetch)
        losses, waits, kinds = [], list[str](), set[str]()
        for number, each in enumerate(loader):
            with counted(waits if number else []):
                losses.append(trainer.step(each)[0])
            kinds |= {leaf.device.type for leaf in each.tree.values()}
        loader.close()
        return [float(loss) for loss in losses], waits, kinds

    return plait.run_ranks(plan.mesh, rank, device=device)[0]


@pytest.mark.parametrize(("prefetch", "place"), [(2, "cuda"), (0, "cpu")])
def test_the_loader_moves_batches_ahead_of_the_step(prefetch: int, place: str) -> None:
    losses, waits, kinds = losses_of("cuda", prefetch)
    assert losses == pytest.approx(losses_of("cpu", prefetch)[0], abs=1e-9)
    assert (waits, kinds) == ([], {place})


@pytest.mark.parametrize("place", ["cuda", "pinned"])
def test_a_batch_may_be_on_the_device_or_pinned(place: str) -> None:
    def rank(trainer: plait.Trainer, _: Any) -> Any:
        waits: list[str] = []
        move = Tensor.cuda if place == "cuda" else Tensor.pin_memory
        given = {name: move(leaf) for name, leaf in batch(3).items()}
        with counted(waits):
            loss = trainer.step(given)[0]
        assert waits == []
        return [float(loss)]

    wanted = train("data=2 tensor=2", "cpu", then=lambda trainer, _: [float(trainer.step(batch(3))[0])])
    assert train("data=2 tensor=2", then=rank).evaluated == pytest.approx(wanted.evaluated, abs=1e-9)
