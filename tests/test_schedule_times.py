"""The times of schedules without a trace: those of the simulator, to the last digit."""

from __future__ import annotations

import random

import pytest

from plait.cost.costs import Costs
from plait.cost.pipeline_forms import schedule_wait
from plait.cost.simulate import schedule_times, simulate
from plait.errors import PlanError
from plait.schedule.families import make_schedule


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("gpipe", None), ("1f1b", None), ("interleaved", 3), ("looped-bfs", 2), ("zb-h1", None), ("zb-h2", None),
     ("zb-v", None), ("dualpipe-v", None), ("naive", None)],
)  # fmt: skip
def test_times_are_those_of_the_trace(name: str, chunks: int | None) -> None:
    drawn = random.Random(name)
    for ranks, num_micro in ((1, 2), (2, 3), (4, 9)):
        schedule = make_schedule(name, ranks, num_micro, chunks)
        stages = range(schedule.num_stages)
        forward, backward, weight = (tuple(drawn.random() for _ in stages) for _ in range(3))
        kept = tuple(drawn.randrange(100, 200) for _ in stages)
        later = tuple(drawn.randrange(100) for _ in stages)
        crossing = {(stage, stage + 1): drawn.randrange(9) for stage in stages}
        costs = Costs(forward, backward, weight, 0.1, 0.01, 100.0, crossing, kept, later)
        trace, found = simulate(schedule, costs), schedule_times(name, ranks, num_micro, chunks, costs)
        assert found.seconds == pytest.approx(trace.seconds, rel=1e-12)
        assert found.busy == pytest.approx(max(map(trace.busy, range(ranks))), rel=1e-12)
        assert found.kept == max(each.value for each in trace.memory)


def test_a_schedule_that_does_not_exist() -> None:
    with pytest.raises(PlanError, match="did you mean zb-h2 or zb-h1"):
        schedule_times("zb-h9", 2, 4, None, Costs.equal(2))


def test_closed_forms_of_bubbles_are_those_of_schedules_with_few_microbatches_too() -> None:
    chunks = {"interleaved": 4, "looped-bfs": 2, "zb-v": 2, "dualpipe-v": 2}
    for name in ("1f1b", "gpipe", "zb-h1", "zb-h2", *chunks):
        for ranks, num_micro in ((2, 1), (2, 5), (4, 1), (4, 2), (4, 6), (4, 16), (8, 3), (8, 8), (8, 20)):
            each, times = chunks.get(name, 1), (1.0, 1.2, 0.8)
            split = (tuple(seconds / each for _ in range(each * ranks)) for seconds in times)
            made = schedule_times(name, ranks, num_micro, each if each > 1 else None, Costs(*split))
            closed = num_micro * sum(times) + schedule_wait(name, ranks, num_micro, each, *times)
            assert closed == pytest.approx(made.seconds, rel=0.05), (name, ranks, num_micro)
