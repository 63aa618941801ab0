"""Closed forms of pipelines: the bubble of a schedule, and the activations that its ranks keep.

p ranks, m microbatches, v chunks on each rank. tests/test_schedule_times.py holds them to simulated schedules.
"""

from __future__ import annotations


def schedule_wait(
    schedule: str, ranks: int, num_micro: int, chunks: int, forward: float, inputs: float, weight: float
) -> float:
    """Seconds of the bubble of a schedule by its name, for `forward`, `inputs` and `weight` seconds of a microbatch on
    a rank; 1F1B's for a schedule that has no closed form.

    Chunks and weight parts fill a bubble only as far as there are microbatches: one goes through all ranks whatever the
    schedule. tests/test_cost.py holds these to simulated schedules."""
    whole, ahead, more = forward + inputs + weight, ranks - 1, num_micro - 1
    few = ahead * (forward + inputs)  # of one microbatch, whose last weight part is all that is left at its end
    if schedule == "naive":
        return ahead * num_micro * whole
    if schedule == "zb-h1":
        return max(few - min(more, ahead) * weight, 0.0)
    if schedule == "zb-h2":  # the last rank begins after the forwards of all others
        full = ahead * max(forward, forward + inputs - 2 * weight)
        return max(few - (weight + (num_micro / 2 - 1) * inputs if more else 0.0), full)
    if schedule in ("zb-v", "dualpipe-v"):
        few += ahead * weight / 2 if schedule == "dualpipe-v" else 0.0  # its ranks take a backward whole at first
        return max(few - more * forward, ahead * max(forward + inputs - 2 * weight, whole / 6))
    idle = max(ranks - num_micro, 0)  # ranks that no microbatch is for, at any time
    wait = (idle + (ahead - idle) / chunks) * whole
    if schedule == "interleaved" and not idle:  # chunks take turns in rounds of as many microbatches as ranks
        wait += -num_micro % ranks * (1 - 1 / chunks) * (inputs + weight)
    return wait


def schedule_activations(schedule: str, ranks: int, num_micro: int, chunks: int = 1) -> float:
    """The activations that the fullest rank keeps under a schedule, over those of a microbatch in all layers."""
    most = num_micro / ranks
    if schedule == "naive":
        return 1 / ranks
    if schedule in ("gpipe", "looped-bfs"):
        return most
    if schedule == "zb-h2":
        return min(most, (2 * ranks - 1) / ranks)
    if schedule == "dualpipe-v":
        return min(most, (2 * ranks + 1) / (2 * ranks))
    return min(most, 1.0) if chunks == 1 or schedule == "zb-v" else min(most, first_stage_factor(ranks, chunks))


def first_stage_factor(ranks: int, chunks: int = 1) -> float:
    """What the first rank of 1F1B keeps, in activations of all layers: 1, as it has p microbatches of 1/p of them in
    flight; with chunks interleaved 1 + (p-1)/(p v) (Korthikanti et al. 2022, section 4.2.3)."""
    return 1.0 if chunks == 1 else 1 + (ranks - 1) / (ranks * chunks)
