"""A checkpoint loads under any other plan, bit for bit; what another model or optimizer made is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpointing import (
    Small,
    assert_same_state,
    batch,
    make_optimizer,
    on,
    on_axes,
    saved_once,
    trainer_of,
    whole_model,
    whole_state,
)
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.errors import CheckpointError
from plait.plan.plan import Plan

pytestmark = pytest.mark.xdist_group("checkpoints")  # trainers of tests/checkpointing.py share what is compiled

PLANS = [
    "data=4 zero=1",
    "data=2 zero=2 micro=2",
    "data=4 zero=3",
    "replica=2 data=2 zero=3",
    "tensor=2",
    "tensor=4 zero=0 data=2",
    "data=2 tensor=2 zero=1 precision=bf16",
    "data=2 tensor=2 zero=3 recompute=budget=4KiB",
    "data=8 zero=3",
    "data=2 tensor=2 central=host",
    "data=4 central=host precision=bf16",
    "pipeline=3 micro=2",
    "pipeline=2 micro=2 data=2 zero=3 schedule=interleaved",
    "pipeline=2 micro=4 data=2 zero=1 precision=bf16 schedule=zb-v",
    "pipeline=4 micro=2 tensor=2",
    "stages=[tensor=2|data=2] data=2 micro=2 zero=1",
]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint made under data=2, and its whole state."""
    path = tmp_path_factory.mktemp("first")

    def run(world: Any) -> Any:
        trainer = trainer_of("data=2", world, scheduler=scheduler, clip_norm=1.0)
        for i in range(3):
            trainer.step(batch(i))
        trainer.save(path, {"data": (1, 2.5)})
        return whole_state(trainer)

    return path, on("data=2", run)[0]


def scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


@pytest.mark.parametrize("plan", PLANS)
def test_any_plan_loads_what_any_other_saved(plan: str, first: tuple[Path, Any], tmp_path: Path) -> None:
    """data=2 -> the plan -> one device, each bit for bit: two pairs of plans each."""
    path, expected = first

    def there(world: Any) -> float:
        trainer = trainer_of(plan, world, other=True, scheduler=scheduler)
        assert trainer.load(path) == {"data": (1, 2.5)}
        assert_same_state(whole_state(trainer), expected)
        trainer.save(tmp_path, wait=False)
        loss = float(trainer.step(batch(5)))  # reads what was loaded: copies in other types or places too
        trainer.close()
        return loss

    def back(world: Any) -> float:
        trainer = trainer_of("", world, other=True, scheduler=scheduler)
        trainer.load(tmp_path)
        assert_same_state(whole_state(trainer), expected)
        return float(trainer.step(batch(5)))

    losses = on_axes(plan, there)
    assert losses[0] == pytest.approx(on("", back)[0], rel=2e-2 if "bf16" in plan else 1e-5)


def test_resharding_from_each_plan_to_the_next(first: tuple[Path, Any], tmp_path: Path) -> None:
    path, expected = first
    for index, plan in enumerate(PLANS):

        def run(world: Any, plan: str = plan, source: Path = path, target: Path = tmp_path / str(index)) -> None:
            trainer = trainer_of(plan, world, other=True, scheduler=scheduler)
            trainer.load(source)
            assert_same_state(whole_state(trainer), expected)
            trainer.save(target)

        on_axes(plan, run)
        path = tmp_path / str(index)


class Grouped(Small):
    """A fused q, k, v of four heads of queries and two of keys and values: blocks of unequal length."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.symbols(x)
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in self.qkv(h).split([8, 4, 4], -1))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(h + self.down(F.gelu(self.up(h))))


def test_unequal_blocks_load_under_any_plan(tmp_path: Path) -> None:
    def save(world: Any) -> Any:
        trainer = trainer_of("tensor=2", world, make=Grouped)
        assert str(trainer.layouts["qkv.weight"]) == "f32[16@tensor/2+1+1, 8]"
        trainer.step(batch(0))
        trainer.save(tmp_path / "0")
        return whole_state(trainer)

    expected = on("tensor=2", save)[0]
    for index, plan in enumerate(["data=2 tensor=2 zero=1", "data=2 zero=2", "data=2 tensor=2 zero=3", "tensor=2", ""]):

        def load(world: Any, plan: str = plan, index: int = index) -> None:
            trainer = trainer_of(plan, world, other=True, make=Grouped)
            trainer.load(tmp_path / str(index))
            assert_same_state(whole_state(trainer), expected)
            trainer.save(tmp_path / str(index + 1))

        on_axes(plan, load)


class Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows that say which they are."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = torch.randint(0, 13, (6,), generator=torch.Generator().manual_seed(index))
        return {"x": found[:-1], "y": found[1:], "row": torch.tensor(index)}


def rows_seen(world: Any, plan: str, steps: int, path: Path, resume: bool) -> list[tuple[float, list[int]]]:
    """The loss of each step and the rows that this rank had in it."""
    data = plait.loader(Numbers(), 8, seed=3, world=world, plan=Plan.parse(plan))
    trainer = trainer_of(plan, world, other=resume)
    if resume:
        data.load_state_dict(trainer.load(path)["data"])
    found = []
    while len(found) < steps:
        for local in data:
            seen = local.tree.pop("row").tolist()
            found.append((float(trainer.step(local)), seen))
            if len(found) == steps:
                break
    trainer.save(path, {"data": data.state_dict()}, wait=False)
    trainer.close()
    return found


@pytest.mark.parametrize("second", ["data=4", "replica=2 data=2 zero=1", "data=2 micro=4 zero=2", "tensor=2", ""])
def test_no_row_is_seen_twice_or_skipped_when_the_plan_changes(second: str, tmp_path: Path) -> None:
    """Over the end of an epoch of five batches."""

    def run(plan: str, steps: int, path: Path, resume: bool = False) -> list[tuple[float, list[int]]]:
        ranks = on_axes(plan, lambda world: rows_seen(world, plan, steps, path, resume))
        return [(step[0][0], sorted({row for _, rows in step for row in rows})) for step in zip(*ranks, strict=True)]

    unbroken = run("data=2", 11, tmp_path / "whole")
    resumed = run("data=2", 4, tmp_path / "run") + run(second, 7, tmp_path / "run", resume=True)
    assert [rows for _, rows in resumed] == [rows for _, rows in unbroken]
    assert [loss for loss, _ in resumed] == pytest.approx([loss for loss, _ in unbroken], rel=1e-5)


@pytest.mark.parametrize("name", ["SGD", "momentum", "Adafactor", "Lamb", "amsgrad", "Rprop"])
def test_state_of_every_optimizer(name: str, tmp_path: Path) -> None:
    factory = make_optimizer(name)

    def made(world: Any) -> tuple[Any, float]:
        trainer = trainer_of("data=2 tensor=2 zero=3", world, optimizer=factory)
        for i in range(2):
            trainer.step(batch(i))
        trainer.save(tmp_path)
        return whole_model(trainer), float(trainer.step(batch(7)))

    def loaded(world: Any) -> tuple[Any, float]:
        trainer = trainer_of("data=2 zero=1", world, other=True, optimizer=factory)
        trainer.load(tmp_path)
        found = whole_model(trainer)
        trainer.step(batch(7))
        trainer.load(tmp_path)
        return found, float(trainer.step(batch(7)))

    (expected, loss), (found, again) = on("data=2 tensor=2", made)[0], on("data=2", loaded)[0]
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert again == pytest.approx(loss, rel=1e-5)


def test_a_resumed_run_draws_what_the_unbroken_one_draws(tmp_path: Path) -> None:
    """Dropout by (seed, step), and the process's own generators, which a user's data may use."""

    class Dropped(Small):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.3, self.training)

    def draws() -> list[float]:
        return [
            float(torch.rand(1)),
            random.random(),
            random.gauss(0, 1),
            float(np.random.normal()),
            float(np.random.rand()),
        ]

    def run(world: Any) -> tuple[list[float], list[float]]:
        trainer = trainer_of("", world, make=Dropped, seed=4)
        trainer.step(batch(0))
        random.gauss(0, 1), np.random.normal()
        trainer.save(tmp_path)
        unbroken = [float(trainer.step(batch(i))) for i in range(3)], draws()
        other = trainer_of("", world, other=True, make=Dropped)
        other.load(tmp_path)
        assert ([float(other.step(batch(i))) for i in range(3)], draws()) == unbroken
        return unbroken

    on("", run)


def test_another_model_is_refused_before_any_change(first: tuple[Path, Any]) -> None:
    def double() -> nn.Module:
        return Small().double()

    class More(Small):
        def __init__(self) -> None:
            super().__init__(hidden=12)
            self.extra = nn.Linear(3, 3)
            self.out = nn.Linear(8, 8, bias=False)

    def run(world: Any) -> None:
        trainer = trainer_of("data=2 zero=1", world, make=More)
        before = whole_state(trainer)
        with pytest.raises(CheckpointError) as caught:
            trainer.load(first[0])
        for text in (
            "was made by another model: it lacks extra.bias, extra.weight; it has out.bias, which this model lacks",
            "up.weight has shape [10, 8] there and [12, 8] here",
        ):
            assert text in str(caught.value)
        assert_same_state(whole_state(trainer), before)
        with pytest.raises(CheckpointError, match="down.weight is float32 there and float64 here"):
            trainer_of("data=2", world, make=double).load(first[0])

    on("data=2", run)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "message"),
    [
        ("momentum", "Lamb", "SGD keeps momentum_buffer there, and Lamb here keeps exp_avg, exp_avg_sq, step"),
        ("SGD", "amsgrad", "SGD keeps nothing there, and Adam here keeps exp_avg, exp_avg_sq, max_exp_avg_sq, step of"),
        ("amsgrad", "Adam", "and the one here, with its options, keeps exp_avg, exp_avg_sq, step"),
        ("groups", "Adam", "it has 2 parameter groups there and 1 here"),
    ],
)
def test_another_optimizer_is_refused(saved_by: str, loaded_by: str, message: str, tmp_path: Path) -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.Adam([{"params": [first], "lr": 0.1}, {"params": others}])

    def factory(name: str) -> Any:
        return groups if name == "groups" else torch.optim.Adam if name == "Adam" else make_optimizer(name)

    def run(world: Any) -> None:
        saved_once(world, tmp_path, "data=2", optimizer=factory(saved_by))
        trainer = trainer_of("data=2", world, optimizer=factory(loaded_by), other=True)
        before = whole_model(trainer)
        with pytest.raises(CheckpointError) as caught:
            trainer.load(tmp_path)
        assert "was made with another optimizer" in str(caught.value) and message in str(caught.value)
        assert "load_weights" in str(caught.value)
        trainer.load_weights(tmp_path)
        after = whole_model(trainer)
        assert not torch.equal(after["up.weight"], before["up.weight"])

    on("data=2", run)
