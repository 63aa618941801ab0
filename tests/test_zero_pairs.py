"""zero or central storage x recompute x micro x tensor x precision x replica x data x allreduce x bucket: a walk in
which every pair of values meets; a small GPT with dropout, tied weights, clipping and a loss given as (sum, weight)."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from pairs import covering
from test_verify import masked_loss
from torch import Tensor

import plait
from plait.api.job.gpt import BytesGPT
from plait.api.trainer import Trainer
from plait.comm.protocol import World
from plait.engine.compiler import Compiler
from plait.plan.plan import Plan

pytestmark = pytest.mark.xdist_group("zero_pairs")  # plans share what is captured

VALUES = {
    "zero": ("0", "1", "2", "3", "0 central=host"),
    "recompute": ("none", "layer", "*.up", "budget=300KiB"),
    "micro": ("1", "3"),
    "tensor": ("1", "2"),
    "precision": ("fp32", "bf16", "bf16 precision.head=fp32 precision.blocks.1=fp32"),
    "replica": ("1", "2"),
    "data": ("2", "1", "3"),
    "allreduce": ("backend", "ring", "naive"),
    "bucket": ("25MiB", "1KiB", "40KiB"),
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


def text(chosen: dict[str, str]) -> str:
    if chosen["data"] == "1" and chosen["recompute"].startswith("budget"):
        chosen = chosen | {"recompute": "budget=800KiB"}
    return " ".join(f"{key}={value}" for key, value in chosen.items())


@pytest.mark.parametrize("plan", [text(case) for case in covering(VALUES)])
def test_every_pair_of_values(plan: str) -> None:
    report = verifier().verify(plan)
    assert report.ok, report


def test_every_pair_is_in_a_case() -> None:
    cases = covering(VALUES)
    for one, other in itertools.combinations(VALUES, 2):
        met = {(case[one], case[other]) for case in cases}
        assert met == {*itertools.product(VALUES[one], VALUES[other])}
    assert len(cases) <= 24


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
