"""Start times of actions where ranks have the cores of one host in common: those that compute slow each other."""

from __future__ import annotations

import math
from collections.abc import Callable

from plait.schedule.readiness import Delay, Duration, RankAction, TopologicalOrder
from plait.spec.schedule import SEND, Action, Schedule


def shared_times(
    schedule: Schedule, found: TopologicalOrder, duration: Duration, delay: Delay, speed: Callable[[int], float]
) -> dict[RankAction, tuple[float, float]]:
    """Start and end of each action where ranks share the cores of a host: `speed(num)` is that of each of `num` ranks
    that compute at the same time. Otherwise as `start_times`."""
    times: dict[RankAction, tuple[float, float]] = {}
    at = [0] * schedule.num_ranks
    running: dict[int, tuple[Action, float, float]] = {}  # by rank: action, start, seconds left at speed 1
    now = 0.0

    def ready(rank: int, action: Action) -> float:
        """When all that an action needs is there; infinity if that is not known yet."""
        latest = now
        for peer, made in found.needs[rank, action]:
            if (peer, made) not in times:
                return math.inf
            arrives = times[peer, made][1]
            if peer != rank:
                arrives += delay(peer, made.producer if made.kind == SEND else made, rank, action)
            latest = max(latest, arrives)
        return latest

    while True:
        later, progress = math.inf, True
        while progress:
            progress, later = False, math.inf
            for rank, actions in enumerate(schedule.ranks):
                if rank in running or at[rank] == len(actions):
                    continue
                action = actions[at[rank]]
                starts = ready(rank, action)
                if starts > now:
                    later = min(later, starts)
                    continue
                at[rank] += 1
                seconds = duration(rank, action)
                if seconds:
                    running[rank] = (action, now, seconds)
                else:
                    times[rank, action] = (now, now)
                    progress = True
        if len(times) == len(found.order):
            break
        rate = speed(len(running))
        span = min([left / rate for _, _, left in running.values()] + [later - now])
        assert span < math.inf, "a schedule that was checked has no deadlock"
        now += span
        for rank, (action, start, left) in list(running.items()):
            if left - span * rate <= 1e-12:
                times[rank, action] = (start, now)
                del running[rank]
            else:
                running[rank] = (action, start, left - span * rate)
    return times
