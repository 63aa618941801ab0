"""Fused recurrent cells and gates: samples can be sharded; gates are blocks of the feature dim."""

from __future__ import annotations

from plait.compile.ops.base import Call, OpSpec, Partial, Placements, Shard, Strategy, register
from plait.compile.ops.dims import blocks_of, equal_blocks_of, first_operand, overloads, positive, sharded_strategy


def _samples(call: Call, given: Placements, size: int) -> list[Strategy]:
    """Tensors of two dims have a row per sample. Biases have none, and their gradients are partial sums."""
    inputs = [0 if s.ndim > 1 else None for s in call.inputs]
    outputs = [0 if s is not None and s.ndim > 1 else None for s in call.outputs]
    return [sharded_strategy(call, inputs, outputs, b, Partial()) for b in blocks_of(given, inputs)]


register(
    *overloads(
        "_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell",
        "_thnn_fused_gru_cell_backward",
    ),
    spec=OpSpec(strategies=_samples),
)  # fmt: skip


def _halves(call: Call, given: Placements, size: int) -> list[Strategy]:
    """glu(x, dim) and its backward (grad, x, dim): both halves of dim are sharded alike."""
    backward = len(call.inputs) > 1
    x = call.inputs[-1]
    dim = positive(call.arg(2 if backward else 1, "dim", -1), x.ndim)
    found = []
    for d in range(x.ndim):
        for b in equal_blocks_of(given, (d,) * len(given)) if d != dim else _half_blocks(given[0], dim, backward):
            whole = Shard(d, b if d != dim else 2 * b)
            part = Shard(d, b)
            found.append(Strategy((part, whole) if backward else (whole,), (whole,) if backward else (part,)))
    return found


def _half_blocks(placement: object, dim: int, backward: bool) -> list[int]:
    """Blocks of one half to try, from those that the half (backward) or the whole (forward) has."""
    if not isinstance(placement, Shard) or placement.dim != dim:
        return [1]
    if not isinstance(placement.blocks, int):
        return [1]
    return sorted({1, placement.blocks if backward else max(placement.blocks // 2, 1)})


register(*overloads("glu"), spec=OpSpec(strategies=_halves))
register(*overloads("glu_backward"), spec=OpSpec(strategies=_halves, linear=first_operand))
