"""Pointwise ops, fused recurrent cells and gates.

Every dim of a pointwise op's output may be sharded, and operands are broadcast; torch's tag lists these ops. Cells may
be sharded over samples. The halves of a gate are blocks of its feature dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._ops import OpOverload

from plait.compile.ops.base import (
    REPLICATE,
    Call,
    OpSpec,
    Partial,
    Placements,
    Shard,
    Strategy,
    View,
    no_groups,
    register,
    state,
)
from plait.compile.ops.dims import (
    aten,
    blocks_of,
    broadcast_dim,
    each_operand,
    equal_blocks_of,
    first_operand,
    is_floating,
    overloads,
    pointwise_factors,
    positive,
    sharded_strategy,
)


def tagged() -> list[OpOverload]:
    """Every functional ATen overload that torch tags as pointwise."""
    found = []
    for name in dir(aten):
        packet = getattr(aten, name)
        if name.startswith(("_foreach", "__i")) or name.endswith("_") or not hasattr(packet, "overloads"):
            continue
        for overload in packet.overloads():
            op = getattr(packet, overload)
            random = torch.Tag.nondeterministic_seeded in op.tags
            if torch.Tag.pointwise in op.tags and not random and not op._schema.is_mutable and _makes_tensors(op):
                found.append(op)
    return found


def _makes_tensors(op: OpOverload) -> bool:
    def is_tensor(argument: torch.Argument) -> bool:
        return str(argument.type) == "Tensor"

    return any(map(is_tensor, op._schema.arguments)) and all(map(is_tensor, op._schema.returns))


def _sum_groups(call: Call) -> list[tuple[int, ...]]:
    """add, sub: linear in both operands jointly. Not with a number, which would be added once per rank."""
    out = call.outputs[0]
    linear = len(call.inputs) == 2 and out is not None and out.dtype is not torch.bool
    return [(0, 1)] if linear else []


def _quotient_groups(call: Call) -> list[tuple[int, ...]]:
    return [(0,)] if call.inputs and call.args and call.args[0] is call.inputs[0] else []


def _cast_groups(call: Call) -> list[tuple[int, ...]]:
    """A cast may come before the sum if it loses no precision."""
    (source,), out = call.inputs, call.outputs[0]
    assert out is not None
    if source.dtype == out.dtype:
        return [(0,)]
    return [(0,)] if is_floating(source) and is_floating(out) and out.dtype.itemsize > source.dtype.itemsize else []


def _where_groups(call: Call) -> list[tuple[int, ...]]:
    return [(1, 2)] if len(call.inputs) == 3 else []


def _fill_groups(call: Call) -> list[tuple[int, ...]]:
    return [(0,)] if call.arg(2, "value") == 0 else []


def _second_operand(call: Call) -> list[tuple[int, ...]]:
    return [(1,)] if len(call.inputs) == 2 else []


_LINEAR: dict[OpOverload, Callable[[Call], Sequence[tuple[int, ...]]]] = {
    **dict.fromkeys(overloads("add.Tensor", "sub.Tensor", "complex"), _sum_groups),
    **dict.fromkeys(overloads("mul.Tensor", "mul.Scalar"), each_operand),
    **dict.fromkeys(overloads("div.Tensor", "div.Scalar", "true_divide.Tensor"), _quotient_groups),
    **dict.fromkeys(
        overloads(
            "neg", "positive", "clone", "alias", "detach", "lift_fresh_copy", "deg2rad", "rad2deg", "conj_physical",
            "_conj_physical",
            "threshold_backward", "gelu_backward", "silu_backward", "sigmoid_backward", "tanh_backward",
            "elu_backward", "hardswish_backward", "hardsigmoid_backward", "hardtanh_backward", "mish_backward",
            "leaky_relu_backward", "softplus_backward", "softshrink_backward", "hardshrink_backward",
            "native_dropout_backward", "logit_backward", "polar",
        ),
        first_operand,
    ),
    **dict.fromkeys(overloads("where.self"), _where_groups),
    **dict.fromkeys(overloads("masked_fill.Scalar"), _fill_groups),
    **dict.fromkeys(overloads("copy", "fill.Tensor"), _second_operand),
    **dict.fromkeys(overloads("_to_copy"), _cast_groups),
}  # fmt: skip

# Pointwise ops that torch does not tag.
_EXTRAS = overloads(
    "_to_copy", "alias", "detach", "lift_fresh_copy", "copy", "fill.Tensor", "fill.Scalar", "masked_fill.Tensor",
    "floor_divide", "floor_divide.Scalar", "elu_backward", "hardswish", "hardswish_backward", "hardsigmoid_backward",
    "hardtanh_backward", "leaky_relu_backward", "softplus_backward", "mish_backward", "softshrink_backward",
    "hardshrink_backward", "_prelu_kernel", "rsub.Tensor", "where.ScalarOther", "where.ScalarSelf", "where.Scalar",
    "complex", "polar", "_conj_physical",
)  # fmt: skip


def _log_sigmoid(call: Call, given: Placements, size: int) -> list[Strategy]:
    """log_sigmoid_forward and its backward: the buffer has the input's shape on a CPU and is empty on a GPU."""
    shape = call.inputs[0].shape
    found = []
    for d in range(len(shape)):
        inputs = [broadcast_dim(s.shape, d, shape) for s in call.inputs]
        outputs = [None if s is None else broadcast_dim(s.shape, d, shape) for s in call.outputs]
        found += [sharded_strategy(call, inputs, outputs, b) for b in blocks_of(given, inputs)]
    return found


def _like(call: Call, given: Placements, size: int) -> list[Strategy]:
    """zeros_like and similar ops read only the shape, so that the input may be partial."""
    return [Strategy(given, (REPLICATE,))] if isinstance(given[0], Partial) else []


OPS = tuple(dict.fromkeys([*tagged(), *_EXTRAS]))
for _op in OPS:
    register(_op, spec=OpSpec(factors=pointwise_factors, linear=_LINEAR.get(_op, no_groups)))
state(*overloads("alias", "detach", "lift_fresh", "lift_fresh_copy", "positive"), view=View.ALIAS)
state(*overloads("_to_copy", "clone", "contiguous"), copies=0)
state(*overloads("copy"), copies=1)
state(*overloads("mish_backward"), fake=aten.mul.Tensor)  # the op's own shape function gives wrong dtypes
register(
    *overloads("_prelu_kernel_backward", "rrelu_with_noise_backward"),
    spec=OpSpec(factors=pointwise_factors, linear=first_operand),
)
register(
    *overloads("zeros_like", "ones_like", "empty_like", "full_like"),
    spec=OpSpec(factors=pointwise_factors, strategies=_like, reads="shape"),
)
state(*overloads("zeros_like"), fills=0)
state(*overloads("ones_like"), fills=1)
register(*overloads("log_sigmoid_forward"), spec=OpSpec(strategies=_log_sigmoid, by_device=True))
register(*overloads("log_sigmoid_backward"), spec=OpSpec(strategies=_log_sigmoid, linear=first_operand))


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
