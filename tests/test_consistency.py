"""Who may go on, which pushes make an update, who holds what: decided without torch or any process."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.schedule.consistency import Commit, Consistency, Go, Late, Push, Refuse, may_go_on, num_needed, shares_of
from plait.schedule.variable_placement import Variable, place_variables
from plait.schedule.work_queue import WorkQueue


def begun(num: int, **options: object) -> Consistency:
    consistency = Consistency(num, **options)  # type: ignore[arg-type]
    for worker in range(num):
        decisions = consistency.join(worker)
    assert decisions == [Go(worker) for worker in range(num)]
    return consistency


def test_nobody_begins_before_all_are_there() -> None:
    consistency = Consistency(2)
    assert consistency.join(0) == [] and consistency.push(Push(0, 0))[0].why.endswith("without having taken values")
    assert consistency.join(1) == [Go(0), Go(1)]
    assert consistency.join(7) == [Go(7)], "who comes later begins at once"


def test_asynchronous_waits_for_nobody() -> None:
    consistency = begun(3)
    for number in range(1, 10):
        commit, go = consistency.push(Push(0, consistency.version))
        assert commit == Commit(number, (0,), (1.0,), (0,), number % 3 == 0) and go == Go(0)
    assert consistency.push(Push(1, 0))[0].staleness == (9,)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 10**6))
def test_the_bound_holds_and_nobody_waits_for_ever(num: int, bound: int, seed: int) -> None:
    consistency, draw = begun(num, staleness=bound), random.Random(seed)
    base = dict.fromkeys(range(num), 0)
    for _ in range(60):
        worker = draw.choice(sorted(base))
        for decision in consistency.push(Push(worker, base.pop(worker))):
            if isinstance(decision, Go):
                base[decision.worker] = consistency.version
        clocks = consistency.clocks
        assert max(clocks.values()) - min(clocks.values()) <= bound + 1
        assert set(base) == {w for w in clocks if may_go_on(clocks, w, bound)}
    assert consistency.version == 60


@given(st.integers(1, 4), st.integers(0, 2), st.integers(0, 3), st.integers(0, 10**6))
def test_workers_with_several_tasks(num: int, overlap: int, more: int, seed: int) -> None:
    """A worker's gradient is of the values once its push 1 + overlap before was taken in, or later if it waits."""
    bound = overlap + more if overlap + more else None
    consistency, draw = Consistency(num, bound, overlap=overlap), random.Random(seed)
    bases: dict[int, list[int]] = {worker: [] for worker in range(num)}
    pushed: dict[int, list[int]] = {worker: [0] * (1 + overlap) for worker in range(num)}  # versions after its pushes

    def carry_out(decisions: list[object]) -> None:
        for decision in decisions:
            if isinstance(decision, Go):
                bases[decision.worker].append(consistency.version)

    for worker in range(num):
        carry_out(consistency.join(worker))
    assert all(tasks == [0] * (1 + overlap) for tasks in bases.values())
    for _ in range(60):
        worker = draw.choice([worker for worker, tasks in bases.items() if tasks])
        base = bases[worker].pop(0)
        assert base >= pushed[worker][-1 - overlap] and (bound or base == pushed[worker][-1 - overlap])
        decisions = consistency.push(Push(worker, base))
        pushed[worker].append(consistency.version)
        carry_out(decisions)
        ahead = {worker: consistency.clocks[worker] + len(tasks) for worker, tasks in bases.items()}
        assert all(len(tasks) <= 1 + overlap for tasks in bases.values())
        assert bound is None or max(ahead.values()) - min(consistency.clocks.values()) <= bound + 1
    assert consistency.version == 60


def test_synchronous_takes_one_push_of_each_by_weight() -> None:
    consistency = begun(2, staleness=0)
    assert consistency.push(Push(1, 0, 3.0)) == []
    assert consistency.push(Push(0, 0, 1.0)) == [Commit(1, (0, 1), (0.25, 0.75), (0, 0), True), Go(0), Go(1)]


def test_a_backup_is_late() -> None:
    consistency = begun(3, staleness=0, backup=1)
    consistency.push(Push(2, 0))
    assert consistency.push(Push(0, 0))[1:] == [Go(0), Go(2)]
    assert consistency.push(Push(1, 0)) == [Late(1, 0), Go(1)]
    assert num_needed(3, 1) == 2 and num_needed(1, 1) == 1 and shares_of([0, 0]) == (0.5, 0.5)


def test_who_leaves_is_not_waited_for() -> None:
    consistency = begun(3, staleness=1)
    for _ in range(2):
        consistency.push(Push(0, consistency.version))
    consistency.push(Push(1, consistency.version))
    assert consistency.leave(2) == [Go(0)]
    assert consistency.push(Push(2, 0)) == [Refuse(2, "worker 2 is no member of this run")]
    synchronous = begun(3, staleness=0)
    synchronous.push(Push(0, 0))
    synchronous.push(Push(1, 0))
    assert [type(decision) for decision in synchronous.leave(2)] == [Commit, Go, Go]


def test_versions_that_there_are_not() -> None:
    consistency = begun(1)
    refuse, go = consistency.push(Push(0, 5))
    assert refuse == Refuse(0, "a gradient of version 5, and there are versions 0 to 0") and go == Go(0)


def test_a_given_order_is_kept() -> None:
    consistency = begun(2, order=(1, 1, 0))
    assert consistency.push(Push(0, 0)) == []
    assert consistency.push(Push(1, 0)) == [Commit(1, (1,), (1.0,), (0,), False), Go(1)]
    decisions = consistency.push(Push(1, 1))
    assert [d.members for d in decisions if isinstance(d, Commit)] == [(1,), (0,)]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 4), st.booleans())
def test_servers_hold_every_row_once(rows: list[int], servers: int, may_cut: bool) -> None:
    variables = [Variable(f"v{i}", (n, 4), "float32", n * 16) for i, n in enumerate(rows)]
    shards = place_variables(variables, servers, may_cut)
    assert len(shards) == servers
    for variable in variables:
        held = sorted((p.start, p.stop) for pieces in shards for p in pieces if p.name == variable.name)
        assert held[0][0] == 0 and held[-1][1] == variable.rows
        assert all(a[1] == b[0] and b[0] < b[1] for a, b in itertools.pairwise(held))
        assert may_cut or len(held) == 1
    assert all(len({p.name for p in pieces}) == len(pieces) for pieces in shards)
    sizes = [sum(p.num_elements for p in pieces) for pieces in shards]
    if may_cut and servers > 1 and sum(rows) > 40 * servers:
        assert max(sizes) <= 1.12 * sum(sizes) / servers + 8
    if not may_cut:
        assert max(sizes) - min(sizes) <= max(rows) * 4


def test_a_number_is_a_variable_too() -> None:
    variables = [Variable("scale", (), "float32", 4), Variable("weight", (6, 2), "float32", 48)]
    (first, second) = place_variables(variables, 2, True)
    assert [(p.name, p.own_shape) for p in first] == [("scale", ()), ("weight", (3, 2))]
    assert [p.own_shape for p in second] == [(3, 2)]


def test_pieces_go_once_to_whoever_is_there() -> None:
    handout = WorkQueue()
    assert handout.give([0, 1]) == [(0, 0, 2), (1, 1, 3)]
    handout.used(0, 0)
    assert handout.give([0]) == [(0, 2, 4)]
    handout.take_back(1)
    assert handout.give([5]) == [(5, 1, 3)]
    assert handout.next_piece == 5


def test_pieces_of_workers_with_several_tasks() -> None:
    handout = WorkQueue()
    assert handout.give([0, 1, 0, 1]) == [(0, 0, 2), (1, 1, 3), (0, 2, 4), (1, 3, 5)]
    handout.used(0, 0)
    assert handout.give([0]) == [(0, 4, 6)] and handout.holds(0, 2) and not handout.holds(0, 0)
    assert handout.take_back(0) == [2, 4]
    assert [piece for _, piece, _ in handout.give([7, 7, 7])] == [2, 4, 6]


@pytest.mark.parametrize("bound", [None, 2])
def test_a_coordinator_that_comes_back_knows_who_computes(bound: int | None) -> None:
    consistency = Consistency(2, bound, version=9, started=True)
    consistency.adopt(4)
    assert [type(d) for d in consistency.push(Push(4, 8))] == [Commit, Go]
    assert consistency.version == 10
