"""Schedules without a flush between updates.

pipedream and pipedream-vertical update after every backward, pipedream-2bw after each group of backwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from plait.schedule.action_builder import alternate, backward, forward, make, round_robin
from plait.spec.schedule import BACKWARD, STEP, Action, Schedule


def pipedream(num_ranks: int, num_micro: int) -> Schedule:
    """Forwards to fill the pipeline, then backward and forward in turn, with an update after each backward.

    (Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", figures 4 and 8.) Rank r
    runs num_ranks - r forwards ahead, and so keeps that many versions of its weights. The ranks drain only after all
    `num_micro` microbatches.

        F0 F1 F2 F3  .  .  .  .  .  . B0 == F4 B1 == F5 B2 ==  . B3 ==  . B4 ==  . B5 ==
         . F0 F1 F2  .  .  .  . B0 == F3 B1 == F4 B2 == F5 B3 ==  . B4 ==  . B5 ==  .  .
         .  . F0 F1  .  . B0 == F2 B1 == F3 B2 == F4 B3 == F5 B4 ==  . B5 ==  .  .  .  .
         .  .  . F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 == F5 B5 ==  .  .  .  .  .  .
    """
    return _endless("pipedream", num_ranks, num_micro, 1)


def pipedream_vertical(num_ranks: int, num_micro: int) -> Schedule:
    """pipedream with vertical sync: a microbatch uses on every rank the weight version that it used on the first.

    (Narayanan et al. 2019, section 3.3.) Every rank therefore keeps as many versions as the first.

        F0 F1 F2 F3  .  .  .  .  .  . B0 == F4 B1 == F5 B2 ==  . B3 ==  . B4 ==  . B5 ==
         . F0 F1 F2  .  .  .  . B0 == F3 B1 == F4 B2 == F5 B3 ==  . B4 ==  . B5 ==  .  .
         .  . F0 F1  .  . B0 == F2 B1 == F3 B2 == F4 B3 == F5 B4 ==  . B5 ==  .  .  .  .
         .  .  . F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 == F5 B5 ==  .  .  .  .  .  .
    """
    return replace(_endless("pipedream-vertical", num_ranks, num_micro, 1), vertical=True)


def pipedream_2bw(num_ranks: int, num_micro: int) -> Schedule:
    """The order of pipedream, with an update after each group of num_ranks microbatches: two versions are enough.

    (Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", figure 2.)

        F0 F1 F2 F3  .  .  .  .  .  . B0 == F4 B1 == F5 B2 == F6 B3 == F7 B4 ==  . B5 ==  . B6 ==  . B7 ==
         . F0 F1 F2  .  .  .  . B0 == F3 B1 == F4 B2 == F5 B3 == F6 B4 == F7 B5 ==  . B6 ==  . B7 ==  .  .
         .  . F0 F1  .  . B0 == F2 B1 == F3 B2 == F4 B3 == F5 B4 == F6 B5 == F7 B6 ==  . B7 ==  .  .  .  .
         .  .  . F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 == F5 B5 == F6 B6 == F7 B7 ==  .  .  .  .  .  .
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

    return make(name, num_micro, round_robin(num_ranks), actions)
