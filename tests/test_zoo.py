"""The zoo's further families, each under some of the plans, in rotation: with test_verify.py's, more than eighty."""

from __future__ import annotations

import pytest
from zoo import EXTRA, ZOO
from zoo_more import MORE

import plait
from plait.errors import PlanError

PLANS = ("data=2", "tensor=2", "pipeline=2 micro=2", "data=2 zero=3", "data=2 tensor=2")
# What is refused: (family, plan) -> why. All else verifies.
REFUSED = {
    ("wgan_critic", "tensor=2"): "splits no pair of weights",  # spectral norm needs each weight whole
    ("wgan_critic", "data=2 tensor=2"): "splits no pair of weights",
}


def plans_of(number: int, num: int) -> list[str]:
    """The plans of a family, by its number: neighbours have others."""
    return [PLANS[(number + 2 * place) % len(PLANS)] for place in range(num)]


# Those of transformers take seconds to capture, and have one plan each; test_capture.py has these two.
DEEP = {"mobilenet_v2", "efficientnet"}
CASES = [
    *((name, plans_of(number, 2)) for number, name in enumerate(MORE)),
    *((name, plans_of(number, 1)) for number, name in enumerate(EXTRA) if name not in DEEP),
]


@pytest.mark.filterwarnings("ignore:plait has no rule", "ignore:.*pipeline.*cut")
@pytest.mark.parametrize(("family", "plans"), CASES, ids=[name for name, _ in CASES])
def test_family(family: str, plans: list[str]) -> None:
    model, loss_fn, batch = {**MORE, **EXTRA}[family].make()
    verifier = plait.Verifier(model, loss_fn, batch)
    for plan in plans:
        if why := REFUSED.get((family, plan)):
            with pytest.raises(PlanError, match=why):
                verifier.verify(plan)
            continue
        report = verifier.verify(plan)
        assert report.ok, f"{family}\n{report}"


def test_the_zoo_has_sixty_families() -> None:
    assert len({*ZOO, *EXTRA, *MORE}) >= 60
    assert not ZOO.keys() & (EXTRA.keys() | MORE.keys()) and not EXTRA.keys() & MORE.keys()
    for plan in PLANS:
        assert sum(plan in plans for _, plans in CASES) >= 15, plan
