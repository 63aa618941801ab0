"""Checks a schedule before it runs: no action is missing or doubled, the order is valid, and ranks do not deadlock."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from plait.errors import ScheduleError
from plait.schedule.readiness import Edges, RankAction, chain, topological_order
from plait.schedule.schedule_grid import draw_grid
from plait.spec.schedule import BACKWARD, FORWARD, RECV, REDUCE, SEND, STEP, WEIGHT, Action, Schedule


def check_schedule(schedule: Schedule, edges: Edges | None = None) -> None:
    """Raise ScheduleError, with the schedule drawn and the place marked, unless the schedule runs.

    Each microbatch must run once through the forward of each stage, and once through its backward unless the schedule
    is forward-only. W may be an action of its own. Transfers, if there are any, must come in pairs. Ranks must not wait
    for each other. `edges` say which cells need which; by default stages are a chain.
    """
    edges = chain(schedule.num_stages) if edges is None else edges
    _check_words(schedule, edges)
    _check_complete(schedule, edges)
    _check_order(schedule, edges)
    _check_updates(schedule, edges)
    _check_transfers(schedule, edges)
    check_runs(schedule, edges)


def check_runs(schedule: Schedule, edges: Edges) -> None:
    """Raise ScheduleError if ranks wait for each other, or for an action that no rank has."""
    found = topological_order(schedule, edges)
    stuck = {rank: (rank, schedule.ranks[rank][found.stopped[rank]]) for rank in sorted(found.waits)}
    if not stuck:
        return
    circle = _circle(found.waits)
    parts = [f"rank {rank} stands before {stuck[rank][1]} and waits for {_who(found.waits[rank])}" for rank in circle]
    marks = {stuck[rank]: -1 for rank in [*circle, *stuck]}
    _fail(schedule, edges, f"deadlock: {'; '.join(parts)}", marks)


def _check_words(schedule: Schedule, edges: Edges) -> None:
    """Each action names a microbatch, chunk and rank that exist, is on the replica that runs the microbatch, and occurs
    once."""
    for rank, actions in enumerate(schedule.ranks):
        for action, times in Counter(actions).items():
            place = f"{action} of rank {rank}"
            chunks = len(schedule.stages[rank])
            if action.peer is not None:
                if action.peer >= schedule.num_ranks or action.peer == rank:
                    others = f"other ranks are 0 to {schedule.num_ranks - 1}"
                    _fail(schedule, edges, f"{place} names rank {action.peer}; {others}", {(rank, action): -1})
                chunks = len(schedule.stages[action.peer if action.kind == RECV else rank])
            if action.micro is not None and action.micro >= schedule.num_micro:
                _fail(schedule, edges, f"{place}: microbatches are 0 to {schedule.num_micro - 1}", {(rank, action): -1})
            if action.chunk >= chunks:
                _fail(
                    schedule, edges, f"{place}: that rank has chunks 0 to {chunks - 1} ({schedule.placement})",
                    {(rank, action): -1},
                )  # fmt: skip
            if times > 1:
                _fail(schedule, edges, f"{place} stands there {times} times; once is enough", {(rank, action): -1})
            if action.computes and action.micro is not None:
                stage = schedule.stages[rank][action.chunk]
                turn = schedule.where(stage, action.micro)[0]
                if turn != rank:
                    _fail(
                        schedule, edges, f"{place}: replicas of stage {stage} take turns, and this is rank {turn}'s",
                        {(rank, action): -1},
                    )  # fmt: skip


def _check_complete(schedule: Schedule, edges: Edges) -> None:
    kinds = (FORWARD,) if schedule.forward_only else (FORWARD, BACKWARD)
    missing = []
    for stage in range(schedule.num_stages):
        for micro in range(schedule.num_micro):
            rank, chunk = schedule.where(stage, micro)
            missing += [
                (rank, Action(kind, micro, chunk))
                for kind in kinds
                if not schedule.has(rank, Action(kind, micro, chunk))
            ]
    if not missing:
        return
    names = ", ".join(f"{action} of rank {rank}" for rank, action in missing[:4])
    more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    each = "forward" if schedule.forward_only else "forward and backward"
    _fail(
        schedule, edges,
        f"{names}{more} {'is' if len(missing) == 1 else 'are'} missing; each of {schedule.num_micro} microbatches goes"
        f" once through {each} of each of {schedule.num_stages} stages",
        {place: -1 for place in missing[:4]},
    )  # fmt: skip


def _check_order(schedule: Schedule, edges: Edges) -> None:
    """F comes before B on each rank, B before W, a value's action before its SEND, and an update after its
    backwards."""
    for rank, actions in enumerate(schedule.ranks):
        at = {action: position for position, action in enumerate(actions)}
        for action in actions:
            before: list[Action] = []
            if action.kind == BACKWARD:
                before = [Action(FORWARD, action.micro, action.chunk)]
            elif action.kind == WEIGHT:
                before = [Action(BACKWARD, action.micro, action.chunk)]
            elif action.kind == SEND:
                before = [action.producer]
            for each in before:
                if at.get(each, len(actions)) > at[action]:
                    what = "stands after it" if each in at else "is missing"
                    _fail(schedule, edges, f"{action} of rank {rank} needs {each}, which {what}", {(rank, action): -1})
        later: list[Action] = []  # the backwards after this position: the earliest microbatch of each chunk
        for action in reversed(actions):
            late = [each for each in later if _settles(action, each)]
            if late:
                _fail(
                    schedule, edges, f"{action} of rank {rank} needs {late[0]}, which stands after it",
                    {(rank, action): -1},
                )  # fmt: skip
            if action.kind in (BACKWARD, WEIGHT):
                same = [each for each in later if each.chunk == action.chunk]
                later = [each for each in later if each.chunk != action.chunk]
                later.append(min([action, *same], key=lambda each: each.micro or 0))


def _check_updates(schedule: Schedule, edges: Edges) -> None:
    """Updates with a number are in the order of their microbatches, and the last one ends the step. All ranks have the
    same ones, except replicas of a stage, which take microbatches in turn."""
    steps = [[action for action in actions if action.kind == STEP] for actions in schedule.ranks]
    if all(action.micro is None for each in steps for action in each):
        return
    last = Action(STEP, schedule.num_micro - 1)
    every = sorted({action for each in steps for action in each if action.micro is not None} | {last})
    in_turns = any(len({*schedule.holders(stage)}) > 1 for stage in range(schedule.num_stages))
    for rank, each in enumerate(steps):
        wanted = [action for action in every if action in each] if in_turns else every
        if each != wanted:
            _fail(
                schedule, edges,
                f"rank {rank} updates as {' '.join(map(str, each)) or 'nothing'}, and each microbatch is in one update,"
                f" the same on all ranks: give {' '.join(map(str, wanted))} in this order",
                {(rank, action): -1 for action in each[:1]},
            )  # fmt: skip


def _settles(action: Action, backward: Action) -> bool:
    """Whether a REDUCE or STEP needs the gradients of this backward."""
    if action.kind == REDUCE:
        return action.chunk == backward.chunk
    return action.kind == STEP and (action.micro is None or (backward.micro or 0) <= action.micro)


def _check_transfers(schedule: Schedule, edges: Edges) -> None:
    """Each SEND has its RECV, and both ranks list the transfers between them in the same order."""
    lines: dict[tuple[int, int], tuple[list[Action], list[Action]]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind == SEND and action.peer is not None:
                lines.setdefault((rank, action.peer), ([], []))[0].append(action)
            elif action.kind == RECV and action.peer is not None:
                lines.setdefault((action.peer, rank), ([], []))[1].append(action)
    for (source, target), (sends, receives) in sorted(lines.items()):
        for i in range(max(len(sends), len(receives))):
            send = sends[i] if i < len(sends) else None
            receive = receives[i] if i < len(receives) else None
            if send and receive and send.producer == receive.producer:
                continue
            shown = [(source, send), (target, receive)]
            _fail(
                schedule, edges,
                f"transfer {i} from rank {source} to rank {target} is {send or 'none'} there and {receive or 'none'}"
                " here; give both, in the same order",
                {(rank, action): -1 for rank, action in shown if action},
            )  # fmt: skip


def _exists(schedule: Schedule, rank: int, action: Action) -> bool:
    """Whether the ranks, chunk and microbatch of an action exist."""
    if action.peer is not None and action.peer >= schedule.num_ranks:
        return False
    chunks = schedule.stages[rank if action.kind != RECV or action.peer is None else action.peer]
    return action.chunk < len(chunks) and (action.micro or 0) < schedule.num_micro


def _circle(waits: dict[int, RankAction]) -> list[int]:
    """A cycle of ranks, each of which waits for the next; without a cycle, the rank on which the others wait."""
    seen: list[int] = []
    rank = min(waits)
    while rank not in seen and rank in waits:
        seen.append(rank)
        rank = waits[rank][0]
    return seen[seen.index(rank) :] if rank in seen else seen[-1:]


def _who(place: RankAction) -> str:
    return f"{place[1]} of rank {place[0]}"


def _fail(schedule: Schedule, edges: Edges, message: str, marks: dict[RankAction, int]) -> None:
    known = [
        tuple(each for each in actions if _exists(schedule, rank, each)) for rank, actions in enumerate(schedule.ranks)
    ]
    grid = draw_grid(replace(schedule, ranks=tuple(known)), edges, marks)
    raise ScheduleError(f"the schedule {schedule.name} cannot run: {message}\n{grid}")
