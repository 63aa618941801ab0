"""One stage a rank, all of a backward at once: naive, gpipe, 1f1b; and forward alone, for evaluation."""

from __future__ import annotations

from plait.decide.schedules.build import alternate, backward, forward, loop, make
from plait.spec.schedule import Schedule


def naive(num_ranks: int, num_micro: int) -> Schedule:
    """One microbatch after the other, each all the way forward and backward: one rank works at a time.

    PICTURE naive 4 2
    """
    return make(
        "naive", num_micro, loop(num_ranks), lambda _: (f(i) for i in range(num_micro) for f in (forward, backward))
    )


def gpipe(num_ranks: int, num_micro: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, "GPipe", figure 2).

    Backwards come in the order of the microbatches, so that gradients add up as without a pipeline; the paper draws the
    reverse, which takes as long.

    PICTURE gpipe 4 4
    """
    return make(
        "gpipe",
        num_micro,
        loop(num_ranks),
        lambda _: [*map(forward, range(num_micro)), *map(backward, range(num_micro))],
    )


def one_f_one_b(num_ranks: int, num_micro: int) -> Schedule:
    """Backward as soon as it can be: rank r holds at most num_ranks - r microbatches of activations.

    (Narayanan et al. 2019, "PipeDream", figure 4, with the flush of Narayanan et al. 2021, "Memory-Efficient
    Pipeline-Parallel DNN Training", figure 3; also DAPPLE, Fan et al. 2021.)

    PICTURE 1f1b 4 6
    """
    forwards, backwards = [forward(i) for i in range(num_micro)], [backward(i) for i in range(num_micro)]
    return make("1f1b", num_micro, loop(num_ranks), lambda rank: alternate(forwards, backwards, num_ranks - rank))


def forward_only(num_ranks: int, num_micro: int, chunks: int = 1) -> Schedule:
    """Evaluation: forwards alone. With several chunks in rounds of num_ranks microbatches, as `interleaved` has them.

    PICTURE forward-only 4 4
    """
    rounds = [range(start, start + num_ranks) for start in range(0, num_micro, num_ranks)]
    actions = [forward(i, chunk) for group in rounds for chunk in range(chunks) for i in group]
    return make("forward-only", num_micro, loop(num_ranks, chunks), lambda _: actions)
