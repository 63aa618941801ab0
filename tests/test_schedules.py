"""Schedules as data: text that parses back, golden files, what every family keeps to, and what bad files get."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import PlanError, ScheduleError
from plait.schedule.check import check_schedule
from plait.schedule.families import FAMILIES, make_replicated, make_schedule
from plait.schedule.readiness import chain, needs, shared
from plait.schedule.schedule_grid import draw_grid
from plait.schedule.transfers import add_transfers, add_updates
from plait.spec.schedule import Action, Schedule

GOLDEN = Path(__file__).parent / "golden" / "schedules"
SIZES = {name: (4, 8, None) for name in FAMILIES} | {"naive": (4, 2, None), "zb-v": (3, 6, None)}
# What the docstrings draw, where small letters are of the second chunk.
DRAWN = {
    "naive": (4, 2), "gpipe": (4, 4), "1f1b": (4, 6), "interleaved": (4, 4), "looped-bfs": (4, 4), "zb-h1": (4, 6),
    "zb-h2": (4, 8), "zb-v": (3, 5), "dualpipe-v": (2, 6), "forward-only": (4, 4), "pipedream": (4, 6),
    "pipedream-vertical": (4, 6), "pipedream-2bw": (4, 8),
}  # fmt: skip

families = st.sampled_from(sorted(FAMILIES))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name, num_micro = draw(families), draw(st.integers(1, 13))
    chunks = draw(st.integers(1, 4)) if FAMILIES[name].any_chunks else None
    if draw(st.booleans()):
        return make_schedule(name, draw(st.integers(1, 7)), num_micro, chunks)
    return make_replicated(name, draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)), num_micro, chunks)


def golden(name: str) -> str:
    schedule = make_schedule(name, *SIZES[name])
    grid = draw_grid(schedule, chain(schedule.num_stages))
    return "".join(f"# {line}\n" for line in grid.splitlines()) + f"{schedule}\n"


@pytest.mark.parametrize("name", FAMILIES)
def test_golden(name: str) -> None:
    assert golden(name) == (GOLDEN / f"{name}.txt").read_text()
    assert Schedule.parse(golden(name)) == make_schedule(name, *SIZES[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_docstrings_draw_the_schedule(name: str) -> None:
    schedule = make_schedule(name, *DRAWN[name])
    lines = []
    for line in draw_grid(schedule, chain(schedule.num_stages)).splitlines():
        cells = [re.sub(r"(.*)\.1", lambda found: found[1].lower(), cell) for cell in line.partition("|")[2].split()]
        lines.append(" ".join(cell.rjust(2) for cell in cells).rstrip())
    drawn = (inspect.getdoc(FAMILIES[name].make) or "").splitlines()[-len(lines) :]
    assert textwrap.dedent("\n".join(drawn)).splitlines() == lines


WORDS = [
    ("F3", Action("F", 3)),
    ("B12.1", Action("B", 12, 1)),
    ("W0", Action("W", 0)),
    ("SEND:F3.1>2", Action("SEND", 3, 1, 2, "F")),
    ("RECV:B3<0", Action("RECV", 3, 0, 0, "B")),
    ("REDUCE.1", Action("REDUCE", chunk=1)),
    ("STEP", Action("STEP")),
    ("STEP7", Action("STEP", 7)),
]


@pytest.mark.parametrize(("word", "action"), WORDS)
def test_actions_print_and_parse(word: str, action: Action) -> None:
    assert Action.parse(word) == action
    assert str(action) == word


@pytest.mark.parametrize("word", ["", "F", "f3", "F3.", "F-1", "SEND:F3<2", "RECV:F3>2", "SEND:F3", "STEP.1", "B3 "])
def test_what_is_no_action(word: str) -> None:
    with pytest.raises(ValueError, match="an action looks like F3"):
        Action.parse(word)


@pytest.mark.parametrize(
    "arguments", [("G", 1), ("F",), ("SEND", 1), ("F", 1, 0, 2), ("F", -1), ("REDUCE", 3), ("SEND", 1, 0, 2, "STEP")]
)
def test_actions_check_themselves(arguments: tuple) -> None:
    with pytest.raises(ValueError, match="kind|microbatch|peer|negative|result"):
        Action(*arguments)


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_every_schedule_of_any_size_is_complete_and_runs(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule
    check_schedule(schedule)


@settings(max_examples=100, deadline=None)
@given(schedules(), st.data())
def test_transfers_under_any_skips(schedule: Schedule, data: st.DataObject) -> None:
    stages = st.integers(0, schedule.num_stages - 1)
    skips = data.draw(st.lists(st.tuples(stages, stages).filter(lambda pair: pair[0] < pair[1]), max_size=3))
    groups = data.draw(st.lists(st.lists(stages, min_size=1, max_size=3), max_size=2))
    edges = chain(schedule.num_stages, skips)
    # Of the async ones an early STEP stands before the sums: what is shared there is summed by the executor.
    moved = add_transfers(schedule, edges)
    full = add_updates(moved, edges, groups)
    check_schedule(moved, edges)
    check_schedule(full, edges | shared(groups))
    assert Schedule.parse(str(full)) == full
    assert [a for a in full.ranks[0] if a.computes] == [a for a in schedule.ranks[0] if a.computes]
    assert add_transfers(moved, edges) == moved
    for rank, actions in enumerate(moved.ranks):
        kinds = [action.kind for action in actions]
        sends = [(action.producer, action.peer) for action in actions if action.kind == "SEND"]
        assert len(sends) == len(set(sends))  # one for each producer and rank, however many stages need it
        for i, action in enumerate(actions):
            if action.kind == "SEND":  # right after what made the value
                assert actions[max(j for j in range(i) if kinds[j] != "SEND")] == action.producer
            for peer, made in needs(moved, rank, action, edges) if action.computes else ():
                assert peer == rank or made.kind == "SEND"


def test_transfers_of_a_skip_go_straight_and_none_on_the_same_rank() -> None:
    edges = chain(4, [(0, 3)])
    assert str(add_updates(add_transfers(make_schedule("gpipe", 4, 1), edges), edges, [(0, 3)])) == (
        "name=gpipe micro=1 stages=0|1|2|3\n"
        "0: RECV:B0<1 RECV:B0<3 F0 SEND:F0>1 SEND:F0>3 B0 REDUCE STEP\n"
        "1: RECV:F0<0 RECV:B0<2 F0 SEND:F0>2 B0 SEND:B0>0 STEP\n"
        "2: RECV:F0<1 RECV:B0<3 F0 SEND:F0>3 B0 SEND:B0>1 STEP\n"
        "3: RECV:F0<0 RECV:F0<2 F0 B0 SEND:B0>0 SEND:B0>2 REDUCE STEP"
    )
    turn = add_transfers(make_schedule("zb-v", 1, 2), chain(2))
    assert not [action for action in turn.ranks[0] if action.kind in ("SEND", "RECV")]


def test_replicas_take_turns() -> None:
    assert make_replicated("gpipe", [1, 2], 3) == Schedule.parse(
        "name=gpipe micro=3 stages=0|1|1\n0: F0 F1 F2 B0 B1 B2\n1: F0 F2 B0 B2\n2: F1 B1"
    )
    assert make_replicated("1f1b", [1, 1, 1], 5) == make_schedule("1f1b", 3, 5)
    with pytest.raises(PlanError, match=r"copies \[1, 0\]"):
        make_replicated("1f1b", [1, 0], 5)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("1f1", (4, 8), "there is no schedule '1f1'; did you mean 1f1b"),
        ("zb", (4, 8), "did you mean zb-v"),
        ("frobnicate", (4, 8), "there is no schedule 'frobnicate'; the schedules are naive, gpipe"),
        ("1f1b", (4, 8, 2), "chunks=2: the schedule 1f1b has 1 on each rank.*interleaved or looped-bfs"),
        ("zb-v", (4, 8, 3), "chunks=3: the schedule zb-v has 2"),
        ("interleaved", (4, 8, 0), "chunks=0"),
        ("1f1b", (0, 8), "0 ranks and 8 microbatches"),
    ],
)
def test_unknown_schedules(name: str, arguments: tuple, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_schedule(name, *arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the schedule is empty"),
        ("# nothing\n", "the schedule is empty"),
        ("0: F0 B0", "line 1: cannot read '0:'"),
        ("name=a stages=0", "line 1: micro= is missing"),
        ("name=a micro=x", "line 1: micro=x"),
        ("name=a micro=0\n0: F0", "0 microbatches"),
        ("name=a micro=1 stages=0|x", "line 1: cannot read stages=0|x"),
        ("name=a micro=1 stages=0|2\n0: F0\n1: F0", r"without stage 1"),
        ("name=a micro=1 stages=0|1\n0: F0", "actions of 1 ranks, but places stages on 2"),
        ("name=a micro=1\n\n0: F0 B0\n2: F0 B0", "line 4: '2:' stands where the actions of rank 1 are expected"),
        ("name=a micro=1\n0: F0 # fine\n1: F0 G0", "line 3: cannot read 'G0': an action looks like F3"),
        ("name=a micro=1 stages=0,0\n0: F0", "the same stage twice"),
    ],
)
def test_files_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message) if "|" in message else message):
        Schedule.parse(text)


TWO = "name=mine micro=2 stages=0|1\n"


@pytest.mark.parametrize(
    ("text", "message", "grid"),
    [
        (TWO + "0: F0 F1 B0 B1\n1: F0 F1 B0", "B1 of rank 1 is missing; each of 2 microbatches",
         ["rank 0 |   F0   F1    .    .    .   B0   ==", "rank 1 |    .   F0   F1   B0   == [B1]    ."]),
        (TWO + "0: F0 B0 F1 B1\n1: F0 F1 B1 B0",
         "deadlock: rank 0 stands before B0 and waits for B0 of rank 1; rank 1 stands before F1 and waits for F1 of"
         " rank 0", ["rank 0 |   F0 [B0]    .", "rank 1 |    .   F0 [F1]"]),
        (TWO + "0: B0 F0 F1 B1\n1: F0 F1 B0 B1", "B0 of rank 0 needs F0, which stands after it", ["rank 0 | [B0]"]),
        (TWO + "0: F0 F1 B0 B1\n1: F0 F1 W1 B0 B1", "W1 of rank 1 needs B1, which stands after it", []),
        (TWO + "0: F0 F1 B0 B1 W0\n1: F0 F1 B0 B1 B1", "B1 of rank 1 stands there 2 times", ["[B1]"]),
        (TWO + "0: F0 F1 B0 B1 F2\n1: F0 F1 B0 B1", "F2 of rank 0: microbatches are 0 to 1", ["[F2]"]),
        (TWO + "0: F0 F1 B0 B1\n1: F0 F1.1 B0 B1", "F1.1 of rank 1: that rank has chunks 0 to 0", ["[F1.1]"]),
        (TWO + "0: F0 F1 B0 STEP B1\n1: F0 F1 B0 B1", "STEP of rank 0 needs B1, which stands after it", ["[STEP]"]),
        (TWO + "0: F0 F1 B0 REDUCE B1\n1: F0 F1 B0 B1", "REDUCE of rank 0 needs B1", ["[REDUCE]"]),
        (TWO + "0: F0 STEP0 F1 B0 B1\n1: F0 F1 B0 B1", "STEP0 of rank 0 needs B0", ["[STEP0]"]),
        (TWO + "0: F0 SEND:F0>1 F1 B0 B1\n1: F0 F1 B0 B1",
         "transfer 0 from rank 0 to rank 1 is SEND:F0>1 there and none here", ["[SEND:F0>1]"]),
        (TWO + "0: SEND:F0>1 F0 F1 B0 B1\n1: RECV:F0<0 F0 F1 B0 B1", "SEND:F0>1 of rank 0 needs F0", []),
        (TWO + "0: F0 SEND:F0>4 F1 B0 B1\n1: F0 F1 B0 B1", "names rank 4; other ranks are 0 to 1", []),
        (TWO + "0: F0 F1 B0 B1 STEP1 STEP0\n1: F0 B0 STEP0 F1 B1 STEP1",
         "rank 0 updates as STEP1 STEP0, and each microbatch is in one update, the same on all ranks: give STEP0 STEP1"
         " in this order", ["[STEP1]"]),
        (TWO + "0: F0 F1 B0 STEP0 B1 STEP1\n1: F0 B0 F1 B1 STEP1", "rank 1 updates as STEP1", ["[STEP1]"]),
        (TWO + "0: F0 F1 B0 STEP0 B1\n1: F0 B0 STEP0 F1 B1", "rank 0 updates as STEP0, and", ["[STEP0]"]),
        ("name=mine micro=2 stages=0|0\n0: F0 B0 F1 B1\n1:", "F1 of rank 0: replicas of stage 0 take turns, and this is"
         " rank 1's", ["[F1]"]),
    ],
)  # fmt: skip
def test_schedules_that_cannot_run(text: str, message: str, grid: list[str]) -> None:
    with pytest.raises(ScheduleError) as caught:
        check_schedule(Schedule.parse(text))
    found = str(caught.value)
    assert message in found
    assert found.startswith("the schedule mine cannot run: ")
    assert all(part in found for part in grid)


def test_a_deadlock_of_a_skip_connection_only() -> None:
    """Rank 1 asks for the second microbatch of stage 0 before rank 0 may have it."""
    schedule = Schedule.parse("name=mine micro=1 stages=0,2|1\n0: F0 F0.1 B0.1 B0\n1: F0 B0")
    check_schedule(schedule)
    check_schedule(schedule, chain(3, [(0, 2)]))
    with pytest.raises(ScheduleError, match="deadlock"):
        check_schedule(schedule, chain(3) | {(("F", 2), ("F", 1))})


def test_the_grid_of_a_large_schedule_shows_what_is_around_the_mark() -> None:
    schedule = make_schedule("1f1b", 64, 128)
    broken = Schedule.parse(str(schedule).replace("\n40: F0 ", "\n40: "))
    with pytest.raises(ScheduleError, match="F0 of rank 40 is missing") as caught:
        check_schedule(broken)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + 16 + 1 and max(map(len, lines[1:])) <= 130
    assert "[F0]" in next(line for line in lines if line.startswith("rank 40"))
    assert lines[-1].startswith("(ranks 32 to 47 of 64, steps ")


if __name__ == "__main__":
    for each in FAMILIES:
        (GOLDEN / f"{each}.txt").write_text(golden(each))
