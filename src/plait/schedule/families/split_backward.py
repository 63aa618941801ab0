"""Schedules with split backwards, in B for the inputs and W for the weights: zb-h1, zb-h2, zb-v and dualpipe-v.

In the drawings each part takes one column. `B ==` is a backward that is not split, and small letters are a rank's
second chunk.
"""

from __future__ import annotations

from plait.schedule.action_builder import ActionBuilder, make, round_robin, v_shape
from plait.spec.schedule import BACKWARD, FORWARD, Action, Schedule


def zb_h1(num_ranks: int, num_micro: int) -> Schedule:
    """1f1b whose later ranks delay W until the end: a third of the bubble of 1f1b, in at most its memory.

    (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", figure 2.) On rank r, W is r microbatches behind B.

        F0 F1 F2 F3  .  .  . B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5
         . F0 F1 F2  .  . B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 B4 W3 B5 W4 W5
         .  . F0 F1  . B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 B5 W3 W4 W5
         .  .  . F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5
    """
    return make("zb-h1", num_micro, round_robin(num_ranks), lambda r: _halves(num_micro, num_ranks - r, r))


def zb_h2(num_ranks: int, num_micro: int) -> Schedule:
    """So many forwards ahead that no rank waits once it has begun, in up to twice the memory of 1f1b.

    (Qi et al. 2024, figure 3; for parts of equal length and at least 2 * num_ranks - 1 microbatches.) The last rank
    ends num_ranks - 1 forwards after the first; the forwards of the next step can fill that time.

        F0 F1 F2 F3 F4 F5 F6 B0 W0 F7 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5 B6 W6 B7 W7  .  .  .
         . F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 W0 F7 B3 W1 B4 W2 B5 W3 B6 W4 B7 W5 W6 W7  .  .
         .  . F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 W0 F7 B5 W1 B6 W2 B7 W3 W4 W5 W6 W7  .
         .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 W0 F7 B7 W1 W2 W3 W4 W5 W6 W7
    """
    return make(
        "zb-h2", num_micro, round_robin(num_ranks), lambda r: _halves(num_micro, 2 * (num_ranks - r) - 1, 2 * r)
    )


def _halves(num_micro: int, ahead: int, owed: int) -> list[Action]:
    """`ahead` forwards, then B, W and F in turn, where W is `owed` microbatches behind B."""
    made = ActionBuilder()
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
        made = ActionBuilder()
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

    return make("zb-v", num_micro, v_shape(num_ranks), actions)


def dualpipe_v(num_ranks: int, num_micro: int) -> Schedule:
    """DualPipe cut in half: two chunks per rank, placed like a V, so that parameters are held once instead of twice.

    (DeepSeek-AI 2024, "DeepSeek-V3", section 3.2.1; cut in half by Qi et al. 2025, "DualPipe could be better without
    the Dual".) In the steady state each F is next to the B of the other chunk, with which it can overlap. Fewer
    than 2 * num_ranks microbatches are padded to that number.

        F0 F1 F2 f0 b0 w0 f1 F3 b1 == f2 B0 == F4 b2 == f3 B1 == F5 b3 == f4 B2 == b4 == f5  . B3 == b5 == B4 W4 B5 W5
         . F0 f0 F1 f1 F2 b0 == f2 B0 == F3 b1 == f3 B1 == F4 b2 == f4 B2 == F5 b3 == f5 B3 == b4 == B4 == b5 B5 w5 W5
    """
    padded = max(num_micro, 2 * num_ranks)

    def actions(rank: int) -> list[Action]:
        made, after = ActionBuilder(), num_ranks - rank - 1  # ranks after this one in the first half of the V
        for _ in range(2 * after):
            made.forward(0)
        for _ in range(rank + 1):
            made.forward(0)
            made.forward(1)
        for _ in range(after):
            made.inputs(1)
            made.weight()
            made.forward(1)
        for _ in range(padded - 2 * num_ranks + rank + 1):
            made.forward(0)
            made.backward(1)
            made.forward(1)
            made.backward(0)
        for _ in range(after):
            made.backward(1)
            made.forward(1)
            made.backward(0)
        _drain(made, rank)
        for _ in range(after):
            made.weight()
            made.inputs(0)
        made.weights()
        return made.actions

    return make("dualpipe-v", num_micro, v_shape(num_ranks), actions)


def _drain(made: ActionBuilder, rank: int) -> None:
    """Append backwards of both chunks in turn; the second half of them are split, with W due later."""
    for i in range(2 * (rank + 1)):
        (made.backward if i <= rank else made.inputs)(1 - i % 2)
