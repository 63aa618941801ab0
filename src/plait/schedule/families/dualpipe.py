"""dualpipe-v: the forward of one chunk beside the backward of the other; the chunks are the two halves of a V.

In the drawing small letters are a rank's second chunk, B and W the parts of a backward, and `B ==` a whole backward.
"""

from __future__ import annotations

from plait.schedule.families.common import Counting, make, vee
from plait.spec.action import Action
from plait.spec.schedule import Schedule


def dualpipe_v(num_ranks: int, num_micro: int) -> Schedule:
    """DualPipe cut in half: two chunks per rank, placed like a V, so that parameters are held once and not twice.

    (DeepSeek-AI 2024, "DeepSeek-V3", section 3.2.1; cut in half by Qi et al. 2025, "DualPipe could be better without
    the Dual".) In the steady state each F stands next to the B of the other chunk, with which it can overlap. Fewer
    than 2 * num_ranks microbatches are padded to that number.

        F0 F1 F2 f0 b0 w0 f1 F3 b1 == f2 B0 == F4 b2 == f3 B1 == F5 b3 == f4 B2 == b4 == f5  . B3 == b5 == B4 W4 B5 W5
         . F0 f0 F1 f1 F2 b0 == f2 B0 == F3 b1 == f3 B1 == F4 b2 == f4 B2 == F5 b3 == f5 B3 == b4 == B4 == b5 B5 w5 W5
    """
    padded = max(num_micro, 2 * num_ranks)

    def actions(rank: int) -> list[Action]:
        made, after = Counting(), num_ranks - rank - 1  # ranks after this one on the way down the V
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

    return make("dualpipe-v", num_micro, vee(num_ranks), actions)


def _drain(made: Counting, rank: int) -> None:
    """Append backwards of both chunks in turn; the second half of them leave their weight parts for later."""
    for i in range(2 * (rank + 1)):
        (made.backward if i <= rank else made.inputs)(1 - i % 2)
