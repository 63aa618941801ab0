"""One stage per rank and unsplit backwards: naive, gpipe, 1f1b; and forward-only, for evaluation.

In the drawings a line is a rank and a column a unit of time; a backward takes two columns, and a dot is a bubble.
"""

from __future__ import annotations

from plait.schedule.families.common import alternate, backward, forward, loop, make
from plait.spec.schedule import Schedule


def naive(num_ranks: int, num_micro: int) -> Schedule:
    """One microbatch after the other, each all the way forward and backward: one rank computes at a time.

    F0  .  .  .  .  .  .  .  .  . B0 == F1  .  .  .  .  .  .  .  .  . B1 ==
     . F0  .  .  .  .  .  . B0 ==  .  .  . F1  .  .  .  .  .  . B1 ==  .  .
     .  . F0  .  .  . B0 ==  .  .  .  .  .  . F1  .  .  . B1 ==  .  .  .  .
     .  .  . F0 B0 ==  .  .  .  .  .  .  .  .  . F1 B1 ==  .  .  .  .  .  .
    """
    return make(
        "naive", num_micro, loop(num_ranks), lambda _: (f(i) for i in range(num_micro) for f in (forward, backward))
    )


def gpipe(num_ranks: int, num_micro: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, "GPipe", figure 2).

    Backwards come in the order of the microbatches, so that gradients are summed as without a pipeline. The paper draws
    the reverse order, which takes as long.

        F0 F1 F2 F3  .  .  .  .  .  .  .  .  . B0 == B1 == B2 == B3 ==
         . F0 F1 F2 F3  .  .  .  .  .  . B0 == B1 == B2 == B3 ==  .  .
         .  . F0 F1 F2 F3  .  .  . B0 == B1 == B2 == B3 ==  .  .  .  .
         .  .  . F0 F1 F2 F3 B0 == B1 == B2 == B3 ==  .  .  .  .  .  .
    """
    return make(
        "gpipe",
        num_micro,
        loop(num_ranks),
        lambda _: [*map(forward, range(num_micro)), *map(backward, range(num_micro))],
    )


def one_f_one_b(num_ranks: int, num_micro: int) -> Schedule:
    """A backward as soon as possible: rank r holds activations of at most num_ranks - r microbatches.

    (Narayanan et al. 2019, "PipeDream", figure 4, with the flush of Narayanan et al. 2021, "Memory-Efficient
    Pipeline-Parallel DNN Training", figure 3; also DAPPLE, Fan et al. 2021.)

        F0 F1 F2 F3  .  .  .  .  .  . B0 == F4 B1 == F5 B2 ==  . B3 ==  . B4 ==  . B5 ==
         . F0 F1 F2  .  .  .  . B0 == F3 B1 == F4 B2 == F5 B3 ==  . B4 ==  . B5 ==  .  .
         .  . F0 F1  .  . B0 == F2 B1 == F3 B2 == F4 B3 == F5 B4 ==  . B5 ==  .  .  .  .
         .  .  . F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 == F5 B5 ==  .  .  .  .  .  .
    """
    forwards, backwards = [forward(i) for i in range(num_micro)], [backward(i) for i in range(num_micro)]
    return make("1f1b", num_micro, loop(num_ranks), lambda rank: alternate(forwards, backwards, num_ranks - rank))


def forward_only(num_ranks: int, num_micro: int, chunks: int = 1) -> Schedule:
    """Evaluation: forwards only, with several chunks in the order of `interleaved`.

    F0 F1 F2 F3  .  .  .
     . F0 F1 F2 F3  .  .
     .  . F0 F1 F2 F3  .
     .  .  . F0 F1 F2 F3
    """
    rounds = [range(start, start + num_ranks) for start in range(0, num_micro, num_ranks)]
    actions = [forward(i, chunk) for group in rounds for chunk in range(chunks) for i in group]
    return make("forward-only", num_micro, loop(num_ranks, chunks), lambda _: actions)
