"""What a program does of a transformer's step, beside how it is spread: dtypes, bytes of states and of activations, and
what attention sends and keeps where ranks have a part of every sequence, in closed form.

    ulysses   queries, keys, values and results are exchanged for parts of the heads, and back (Jacobs et al. 2023)
    ring      keys and values go around, in backward again and with their gradients (Liu et al. 2023)
    gather    keys and values are gathered, and their gradients scattered (Llama Team 2024, section 3.3.2)

With recompute=layer plait gathers and exchanges again, but keeps what a ring has computed. Within a budget all that
came from other ranks stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from plait.cost.collective_time import CollectiveKind
from plait.cost.memory_model import StateBytes
from plait.cost.transformer import HALF_BYTES, TransformerShape
from plait.cost.transformer_states import StateTraffic
from plait.plan.parallelism import BUDGET, FULL, NONE, Parallelism

# Adam in mixed precision: half-precision weights and gradients, float32 weights and two moments.
MIXED = StateBytes(parameters=2, gradients=2, optimizer=12)


@dataclass(frozen=True)
class TransformerProgram:
    """What a program does of a step, beside how it is spread.

    Attributes:
        dtype: of products; its peak is the device's.
        states: bytes per parameter.
        traffic: how often what a layer keeps is read or written between products, in a forward. About 2: it is written,
            and read once. Fused kernels have less.
        causal: the fraction of attention's products that is computed: 0.5 if kernels skip what the mask hides.
        attention: how fast attention's products are, relative to products of matrices; 0 for what the device reaches.
        gather_efficiency: of the links, in gathers of parameters for their use.
        loss_bytes: bytes per element of the logits that the loss keeps, its gradient included.
        value_bytes: bytes of an activation.
        stream_bytes: bytes of a value of the residual stream, which autocast leaves in float32.
        reduce_bytes: bytes per parameter of gradients as they are summed over ranks; 0 for those of `states`.
        hides_sums: whether sums of gradients run while the last backward computes.
        repeats_sums: whether a layer that is recomputed sums over ranks that split weights, and gathers parameters,
            once more for that. If not, only gathers of a sequence are repeated, and the sum after attention is kept.
        contention: the seconds that compute loses for each second of a collective that it hides.
        repeats_heads: whether keys and values are repeated for all heads before they go around a ring of a context.
        ring_gradient_bytes: bytes per element of their gradients as they go around; 0 for those of an activation.
        ring_traffic: bytes per element of the queries that each further step of a ring reads and writes beside
            attention itself, in forward and in backward: copies of what is sent, merges of partial results, sums of
            partial gradients. By default as counted in torch.distributed.tensor.experimental._attention of 2.6.
    """

    dtype: str = "bfloat16"
    states: StateBytes = MIXED
    traffic: float = 2.0
    causal: float = 1.0
    attention: float = 0.0
    gather_efficiency: float = 1.0
    loss_bytes: float = 6.0
    value_bytes: int = HALF_BYTES
    stream_bytes: int = HALF_BYTES
    reduce_bytes: int = 0
    hides_sums: bool = False
    repeats_sums: bool = True
    contention: float = 0.0
    repeats_heads: bool = False
    ring_gradient_bytes: int = 0
    ring_traffic: tuple[float, float] = (41.0, 58.0)

    @property
    def summed_bytes(self) -> float:
        """Bytes per parameter of gradients as they are summed over ranks."""
        return self.reduce_bytes or self.states.gradients

    @property
    def state_traffic(self) -> StateTraffic:
        """How states are stored and sent."""
        return StateTraffic(
            self.states, self.summed_bytes, self.value_bytes, self.stream_bytes, self.gather_efficiency,
            self.hides_sums, self.repeats_sums, self.contention,
        )  # fmt: skip


DEFAULT_PROGRAM = TransformerProgram()


ULYSSES, RING, GATHER = "ulysses", "ring", "gather"
_STATISTICS_BYTES = 4  # of a position and head: the logarithm of its sum of exponentials


class AttentionExchange(NamedTuple):
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
) -> AttentionExchange:
    """What an attention sends over the ranks of a context, of `tokens` tokens on each."""
    if how.context == 1:
        return AttentionExchange([], [])
    kind, again = attention_kind(shape, how), how.recompute == FULL
    if kind == ULYSSES:
        widths = [shape.attention_width] * 2 + [shape.kv_width] * 2
        each = [(CollectiveKind.ALL_TO_ALL, program.value_bytes * tokens * width / how.weights) for width in widths]
        return AttentionExchange(each, each * (1 + again))
    width = shape.attention_width if program.repeats_heads else shape.kv_width
    pairs = 2 * tokens * how.context * width / how.weights
    values = (CollectiveKind.ALL_GATHER, pairs * program.value_bytes)
    num_bytes = pairs * (program.ring_gradient_bytes or program.value_bytes)
    if kind == GATHER:
        return AttentionExchange([values], [values] * again + [(CollectiveKind.REDUCE_SCATTER, num_bytes)])
    again = again and program.repeats_sums
    return AttentionExchange([values], [values] * (1 + again) + [(CollectiveKind.ALL_GATHER, num_bytes)])


def received_bytes(
    shape: TransformerShape, how: Parallelism, tokens: float, program: TransformerProgram, recompute: str
) -> float:
    """Bytes of what other ranks have sent or helped to compute that a layer keeps from forward to backward, beside its
    activations; with `budget` those that stay whatever the budget is."""
    if (program.repeats_sums and recompute != NONE) or (how.context == 1 and recompute != BUDGET):
        return 0.0
    width, statistics = 0.0, 0.0
    if how.context > 1:
        kind, queries, keys = (
            attention_kind(shape, how),
            shape.attention_width / how.weights,
            shape.kv_width / how.weights,
        )
        if kind == GATHER and recompute != FULL:  # keys and values of all positions; the rank's own are activations
            width += 2 * keys * (how.context - (recompute == NONE))
        elif kind == ULYSSES and recompute == BUDGET:
            width += 2 * (queries + keys)
        elif kind == RING and recompute != NONE:
            width, statistics = width + queries, shape.heads / how.weights
    if recompute == BUDGET:
        width += 2 * shape.hidden * (how.sequence and how.weights > 1)  # gathered for attention and for the MLP
        if how.experts > 1:  # rows that came, and those that came back
            width += shape.experts_per_token * shape.hidden * (how.sent_rows + 1)
    return tokens * (program.value_bytes * width + _STATISTICS_BYTES * statistics)
