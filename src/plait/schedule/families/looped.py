"""Several stages per rank, placed round-robin: interleaved and looped breadth-first.

In the drawings small letters are a rank's second chunk, and a backward takes two columns.
"""

from __future__ import annotations

from plait.schedule.families.common import alternate, backward, forward, loop, make
from plait.spec.schedule import Schedule


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
        "interleaved", num_micro, loop(num_ranks, chunks), lambda rank: alternate(forwards, backwards, ahead(rank))
    )


def looped_bfs(num_ranks: int, num_micro: int, chunks: int) -> Schedule:
    """All microbatches through one chunk before the next, and back the same way.

    (Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism", figure 4.) A chunk's parameters are gathered twice a step
    for any number of microbatches, and its gradients are complete early, which suits ZeRO.

        F0 F1 F2 F3 f0 f1 f2 f3  .  .  .  .  .  .  .  .  . b0 == b1 == b2 == b3 == B0 == B1 == B2 == B3 ==
         . F0 F1 F2 F3 f0 f1 f2 f3  .  .  .  .  .  . b0 == b1 == b2 == b3 == B0 == B1 == B2 == B3 ==  .  .
         .  . F0 F1 F2 F3 f0 f1 f2 f3  .  .  . b0 == b1 == b2 == b3 == B0 == B1 == B2 == B3 ==  .  .  .  .
         .  .  . F0 F1 F2 F3 f0 f1 f2 f3 b0 == b1 == b2 == b3 == B0 == B1 == B2 == B3 ==  .  .  .  .  .  .
    """
    forwards = [forward(i, chunk) for chunk in range(chunks) for i in range(num_micro)]
    backwards = [backward(i, chunk) for chunk in reversed(range(chunks)) for i in range(num_micro)]
    return make("looped-bfs", num_micro, loop(num_ranks, chunks), lambda _: forwards + backwards)
