"""The order of the passes that make the graphs of a plan, and what explain tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.backends.eager.passes import EAGER_PASSES
from plait.compile.pass_base import Pass, check_order
from plait.compile.pipeline import PASSES
from plait.errors import PlanError
from plait.report.explanation import Explanation

PLANS = [
    "data=2",
    "data=2 zero=3 micro=3",
    "tensor=2",
    "data=2 pipeline=2 micro=4 zero=2",
    "pipeline=2 recompute=layer",
]


def explained(plan: str) -> Explanation:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 8))
    batch = torch.randn(24, 8)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    return plait.explain(model, loss_fn, batch, plan)


@pytest.mark.parametrize("passes", [PASSES, EAGER_PASSES], ids=["compile", "eager"])
def test_every_pass_comes_after_those_that_provide_what_it_requires(passes: Sequence[Pass[Any]]) -> None:
    check_order(passes)
    assert {fact for each in passes for fact in each.requires} <= {fact for each in passes for fact in each.provides}


def test_every_pass_has_a_name_of_its_own() -> None:
    names = [each.name for each in (*PASSES, *EAGER_PASSES)]
    assert len({*names}) == len(names)


def test_an_order_that_lacks_a_fact_is_refused() -> None:
    first: Pass[Any] = Pass("first", "", lambda draft: None, provides=["layouts"])
    second: Pass[Any] = Pass("second", "", lambda draft: None, requires=["layouts"])
    check_order([first, second])
    with pytest.raises(PlanError, match="the pass 'second' requires 'layouts', which no pass before it provides"):
        check_order([second, first])


@pytest.mark.parametrize("plan", PLANS)
def test_explain_lists_the_passes_that_ran_in_their_order(plan: str) -> None:
    lines = explained(plan).passes().splitlines()
    ran = [line.split()[0] for line in lines[1:]]
    assert ran == [each.name for each in (*PASSES, *EAGER_PASSES) if each.name in ran]
    assert ("gather-parameters" in ran) == ("bucket-gathers" in ran) == ("zero=3" in plan)
    assert ("scatter-gradients" in ran) == ("zero" in plan)
    assert ("split-in-cells" in ran) == ("assign-stages" in ran) == ("pipeline" in plan)
    assert ("recompute" in ran) == ("recompute" in plan)


def test_explain_counts_what_a_pass_changes() -> None:
    rows = {line.split()[0]: line.split() for line in explained("tensor=2").passes().splitlines()}
    assert rows["mark-auxiliary"][2] != "+0" and not rows["mark-auxiliary"][2].startswith("+")
    assert rows["shard"][2].startswith("+")  # collectives


def test_explain_shows_the_graphs_before_and_after_a_pass() -> None:
    found = explained("data=2 zero=3")
    diff = found.diff("gather-parameters")
    assert "--- step before" in diff and "+++ step after" in diff
    assert "+gather_part = gather_part(" in diff and "world" not in diff
    assert "+gather_start = gather_start(world, data" in found.diff("bucket-gathers")
    assert found.diff("mark-auxiliary") == "the pass mark-auxiliary changes nothing"
    assert found.diff("split-in-cells") == "the pass split-in-cells does not run under this plan"


def test_a_pass_that_is_not_known_is_refused_with_those_near() -> None:
    with pytest.raises(PlanError, match="there is no pass 'gather'; did you mean bucket-gathers or gather-parameters"):
        explained("data=2").diff("gather")
