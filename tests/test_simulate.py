"""The simulator: published bubbles and utilisations, memory and microbatches in flight, costs from a file."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cost.costs import Costs, read_costs
from plait.cost.simulate import simulate
from plait.errors import ConfigError, PlanError, ScheduleError
from plait.schedule.families import FAMILIES, make_replicated, make_schedule
from plait.schedule.in_flight import microbatches_in_flight, most_bytes_in_flight, most_microbatches_in_flight
from plait.schedule.readiness import chain, needs
from plait.schedule.transfers import add_transfers, add_updates
from plait.spec.schedule import Schedule
from plait.spec.trace import COMPUTE_KINDS, Sample, Span, Trace

# Table 5 of "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), with its inputs of table 9: stages, microbatches,
# and milliseconds of F, B, W and communication; then the bubble rates of 1F1B, ZB-H1 and ZB-H2.
ZERO_BUBBLE = """
    8  24  18.522 18.086 9.337 0.601  0.2431 0.1585 0.1083
    8  32  18.513 18.086 9.331 0.626  0.1985 0.1242 0.0837
    8  64  18.546 18.097 9.321 0.762  0.1240 0.0674 0.0444
    16  48 11.347 11.248 8.132 0.377  0.2552 0.1397 0.0672
    16  64 11.307 11.254 8.101 0.379  0.2082 0.1088 0.0516
    16 128 11.325 11.308 8.109 0.378  0.1251 0.0576 0.0266
"""
ROWS = [line.split() for line in ZERO_BUBBLE.strip().splitlines()]
CELLS = [(row, name, row[6 + i]) for row in ROWS for i, name in enumerate(("1f1b", "zb-h1", "zb-h2"))]

ONES = Costs.equal


def test_the_table_has_18_cells() -> None:
    assert len(CELLS) == 18


@pytest.mark.parametrize(("row", "name", "printed"), CELLS)
def test_the_zero_bubble_papers_table(row: list[str], name: str, printed: str) -> None:
    num_ranks, num_micro, times = int(row[0]), int(row[1]), [float(each) for each in row[2:6]]
    trace = simulate(make_schedule(name, num_ranks, num_micro), Costs.equal(num_ranks, *times))
    assert f"{trace.bubble():.4f}" == printed


@pytest.mark.parametrize(
    ("name", "num_micro", "percent"), [("gpipe", 4, 57), ("gpipe", 8, 72), ("gpipe", 8, 73), ("naive", 1, 25)]
)
def test_utilisation_of_four_stages(name: str, num_micro: int, percent: int) -> None:
    """m / (m + 3): 4 microbatches 57.1%, 8 of them 72.7%, which is printed cut and rounded."""
    found = 100 * simulate(make_schedule(name, 4, num_micro), ONES(4)).utilisation()
    assert percent in (int(found), round(found))


def test_eight_stages_under_gpipe_and_what_zb_h2_reaches_when_steps_follow() -> None:
    gpipe = simulate(make_schedule("gpipe", 8, 32), ONES(8))
    assert 8 * gpipe.utilisation() == pytest.approx(8 * 32 / 39)
    assert simulate(make_schedule("zb-h2", 8, 32), ONES(8)).bubble() == pytest.approx(0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    name, num_micro = draw(st.sampled_from(sorted(FAMILIES))), draw(st.integers(1, 12))
    chunks = draw(st.integers(1, 3)) if FAMILIES[name].any_chunks else None
    schedule = make_schedule(name, draw(st.integers(1, 6)), num_micro, chunks)
    seconds = st.lists(st.integers(0, 9), min_size=schedule.num_stages, max_size=schedule.num_stages).map(tuple)
    sizes = draw(seconds)
    costs = Costs(
        draw(seconds), draw(seconds), draw(seconds), latency=draw(st.sampled_from((0.0, 0.5))), bytes_per_second=10,
        crossing=draw(st.integers(0, 20)), activation_bytes=sizes, weight_activation_bytes=tuple(s // 2 for s in sizes),
    )  # fmt: skip
    return schedule, costs


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_trace_keeps_the_rules(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    trace = simulate(schedule, costs)
    edges = chain(schedule.num_stages)
    done = {(span.rank, span.name): span for span in trace.spans if span.kind in COMPUTE_KINDS}
    assert len(done) == sum(1 for _ in schedule.cells())
    for rank, action in schedule.cells():
        for peer, made in needs(schedule, rank, action, edges):
            stages = schedule.stages[peer][made.chunk], schedule.stages[rank][action.chunk]
            late = costs.transfer(*stages) if peer != rank else 0
            assert done[rank, str(action)].start >= done[peer, str(made)].end + late
    for rank in range(schedule.num_ranks):
        spans = [span for span in trace.of_rank(rank) if span.kind != "send"]
        assert all(first.end <= second.start for first, second in itertools.pairwise(spans))
        assert [span.name for span in spans if span.kind in COMPUTE_KINDS] == [
            str(action) for action in schedule.ranks[rank] if action.computes
        ]
        assert [each.value for each in trace.memory if each.rank == rank][-1] == 0
        assert [each.value for each in trace.in_flight if each.rank == rank][-1] == 0
    moved = add_updates(add_transfers(schedule, edges), edges)
    assert simulate(moved, costs).spans == trace.spans  # what is sent right away arrives as if nobody had written it
    assert Trace.from_json(trace.to_json()) == trace


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(1, 20))
def test_microbatches_in_flight(num_ranks: int, num_micro: int) -> None:
    def peaks(name: str, chunks: int | None = None) -> list[int]:
        schedule = make_schedule(name, num_ranks, num_micro, chunks)
        trace = simulate(schedule, ONES(schedule.num_stages))
        return [trace.peak_in_flight(rank) for rank in range(num_ranks)]

    assert peaks("1f1b") == [min(num_ranks - rank, num_micro) for rank in range(num_ranks)]
    assert max(peaks("zb-h1")) == max(peaks("1f1b"))
    assert max(peaks("zb-h2")) <= 2 * num_ranks - 1
    assert peaks("gpipe") == [num_micro] * num_ranks
    assert peaks("naive") == peaks("forward-only") == [1] * num_ranks
    # Chunks of half a stage: the memory of 1f1b, and one microbatch more for the cut-in-half DualPipe.
    assert max(peaks("zb-v")) <= 2 * num_ranks
    assert max(peaks("dualpipe-v")) <= 2 * num_ranks + 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_one_count_of_microbatches_in_flight(name: str) -> None:
    """What the order of actions says is what a simulation sees; a split backward keeps fewer up to its first part."""
    schedule = make_schedule(name, 4, 8)
    trace = simulate(schedule, ONES(schedule.num_stages))
    for rank, chunks in enumerate(schedule.stages):
        changes = [change for _, change in microbatches_in_flight(schedule, rank)]
        assert max(itertools.accumulate(changes)) == trace.peak_in_flight(rank) and sum(changes) == 0
        for chunk in range(len(chunks)):
            first = most_microbatches_in_flight(schedule, rank, chunk, last="B")
            assert 1 <= first <= most_microbatches_in_flight(schedule, rank, chunk) <= trace.peak_in_flight(rank)
    if name == "1f1b":
        assert [most_microbatches_in_flight(schedule, rank, 0) for rank in range(4)] == [4, 3, 2, 1]
    if name == "zb-h1":
        assert [most_microbatches_in_flight(schedule, rank, 0, last="B") for rank in range(4)] == [4, 3, 2, 1]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 8), st.integers(0, 12))
def test_no_bubble_between_with_equal_costs(num_ranks: int, more: int) -> None:
    zb_h2 = simulate(make_schedule("zb-h2", num_ranks, 2 * num_ranks - 1 + more), ONES(num_ranks))
    assert zb_h2.bubble() == pytest.approx(0)
    one = simulate(make_schedule("1f1b", num_ranks, 2 * num_ranks + more), ONES(num_ranks))
    h1 = simulate(make_schedule("zb-h1", num_ranks, 2 * num_ranks + more), ONES(num_ranks))
    assert h1.cost - h1.busy(0) == pytest.approx(
        (one.cost - one.busy(0)) / 3
    )  # (p - 1)(F + B - W) of (p - 1)(F + B + W)


def test_interleaving_makes_the_bubble_smaller() -> None:
    bubbles = []
    for chunks in (1, 2, 4):
        part = 1 / chunks
        costs = Costs.equal(4 * chunks, part, part, part)
        trace = simulate(make_schedule("interleaved", 4, 8, chunks), costs)
        bubbles.append(trace.cost - trace.busy(0))
    assert bubbles == pytest.approx([9, 9 / 2, 9 / 4])


def test_communication_and_bytes_by_edge() -> None:
    costs = dataclasses.replace(
        Costs.equal(3), latency=1.0, bytes_per_second=10.0, crossing={(0, 1): 10, (1, 2): 20, (0, 2): 100}
    )
    trace = simulate(make_schedule("forward-only", 3, 1), costs, chain(3, [(0, 2)]))
    start = {span.rank: span.start for span in trace.spans if span.kind == "forward"}
    assert start == {0: 0, 1: 1 + 2, 2: 1 + 1 + 10}
    sends = [
        (span.rank, span.name, span.start, span.end, span.num_bytes) for span in trace.spans if span.kind == "send"
    ]
    assert sorted(sends) == [(0, "F0>1", 1, 3, 10), (0, "F0>2", 1, 12, 100), (1, "F0>2", 4, 7, 20)]
    waits = [(span.rank, span.start, span.end) for span in trace.spans if span.kind == "wait"]
    assert waits == [(1, 0, 3), (2, 0, 12)]


def test_memory_lives_from_forward_to_backward_or_to_its_weight_part() -> None:
    costs = dataclasses.replace(
        Costs.equal(1), activation_bytes=(10,), weight_activation_bytes=(4,), state_bytes=(100,), step=(2.0,)
    )
    whole = Schedule.parse("name=whole micro=2\n0: F0 F1 B0 B1 STEP")
    split = Schedule.parse("name=split micro=2\n0: F0 F1 B0 B1 W0 W1 STEP")
    trace = simulate(whole, costs)
    assert [(each.time, each.value) for each in trace.memory] == [(0, 100), (0, 110), (1, 120), (4, 110), (6, 100)]
    assert trace.seconds == 8 and trace.cost == 6 and trace.peak_bytes(0) == 120
    trace = simulate(split, costs)
    assert [(each.time, each.value) for each in trace.memory][3:] == [(3, 114), (4, 108), (5, 104), (6, 100)]
    assert [each.value for each in trace.in_flight] == [0, 1, 2, 2, 2, 1, 0]


def test_a_slow_middle_gets_a_copy() -> None:
    costs = Costs((1, 2, 1), (1, 2, 1), (1, 2, 1))
    alone, two = (simulate(make_replicated("1f1b", copies, 32), costs).seconds for copies in ([1, 1, 1], [1, 2, 1]))
    assert 32 * 6 < alone <= 32 * 6 + 6  # what the middle does, and the way there and back
    assert 32 * 3 < two < 0.75 * alone


def test_a_schedule_that_deadlocks_is_not_simulated() -> None:
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(Schedule.parse("name=mine micro=2\n0: F0 B0 F1 B1\n1: F0 F1 B0 B1"), ONES(2))
    with pytest.raises(PlanError, match="costs of 3 stages for the 2"):
        simulate(make_schedule("1f1b", 2, 2), ONES(3))


def test_traces() -> None:
    spans = (Span(0, "forward", "F0", 1, 3), Span(1, "wait", "", 1, 4), Span(1, "backward", "B0", 4, 5, 0, 0, 1))
    trace = Trace(spans, 2, (Sample(0, 1, 7), Sample(0, 2, 5)))
    assert (trace.seconds, trace.cost, trace.busy(0), trace.peak_bytes(0)) == (4, 2, 2, 7)
    assert (trace.utilisation(0), trace.utilisation(1), trace.utilisation()) == (0.5, 0.25, 0.375)
    assert (trace.bubble(0), trace.bubble(1)) == (0, 0.5)
    assert trace.shifted(2).spans[0].start == 3
    assert trace.between(0, 2).spans == spans[:2]
    assert Trace((), 2).utilisation() == Trace((), 2).bubble() == 0
    with pytest.raises(ValueError, match="unknown kind of span 'rest'"):
        Span(0, "rest", "", 0, 1)
    with pytest.raises(ValueError, match="ends at 1, before 2"):
        Span(0, "wait", "", 2, 1)
    with pytest.raises(ValueError, match="rank 2 in a trace of 2 ranks"):
        Trace((Span(2, "wait", "", 0, 1),), 2)
    for text in ("{}", "[", "3"):
        with pytest.raises(ValueError, match="this is no trace"):
            Trace.from_json(text)


FULL = {
    "forward": [1, 2], "backward": 1, "weight": 0.5, "latency": 0.1, "bytes_per_second": 1e3, "bytes": {"0>1": 100},
    "activation_bytes": [5, 6], "weight_activation_bytes": 1, "state_bytes": 9, "reduce": 0.1, "step": [0, 1],
}  # fmt: skip


def test_costs_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(FULL))
    assert read_costs(path, 2) == Costs(
        (1.0, 2.0), (1.0, 1.0), (0.5, 0.5), latency=0.1, bytes_per_second=1e3, crossing={(0, 1): 100},
        activation_bytes=(5, 6), weight_activation_bytes=(1, 1), state_bytes=(9, 9), reduce=(0.1, 0.1), step=(0.0, 1.0),
    )  # fmt: skip
    assert read_costs(path, 2).transfer(1, 0) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forwards": 1}, "unknown key 'forwards'; the keys are forward, backward"),
        ({"weight": None}, "weight has None; it is a number, 0 or more"),
        ({"forward": [1, 2, 3]}, "forward has 3 numbers for 2 stages"),
        ({"forward": -1}, "forward has -1"),
        ({"forward": "fast"}, "forward has 'fast'"),
        ({"communication": 1}, "communication and latency are both given"),
        ({"bytes": {"0-1": 3}}, "bytes has '0-1'; a key is like '0>1'"),
        ({"bytes": {"1>0": 3}}, "bytes has '1>0'"),
        ({"bytes": {"0>2": 3}}, "of 2 stages"),
        ({"bytes_per_second": 0}, "bytes_per_second is above 0"),
    ],
)
def test_bad_costs(tmp_path: Path, changes: dict, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(FULL | changes))
    with pytest.raises(ConfigError, match=message):
        read_costs(path, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "are not JSON"),
        ("[1]", "are not an object"),
        ('{"forward": 1}', "'backward' is missing"),
        ('{"forward": 1, "backward": 1, "weight": 1, "bytes": 3}', "bytes without bytes_per_second"),
    ],
)
def test_what_is_no_costs_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_costs(path, 2)
    with pytest.raises(ConfigError, match="cannot read the costs"):
        read_costs(tmp_path / "none.json", 2)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(1, 12))
def test_messages_under_way(num_ranks: int, num_micro: int) -> None:
    def most(name: str, rank: int) -> int:
        schedule = make_schedule(name, num_ranks, num_micro)
        edges = chain(schedule.num_stages)
        return most_bytes_in_flight(add_transfers(schedule, edges), edges, rank, lambda action: 1 + (action.of == "B"))

    last = num_ranks - 1
    assert most("naive", 0) == 1
    assert most("gpipe", 0) == num_micro  # nothing comes back before all are sent
    assert most("gpipe", last) == 2 * num_micro
    # A backward tells the rank that the forward was taken, which the last rank does before it needs another.
    assert most("1f1b", 0) == min(num_ranks, num_micro)
    assert most("1f1b", last) <= 2 * num_ranks
