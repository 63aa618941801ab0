"""Backward in two parts, B for the inputs and W for the weights, which fills bubbles: zb-h1, zb-h2, zb-v."""

from __future__ import annotations

from plait.decide.schedules.build import Counting, loop, make, vee
from plait.spec.action import BACKWARD, FORWARD, Action
from plait.spec.schedule import Schedule


def zb_h1(num_ranks: int, num_micro: int) -> Schedule:
    """1f1b whose later ranks put W off until the end: a third of its bubble, and at most its memory.

    (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", figure 2.) Rank r owes r W's throughout.

    PICTURE zb-h1 4 6
    """
    return make("zb-h1", num_micro, loop(num_ranks), lambda r: _halves(num_micro, num_ranks - r, r))


def zb_h2(num_ranks: int, num_micro: int) -> Schedule:
    """Enough forwards ahead that no rank waits once it has begun, for up to twice the memory of 1f1b.

    (Qi et al. 2024, figure 3; all parts as long as each other and 2 * num_ranks - 1 microbatches or more.) The last
    rank ends num_ranks - 1 forwards after the first, which the next step's forwards may follow at once.

    PICTURE zb-h2 4 8
    """
    return make("zb-h2", num_micro, loop(num_ranks), lambda r: _halves(num_micro, 2 * (num_ranks - r) - 1, 2 * r))


def _halves(num_micro: int, ahead: int, owed: int) -> list[Action]:
    """`ahead` forwards, then B, W and F in turn, where W stays `owed` microbatches behind B."""
    made = Counting()
    for _ in range(min(ahead, num_micro)):
        made.forward()
    for i in range(num_micro):
        made.inputs()
        if i >= owed:
            made.weight()
        if made.done(FORWARD) < num_micro:
            made.forward()
    made.weights()
    return made.actions


def zb_v(num_ranks: int, num_micro: int) -> Schedule:
    """Two chunks a rank, placed like a V: no bubble when F, B and W are as long as each other, in the memory of 1f1b.

    (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", and section 6 of "Zero Bubble".) Fewer than
    2 * num_ranks - 1 microbatches are padded to that.

    PICTURE zb-v 4 6
    """
    padded = max(num_micro, 2 * num_ranks - 1)

    def actions(rank: int) -> list[Action]:
        made = Counting()
        for _ in range(2 * (num_ranks - rank) - 1):
            made.forward(0)
        for _ in range(rank):
            made.forward(1)
            made.forward(0)
        for _ in range(num_ranks - rank):
            made.forward(1)
            made.inputs(1)
            made.weight()
        while made.done(FORWARD, 1) < made.done(FORWARD, 0) or made.done(FORWARD, 0) < padded:
            if made.done(FORWARD, 0) < padded:
                made.forward(0)
            made.inputs(0)
            made.weight()
            made.forward(1)
            made.inputs(1)
            made.weight()
        for _ in range(rank):
            made.inputs(0)
            made.inputs(1)
        for _ in range(num_ranks - rank):
            made.inputs(0)
            made.weight()
        made.weights()
        assert made.done(BACKWARD, 0) == made.done(BACKWARD, 1) == padded
        return made.actions

    return make("zb-v", num_micro, vee(num_ranks), actions)
