"""What is known against a plan before any rank starts, as values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from plait.api.trainer import Trainer
from plait.comm import sharing
from plait.comm.sharing import can_share
from plait.engine.checks import place_here
from plait.errors import PlanError, Refusal
from plait.plan.legality import refusals
from plait.plan.plan import Plan
from plait.plan.refusals import refused_together
from plait.plan.step_facts import ParameterFacts, Place, StepFacts

GPU = Place("cuda")
WEIGHT = {"weight": ParameterFacts()}


@pytest.mark.parametrize(
    ("plan", "facts", "place", "whats"),
    [
        ("data=2 zero=3", StepFacts(WEIGHT, clip_norm=1.0), GPU, []),
        ("home.parameters=host", StepFacts(), GPU, ["home.parameters=host has parameters updated on the host"]),
        ("home.parameters=disk", StepFacts(), GPU, ["home.parameters=disk has parameters updated on the host"]),
        ("home.parameters=host home.optimizer=host", StepFacts(), GPU, []),
        ("home.parameters=host", StepFacts(), Place(), []),
        ("home.parameters=host", StepFacts(), None, []),
        ("workers=2 servers=1 home.parameters=host", StepFacts(), GPU, ["home.parameters=host has parameters updated"]),
        ("data=4 central=host", StepFacts(), Place(ranks_per_host=4), []),
        ("data=4 central=host", StepFacts(), Place(ranks_per_host=2), ["central=host keeps the parameters in memory"]),
        ("replica=2 data=2 sync=2 central=host", StepFacts(), Place(ranks_per_host=2), []),
        ("data=2 central=host", StepFacts(), Place(shares_memory=False), ["central=host keeps the parameters in"]),
        ("central=host", StepFacts(), Place(shares_memory=False), []),
        (
            "pipeline=2 micro=4 schedule=pipedream precision=fp16", StepFacts(clip_norm=1.0, updates_within=True), None,
            ["schedule=pipedream updates each stage by itself"] * 2,
        ),
        ("workers=2 servers=1 precision=fp16", StepFacts(), None, ["precision=fp16 scales the loss"]),
        ("data=2 compress=int8 compress.nope=none", StepFacts(WEIGHT), None, ["compress.nope=none"]),
        ("data=2 compress=int8 compress.wei*=none", StepFacts(WEIGHT), None, []),
        ("data=2 compress=int8 compress.nope=none", StepFacts(), None, []),
    ],
)  # fmt: skip
def test_refusals(plan: str, facts: StepFacts, place: Place | None, whats: list[str]) -> None:
    found = refusals(Plan.parse(plan), facts, place)
    assert len(found) == len(whats)
    for refusal, what in zip(found, whats, strict=True):
        assert refusal.what.startswith(what) and refusal.instead
        assert str(refusal).startswith(what) and str(refusal).endswith(f"; {refusal.instead}")


def test_what_does_not_go_together_is_a_value_for_each() -> None:
    values = {"central": "host", "zero": "1", "home.parameters": "disk"}
    found = [one for one in refused_together(_defaults() | values, set(values))]
    assert [one.what for one in found] == [
        "central=host does not go with zero=1", "central=host does not go with home.parameters=disk"
    ]  # fmt: skip
    assert all(isinstance(one, Refusal) and one.why and one.instead for one in found)


def _defaults() -> dict[str, str]:
    from plait.plan.plan import describe_keys

    return {name: default for name, default, _ in describe_keys()}


def made(plan: str) -> Trainer:
    model = nn.Linear(2, 1)
    return Trainer(model, lambda model, batch: model(batch).sum(), torch.optim.SGD, plan)


def test_a_trainer_is_refused_before_it_meets_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on two hosts; there is nobody to meet, and it would wait for the other rank for long."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PlanError, match="central=host keeps the parameters in memory that the ranks of data=2 share"):
        made("data=2 central=host")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(PlanError, match="home.optimizer=device keeps the optimizer's state on cuda; add home.opt"):
        made("data=2 home.parameters=host")


def test_a_host_without_files_in_common_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_share() and place_here().shares_memory

    def refused(*args: Any) -> Any:
        raise PermissionError("no")

    monkeypatch.setattr(sharing.Segment, "open", refused)
    assert not can_share()
    with pytest.raises(PlanError, match="or the system lets no process open another's memory file; use replica=HOSTS"):
        made("data=2 central=host")
