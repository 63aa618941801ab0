"""What the attention of a transformer sends and keeps where ranks have a part of every sequence, in closed form.

    ulysses   queries, keys, values and results are exchanged for parts of the heads, and back (Jacobs et al. 2023)
    ring      keys and values go around, in backward again and with their gradients (Liu et al. 2023)
    gather    keys and values are gathered, and their gradients scattered (Llama Team 2024, section 3.3.2)

With recompute=layer plait keeps what came from other ranks, but gathers again.
"""

from __future__ import annotations

from typing import NamedTuple

from plait.cost.collective_time import CollectiveKind
from plait.cost.transformer import TransformerShape
from plait.cost.transformer_program import TransformerProgram
from plait.plan.parallelism import FULL, NONE, Parallelism

ULYSSES, RING, GATHER = "ulysses", "ring", "gather"
_STATISTICS_BYTES = 4  # of a position and head: the logarithm of its sum of exponentials


class Exchange(NamedTuple):
    """Collectives of a layer for a microbatch: their kinds, and bytes as `collective_time` takes them."""

    forward: list[tuple[CollectiveKind, float]]
    backward: list[tuple[CollectiveKind, float]]


def attention_kind(shape: TransformerShape, how: Parallelism) -> str:
    """How ranks of a context see the positions of others: as the plan says, or what sends the fewest bytes."""
    if how.context_kind != "auto":
        return how.context_kind
    heads, groups = shape.heads // how.weights, shape.groups // how.weights
    divides = heads % how.context == 0 and groups % how.context == 0
    return ULYSSES if divides and heads + groups <= groups * how.context else RING


def attention_exchange(
    shape: TransformerShape, how: Parallelism, tokens: float, program: TransformerProgram
) -> Exchange:
    """What an attention sends over the ranks of a context, of `tokens` tokens on each."""
    if how.context == 1:
        return Exchange([], [])
    kind, repeats = attention_kind(shape, how), how.recompute == FULL and program.repeats_sums
    if kind == ULYSSES:
        widths = [shape.attention_width] * 2 + [shape.kv_width] * 2
        each = [(CollectiveKind.ALL_TO_ALL, program.value_bytes * tokens * width / how.weights) for width in widths]
        return Exchange(each, each * (2 if repeats else 1))
    width = shape.attention_width if program.repeats_heads else shape.kv_width
    pairs = 2 * tokens * how.context * width / how.weights
    values = (CollectiveKind.ALL_GATHER, pairs * program.value_bytes)
    num_bytes = pairs * (program.ring_gradient_bytes or program.value_bytes)
    if kind == GATHER:
        again = [values] if how.recompute == FULL else []
        return Exchange([values], [*again, (CollectiveKind.REDUCE_SCATTER, num_bytes)])
    return Exchange([values], [values] * (2 if repeats else 1) + [(CollectiveKind.ALL_GATHER, num_bytes)])


def exchanged_bytes(
    shape: TransformerShape, how: Parallelism, tokens: float, program: TransformerProgram, recompute: str
) -> float:
    """Bytes that a layer keeps from forward to backward of what ranks of a context and of experts exchange, beside its
    activations."""
    kept = 0.0
    if how.context > 1:
        kind = attention_kind(shape, how)
        both = 2 * (shape.attention_width + shape.kv_width) / how.weights
        if recompute == NONE and kind == GATHER:  # keys and values of all positions
            kept += (how.context - 1) * 2 * shape.kv_width / how.weights
        if recompute == FULL and not program.repeats_sums:
            kept += {ULYSSES: both, RING: shape.attention_width / how.weights, GATHER: 0.0}[kind]
    if how.experts > 1 and recompute == FULL and not program.repeats_sums:  # rows that came, and that came back
        kept += 2 * shape.experts_per_token * how.sent_rows * shape.hidden
    found = program.value_bytes * tokens * kept
    if how.context > 1 and recompute == FULL and not program.repeats_sums and attention_kind(shape, how) == RING:
        found += _STATISTICS_BYTES * tokens * shape.heads / how.weights
    return found
