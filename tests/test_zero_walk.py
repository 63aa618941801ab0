"""zero or central storage x tensor x micro x recompute x precision x replica: a walk in which every pair of values
meets, and plans at random; a small GPT with dropout, tied weights, clipping and a loss given as (sum, weight)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verify import masked_loss
from torch import Tensor

import plait
from plait.api.job.gpt import BytesGPT
from plait.api.trainer import Trainer
from plait.comm.protocol import World
from plait.engine.compiler import Compiler
from plait.plan.plan import Plan

pytestmark = pytest.mark.xdist_group("zero_walk")  # plans share what is captured

VALUES = {
    "zero": ("0", "1", "2", "3", "0 central=host"),
    "recompute": ("none", "layer", "*.up", "budget=300KiB"),
    "micro": ("1", "2", "3"),
    "tensor": ("1", "2"),
    "precision": ("fp32", "bf16"),
    "replica": ("1", "2"),
}
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True)  # the same on any part of a tensor


class TiedGPT(BytesGPT):
    def __init__(self) -> None:
        super().__init__(layers=2, width=32, heads=4, sequence=4, dropout=0.1)
        self.head.weight = self.symbols.weight


def batch() -> dict[str, Tensor]:
    symbols = torch.randint(0, 256, (72, 5), generator=torch.Generator().manual_seed(7))
    return {"x": symbols[:, :-1].contiguous(), "y": symbols[:, 1:].contiguous()}


@functools.cache
def verifier() -> plait.Verifier:
    torch.manual_seed(0)
    return plait.Verifier(TiedGPT(), masked_loss, batch(), optimizer=SGD, clip_norm=0.5)


def text(chosen: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in chosen.items())


def covering() -> list[str]:
    """Few plans in which each value meets each value of every other key."""

    def pairs(row: tuple[str, ...]) -> set[tuple[tuple[str, str], ...]]:
        return set(itertools.combinations(zip(VALUES, row, strict=True), 2))

    every = list(itertools.product(*VALUES.values()))
    missing = set().union(*map(pairs, every))
    plans = []
    while missing:
        row = max(every, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(row)
        plans.append(text(dict(zip(VALUES, row, strict=True))))
    return plans


@pytest.mark.parametrize("plan", covering())
def test_every_pair_of_values(plan: str) -> None:
    report = verifier().verify(f"data=2 {plan}")
    assert report.ok, report


@settings(max_examples=6)
@given(
    st.fixed_dictionaries({key: st.sampled_from(values) for key, values in VALUES.items()}),
    st.fixed_dictionaries(
        {},
        optional={
            "data": st.sampled_from("123"),
            "allreduce": st.sampled_from(["ring", "naive"]),
            "bucket": st.sampled_from(["1KiB", "40KiB"]),
            "precision.head": st.just("fp32"),
            "precision.blocks.1": st.sampled_from(["fp32", "bf16"]),
        },
    ),
)
def test_plans_at_random(chosen: dict[str, str], more: dict[str, str]) -> None:
    if more.get("data", "1") == "1" and chosen["recompute"].startswith("budget"):
        chosen["recompute"] = "budget=800KiB"
    report = verifier().verify(text(chosen | more))
    assert report.ok, report


def parameters_after(plan: str) -> dict[str, Tensor]:
    """After two steps, on rank 0; all ranks have the same bits."""
    compiler = Compiler(verifier().captures, Plan.parse(plan))

    def rank(world: World) -> dict[str, Tensor]:
        trainer = Trainer(compiler.model, masked_loss, SGD, compiler.plan, world=world, compiler=compiler)
        for _ in range(2):
            trainer.step(batch())
        return {name: tensor.clone() for name, tensor in trainer.full_state_dict().items()}

    ranks = plait.run_ranks(compiler.plan.mesh, rank)
    assert all(torch.equal(each[name], value) for each in ranks for name, value in ranks[0].items())
    return ranks[0]


@pytest.mark.parametrize("axes", ["data=3", "data=2 tensor=2 precision=bf16"])
def test_zero_and_recompute_change_no_bit(axes: str) -> None:
    """They move the same numbers elsewhere, and work them out again: also in half precision, where a comparison with
    one device leaves room for errors."""
    expected = parameters_after(axes)
    zero = ("zero=1", "zero=2 recompute=budget=300KiB", "zero=3 recompute=layer", "zero=3 bucket=4KiB")
    for more in (*zero, "central=host"):
        found = parameters_after(f"{axes} {more}")
        different = [name for name, value in expected.items() if not torch.equal(value, found[name])]
        assert not different, more
