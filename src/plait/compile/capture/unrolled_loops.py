"""A Python loop over all experts, in a graph of fixed shapes: the rows of all experts are computed in its first round.

    for number, expert in enumerate(self.experts):
        token, place = torch.where(ids == number)
        out[token] += expert(hidden[token]) * scores[token, place, None]

Python runs each round, and a round begins with the mask of its expert. The first computes the rows of all experts, with
the parameters of all, as that of a loop over the experts that are hit does (expert_loops.py). The others must compute
the same, each with the parameters of its own expert, and add nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from plait.compile.capture.expert_loops import ExpertLoop, ExpertRound
from plait.compile.capture.expert_modules import ExpertModules
from plait.compile.capture.expert_stand_ins import ExpertRows
from plait.compile.capture.graph_recorder import GraphRecorder
from plait.compile.capture.loop_state import calls_since
from plait.compile.capture.masked_rows import Owner, Selected, dynamic
from plait.compile.capture.parts_left_out import Condition
from plait.compile.ir.calls import writes_in_place
from plait.compile.ir.rewriting import root_of
from plait.compile.ir.samples import bound_of, computes_same


class UnrolledLoop(ExpertLoop):
    """The rounds of a loop over `num` experts, one after the other as their masks come."""

    def __init__(self, num: int, owner: Owner, recorder: GraphRecorder, modules: ExpertModules) -> None:
        every = torch.ones(num, dtype=torch.bool)
        super().__init__(Selected(torch.arange(num), every, owner, True), recorder, modules)
        self.num = num
        self.line = ""  # of the first mask
        self._rounds_so_far: list[ExpertRound] = []
        self._mask: Node | None = None  # with which the last round began
        self._began: tuple[int, ...] = ()  # the order of the rows that it gave

    @staticmethod
    def of(mask: Tensor, owner: Owner, recorder: GraphRecorder, modules: ExpertModules) -> UnrolledLoop | None:
        """The loop whose first mask this is; None if it is not the mask of expert 0."""
        probe = ExpertLoop(Selected(mask, mask, owner), recorder, modules)
        for root in probe.roots_of(mask, any_number=True):
            num = bound_of(root)
            if num is not None and num > 1 and probe.has_place(mask, root, 0, num):
                return UnrolledLoop(num, owner, recorder, modules)
        return None

    def rows_of(self, mask: Tensor) -> tuple[ExpertRows, ...] | None:
        """The indices of the rows of the mask, which may begin the next round; None if it belongs to no round."""
        if (found := self.rows_now(mask)) is not None:
            return found
        number = len(self._rounds_so_far)
        if number == self.num:
            return None
        for each in self.roots_of(mask, any_number=True):
            if bound_of(each) == self.num and self.has_place(mask, each, number, self.num):
                if self._rounds_so_far:
                    self._rounds_so_far[-1].end()
                self._mask, self._began = self.recorder.node_of(mask), self.order
                self._rounds_so_far.append(ExpertRound(self, {}, number, adds=number == 0))
                self._rounds_so_far[-1].mask = self._mask
                return self._rounds_so_far[-1].all_rows()
        return None

    def rows_now(self, mask: Tensor) -> tuple[ExpertRows, ...] | None:
        """The indices of the rows of the mask, if it is one of the round that runs."""
        node, number = self.recorder.node_of(mask), len(self._rounds_so_far) - 1
        if self._mask is None:
            return None
        if computes_same(root_of(self._mask), root_of(node)):
            self.order = self._began
            return self._rounds_so_far[-1].all_rows()
        for each in self.roots_of(mask, any_number=True):
            if bound_of(each) == self.num and self.has_place(mask, each, number, self.num):
                # The mask of tokens, and that of their rows, give the same rows in the same order: that of tokens.
                in_order = all(list(order) == sorted(order) for order in (self._began, self.order))
                return self._rounds_so_far[-1].all_rows() if in_order else None
        return None

    def goes_to(self, number: int) -> list[Condition]:
        """Nothing: one device runs every round."""
        return []

    @property
    def is_complete(self) -> bool:
        """Whether each expert had its round, of which the last may still run."""
        return len(self._rounds_so_far) == self.num

    def finish(self) -> None:
        """Raise unless there was a round for each expert, and nothing read what rows were added to in between."""
        for body in self._rounds_so_far[-1:]:
            body.end()
        if not self.is_complete:
            raise dynamic()
        if not self.additions:
            return
        own = {node for body in self._rounds_so_far for node in body.own}
        added = {node for body in self._rounds_so_far for node in body.added}
        behind = set(calls_since(self.recorder, self.last_addition))
        for node in calls_since(self.recorder, self.first_addition):
            reads = not added.isdisjoint(node.all_input_nodes)
            if node not in behind and (writes_in_place(node) or reads) and node not in own:
                raise dynamic()
