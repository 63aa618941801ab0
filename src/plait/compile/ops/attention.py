"""Fused attention, forward and backward: sharded over samples and heads, and over queries if there is no causal mask.

Each op is a row that names its tensors. With grouped queries the key-value heads, which are fewer, are sharded too.
Kernels that drop out elements themselves draw the mask by position in what a rank has, so that none is in a graph:
attention with dropout is an op of plait's own (compile/ops/dropped_attention.py).

Models also call kernels by name, on tensors [B, S, H, D], or on sequences of any lengths laid end to end, [S, H, D].
These are sharded over heads, and over samples where each has a place of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from plait.compile.ops.attention_signature import LSE, MASK, OTHER, PADDED, SIGNATURES, K, Q, Signature
from plait.compile.ops.base import (
    REPLICATE,
    Args,
    Builder,
    Call,
    Emitted,
    Kwargs,
    OpSpec,
    Partial,
    Placement,
    Placements,
    Shard,
    Strategy,
    TensorSpec,
    no_groups,
    register,
)
from plait.compile.ops.context_attention import over_sequence
from plait.compile.ops.dims import blocks_of, broadcast_dim, equal_blocks_of, first_operand, overloads, put
from plait.spec.layout import Blocks

SAMPLES, HEADS, QUERIES = 0, 1, 2
_PADDED_TO = 32  # numbers of queries for which the memory-efficient kernel has sums, on CUDA


def _placement(spec: TensorSpec, look: str, factor: int, blocks: Blocks, scores: tuple[int, ...]) -> Placement | None:
    """The placement of a tensor for a sharded factor; None for a tensor without the factor."""
    dim: int | None
    match look:
        case "q" | "lse" | "padded lse":
            dim = factor
        case "k":
            dim = None if factor == QUERIES else factor
        case "mask":
            dim = broadcast_dim(spec.shape, factor, scores)
        case _:
            dim = None
    return None if dim is None else Shard(dim, blocks)


def attention_strategies(signature: Signature) -> Callable[[Call, Placements, int], Sequence[Strategy]]:
    """The strategies of an attention with these arguments."""

    def strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
        if signature.dropout is not None and call.arg(*signature.dropout, 0.0):
            return []
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
        causal = signature.causal is not None and call.arg(*signature.causal, False)
        for factor in (SAMPLES, HEADS) if causal else (SAMPLES, HEADS, QUERIES):
            rounded = PADDED in (*looks.values(), *signature.outputs)
            if factor == QUERIES and rounded and query.shape[2] % (_PADDED_TO * size):
                continue  # what a rank rounds up to is not its part of what all round up to
            dims = [factor] * len(given)
            for b in blocks_of(given, dims) if signature.emit is None else equal_blocks_of(given, dims):
                inputs = tuple(
                    _placement(s, looks.get(i, OTHER), factor, b, scores) or REPLICATE
                    for i, s in enumerate(call.inputs)
                )
                absent = Partial() if backward else REPLICATE
                outputs = tuple(
                    REPLICATE if s is None or look == OTHER else _placement(s, look, factor, b, scores) or absent
                    for s, look in results
                )
                found.append(Strategy(inputs, outputs, signature.emit or emit))
        return found + over_sequence(call, signature, looks, blocks_of(given, [QUERIES] * len(given)))

    def emit(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
        if signature.num_queries is not None:
            args = put(args, signature.num_queries, builder.shape(args[signature.query])[QUERIES])
        return builder.call(call.op, *args, **kwargs)

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
        (*_GRADS, (4, Q), (5, LSE)), (Q, K, K), 1, (11, "is_causal"), (10, "dropout_p"), 8
    ),
    "_scaled_dot_product_efficient_attention": Signature(
        (*_QKV, (3, MASK)), (Q, PADDED), 0, (6, "is_causal"), (5, "dropout_p")
    ),
    "_scaled_dot_product_efficient_attention_backward": Signature(
        (*_GRADS, (4, MASK), (5, Q), (6, PADDED)), (Q, K, K, MASK), 1, (11, "is_causal"), (9, "dropout_p")
    ),
    "_scaled_dot_product_cudnn_attention": Signature(
        (*_QKV, (3, MASK)), (Q, LSE), 0, (6, "is_causal"), (5, "dropout_p")
    ),
    "_scaled_dot_product_cudnn_attention_backward": Signature(
        (*_GRADS, (4, Q), (5, LSE), (8, MASK)), (Q, K, K), 1, (14, "is_causal"), (13, "dropout_p"), 11
    ),
    "_scaled_dot_product_fused_attention_overrideable": Signature(
        (*_QKV, (3, MASK)), (Q, LSE), 0, (5, "is_causal"), (4, "dropout_p")
    ),
    "_scaled_dot_product_fused_attention_overrideable_backward": Signature(
        (*_GRADS, (4, MASK), (6, Q), (7, LSE)), (Q, K, K, MASK), 1, (13, "is_causal"), (12, "dropout_p"), 10
    ),
}


def _flops(signature: Signature, call: Call) -> float:
    """Two products forward and five backward, masked or not, as torch counts them."""
    query, key, value = signature.qkv(call)
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    wide, values = query.shape[-1], value.shape[-1]
    return 2.0 * pairs * (3 * wide + 2 * values if signature.backward else wide + values)


def _skips(signature: Signature, call: Call) -> float:
    """Half of the products under a causal mask, whose blocks fused kernels pass over."""
    return 0.5 if signature.causal is not None and call.arg(*signature.causal, False) else 0.0


for _name, _signature in _SIGNATURES.items():
    SIGNATURES.update(dict.fromkeys(overloads(_name), _signature))
    _groups = first_operand if _signature.query else no_groups  # backward ops are linear in the gradient
    register(
        *overloads(_name),
        spec=OpSpec(
            strategies=attention_strategies(_signature), linear=_groups, formats=True, strided=True, role="attention",
            dropout=_signature.dropout and _signature.dropout[0], by_device=True,
            flops=functools.partial(_flops, _signature), skips=functools.partial(_skips, _signature),
        ),
    )  # fmt: skip


# For each op: the places of its tensors with heads, those of a mask [B, H, S, T] and of the lengths of sequences, the
# place of the rate of dropout, and how many of the outputs have heads.
_OPS: dict[str, tuple[tuple[int, ...], int | None, int, int, int]] = {
    "_flash_attention_forward": ((0, 1, 2), None, 3, 7, 2),
    "_flash_attention_backward": ((0, 1, 2, 3, 4, 5), None, 6, 10, 3),
    "_efficient_attention_forward": ((0, 1, 2), 3, 4, 8, 2),
    "_efficient_attention_backward": ((0, 1, 2, 3, 5, 10), 4, 6, 11, 3),
}


def _strategies(
    tensors: Sequence[int], mask: int | None, lengths: int, dropout: int, num_outputs: int, backward: bool
) -> Callable[[Call, Placements, int], Sequence[Strategy]]:
    def strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
        if call.arg(dropout) or call.kwargs.get("alibi_slopes") is not None:
            return []
        query = call.args[int(backward)]
        own = {call.args[place].index for place in tensors}
        bias = None if mask is None else call.args[mask]

        def input_part(spec: TensorSpec, samples: bool, blocks: Blocks) -> Placement:
            if spec.index in own:
                return Shard(0 if samples else spec.ndim - 2, blocks)
            return mask_part(spec, samples, blocks) if bias is not None and spec.index == bias.index else REPLICATE

        def mask_part(spec: TensorSpec, samples: bool, blocks: Blocks) -> Placement:
            dim = 0 if samples else 1
            return Shard(dim, blocks) if spec.shape[dim] == query.shape[0 if samples else 2] else REPLICATE

        def output_part(i: int, spec: TensorSpec | None, samples: bool, blocks: Blocks) -> Placement:
            if spec is None:
                return REPLICATE
            if i < num_outputs:
                return Shard(0 if samples else spec.ndim - 2, blocks)
            if bias is None or not backward or i != num_outputs:
                return REPLICATE
            found = mask_part(bias, samples, blocks)
            return found if isinstance(found, Shard) else Partial()

        found = []
        for samples in (False, True) if call.arg(lengths) is None else (False,):
            dims = [0 if samples else spec.ndim - 2 for spec in call.inputs]
            for b in blocks_of(given, dims):
                inputs = tuple(input_part(spec, samples, b) for spec in call.inputs)
                outputs = tuple(output_part(i, spec, samples, b) for i, spec in enumerate(call.outputs))
                found.append(Strategy(inputs, outputs))
        return found

    return strategies


for _name, (_tensors, _mask, _lengths, _dropout, _num_outputs) in _OPS.items():
    _backward = _name.endswith("backward")
    register(
        *overloads(_name),
        spec=OpSpec(
            strategies=_strategies(_tensors, _mask, _lengths, _dropout, _num_outputs, _backward),
            linear=first_operand if _backward else no_groups,
            formats=True,
            strided=True,
            dropout=_dropout,
        ),
    )
