"""The kernels of fused attention on tensors [B, S, H, D], or on sequences of any lengths laid end to end, [S, H, D].

Models call them by name. They are sharded over heads, and over samples where each has a place of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
)
from plait.compile.ops.dims import blocks_of, first_operand, overloads
from plait.spec.layout import Blocks

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
