"""Counts, in a traced run, the rows that a rank's tokens send to each expert, and those that find no room there.

The rank's graph is given a call for each mixture, which keeps small tensors on the device. They are read only when the
trace is written, so no step waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Graph, Node

from plait.compile.ir.calls import copy_graph, is_item, op_spec_of
from plait.compile.ir.node_info import info_of, is_forward
from plait.compile.ops.experts import expert_order, expert_slots

Counts = list[tuple[str, Tensor, Tensor | None]]  # the mixture's module, ends of the experts' rows, dropped rows


class ExpertCounter:
    """Counts of one rank since the last `take`."""

    def __init__(self) -> None:
        self._counts: Counts = []

    def with_counts(self, graph: Graph) -> Graph:
        """A copy of a graph that counts the rows of each mixture in its forward pass; the graph itself if there are
        none."""
        if not any(_is_route(node) for node in graph.nodes):
            return graph
        copy = copy_graph(graph)
        for node in filter(_is_route, list(copy.nodes)):
            module = info_of(node).module
            items = {user.args[1]: user for user in node.users if is_item(user)}
            with copy.inserting_after(max(items.values())):
                if node.target is expert_order:
                    copy.call_function(self._note_order, (module, node))
                else:
                    copy.call_function(self._note_slots, (module, *node.args, node))
        return copy

    def take(self) -> Counts:
        """What was counted, which is then forgotten."""
        found, self._counts = self._counts, []
        return found

    def _note_order(self, module: str, sorted_rows: tuple[Tensor, Tensor, Tensor]) -> None:
        self._counts.append((module, sorted_rows[2], None))

    def _note_slots(
        self, module: str, ids: Tensor, num_experts: int, parts: int, room: int, sent: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        total = num_experts * parts
        known = ids.long().clamp(max=total)
        counts = known.new_zeros(total + 1).scatter_add_(0, known, torch.ones_like(known))[:total]
        dropped = ((sent[0] == parts * room) & (known < total)).sum()
        self._counts.append((module, counts.cumsum(0), dropped))


def read_counts(counts: Counts) -> dict[str, tuple[list[int], int]]:
    """For each mixture the rows of each expert, and how many were dropped, summed over what was counted."""
    found: dict[str, tuple[list[int], int]] = {}
    for module, ends, dropped in counts:
        rows = _between(ends.tolist())
        before, lost = found.get(module, ([0] * len(rows), 0))
        found[module] = (
            [a + b for a, b in zip(before, rows, strict=True)],
            lost + (0 if dropped is None else int(dropped)),
        )
    return found


def _between(ends: Iterable[int]) -> list[int]:
    found, start = [], 0
    for end in ends:
        found.append(end - start)
        start = end
    return found


def _is_route(node: Node) -> bool:
    """Whether a call of the forward pass says where the rows of this rank's tokens go."""
    if node.target not in (expert_order, expert_slots) or not is_forward(node):
        return False
    (ids, *_) = node.args
    assert isinstance(ids, Node)
    return not _has_arrived(ids)


def _has_arrived(ids: Node) -> bool:
    """Whether the experts are those of rows from other ranks, where they have been counted."""
    if op_spec_of(ids).communicates is None:
        return False
    return any(is_item(source) and source.args[0].target is expert_slots for source in ids.all_input_nodes)  # type: ignore[union-attr]
