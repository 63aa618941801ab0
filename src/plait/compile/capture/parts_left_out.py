"""Parameters that have no gradient in a step whose numbers leave out the part of the model that they are in.

    for number, expert in enumerate(self.experts):
        token, place = torch.where(ids == number)
        if token.numel() == 0:
            continue
        out[token] += expert(hidden[token]) * scores[token, place, None]

For an expert without rows one device computes nothing. Its parameters then have no gradient, and the optimizer passes
over them. The graph has the part in every step (empty_rounds.py, expert_loops.py), which gives them zeros, with which
weight decay and momentum would go on. So the step also counts what decides whether each part runs, and the engine takes
away the gradients of parameters none of whose parts ran.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.fx import Node

from plait.compile.capture.graph_recorder import GraphRecorder
from plait.compile.capture.masked_rows import dynamic
from plait.compile.ir.calls import is_cast, is_view, tensor_inputs
from plait.compile.ir.node_info import info_of

COUNTS = "plait.counts_of_parts"  # the name of the output that has the counts


@dataclass(frozen=True)
class LeftOut:
    """The parameters that a step may leave without a gradient.

    Attributes:
        groups: parameters that have one in the same steps, and their uses: for each use the indices of counts, all of
            which are more than 0 where the part with this use runs.
    """

    groups: tuple[tuple[tuple[str, ...], tuple[tuple[int, ...], ...]], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All of these parameters."""
        return tuple(name for names, _ in self.groups for name in names)

    def ran(self, counts: Sequence[Tensor]) -> list[bool]:
        """For each group, whether a part with one of its uses ran. `counts` has those of each microbatch."""
        found = [each.tolist() for each in counts]
        return [any(all(each[i] > 0 for i in use) for each in found for use in uses) for _, uses in self.groups]

    def without_gradient(self, ran: Sequence[bool]) -> frozenset[str]:
        """The parameters of the groups that did not run."""
        pairs = zip(self.groups, ran, strict=True)
        return frozenset(name for (names, _), has_run in pairs if not has_run for name in names)


NOTHING = LeftOut()


class CountSource(Protocol):
    """What decides whether parts run."""

    def counts(self, by_rows: bool) -> Tensor:
        """A vector, whose elements are more than 0 where a part runs: for each expert of a loop the number of its rows,
        or with `by_rows` False whether the loop goes there."""

    def source(self) -> Node:
        """A value from which that is computed."""


class Condition(NamedTuple):
    """That an element of a source's counts is more than 0."""

    source: CountSource
    number: int = 0
    by_rows: bool = False


class Truth:
    """A condition that Python asks for, as `if mask.any():`."""

    def __init__(self, tensor: Tensor, node: Node, expected: bool, recorder: GraphRecorder) -> None:
        self._tensor, self._node, self._expected, self._recorder = tensor, node, expected, recorder

    def counts(self, by_rows: bool) -> Tensor:
        if self._recorder.node_of(self._tensor) is not self._node:  # it was changed in place since
            raise dynamic()
        found = self._tensor.reshape(1).ne(0)
        return found if self._expected else found.logical_not()

    def source(self) -> Node:
        return self._node


_Use = frozenset[Condition]  # all of which must hold


class ConditionalUses:
    """Collects the uses of parameters in parts that a step may leave out, while its forward pass is captured."""

    def __init__(self, recorder: GraphRecorder) -> None:
        self._recorder = recorder
        self._parts: dict[Node, list[Condition]] = {}  # the conditions of the parts that a call is in
        self._tables: dict[Node, dict[int, set[_Use]]] = {}  # stacks of the parameters of all experts, by their numbers
        self._conditions: dict[Condition, None] = {}  # in the order of the program, which is that of all ranks

    def note_part(self, calls: Collection[Node], condition: Condition) -> None:
        """Note the calls of a part that runs on a condition."""
        for call in calls:
            self._parts.setdefault(call, []).append(condition)
        self._conditions[condition] = None

    def note_table(self, table: Tensor, number: int, use: Collection[Condition]) -> None:
        """Note a use of the parameter of one expert, for which a stack of the parameters of all is taken."""
        uses = self._tables.setdefault(self._recorder.node_of(table), {})
        uses.setdefault(number, set()).add(frozenset(use))
        self._conditions |= dict.fromkeys(use)

    @torch.no_grad()
    def finish(self, parameters: Mapping[str, Tensor]) -> tuple[LeftOut, list[Tensor]]:
        """The parameters that the step may leave without a gradient, and if there are any, the one vector of counts."""
        groups: dict[frozenset[_Use], list[str]] = {}
        for name, parameter in parameters.items() if self._parts or self._tables else ():
            if parameter.requires_grad and (uses := self._uses(self._recorder.node_of(parameter))):
                groups.setdefault(frozenset(uses), []).append(name)
        if not groups:
            return NOTHING, []
        vectors: list[Tensor] = []
        begins: dict[tuple[CountSource, bool], int] = {}
        at, used = 0, {(source, by_rows) for uses in groups for use in uses for source, _, by_rows in use}
        for source, _, by_rows in self._conditions:
            if (source, by_rows) in used - begins.keys():
                self._recorder.place_at(info_of(source.source()))  # in a pipeline on the stage that has it
                vectors.append(source.counts(by_rows).long())
                begins[source, by_rows], at = at, at + len(vectors[-1])
        self._recorder.module, self._recorder.phase, self._recorder.at = "", "forward", None

        def indices(use: _Use) -> tuple[int, ...]:
            return tuple(sorted(begins[source, by_rows] + number for source, number, by_rows in use))

        found = [(tuple(names), tuple(sorted(map(indices, uses)))) for uses, names in groups.items()]
        return LeftOut(tuple(found)), [torch.cat(vectors)]

    def _uses(self, parameter: Node) -> set[_Use]:
        """The uses of a parameter, with the conditions of the parts that they are in; none if one has no condition."""
        found: set[_Use] = set()
        waiting = [parameter]
        for node in waiting:
            for user in node.users:
                if user in self._tables:
                    number = tensor_inputs(user).index(node)
                    found |= self._tables[user].get(number, {frozenset()})
                elif is_view(user) or is_cast(user):
                    waiting.append(user)
                else:
                    found.add(frozenset(self._parts.get(user, ())))
        return set() if frozenset() in found else found
