"""Rows of the collectives in comm_ops, for partition by a later mesh axis, which shards other dims of their tensors. A
rule may itself write collectives (`Builder.collective`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Node

from plait.compile.ops import comm_ops
from plait.compile.ops.base import (
    Builder,
    Call,
    CollectiveKind,
    Communication,
    Factor,
    MemoryUse,
    OpSpec,
    Strategy,
    View,
    no_groups,
    register,
)
from plait.compile.ops.dims import first_operand
from plait.cost.memory_model import ACTIVATIONS, BUFFERS, GRADIENTS
from plait.spec.layout import local_shape

_ARRIVES = MemoryUse(BUFFERS, ACTIVATIONS)  # a buffer of the transport is allocated, an activation is freed


def _factors(*positions: int) -> Callable[[Call], Sequence[Factor]]:
    """Every dim can be sharded except those that the arguments at these positions name."""

    def factors(call: Call) -> Sequence[Factor]:
        busy = {call.args[position] for position in positions}
        return [Factor((d,), (d,)) for d in range(call.inputs[0].ndim) if d not in busy]

    return factors


def _summed(call: Call) -> Sequence[tuple[int, ...]]:
    return ((0,),) if call.arg(2, "op", "sum") == "sum" else no_groups(call)


def _emit(b: Builder, call: Call, strategy: Strategy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    """The same collective along the earlier axis, on this rank's part of the tensor along the later one."""
    (out,) = call.outputs
    assert out is not None
    tensor, axis, *rest = args
    return b.collective(call.op, tensor, local_shape(out.shape, strategy.outputs[0], b.size), *rest, axis=axis)


register(
    comm_ops.all_reduce,
    spec=OpSpec(
        factors=_factors(),
        linear=_summed,
        emit=_emit,
        communicates=Communication(CollectiveKind.ALL_REDUCE),
        memory=_ARRIVES,
    ),
)
register(
    comm_ops.broadcast,
    spec=OpSpec(
        factors=_factors(),
        linear=first_operand,
        emit=_emit,
        moves=True,
        copies=0,
        communicates=Communication(CollectiveKind.BROADCAST),
        memory=_ARRIVES,
    ),
)
register(
    comm_ops.all_gather,
    spec=OpSpec(
        factors=_factors(2),
        linear=first_operand,
        emit=_emit,
        moves=True,
        communicates=Communication(CollectiveKind.ALL_GATHER),
        memory=_ARRIVES,
    ),
)
register(
    comm_ops.reduce_scatter,
    spec=OpSpec(
        factors=_factors(2),
        linear=first_operand,
        emit=_emit,
        communicates=Communication(CollectiveKind.REDUCE_SCATTER),
        memory=_ARRIVES,
    ),
)
register(
    comm_ops.all_to_all,
    spec=OpSpec(
        factors=_factors(2, 4),
        linear=first_operand,
        emit=_emit,
        moves=True,
        communicates=Communication(CollectiveKind.ALL_TO_ALL),
        memory=_ARRIVES,
    ),
)
register(comm_ops.shard, spec=OpSpec(factors=_factors(2), linear=first_operand, emit=_emit, moves=True))
register(comm_ops.gather_part, spec=OpSpec(moves=True, communicates=Communication(CollectiveKind.ALL_GATHER)))
register(comm_ops.scatter_part, spec=OpSpec(communicates=Communication(CollectiveKind.REDUCE_SCATTER)))
register(comm_ops.take_part, spec=OpSpec(memory=MemoryUse(BUFFERS, GRADIENTS)))
register(comm_ops.in_format, spec=OpSpec(view=View.PART))  # or a copy
register(comm_ops.coordinate, spec=OpSpec())
