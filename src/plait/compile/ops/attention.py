"""Fused attention, forward and backward: sharded over samples and heads, and over queries if there is no causal mask.

Each op is a row that names its tensors. With grouped queries the key-value heads, which are fewer, are sharded too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.compile.ops.base import (
    REPLICATE,
    Call,
    OpSpec,
    Partial,
    Placement,
    Placements,
    Shard,
    Strategy,
    TensorSpec,
    no_groups,
    register,
    state,
)
from plait.compile.ops.dims import blocks_of, broadcast_dim, first_operand, overloads
from plait.spec.layout import Blocks

SAMPLES, HEADS, QUERIES = 0, 1, 2
# The dims of a tensor: [B, H, S, D] of queries, [B, H, T, D] of keys, [B, H, S], a mask over [B, H, S, T], or others.
Q, K, LSE, MASK, OTHER = "q", "k", "lse", "mask", "other"


@dataclass(frozen=True)
class Signature:
    """Arguments by position or name with the dims of each, and likewise outputs."""

    inputs: Sequence[tuple[int | str, str]]
    outputs: Sequence[str]
    query: int
    causal: tuple[int, str]  # position and name
    dropout: tuple[int, str]


def _placement(spec: TensorSpec, look: str, factor: int, blocks: Blocks, scores: tuple[int, ...]) -> Placement | None:
    """The placement of a tensor for a sharded factor; None for a tensor without the factor."""
    dim: int | None
    match look:
        case "q" | "lse":
            dim = factor if factor < spec.ndim else None
        case "k":
            dim = None if factor == QUERIES else factor
        case "mask":
            dim = broadcast_dim(spec.shape, factor, scores)
        case _:
            dim = None
    return None if dim is None else Shard(dim, blocks)


def _strategies(signature: Signature) -> Callable[[Call, Placements, int], Sequence[Strategy]]:
    def strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
        if call.arg(*signature.dropout, 0.0):
            return []  # its mask is drawn inside, by position in what the rank has
        query, key = call.args[signature.query], call.args[signature.query + 1]
        if query.ndim != 4:
            return []
        scores = (*query.shape[:3], key.shape[2])
        looks: dict[int, str] = {}
        for place, look in signature.inputs:
            value = call.args[place] if isinstance(place, int) and place < len(call.args) else None
            value = call.kwargs.get(place) if isinstance(place, str) else value
            if isinstance(value, TensorSpec):
                looks[value.index] = look
        results = [(o, look) for o, look in zip(call.outputs, signature.outputs, strict=False)]
        results += [(o, OTHER) for o in call.outputs[len(results) :]]
        backward = signature.query > 0
        found = []
        for factor in (SAMPLES, HEADS) if call.arg(*signature.causal, False) else (SAMPLES, HEADS, QUERIES):
            if factor == QUERIES and any(
                look == LSE and s is not None and s.shape[2] != query.shape[2]
                for s, look in [*results, *((call.inputs[i], look) for i, look in looks.items())]
            ):
                continue  # padded
            for b in blocks_of(given, [factor] * len(given)):
                inputs = tuple(
                    _placement(s, looks.get(i, OTHER), factor, b, scores) or REPLICATE
                    for i, s in enumerate(call.inputs)
                )
                absent = Partial() if backward else REPLICATE
                outputs = tuple(
                    REPLICATE if s is None or look == OTHER else _placement(s, look, factor, b, scores) or absent
                    for s, look in results
                )
                found.append(Strategy(inputs, outputs))
        return found

    return strategies


_QKV = ((0, Q), (1, K), (2, K))
_GRADS = ((0, Q), (1, Q), (2, K), (3, K))
_SIGNATURES: dict[str, Signature] = {
    "_scaled_dot_product_flash_attention_for_cpu": Signature(
        (*_QKV, ("attn_mask", MASK)), (Q, LSE), 0, (4, "is_causal"), (3, "dropout_p")
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Signature(
        (*_GRADS, (4, Q), (5, LSE), ("attn_mask", MASK)), (Q, K, K), 1, (7, "is_causal"), (6, "dropout_p")
    ),
    "_scaled_dot_product_flash_attention": Signature(_QKV, (Q, LSE), 0, (4, "is_causal"), (3, "dropout_p")),
    "_scaled_dot_product_flash_attention_backward": Signature(
        (*_GRADS, (4, Q), (5, LSE)), (Q, K, K), 1, (11, "is_causal"), (10, "dropout_p")
    ),
    "_scaled_dot_product_efficient_attention": Signature(
        (*_QKV, (3, MASK)), (Q, LSE), 0, (6, "is_causal"), (5, "dropout_p")
    ),
    "_scaled_dot_product_efficient_attention_backward": Signature(
        (*_GRADS, (4, MASK), (5, Q), (6, LSE)), (Q, K, K, MASK), 1, (11, "is_causal"), (9, "dropout_p")
    ),
    "_scaled_dot_product_cudnn_attention": Signature(
        (*_QKV, (3, MASK)), (Q, LSE), 0, (6, "is_causal"), (5, "dropout_p")
    ),
    "_scaled_dot_product_cudnn_attention_backward": Signature(
        (*_GRADS, (4, Q), (5, LSE), (8, MASK)), (Q, K, K), 1, (14, "is_causal"), (13, "dropout_p")
    ),
}


for _name, _signature in _SIGNATURES.items():
    _groups = first_operand if _signature.query else no_groups  # backward ops are linear in the gradient
    register(
        *overloads(_name),
        spec=OpSpec(strategies=_strategies(_signature), linear=_groups, formats=True, dropout=_signature.dropout[0]),
    )
state(*overloads("_scaled_dot_product_fused_attention_overrideable"), dropout=4)
