"""No flush between updates: pipedream, which updates after every backward, and pipedream-2bw, after a group of them."""

from __future__ import annotations

from collections.abc import Iterator

from plait.decide.schedules.build import alternate, backward, forward, loop, make
from plait.spec.action import BACKWARD, STEP, Action
from plait.spec.schedule import Schedule


def pipedream(num_ranks: int, num_micro: int) -> Schedule:
    """Start-up, then backward and forward in turn, with an update after each backward; never a flush.

    (Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", figures 4 and 8.) Rank r
    runs num_ranks - r forwards ahead, and so keeps that many versions of its weights. The ranks only drain at the end
    of all `num_micro` microbatches, however many there are.

    PICTURE pipedream 4 6
    """
    return _endless("pipedream", num_ranks, num_micro, 1)


def pipedream_2bw(num_ranks: int, num_micro: int) -> Schedule:
    """The same order, with an update once each group of num_ranks microbatches is through: two versions are enough.

    (Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", figure 2.)

    PICTURE pipedream-2bw 4 8
    """
    return _endless("pipedream-2bw", num_ranks, num_micro, num_ranks)


def _endless(name: str, num_ranks: int, num_micro: int, group: int) -> Schedule:
    forwards, backwards = [forward(i) for i in range(num_micro)], [backward(i) for i in range(num_micro)]

    def actions(rank: int) -> Iterator[Action]:
        for action in alternate(forwards, backwards, num_ranks - rank):
            yield action
            last = action.micro == num_micro - 1
            if action.kind == BACKWARD and action.micro is not None and ((action.micro + 1) % group == 0 or last):
                yield Action(STEP, action.micro)

    return make(name, num_micro, loop(num_ranks), actions)
