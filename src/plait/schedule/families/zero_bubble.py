"""Backward in two parts, B for the inputs and W for the weights, which fill bubbles: zb-h1, zb-h2, zb-v.

In the drawings each part takes one column, and small letters are a rank's second chunk.
"""

from __future__ import annotations

from plait.schedule.families.common import Counting, loop, make, vee
from plait.spec.action import BACKWARD, FORWARD, Action
from plait.spec.schedule import Schedule


def zb_h1(num_ranks: int, num_micro: int) -> Schedule:
    """1f1b whose later ranks delay W until the end: a third of its bubble in at most its memory.

    (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", figure 2.) On rank r, W is r microbatches behind B.

        F0 F1 F2 F3  .  .  . B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5
         . F0 F1 F2  .  . B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 B4 W3 B5 W4 W5
         .  . F0 F1  . B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 B5 W3 W4 W5
         .  .  . F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5
    """
    return make("zb-h1", num_micro, loop(num_ranks), lambda r: _halves(num_micro, num_ranks - r, r))


def zb_h2(num_ranks: int, num_micro: int) -> Schedule:
    """Enough forwards ahead that no rank waits once it has begun, in up to twice the memory of 1f1b.

    (Qi et al. 2024, figure 3; for parts of equal length and at least 2 * num_ranks - 1 microbatches.) The last rank
    ends num_ranks - 1 forwards after the first; the forwards of the next step can fill that time.

        F0 F1 F2 F3 F4 F5 F6 B0 W0 F7 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5 B6 W6 B7 W7  .  .  .
         . F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 W0 F7 B3 W1 B4 W2 B5 W3 B6 W4 B7 W5 W6 W7  .  .
         .  . F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 W0 F7 B5 W1 B6 W2 B7 W3 W4 W5 W6 W7  .
         .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 W0 F7 B7 W1 W2 W3 W4 W5 W6 W7
    """
    return make("zb-h2", num_micro, loop(num_ranks), lambda r: _halves(num_micro, 2 * (num_ranks - r) - 1, 2 * r))


def _halves(num_micro: int, ahead: int, owed: int) -> list[Action]:
    """`ahead` forwards, then B, W and F in turn, where W is `owed` microbatches behind B."""
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
    """Two chunks per rank, placed like a V: no bubble if F, B and W take equal time, in the memory of 1f1b.

    (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", and section 6 of "Zero Bubble".) Fewer than
    2 * num_ranks - 1 microbatches are padded to that number.

        F0 F1 F2 F3 F4 f0 b0 w0 f1 b1 w1 f2 b2 w2 B0 W0 f3 b3 w3 B1 W1 f4 b4 w4 B2 W2 B3 W3 B4 W4  .  .
         . F0 F1 F2 f0 F3 f1 b0 w0 f2 b1 w1 F4 B0 W0 f3 b2 w2 B1 W1 f4 b3 w3 B2 b4 B3 W2 B4 w4 W3 W4  .
         .  . F0 f0 F1 f1 F2 f2 b0 w0 F3 B0 W0 f3 b1 w1 F4 B1 W1 f4 b2 w2 B2 b3 B3 b4 B4 W2 w3 W3 w4 W4
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
