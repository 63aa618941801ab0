"""More than eighty families of models: what is captured is the eager step, and plans equal one device.

The plans of a family share what is captured, and most families have some of the plans, in rotation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_capture import eager, run, same
from zoo import EXTRA, ZOO
from zoo_more import MORE

import plait
from plait.compile.capture.captured import Captured
from plait.compile.ir.node_info import info_of
from plait.compile.ops.draw import draw
from plait.errors import PlanError

PLANS = ("data=2", "tensor=2", "pipeline=2 micro=2", "data=2 zero=3", "data=2 tensor=2")
DISK = "bucket=8KiB home.parameters=disk home.optimizer=disk home.activations=disk"
# Layouts in memory that are not in the order of dims, values read late, sums over ranks in the way.
FROM_DISK = ("convnext", "lstm", "mixtral", "inception")
# What is refused: (family, plan) -> why. All else verifies.
REFUSED = {
    ("wgan_critic", "tensor=2"): "splits no pair of weights",  # spectral norm needs each weight whole
    ("wgan_critic", "data=2 tensor=2"): "splits no pair of weights",
}


def plans_of(number: int, num: int) -> list[str]:
    """The plans of a family, by its number: neighbours have others."""
    return [PLANS[(number + 2 * place) % len(PLANS)] for place in range(num)]


# The last two of transformers take seconds to capture, and have no plan.
DEEP = {"mobilenet_v2", "efficientnet"}
CASES = {
    **{name: [f"data=3 zero=3 tensor=2 {DISK}", DISK] if name in FROM_DISK else ["data=3 tensor=2"] for name in ZOO},
    **{name: plans_of(number, 2) for number, name in enumerate(MORE)},
    **{name: [] if name in DEEP else plans_of(number, 1) for number, name in enumerate(EXTRA)},
}


@pytest.mark.filterwarnings("ignore:plait has no rule", "ignore:.*pipeline.*cut")
@pytest.mark.parametrize("family", CASES)
def test_family(family: str) -> None:
    model, loss_fn, batch = {**ZOO, **MORE, **EXTRA}[family].make()
    verifier = plait.Verifier(model, loss_fn, batch)
    for plan in CASES[family]:
        if why := REFUSED.get((family, plan)):
            with pytest.raises(PlanError, match=why):
                verifier.verify(plan)
            continue
        report = verifier.verify(plan)
        assert report.ok, f"{family}\n{report}"
    captured = verifier.captures.captured(batch, train=True)
    check_graph(captured, {name for name, _ in model.named_modules()})
    before = {("buffer", name): b.clone() for name, b in model.named_buffers()}
    found = run(captured, model, batch)
    wanted = eager(model, loss_fn, batch)  # without the buffers that stay
    assert all(torch.equal(found.pop(name), before[name]) for name in found.keys() - wanted.keys())
    same(found, wanted)


def check_graph(captured: Captured, modules: set[str]) -> None:
    """Backward follows forward; no call changes what it is given, or draws numbers by itself; modules have names."""
    phases = []
    nodes = captured.graph.nodes
    for node in nodes:
        if node.op == "call_function":
            target: Any = node.target
            assert "val" in node.meta and info_of(node).phase in ("forward", "backward")
            assert not getattr(getattr(target, "_schema", None), "is_mutable", False), node
            assert (
                target is draw
                or torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ())
                or "scaled_dot_product" in str(target)
            ), node
            phases.append(info_of(node).phase)
    assert phases == sorted(phases, reverse=True)
    assert {info_of(node).module for node in nodes} <= modules


def test_the_zoo_has_sixty_families() -> None:
    assert len({*ZOO, *EXTRA, *MORE}) >= 60
    assert not ZOO.keys() & (EXTRA.keys() | MORE.keys()) and not EXTRA.keys() & MORE.keys()
    for plan in PLANS:
        assert sum(plan in plans for plans in CASES.values()) >= 15, plan
