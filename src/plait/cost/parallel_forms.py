"""Closed forms of what parallelism takes: bytes that ranks send, bubbles of pipelines, memory beside the activations.

Each function names the paper that it is from; tests/test_published.py holds them to the papers' own tables.
"""

from __future__ import annotations

from plait.cost.collective_time import ring_bytes
from plait.plan.sharding_plan import ZeroStage

# What ranks send: elements, from each rank, in a step.


def zero_elements(num_parameters: float, cuts: ZeroStage) -> float:
    """Elements that each of many ranks sends: a gradient is reduce-scattered, and gathered as a sum or as the weight;
    parameters that are cut are gathered once more, for backward (Rajbhandari et al. 2020, "ZeRO", section 7)."""
    return (3 if cuts.parameters else 2) * num_parameters


def checkpoint_gather_elements(sequence: int, hidden: int) -> int:
    """Elements per row and layer to gather activation checkpoints that ranks of tensor parallelism have cut among them
    (ZeRO, section 8); the layer itself sends twelve times as many with recomputation."""
    return sequence * hidden


def tensor_elements(rows: int, sequence: int, hidden: int, weights: int) -> float:
    """Elements that a rank sends for a layer and microbatch: two all-reduces in forward and two in backward (Narayanan
    et al. 2021, section 3.2). With sequence parallelism they are four all-gathers and four reduce-scatters of as many
    elements (Korthikanti et al. 2022)."""
    return ring_bytes(8.0 * rows * sequence * hidden, weights)


def pipeline_elements(rows: int, sequence: int, hidden: int, chunks: int = 1) -> int:
    """Elements between neighbours of a pipeline for a microbatch, in each direction (Narayanan et al. 2021)."""
    return rows * sequence * hidden * chunks


def diloco_bytes(num_parameters: float, steps: int) -> float:
    """Bytes per parameter and step that replicas send in float32 if they synchronise every `steps` steps: 8 for data
    parallelism, a sum and a gather of 4 (Douillard et al. 2023, "DiLoCo")."""
    return 8.0 * num_parameters / steps


def diloco_state_elements(num_parameters: float, fragment: float | None = None) -> float:
    """Elements of weights and optimizer state on the device: Adam has weights and two moments, DiLoCo also the weights
    of the last synchronisation and the outer momentum, which is 5/3 of that. Streaming DiLoCo has of these two only
    what belongs to the `fragment` that synchronises (Douillard et al. 2025, section 2.3)."""
    return 3 * num_parameters + 2 * (num_parameters if fragment is None else fragment)


def diloco_utilisation(steps: int, step_seconds: float, reduce_seconds: float) -> float:
    """The fraction of time in which replicas compute (Jaghouar et al. 2024, "INTELLECT-1", table 2)."""
    return steps * step_seconds / (steps * step_seconds + reduce_seconds)


# Pipelines: p ranks, m microbatches, v chunks on each rank.


def bubble_of_ideal(ranks: int, num_micro: int, chunks: int = 1) -> float:
    """The bubble over the time of the work, for GPipe, 1F1B and with chunks interleaved: (p-1)/(v m) (Narayanan et al.
    2021, section 2.2)."""
    return (ranks - 1) / (chunks * num_micro)


def bubble_of_total(ranks: int, num_micro: int, chunks: int = 1) -> float:
    """The bubble over the time of the step: (p-1)/(m+p-1) for one chunk."""
    return (ranks - 1) / (chunks * num_micro + ranks - 1)


def batch_time(batch: float, rows: float, ranks: int, forward: float, backward: float) -> float:
    """Seconds of a step of `batch` rows in microbatches of `rows`, without communication: (B'/b + p-1) (t_f + t_b)
    (Narayanan et al. 2021, equation 1)."""
    return (batch / rows + ranks - 1) * (forward + backward)


def zero_bubble_sizes(ranks: int, forward: float, backward: float, weight: float) -> dict[str, float]:
    """Seconds of the bubble by schedule, and by their names those of plait (Qi et al. 2024, table 2)."""
    return {
        "1f1b": (ranks - 1) * (forward + backward + weight),
        "zb-h1": (ranks - 1) * (forward + backward - weight),
        "zb-h2": (ranks - 1) * (forward + backward - 2 * weight),
    }


def zero_bubble_in_flight(ranks: int) -> dict[str, int]:
    """Activations of microbatches that the first rank holds at most, by schedule (Qi et al. 2024, table 2)."""
    return {"1f1b": ranks, "zb-h1": ranks, "zb-h2": 2 * ranks - 1}


def few_microbatches_time(
    ranks: int, num_micro: int, forward: float, backward: float, weight: float
) -> tuple[float, float]:
    """Seconds of a step with at most as many microbatches as ranks: of 1F1B and of a zero-bubble schedule, which has
    time for all weight parts but one in the bubble (Qi et al. 2024, appendix)."""
    slots = num_micro + ranks - 1
    return slots * (forward + backward + weight), slots * (forward + backward) + weight


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


def gpipe_activations(num_rows: float, layers: float, ranks: int, num_micro: int) -> float:
    """Activations of the first rank with rematerialization, in those of one row and layer: N + L/K N/M (Huang et al.
    2019, "GPipe", section 2.3)."""
    return num_rows + layers / ranks * num_rows / num_micro


def two_version_memory(weights: float, total: float, inputs: float, ranks: int, recompute: bool) -> float:
    """Bytes of PipeDream-2BW on a rank: two versions of its weights, its activations of d microbatches, and their
    inputs (Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3.4)."""
    return 2 * weights / ranks + (total / ranks if recompute else total) + ranks * inputs


def gpipe_memory(weights: float, total: float, inputs: float, ranks: int, num_micro: int) -> float:
    """Bytes of GPipe with recomputation on a rank, by the same paper."""
    return weights / ranks + total / ranks + num_micro * inputs


def two_version_time(
    compute: list[float], messages: list[float], reduces: list[float], num_micro: int, recompute: bool
) -> float:
    """Seconds per microbatch of PipeDream-2BW: of the slowest stage, its compute and messages, or its part of the sums
    of gradients over replicas; recomputation makes compute 4/3 as long (by the same paper)."""
    extra = 4 / 3 if recompute else 1.0
    return max(
        max(extra * work + sent, reduce / num_micro)
        for work, sent, reduce in zip(compute, messages, reduces, strict=True)
    )


# Other forms.


def deepspeed_device_bytes(num_parameters: float, largest_layer: float, ranks: int, stage: int, offload: str) -> float:
    """Bytes on a device by DeepSpeed's estimators, without activations. `offload` is "none", "optimizer" or, at stage 3
    alone, "all"."""
    if stage == 2:
        return {"none": 4 * num_parameters + 16 * num_parameters / ranks, "optimizer": 2 * num_parameters}[offload]
    rest = {"none": 18 * num_parameters / ranks, "optimizer": 2 * num_parameters / ranks, "all": 0.0}[offload]
    return 4 * largest_layer + rest


def training_seconds(num_tokens: float, num_parameters: float, ranks: int, flops_per_second: float) -> float:
    """Seconds of a whole training with full recomputation, at the flop/s that each rank reaches: 8 T P / (n X)
    (Narayanan et al. 2021, equation 4)."""
    return 8 * num_tokens * num_parameters / (ranks * flops_per_second)


def foundry_mfu(
    num_parameters: float, layers: int, hidden: int, sequence: int, rows_per_second: float, ranks: int, peak: float
) -> float:
    """The model's flop/s over the peak, as llm-foundry counts them: (3 * 2 N s + 3 l 4 h s^2) rows/s / (n peak)."""
    flops = 3 * 2 * num_parameters * sequence + 3 * layers * 4 * hidden * sequence**2
    return flops * rows_per_second / (ranks * peak)


def streaming_factor(steps: int, bits: int, full_bits: int = 16) -> float:
    """How many times fewer bytes Streaming DiLoCo sends than data parallelism: H times full over coded bits (Douillard
    et al. 2025, "Streaming DiLoCo")."""
    return steps * full_bits / bits
