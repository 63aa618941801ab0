"""dualpipe-v: forward of one chunk beside backward of the other, each chunk half of a V."""

from __future__ import annotations

from plait.decide.schedules.build import Counting, make, vee
from plait.spec.action import Action
from plait.spec.schedule import Schedule


def dualpipe_v(num_ranks: int, num_micro: int) -> Schedule:
    """DualPipe cut in half: two chunks a rank, placed like a V, so that parameters are there once and not twice.

    (DeepSeek-AI 2024, "DeepSeek-V3", section 3.2.1; cut in half by Qi et al. 2025, "DualPipe could be better without
    the Dual".) In the main part each F stands next to the B of the other chunk, with which it can overlap. Fewer than
    2 * num_ranks microbatches are padded to that.

    PICTURE dualpipe-v 4 8
    """
    padded = max(num_micro, 2 * num_ranks)

    def actions(rank: int) -> list[Action]:
        made, after = Counting(), num_ranks - rank - 1  # ranks further down the V
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
    """Backwards of both chunks in turn; the second half of them leave their weights for later."""
    for i in range(2 * (rank + 1)):
        (made.backward if i <= rank else made.inputs)(1 - i % 2)
