"""verify of plans with parameter servers: a run in one process against the serial program that defines them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import plait
from plait.errors import BatchError, PlanError
from plait.integrations.ray_servers.optimizer_shard import ServerShard
from plait.schedule.consistency import Commit, Consistency, Go, Push, drawn_order
from tests.served import Points, make_click, make_clicks, make_model

pytestmark = pytest.mark.xdist_group("verify_served")  # plans share what is captured

ADAMW = functools.partial(torch.optim.AdamW, lr=0.05)
PLANS = [
    "workers=3 servers=2",
    "workers=2 servers=2 overlap=2",
    "workers=3 servers=1 staleness=1",
    "workers=3 servers=1 staleness=2 overlap=1",
    "workers=3 servers=2 staleness=0",
    "workers=3 servers=2 staleness=0 backup=1",
    "workers=2 servers=2 tensor=2 overlap=1",
    "workers=2 servers=1 pipeline=2 micro=3",
    "workers=2 servers=1 staleness=0 micro=2 precision=bf16",
    "workers=2 servers=1 compress=powersgd:2",
    "workers=2 servers=2 compress=topk:0.1 tensor=2",
    "workers=3 servers=1 staleness=0 sync=2 outer=nesterov",
    "workers=3 servers=2 staleness=0 sync=2 moments=reset compress=int8",
    "workers=2 servers=2 staleness=0 sync=2 data=2 zero=2",
]


def batch_of(dataset: Any, num: int) -> Any:
    return torch.utils.data.default_collate([dataset[index] for index in range(num)])


class Dropped(nn.Module):
    """Dropout and weights that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.top, self.dropout = nn.Linear(6, 24), nn.Linear(24, 3), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.dropout(self.wide(x).tanh()) + self.wide(-x))


@pytest.fixture(scope="module")
def verifier() -> plait.Verifier:
    torch.manual_seed(5)
    _, loss_fn = make_model()
    return plait.Verifier(Dropped(), loss_fn, batch_of(Points(), 12), optimizer=ADAMW, steps=3, clip_norm=0.3)


@pytest.fixture(scope="module")
def whole() -> plait.Verifier:
    """Of a batch that every number of workers divides."""
    torch.manual_seed(5)
    return plait.Verifier(Dropped(), make_model()[1], batch_of(Points(), 24), optimizer=ADAMW, steps=2)


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_in_one_process_equals_the_definition(verifier: plait.Verifier, plan: str) -> None:
    report = verifier.verify(plan, tolerance=1e-5)
    assert report.ok, report
    assert report.steps == 3 and {d.name for d in report.parameters} == set(dict(Dropped().named_parameters()))


@st.composite
def plans(draw: st.DrawFn) -> str:
    mode = draw(st.sampled_from(["none", "bounded", "step", "rounds"]))
    words = [f"workers={draw(st.integers(1, 4))}", f"servers={draw(st.integers(1, 3))}"]
    words.append(
        draw(st.sampled_from(["", "tensor=2", "data=2", "data=2 zero=3", "pipeline=2", "micro=2", "tensor=3"]))
    )
    words.append(draw(st.sampled_from(["", "", "compress=int8", "compress=int4", "compress=bf16", "compress=fp8"])))
    overlap = draw(st.integers(0, 3))
    if mode == "none":
        words.append(f"overlap={overlap}")
    elif mode == "bounded":
        words.append(f"overlap={overlap} staleness={overlap + draw(st.integers(1, 2))}")
    else:
        words.append(f"staleness=0 backup={draw(st.integers(0, int(words[0][-1]) - 1))}")
        words += ["sync=2", draw(st.sampled_from(["", "outer=sgd", "outer=nesterov"]))] if mode == "rounds" else []
    return " ".join(words)


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans())
def test_plans_drawn_at_random(whole: plait.Verifier, plan: str) -> None:
    report = whole.verify(plan)
    assert report.ok, report


def test_what_is_wrong_is_found(verifier: plait.Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ServerShard.set_gradients

    def doubled(self: ServerShard, gradients: Any, shares: Any) -> None:
        original(self, gradients, [2 * share for share in shares])

    monkeypatch.setattr(ServerShard, "set_gradients", doubled)
    sgd = plait.Verifier(Dropped(), make_model()[1], verifier.batch, steps=2)
    report = sgd.verify("workers=2 servers=1")
    assert not report.ok and "NOT EQUAL" in str(report)


def test_what_verify_refuses_of_servers(verifier: plait.Verifier) -> None:
    with pytest.raises(BatchError, match="12 does not split over the 5 workers"):
        verifier.verify("workers=5 servers=1")
    with pytest.raises(PlanError, match="fp16 scales the loss"):
        verifier.verify("workers=2 servers=1 precision=fp16")
    with pytest.raises(PlanError, match="runs no tables on servers, and the model has table; check the plan 'data=2'"):
        plait.verify(*make_click(), batch_of(make_clicks()[0], 12), "workers=2 servers=1")


@pytest.mark.parametrize("options", [{}, {"staleness": 1}, {"staleness": 0, "backup": 1}, {"overlap": 2}])
def test_a_drawn_order_is_one_that_can_be(options: dict[str, int]) -> None:
    order = drawn_order(Consistency(3, **options), 12, seed=4)
    consistency, bases = Consistency(3, order=order, **options), {0: [0], 1: [0], 2: [0]}
    decisions = [decision for worker in range(3) for decision in consistency.join(worker)]
    bases = {worker: [0] * decisions.count(Go(worker)) for worker in range(3)}
    for worker in order:
        decisions = consistency.push(Push(worker, bases[worker].pop(0)))
        for decision in decisions:
            if isinstance(decision, Go):
                bases[decision.worker].append(consistency.version)
    assert consistency.version == 12 and order != tuple(sorted(order))
    assert (
        order
        == drawn_order(Consistency(3, **options), 12, seed=4)
        != drawn_order(Consistency(3, **options), 12, seed=5)
    )
    assert any(isinstance(decision, Commit) for decision in decisions)


def test_a_model_in_half_precision_is_compared_as_it_rounds() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 4)).bfloat16()
    batch = {"x": torch.randn(8, 16).bfloat16(), "y": torch.randint(0, 4, (8,))}

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    report = plait.verify(model, loss_fn, batch, "workers=1 servers=2 staleness=2 micro=2")
    assert report.ok, report
