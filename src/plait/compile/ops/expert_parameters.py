"""Experts whose parameters are tensors of their own, as those of modules in a list are, on the ranks that have them.

    stack_experts([p0, p1, ...]) -> [E, ...]     the parameters of E experts as one tensor
    expert_of(grad[E, ...], number) -> [...]     the gradient of that of one expert

An axis that cuts experts puts each parameter on one of its ranks (`Only`). Of `size` ranks each has E / size of them,
in order, so that the stack is cut along its first dim, and nothing is sent. compile/shard.py writes these calls in the
place of `stack` and `select`, for which no axis has such strategies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.compile.ops.base import (
    Args,
    Builder,
    Call,
    Emitted,
    Factor,
    Kwargs,
    OpSpec,
    Placements,
    Shard,
    Strategy,
    register,
)
from plait.compile.ops.dims import all_operands, aten, first_operand
from plait.spec.layout import Only


def stack_experts(parameters: Sequence[Tensor]) -> Tensor:
    """The parameters of all experts as one tensor."""
    return torch.stack(list(parameters))


def expert_of(stacked: Tensor, number: int) -> Tensor:
    """The part of a stacked tensor that belongs to expert `number`."""
    return stacked.select(0, number)


def own_part(*parts: Tensor) -> Tensor:
    """The value that this rank has, of values that lie on different ranks of an axis. In the graph of a rank that value
    replaces the call (compile/rank_program.py)."""
    return parts[0]


def owner_of(number: int, num_experts: int, size: int) -> Only:
    """The placement of the parameters of one of `num_experts` experts, along an axis of `size` ranks."""
    return Only(number * size // num_experts)


def _stack_on_ranks(call: Call, given: Placements, size: int) -> list[Strategy]:
    num = len(call.inputs)
    owners = tuple(owner_of(number, num, size) for number in range(num))
    return [Strategy(owners, (Shard(0),), _emit_stack)] if num % size == 0 and tuple(given) == owners else []


def _emit_stack(b: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    (parameters,) = args
    each = len(parameters) // b.size
    parts = []
    for rank in range(b.size):
        with b.on_rank(rank):
            parts.append(b.call(aten.stack.default, parameters[rank * each : (rank + 1) * each]))
    return b.call(own_part, *parts)


def _take_on_rank(call: Call, given: Placements, size: int) -> list[Strategy]:
    num, number = call.inputs[0].shape[0], call.args[1]
    return [Strategy((Shard(0),), (owner_of(number, num, size),), _emit_take)] if num % size == 0 else []


def _emit_take(b: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    stacked, number = args
    return b.call(aten.select.int, stacked, 0, number % b.shape(stacked)[0])


def _any_dim(call: Call) -> list[Factor]:
    return [Factor((d,) * len(call.inputs), (d,)) for d in range(call.inputs[0].ndim)]


register(stack_experts, spec=OpSpec(strategies=_stack_on_ranks, linear=all_operands))
register(expert_of, spec=OpSpec(strategies=_take_on_rank, linear=first_operand))
register(own_part, spec=OpSpec(factors=_any_dim, linear=all_operands))
