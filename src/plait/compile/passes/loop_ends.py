"""What a loop over positions ends with: calls that gather a value of each round.

These are stacks and concatenations; in backward, sums of the gradients of a tensor's slices, and sums of the gradients
of a tensor that all rounds read. A loop that writes the value of each round to its slice of a tensor ends with a stack:

    for i in range(length):
        out[:, i] = value      ->      out = torch.stack(values, 1)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import drop_dead_calls
from plait.compile.ir.node_info import describe, info_of, is_backward
from plait.compile.passes.loop_rounds import LoopRounds, Operand, RoundValue, alike

aten = torch.ops.aten


@dataclass(frozen=True)
class Gathered:
    """The values of all rounds, gathered in one result.

    Attributes:
        node: the call whose result has them; of a sum, the last addition.
        operand: what the values are.
        dim: the dim of the result that has the rounds; None if the result is their sum.
        joins: whether the values have that dim, with size 1.
        without: rounds that have no value; zeros in a sum of gradients.
        readers: the calls that read the values, and only gather them.
        terms: of a sum, those that the values are in.
    """

    node: Node
    operand: Operand
    dim: int | None
    joins: bool
    without: tuple[int, ...]
    readers: frozenset[Node]
    terms: tuple[Node, ...] = ()


@dataclass(frozen=True)
class GradientSum:
    """A sum of gradients: the last addition, all additions, and the terms."""

    total: Node
    sums: frozenset[Node]
    terms: tuple[Node, ...]


def gathers(graph: Graph, rounds: LoopRounds) -> tuple[list[Gathered], list[GradientSum]]:
    """All calls with which loops of so many rounds end, and the sums among these."""
    found, sums = list[Gathered](), list[GradientSum]()
    for node in graph.nodes:
        if (values := _stacked(node, rounds.num)) is not None:
            dim = (node.args[1] if len(node.args) > 1 else 0) % node.meta["val"].ndim
            operand = rounds.follow(values)
            if operand is not None and not isinstance(operand, Node):
                joins = node.target is aten.cat.default
                found.append(Gathered(node, operand, dim, joins, (), frozenset([node])))
    for each in _sums(graph, rounds.num):
        parts = [*_slices(each, rounds), *_shared(each, rounds)]
        found += parts
        sums += [each] if parts else []
    rounds.complete()
    return found, sums


def _stacked(node: Node, num: int) -> list[Node] | None:
    if node.target not in (aten.stack.default, aten.cat.default):
        return None
    values: Any = node.args[0]
    alone = len(values) == num and len({each.meta["val"].shape for each in values}) == 1
    return list(values) if alone and len(set(values)) > 1 else None


def _adds(node: Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs and is_backward(node)


def _sums(graph: Graph, num: int) -> Iterator[GradientSum]:
    """The sums of gradients that have a term for each of `num` rounds, or for all but one."""
    for node in graph.nodes:
        if not _adds(node) or (len(node.users) == 1 and all(_adds(user) and _fits(user, node) for user in node.users)):
            continue
        terms, sums = list[Node](), [node]
        for each in sums:
            for term in each.args:
                if isinstance(term, Node):
                    (sums if _adds(term) and len(term.users) == 1 and _fits(term, node) else terms).append(term)
        whole = all(isinstance(term, Node) and _fits(term, node) for each in sums for term in each.args)
        if whole and len(terms) >= num - 1:
            yield GradientSum(node, frozenset(sums), tuple(terms))


def _fits(node: Node, other: Node) -> bool:
    value, wanted = node.meta["val"], other.meta["val"]
    return bool(value.shape == wanted.shape and value.dtype == wanted.dtype)


def _slices(each: GradientSum, rounds: LoopRounds) -> Iterator[Gathered]:
    """Gradients of slices of one tensor, at most one for each position at a time."""
    groups: list[tuple[tuple[int, bool], dict[int, Node]]] = []  # gradients of slices, by position
    places = {term: found for term in each.terms if (found := _slice_gradient(term, rounds.num)) is not None}
    for term in sorted(places):
        dim, joins, at = places[term]
        for key, group in groups:
            if (
                key == (dim, joins)
                and at not in group
                and alike(_gradient(next(iter(group.values()))), _gradient(term))
            ):
                group[at] = term
                break
        else:
            groups.append(((dim, joins), {at: term}))
    edges = [group for _, group in groups if len(group) == 1 and not {*group}.isdisjoint((0, rounds.num - 1))]
    for (dim, joins), group in groups:
        if len(group) < rounds.num - 2 or any(group is edge for edge in edges):
            continue
        left = [edge for edge in edges if {*edge}.isdisjoint(group)]
        for more in [*left, {}]:
            together = group | more
            values: list[RoundValue] = [_gradient(together[at]) if at in together else None for at in range(rounds.num)]
            operand = rounds.follow(values)
            if operand is not None and not isinstance(operand, Node):
                edges = [edge for edge in edges if edge is not more]
                readers = frozenset(together.values())
                without = tuple(at for at, value in enumerate(values) if value is None)
                yield Gathered(each.total, operand, dim, joins, without, readers, tuple(together.values()))
                break


def _gradient(term: Node) -> Node:
    gradient = term.args[0]
    assert isinstance(gradient, Node)
    return gradient


def _slice_gradient(node: Node, num: int) -> tuple[int, bool, int] | None:
    """The slice that a call gives the gradient of: its dim, whether it keeps the dim, and its position."""
    given: Any = node.args
    if len(node.users) != 1 or node.target not in (aten.select_backward.default, aten.slice_backward.default):
        return None
    gradient, sizes, dim, at = given[:4]
    dim %= len(sizes)
    keeps = node.target is aten.slice_backward.default
    if sizes[dim] != num or (keeps and gradient.meta["val"].shape[dim] != 1):
        return None
    return dim, keeps, at % num


def _shared(each: GradientSum, rounds: LoopRounds) -> Iterator[Gathered]:
    """Gradients of a tensor that all rounds read: one of each round, or of each but the first."""
    groups: list[list[Node]] = []
    for term in sorted(each.terms):
        if _slice_gradient(term, rounds.num) is None:
            for group in groups:
                if alike(group[0], term):
                    group.append(term)
                    break
            else:
                groups.append([term])
    for group in groups:
        found = None
        for values in _orders(group, rounds.num):
            operand = rounds.follow(values)
            if operand is not None and not isinstance(operand, Node):
                without = tuple(at for at, value in enumerate(values) if value is None)
                found = Gathered(each.total, operand, None, False, without, each.sums, tuple(group))
                break
        if found is not None:
            yield found


def _orders(terms: list[Node], num: int) -> Iterator[list[RoundValue]]:
    """The rounds that terms in the order of the graph can be of."""
    for order in (terms[::-1], terms):
        if len(order) == num:
            yield [*order]
        elif len(order) == num - 1:
            yield [None, *order]
            yield [*order, None]


@dataclass
class _Writes:
    """A tensor whose slices along a dim are written one after the other, each once; `after` has the number of the write
    and the value, by position."""

    first: Node
    dim: int
    after: dict[int, tuple[int, Node]]


def stack_writes(graph: Graph, num: int) -> None:
    """Write a stack in place of writes to all `num` slices of a tensor, and let what reads a slice read the value that
    was written, or the tensor before the writes to others. Changes the graph."""
    found: dict[Node, tuple[_Writes, int]] = {}  # what a write belongs to, and its number
    for node in list(graph.nodes):
        if node.target is aten.copy.default and _form(node.args[1]) == _form(node) and _is_written(node):
            node.replace_all_uses_with(node.args[1])
        elif node.target is aten.select.int and node.args[0] in found:
            _read(node, *found[node.args[0]])
        elif node.target is aten.select_scatter.default and (written := _written(node, num)) is not None:
            tensor, value, dim, at = written
            writes, number = found.get(tensor, (_Writes(tensor, dim, {}), -1))
            if writes.dim != dim or at in writes.after or len(writes.after) > number + 1:
                writes, number = _Writes(tensor, dim, {}), -1
            writes.after[at] = number + 1, value
            found[node] = writes, number + 1
    for node, (writes, number) in found.items():
        if number == num - 1:
            with graph.inserting_before(node):
                values = [writes.after[at][1] for at in range(num)]
                made = graph.call_function(aten.stack.default, (values, writes.dim))
            describe(made, info_of(node)._replace(formats=None), node.meta["val"])
            node.replace_all_uses_with(made)
    drop_dead_calls(graph)


def _form(value: object) -> Any:
    if not isinstance(value, Node):
        return None
    tensor = value.meta["val"]
    return tensor.shape, tensor.dtype, tensor.device


def _is_written(node: Node) -> bool:
    """Whether a value is only written to slices."""
    return all(user.target is aten.select_scatter.default and user.args[1] is node for user in node.users)


def _read(node: Node, writes: _Writes, number: int) -> None:
    """Let a call that takes a slice after so many writes take it of what it was written to, or be the value."""
    given: Any = node.args
    dim, at = given[1] % writes.first.meta["val"].ndim, given[2] % writes.first.meta["val"].shape[given[1]]
    if dim != writes.dim:
        return
    written, value = writes.after.get(at, (number + 1, node))
    if written > number:
        node.args = (writes.first, dim, at)
    elif _form(value) == _form(node):
        node.replace_all_uses_with(value)


def _written(node: Node, num: int) -> tuple[Node, Node, int, int] | None:
    """The tensor, what is written to its slice, the dim of `num` positions, and the position."""
    given: Any = node.args
    if len(given) != 4 or node.meta["val"].shape[given[2]] != num:
        return None
    tensor, value, dim, at = given
    if value.meta["val"].dtype != node.meta["val"].dtype:
        return None
    return tensor, value, dim % node.meta["val"].ndim, at % num
