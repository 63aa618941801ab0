"""The limits of a search that are refused, and a search whose plans are all refused by the model."""

from __future__ import annotations

from typing import NoReturn

import pytest

from plait.cost.plan_search import search
from plait.cost.shape_evaluator import ShapeEvaluator
from plait.cost.transformer import TransformerShape
from plait.errors import PlanError
from plait.plan.plan import Plan
from plait.plan.plan_space import Limits
from plait.spec.cluster_file import find_cluster

GPT = TransformerShape(16, 2048, 16, 50257, 1024, dropout=False, stores_scores=False)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ("tensr=2", "'tensr' is not searched; did you mean tensor"),
        ("tensor", "cannot read 'tensor' of the limits"),
        ("tensor=4..2", "a range is like tensor=1..8"),
        ("tensor=a..b", "a range is like tensor=1..8"),
        ("tensor=2 tensor=4", "tensor is given twice"),
        ("tensor=0", "bad value '0' of the limit 'tensor=0': a size is a whole number, 1 or more"),
        ("context=1,x", "bad value 'x' of the limit 'context=1,x'"),
        ("zero=1,7", "bad value '7' of the limit 'zero=1,7'"),
        ("precision=fp8", "bad value 'fp8' .* it is one of fp32"),
        ("sequence=1", "bad value '1' of the limit"),
        ("schedule=foo", "'foo' of the limit 'schedule=foo' is not searched; schedule is one of 1f1b"),
        ("recompute=banana", "recompute is one of none, layer, budget"),
        ("compress=topk", "compress is one of none, int8, int4"),
        ("bucket=7", "bad value '7' of the limit 'bucket=7': a size has a number and a unit"),
    ],
)
def test_bad_limits(limits: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Limits.parse(limits)


def test_what_fits_but_is_refused_by_the_model_is_an_error() -> None:
    class Refusing(ShapeEvaluator):
        def simulate(self, plan: Plan, rows: int) -> NoReturn:
            raise PlanError("the model says no")

    where = find_cluster("h100x8")
    with pytest.raises(PlanError, match=r"plans for h100x8 that fit by closed forms can be had: the model says no"):
        search(Refusing(GPT, where), where, (64,), Limits.parse("tensor=8 micro=1 recompute=none"))
