"""Schedules whose backwards are not split.

naive, gpipe and 1f1b have one stage per rank; interleaved and looped-bfs have several, placed round-robin. forward-only
is for evaluation. In the drawings a line is a rank and a column a unit of time. A backward takes two columns, a dot is
a bubble, and small letters are a rank's second chunk.
"""

from __future__ import annotations

from plait.schedule.action_builder import alternate, backward, forward, make, round_robin
from plait.spec.schedule import Schedule


def naive(num_ranks: int, num_micro: int) -> Schedule:
    """One microbatch after the other, each forward and backward through all stages: one rank computes at a time.

    F0  .  .  .  .  .  .  .  .  . B0 == F1  .  .  .  .  .  .  .  .  . B1 ==
     . F0  .  .  .  .  .  . B0 ==  .  .  . F1  .  .  .  .  .  . B1 ==  .  .
     .  . F0  .  .  . B0 ==  .  .  .  .  .  . F1  .  .  . B1 ==  .  .  .  .
     .  .  . F0 B0 ==  .  .  .  .  .  .  .  .  . F1 B1 ==  .  .  .  .  .  .
    """
    return make(
        "naive",
        num_micro,
        round_robin(num_ranks),
        lambda _: (f(i) for i in range(num_micro) for f in (forward, backward)),
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
        round_robin(num_ranks),
        lambda _: [*map(forward, range(num_micro)), *map(backward, range(num_micro))],
    )


def one_f_one_b(num_ranks: int, num_micro: int) -> Schedule:
    """Each backward as soon as possible: rank r holds activations of at most num_ranks - r microbatches.

    (Narayanan et al. 2019, "PipeDream", figure 4, with the flush of Narayanan et al. 2021, "Memory-Efficient
    Pipeline-Parallel DNN Training", figure 3; also DAPPLE, Fan et al. 2021.)

        F0 F1 F2 F3  .  .  .  .  .  . B0 == F4 B1 == F5 B2 ==  . B3 ==  . B4 ==  . B5 ==
         . F0 F1 F2  .  .  .  . B0 == F3 B1 == F4 B2 == F5 B3 ==  . B4 ==  . B5 ==  .  .
         .  . F0 F1  .  . B0 == F2 B1 == F3 B2 == F4 B3 == F5 B4 ==  . B5 ==  .  .  .  .
         .  .  . F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 == F5 B5 ==  .  .  .  .  .  .
    """
    forwards, backwards = [forward(i) for i in range(num_micro)], [backward(i) for i in range(num_micro)]
    return make(
        "1f1b", num_micro, round_robin(num_ranks), lambda rank: alternate(forwards, backwards, num_ranks - rank)
    )


def forward_only(num_ranks: int, num_micro: int, chunks: int = 1) -> Schedule:
    """Forwards only, for evaluation; several chunks run in the order of `interleaved`.

    F0 F1 F2 F3  .  .  .
     . F0 F1 F2 F3  .  .
     .  . F0 F1 F2 F3  .
     .  .  . F0 F1 F2 F3
    """
    rounds = [range(start, start + num_ranks) for start in range(0, num_micro, num_ranks)]
    actions = [forward(i, chunk) for group in rounds for chunk in range(chunks) for i in group]
    return make("forward-only", num_micro, round_robin(num_ranks, chunks), lambda _: actions)


def interleaved(num_ranks: int, num_micro: int, chunks: int) -> Schedule:
    """1f1b over chunks * num_ranks stages, in rounds of num_ranks microbatches: the bubble is `chunks` times smaller.

    (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", figure
    4.) The last round is padded to num_ranks microbatches.

        F0 F1 F2 F3 f0 f1 f2 f3  .  .  .  .  .  . b0 ==  . b1 ==  . b2 ==  . b3 == B0 == B1 == B2 == B3 ==
         . F0 F1 F2 F3 f0 f1 f2 f3  .  .  . b0 ==  . b1 ==  . b2 ==  . b3 == B0 == B1 == B2 == B3 ==  .  .
         .  . F0 F1 F2 F3 f0 f1 f2  . b0 == f3 b1 ==  . b2 ==  . b3 == B0 == B1 == B2 == B3 ==  .  .  .  .
         .  .  . F0 F1 F2 F3 f0 b0 == f1 b1 == f2 b2 == f3 b3 == B0 == B1 == B2 == B3 ==  .  .  .  .  .  .
    """
    rounds = [range(start, start + num_ranks) for start in range(0, num_micro, num_ranks)]
    forwards = [forward(i, chunk) for group in rounds for chunk in range(chunks) for i in group]
    backwards = [backward(i, chunk) for group in rounds for chunk in reversed(range(chunks)) for i in group]

    def ahead(rank: int) -> int:
        between = 2 if chunks > 1 else 1  # with one chunk this is 1f1b
        return between * (num_ranks - 1 - rank) + (chunks - 1) * num_ranks + 1

    return make(
        "interleaved",
        num_micro,
        round_robin(num_ranks, chunks),
        lambda rank: alternate(forwards, backwards, ahead(rank)),
    )


def looped_bfs(num_ranks: int, num_micro: int, chunks: int) -> Schedule:
    """All microbatches run through one chunk before the next, forward and backward.

    (Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism", figure 4.) A chunk's parameters are gathered twice a step
    for any number of microbatches, and its gradients are complete early, which suits ZeRO.

        F0 F1 F2 F3 f0 f1 f2 f3  .  .  .  .  .  .  .  .  . b0 == b1 == b2 == b3 == B0 == B1 == B2 == B3 ==
         . F0 F1 F2 F3 f0 f1 f2 f3  .  .  .  .  .  . b0 == b1 == b2 == b3 == B0 == B1 == B2 == B3 ==  .  .
         .  . F0 F1 F2 F3 f0 f1 f2 f3  .  .  . b0 == b1 == b2 == b3 == B0 == B1 == B2 == B3 ==  .  .  .  .
         .  .  . F0 F1 F2 F3 f0 f1 f2 f3 b0 == b1 == b2 == b3 == B0 == B1 == B2 == B3 ==  .  .  .  .  .  .
    """
    forwards = [forward(i, chunk) for chunk in range(chunks) for i in range(num_micro)]
    backwards = [backward(i, chunk) for chunk in reversed(range(chunks)) for i in range(num_micro)]
    return make("looped-bfs", num_micro, round_robin(num_ranks, chunks), lambda _: forwards + backwards)
