"""The search for zero-bubble schedules: valid, within memory, and no worse than the schedules that need none."""

from __future__ import annotations

import pytest

from plait.cost.costs import Costs
from plait.cost.simulate import simulate
from plait.errors import PlanError
from plait.schedule.check import check_schedule
from plait.schedule.families import make_schedule
from plait.schedule.zero_bubble_rules import ScheduleRules, StageSeconds, alternating, in_time, search_zero_bubble
from plait.spec.schedule import BACKWARD, FORWARD, Schedule


def most_held(schedule: Schedule, kept: float) -> float:
    """The most that a rank holds, in activations of microbatches."""
    most = 0.0
    for actions in schedule.ranks:
        held = 0.0
        for action in actions:
            held += {FORWARD: 1.0, BACKWARD: kept - 1.0}.get(action.kind, -kept)
            most = max(most, held)
    return most


@pytest.mark.parametrize(("ranks", "num_micro"), [(1, 1), (1, 3), (2, 1), (3, 8), (4, 2), (4, 12)])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (1.0, 2.0, 3.0), (1.0, 1.0, 0.0)])
@pytest.mark.parametrize(("factor", "kept"), [(1, 1.0), (2, 0.4)])
@pytest.mark.parametrize("rules", [alternating, in_time])
def test_what_is_found_is_valid_and_within_memory(
    ranks: int, num_micro: int, times: tuple[float, float, float], factor: int, kept: float, rules: ScheduleRules
) -> None:
    found = search_zero_bubble([StageSeconds(*times)] * ranks, 0.1, num_micro, factor * ranks, kept, (rules,))
    check_schedule(found)
    assert most_held(found, kept) <= factor * ranks + 1e-9
    costs = Costs.equal(ranks, *times, 0.1)
    plain = simulate(make_schedule("1f1b", ranks, num_micro), costs)
    assert simulate(found, costs).cost <= plain.cost + 1e-9


def test_more_memory_leaves_less_bubble() -> None:
    stages, costs = [StageSeconds(2.0, 2.0, 1.0)] * 6, Costs.equal(6, 2.0, 2.0, 1.0, 0.05)
    bubbles = [simulate(search_zero_bubble(stages, 0.05, 30, limit, 0.4), costs).bubble() for limit in (6, 9, 12)]
    assert bubbles == sorted(bubbles, reverse=True)
    assert bubbles[-1] < 0.01 < simulate(make_schedule("zb-h2", 6, 30), costs).bubble()


def test_a_slow_stage_sets_the_pace() -> None:
    stages = [StageSeconds(1.0, 1.0, 1.0)] * 3 + [StageSeconds(1.5, 1.5, 1.5)]
    found = search_zero_bubble(stages, 0.0, 16, 8)
    each = tuple(zip(*((stage.forward, stage.inputs, stage.weight) for stage in stages), strict=True))
    assert simulate(found, Costs(*each)).cost == pytest.approx(16 * 4.5, rel=0.05)


def test_too_little_memory() -> None:
    with pytest.raises(PlanError, match="a limit of 3 microbatches for 4 ranks; give 4 or more"):
        search_zero_bubble([StageSeconds(1, 1, 1)] * 4, 0.0, 8, 3)
