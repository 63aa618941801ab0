"""Recurrences over positions that are linear in their state, each as one call that may be cut along the positions.

    state = a[i] * state + b[i]

A loop over positions becomes these calls before an axis cuts the sequence (compile/passes/roll_loops.py). Positions are
dim 0. Each rank reduces its steps to one, in which order does not matter (Blelloch 1990, "Prefix Sums and Their
Applications"). The state then goes from rank to rank, with one multiplication at each; last, all ranks run their own
steps at the same time.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from plait.compile.ops import comm_ops
from plait.compile.ops.base import (
    REPLICATE,
    Args,
    Builder,
    Call,
    Emitted,
    Factor,
    Kwargs,
    OpSpec,
    Partial,
    Placement,
    Placements,
    Shard,
    Strategy,
    TensorSpec,
    register,
)
from plait.compile.ops.dims import first_operand


def linear_scan(a: Tensor | None, b: Tensor, first: Tensor | None, reverse: bool) -> Tensor:
    """The states before each step of a recurrence, [positions, *state].

    Args:
        a: factors [positions, *state], of which dims of the state may be 1; None for zeros: a state is then the b of
            the step before.
        b: terms [positions, *state].
        first: the state before the first step; None for zeros.
        reverse: whether the last position is the first step.
    """
    num = b.shape[0]
    states = torch.empty_like(b, memory_format=torch.contiguous_format)
    steps = range(num - 1, -1, -1) if reverse else range(num)
    if first is None:
        states[steps[0]].zero_()
    else:
        states[steps[0]].copy_(first)
    if a is None:
        size = num - 1
        states.narrow(0, 0 if reverse else 1, size).copy_(b.narrow(0, 1 if reverse else 0, size))
        return states
    every = states.unbind(0)
    factors, terms = a.unbind(0), b.unbind(0)
    for here, there in itertools.pairwise(steps):
        torch.addcmul(terms[here], factors[here], every[here], out=every[there])
    return states


def joined_steps(a: Tensor, b: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """All steps of a recurrence as one: the factor and the term by which the first state gives the last."""
    early, late = (1, 0) if reverse else (0, 1)
    left: list[tuple[Tensor, Tensor]] = []  # the last step of an odd number, of each round
    while (num := b.shape[0]) > 1:
        if num % 2:
            last, start = (0, 1) if reverse else (num - 1, 0)
            left.append((a[last], b[last]))
            a, b = a.narrow(0, start, num - 1), b.narrow(0, start, num - 1)
        b = torch.addcmul(b[late::2], a[late::2], b[early::2])
        a = a[late::2] * a[early::2]
    factor, term = a[0], b[0]
    for a, b in reversed(left):
        factor, term = a * factor, torch.addcmul(b, a, term)
    return factor.clone(), term.clone()


def state_at(states: Tensor, index: int) -> Tensor:
    """The value at a position, in memory of its own."""
    return states[index].clone()


def state_of_rank(states: Tensor, index: int, rank: int) -> Tensor:
    """The value at a position of the whole, of which each rank has a part; zeros on ranks that lack it."""
    num = states.shape[0]
    return states[index % num].clone() if index // num == rank else torch.zeros_like(states[0])


def _along(call: Call, tensors: Sequence[TensorSpec | None], shape: Sequence[int]) -> list[Factor]:
    """The dims of a state of this shape, which are the last dims of all tensors; a tensor may have 1 of a dim."""
    specs = [spec for spec in tensors if spec is not None]
    factors = []
    for d in range(-len(shape), 0):
        inputs = tuple(spec.ndim + d if spec.shape[d] == shape[d] else None for spec in specs)
        outputs = tuple(out.ndim + d if out.shape[d] == shape[d] else None for out in call.outputs if out is not None)
        factors.append(Factor(inputs, outputs))
    return factors


def _cuts_positions(given: Placements, length: int, size: int) -> bool:
    return Shard(0) in given and length % size == 0


def _strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
    a, b, first, _ = call.args
    if not _cuts_positions(given, b.shape[0], size):
        return []
    inputs: tuple[Placement, ...] = (Shard(0),) * (1 if a is None else 2)
    return [Strategy(inputs + (() if first is None else (REPLICATE,)), (Shard(0),), _emit, sends=True)]


def _emit(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    a, b, first, reverse = args
    if a is None:
        factor, term = None, builder.call(state_at, b, 0 if reverse else builder.shape(b)[0] - 1)
    else:
        made = builder.call(joined_steps, a, b, reverse)
        factor, term = (builder.call(operator.getitem, made, i) for i in range(2))
    before = _passed(builder, term, builder.axis, factor, first, reverse)
    return builder.call(linear_scan, a, b, before, reverse)


def _joined(call: Call, given: Placements, size: int) -> list[Strategy]:
    """The dims of the state, of which the factors may have 1."""
    a, b = call.inputs
    found = []
    for part in dict.fromkeys(p for p in given if isinstance(p, Shard) and p.dim > 0):
        less = Shard(part.dim - 1, part.blocks)
        if a.shape[part.dim] == b.shape[part.dim]:
            found.append(Strategy((part, part), (less, less)))
        else:
            found.append(Strategy((REPLICATE, part), (REPLICATE, less)))
    return found


def _passed(builder: Builder, term: Node, axis: str, *rest: object) -> Node:
    value = builder.value(term)
    num_bytes = value.numel() * value.element_size()
    return builder.node(
        comm_ops.pass_state, (term, axis, *rest), {}, value.new_empty(value.shape), num_bytes, "a state"
    )  # fmt: skip


def _at_rank(call: Call, given: Placements, size: int) -> list[Strategy]:
    if not _cuts_positions(given, call.inputs[0].shape[0], size):
        return []
    return [Strategy((Shard(0),), (Partial(),), _emit_at_rank)]


def _emit_at_rank(b: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    return b.call(state_of_rank, *args, b.coordinate())


def _of_state(call: Call) -> Sequence[Factor]:
    return _along(call, call.inputs, call.inputs[0].shape[1:])


register(
    linear_scan,
    spec=OpSpec(
        factors=lambda call: _along(call, call.args[:3], call.args[1].shape[1:]),
        linear=lambda call: (tuple(spec.index for spec in call.args[1:3] if spec is not None),),
        strategies=_strategies,
        fake=lambda a, b, first, reverse: b.new_empty(b.shape),
    ),
)
register(
    joined_steps,
    spec=OpSpec(
        strategies=_joined,
        fake=lambda a, b, reverse: (a.new_empty(a.shape[1:]), b.new_empty(b.shape[1:])),
    ),
)
register(
    comm_ops.pass_state,
    spec=replace(
        comm_ops.TO_NEIGHBOURS,
        factors=lambda call: _along(call, call.inputs, call.inputs[0].shape),
        emit=lambda b, call, strategy, args, kwargs: _passed(b, *args),
    ),
)
register(state_at, spec=OpSpec(factors=_of_state, linear=first_operand, strategies=_at_rank))
register(
    state_of_rank,
    spec=OpSpec(factors=_of_state, linear=first_operand, fake=lambda states, *_: states.new_empty(states.shape[1:])),
)
