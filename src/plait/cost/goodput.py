"""Goodput: the fraction of time in which training gets on, though nodes fail.

    M   mean seconds between failures of any node (`mean_time_between_failures`)
    s   seconds for which training stands still to save       R  seconds from a failure until steps run again
    t   seconds of training between two saves                 w  seconds from a save until it counts

Failures are independent, and as likely at any time. A segment of t + s seconds that a failure meets is run again, after
a restart that a failure may meet, too; on average it takes M e^(R/M) (e^((t+s)/M) - 1) seconds (Daly 2006, "A higher
order estimate of the optimum checkpoint interval for restart dumps"). What no save has made count by then is run again,
too, as a longer restart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.errors import ConfigError


@dataclass(frozen=True)
class Goodput:
    """The fraction of time that is not lost, and what the rest is lost to.

    Attributes:
        fraction: of the time, in which training gets on.
        lost: fractions of the time, by what they are lost to. With `fraction` they add up to 1.
        interval: seconds of training from one save to the next; 0 where nothing is saved for failures.
    """

    fraction: float
    lost: dict[str, float]
    interval: float = 0.0


def mean_time_between_failures(node_seconds: float, num_nodes: int) -> float:
    """Seconds between failures of any of `num_nodes` nodes, of which one fails every `node_seconds`.

    Raises ConfigError for a time that is not more than 0, and for no nodes.
    """
    _check("the mean time between failures of a node", node_seconds, positive=True)
    if num_nodes < 1:
        raise ConfigError(f"{num_nodes} nodes cannot fail; give 1 or more")
    return node_seconds / num_nodes


def young_interval(save: float, mean: float) -> float:
    """The seconds of training between two saves of `save` seconds that lose least, to first order: sqrt(2 s M) (Young
    1974, "A first order approximation to the optimum checkpoint interval")."""
    return math.sqrt(2 * save * mean)


def daly_interval(save: float, mean: float) -> float:
    """The same to higher order, for saves that take a good part of the time between failures (Daly 2006)."""
    if save >= 2 * mean:
        return mean
    ratio = save / (2 * mean)
    return math.sqrt(2 * save * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def goodput_of_restarts(
    mean: float, save: float, restart: float, interval: float | None = None, delay: float = 0.0
) -> Goodput:
    """The goodput of ranks that all begin again from the last save where one node fails.

    Args:
        mean: seconds between failures of any node.
        save: seconds for which training stands still to save.
        restart: seconds from a failure until steps run again.
        interval: seconds of training between two saves; by default Daly's, and at least `delay`, as one save is written
            at a time, and a thousandth of `mean`.
        delay: seconds from a save until it counts, if it is written while training goes on.

    Raises ConfigError for a time below 0, or not more than 0 where nothing would be left.
    """
    for what, seconds in (("a save", save), ("a restart", restart), ("writing a save", delay)):
        _check(what, seconds)
    _check("the mean time between failures", mean, positive=True)
    chosen = max(daly_interval(save, mean), delay, 1e-3 * mean) if interval is None else interval
    _check("the training between two saves", chosen, positive=True)
    segment = chosen + save
    if (segment + restart + delay) / mean > 500:  # e^500 attempts
        return Goodput(0.0, {"saves": 0.0, "work done again": 1.0, "restarts": 0.0}, chosen)
    failures = math.expm1(segment / mean)  # of a segment, until it is done
    work = mean * failures
    down = mean * math.expm1((restart + delay) / mean) * failures
    again = down * (delay / (restart + delay) if restart + delay else 0.0)
    whole = work + down
    lost = {
        "saves": save / whole,
        "work done again": (work - segment + again) / whole,
        "restarts": (down - again) / whole,
    }
    return Goodput(chosen / whole, lost, chosen)


def goodput_of_replicas(
    node_seconds: float, num_nodes: int, replicas: int, step: float, stall: float, heal: float
) -> Goodput:
    """The goodput of replicas that go on without one of them where a node of it fails, from the step that it fails in.

    A failure costs all ranks what they had of that step, half on average, and a stall in which they agree on who is
    left. The replica is back after `heal` seconds, with the others' weights, and counts as lost until then.

    Args:
        node_seconds: mean seconds between failures of one node.
        num_nodes: of all replicas together.
        replicas: of as many nodes each.
        step: seconds of a step.
        stall: seconds until the others go on.
        heal: seconds until the replica is back.

    Raises ConfigError for fewer than two replicas, whose nodes must divide, and for times that cannot be.
    """
    for what, seconds in (("a step", step), ("a stall", stall), ("healing", heal)):
        _check(what, seconds)
    if replicas < 2 or num_nodes % replicas:
        raise ConfigError(
            f"{replicas} replicas of {num_nodes} nodes cannot go on without one; give 2 or more, which divide the nodes"
        )
    mean = mean_time_between_failures(node_seconds, num_nodes)
    there = 1 / (1 + heal / (mean * replicas))
    going = 1 / (1 + (stall + step / 2) / mean)
    both = stall + step / 2
    share = stall / both if both else 0.0
    lost = {
        "replicas that are away": (1 - there) * going,
        "stalls": (1 - going) * share,
        "work done again": (1 - going) * (1 - share),
    }
    return Goodput(there * going, lost)


def _check(what: str, seconds: float, positive: bool = False) -> None:
    if not (seconds > 0 if positive else seconds >= 0) or not math.isfinite(seconds):
        least = "more than 0" if positive else "0 or more"
        raise ConfigError(f"{what} of {seconds} seconds cannot be; give a number of seconds, {least}")
