"""The bytes that a transformer's step takes on its fullest rank, by class, in closed form."""

from __future__ import annotations

from functools import lru_cache

from plait.cost.pipeline_forms import schedule_activations
from plait.cost.transformer import HALF_BYTES, TransformerShape
from plait.cost.transformer_program import TransformerProgram, received_bytes
from plait.cost.transformer_states import Owned, held_states
from plait.plan.parallelism import ALTERNATE, BUDGET, FULL, NONE, Parallelism
from plait.plan.sharding_plan import DEVICE


def own_parameters(shape: TransformerShape, how: Parallelism) -> Owned:
    """Parameters of the rank that has the most: its layers, and an embedding or an output layer."""
    return _own_parameters(shape, how.pipeline, how.weights, how.experts)


@lru_cache(maxsize=1 << 12)
def _own_parameters(shape: TransformerShape, pipeline: int, weights: int, num_experts: int) -> Owned:
    ends = shape.embedding_parameters if pipeline == 1 else max(shape.vocab * shape.hidden, 1)
    layers, experts = shape.layers / pipeline, shape.expert_parameters
    dense = (layers * (shape.layer_parameters - experts) + ends) / weights
    return Owned(dense, layers * experts / weights / num_experts, num_experts)


def kept_bytes(
    shape: TransformerShape, how: Parallelism, rows: float, program: TransformerProgram, recompute: str
) -> float:
    """Bytes that a layer keeps from forward to backward on one rank, for a microbatch of `rows` sequences."""
    if recompute == BUDGET:
        least, most = least_kept(shape, how, rows, program), kept_bytes(shape, how, rows, program, NONE)
        return min(max((how.budget - logits_bytes(shape, how, rows, program)) / shape.layers, least), most)
    found = shape.activation_bytes(rows, how.weights, how.sequence, recompute, how.sent_rows)
    found *= program.value_bytes / HALF_BYTES
    inputs = 1 if recompute in (ALTERNATE, FULL) else 2  # of norms, which are of the residual stream
    wider = inputs * (program.stream_bytes - program.value_bytes) * shape.hidden * rows * shape.sequence
    found += wider / (how.weights if how.sequence else 1)
    if recompute == FULL and how.weights > 1 and not program.repeats_sums:
        sums = 1 / (how.weights if how.sequence else 1)  # that of attention
        found += program.value_bytes * rows * shape.sequence * shape.hidden * sums
    return found + received_bytes(shape, how, rows * shape.sequence, program, recompute)


def least_kept(shape: TransformerShape, how: Parallelism, rows: float, program: TransformerProgram) -> float:
    """Bytes that a layer keeps within the smallest budget: its input, and what came from other ranks."""
    whole = kept_bytes(shape, how, rows, program, FULL)
    sent = (received_bytes(shape, how, rows * shape.sequence, program, kind) for kind in (BUDGET, FULL))
    return whole + next(sent) - next(sent)


def least_budget(shape: TransformerShape, how: Parallelism, rows: float, program: TransformerProgram) -> float:
    """Bytes of the smallest budget: what all layers keep within it, and what the loss keeps."""
    return shape.layers * least_kept(shape, how, rows, program) + logits_bytes(shape, how, rows, program)


def logits_bytes(shape: TransformerShape, how: Parallelism, rows: float, program: TransformerProgram) -> float:
    return program.loss_bytes * rows * shape.sequence * shape.vocab / how.weights


def memory_of_rank(
    shape: TransformerShape, how: Parallelism, rows: float, program: TransformerProgram, kept: float | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes by class on the device of the fullest rank, and outside it, for a step of `rows` sequences.

    `kept` are the bytes of activations of all microbatches in flight, where a simulated schedule has told them.
    """
    own = own_parameters(shape, how)
    states, cuts, homes = program.states, how.cuts, how.homes
    sizes = held_states(own, how, states)
    rows /= how.batch * how.num_micro * how.context
    layer = kept_bytes(shape, how, rows, program, how.recompute)
    factor = schedule_activations(how.order, how.pipeline, how.num_micro, how.chunks)
    sizes["activations"] = layer * shape.layers * factor if kept is None else kept
    away: dict[str, float] = {}
    if homes.activations != DEVICE:  # but of the layer that computes, and of the one that is copied
        away["activations"] = sizes["activations"]
        sizes["activations"] = min(2 * layer, away["activations"])
    if how.recompute in (ALTERNATE, FULL, BUDGET):  # of the layer that is recomputed
        sizes["activations"] += kept_bytes(shape, how, rows, program, NONE)
        sizes["activations"] -= layer if how.recompute == BUDGET else 0.0
    experts = shape.expert_parameters
    layer_elements = (shape.layer_parameters - experts + experts / how.experts) / how.weights
    sizes["logits"] = logits_bytes(shape, how, rows, program)
    most = max(2 * layer_elements, shape.vocab * shape.hidden / how.weights)  # two layers are there at a time
    if cuts.parameters:
        sizes["buffers"] = 2 * program.value_bytes * layer_elements
    if homes.optimizer != DEVICE:
        away["optimizer"] = sizes.pop("optimizer")
        away["gradients"], sizes["gradients"] = sizes["gradients"], min(most * states.gradients, sizes["gradients"])
    if homes.parameters != DEVICE:
        away["parameters"] = sizes.pop("parameters")
        sizes["buffers"] = most * program.stream_bytes
    return sizes, away
