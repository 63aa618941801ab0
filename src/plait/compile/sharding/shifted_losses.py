"""Losses of the next position: of all positions but the last, against all but the first.

    log_softmax(logits[:, :-1]) against tokens[:, 1:]

An axis that divides the sequence does not divide one position less, so that the logits would be gathered. The same loss
is that of all positions, where the last one has the target that the loss ignores: no term of the sum, no part of its
weight, and a gradient of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from plait.compile.ir.calls import call_of, is_item, op_spec_of, tensor_inputs
from plait.compile.ir.node_info import describe, info_of, is_forward
from plait.compile.ops import Call
from plait.compile.ops.view import view_groups

aten = torch.ops.aten


def keep_last_positions(graph: Graph, size: int) -> None:
    """Let losses of the next position take all positions, if `size` ranks can share these. Changes the graph."""
    for node in list(graph.nodes):
        if op_spec_of(node).role == "class loss" and is_forward(node):
            for source, positions in _slices_before(node):
                found = _Region(positions)
                if (positions.num + 1) % size == 0 and found.grow(source):
                    found.write()
                    break
    graph.eliminate_dead_code()


@dataclass(frozen=True)
class _Positions:
    """The dim of a value that has all positions but the last, perhaps times others: `num` without the last."""

    dim: int
    num: int


def _slices_before(loss: Node) -> Iterator[tuple[Node, _Positions]]:
    """The slices without the last position of a dim from which the loss is computed by ops of one input."""
    node = tensor_inputs(loss)[0]
    while node.op == "call_function" and len(inputs := tensor_inputs(node)) == 1:
        source = inputs[0]
        before, after = source.meta["val"].shape, node.meta["val"].shape
        if node.target is aten.slice.Tensor and len(before) == len(after):
            cut = [dim for dim, (m, n) in enumerate(zip(before, after, strict=True)) if m != n]
            first = node.args[2] if len(node.args) > 2 else 0
            if len(cut) == 1 and not first and after[cut[0]] == before[cut[0]] - 1:
                yield node, _Positions(cut[0], after[cut[0]])
        node = source


def _keeps_zeros(node: Node, call: Call) -> bool:
    """Whether gradients that are zero stay so: ops are linear in them, and those of ATen that are named backward."""
    return bool(op_spec_of(node).linear(call)) or "backward" in str(node.target)


@dataclass
class _Region:
    """The values that have all positions but the last, from a slice to losses, and back to the slice's gradient."""

    first: _Positions
    grown: dict[Node, _Positions] = field(default_factory=dict)
    targets: dict[Node, Node] = field(default_factory=dict)  # of losses, by the loss
    ends: list[Node] = field(default_factory=list)  # gradients of the slice
    slice: Node | None = None

    def grow(self, source: Node) -> bool:
        """Whether all readers of these values can take one position more."""
        self.slice, self.grown[source] = source, self.first
        queue = list(source.users)
        while queue:
            node = queue.pop(0)
            if node in self.grown or node in self.ends or node in self.targets:
                continue
            if node.op != "call_function" or is_item(node) or not self._take(node):
                return False
            if node in self.grown:
                queue += node.users
        return bool(self.targets)

    def _take(self, node: Node) -> bool:
        """Take a reader of such a value into the region. Returns False if it cannot be there."""
        if op_spec_of(node).role == "class loss":
            return self._take_loss(node, 0)
        if node.target is aten.nll_loss_backward.default:
            self.grown[node] = _Positions(0, self.first.num)
            return self._take_loss(node, 1)
        if node.target is aten.slice_backward.default:
            return self._take_end(node)
        inputs, call = tensor_inputs(node), call_of(node)
        if not (is_forward(node) or _keeps_zeros(node, call)) or any(
            i not in self.grown and self._may_have(i) for i in inputs
        ):
            return False
        dims = {self._after(node, call, i, self.grown[each]) for i, each in enumerate(inputs) if each in self.grown}
        if len(dims) != 1 or (dim := dims.pop()) is None:
            return False
        self.grown[node] = _Positions(dim, self.first.num)
        return True

    def _take_end(self, node: Node) -> bool:
        """Take the gradient of the slice."""
        given: Any = node.args
        first: Any = self.slice
        self.ends.append(node)
        sizes = list(first.args[0].meta["val"].shape)
        return list(given[1]) == sizes and given[2] % len(sizes) == self.first.dim and not given[3]

    def _may_have(self, node: Node) -> bool:
        """Whether a value from outside is of a size that only these positions explain."""
        return any(n > 1 and n % self.first.num == 0 for n in node.meta["val"].shape)

    def _after(self, node: Node, call: Call, number: int, positions: _Positions) -> int | None:
        """The dim of a result that has the positions of input `number`; None if an op mixes them."""
        source, (out, *more) = call.inputs[number].shape, call.outputs
        if out is None or more:
            return None
        if op_spec_of(node).sizes is None:
            at = (each.outputs[0] for each in op_spec_of(node).factors(call) if each.inputs[number] == positions.dim)
            return next(at, None)
        (group,) = (each for each in view_groups(source, out.shape) if positions.dim in each[0])
        dims, into = group
        found = [d for d in into if out.shape[d] > 1]
        is_last = math.prod(source[positions.dim + 1 : dims.stop]) == 1 and bool(found)
        return found[-1] if is_last and out.shape[found[-1]] % positions.num == 0 else None

    def _take_loss(self, node: Node, at: int) -> bool:
        """Take a loss over classes, or its gradient, with the scores among the arguments `at` that position."""
        given: Any = node.args
        scores, target, reduction = given[at], given[at + 1], given[at + 3]
        self.targets[node] = target
        known = scores in self.grown and self.grown[scores].dim == 0
        return known and reduction != 0 and target.meta["val"].ndim == 1 and target not in self.grown

    # Writing

    def write(self) -> None:
        """Let the values have all positions. Changes the graph."""
        first: Any = self.slice
        targets = {target: self._whole_target(target, loss) for loss, target in self.targets.items()}
        order = {node: i for i, node in enumerate(first.graph.nodes)}
        first.replace_all_uses_with(first.args[0])
        for loss, target in self.targets.items():
            loss.args = tuple(targets[target] if arg is target else arg for arg in loss.args)
        for node in sorted(self.grown.keys() | self.targets.keys(), key=order.__getitem__):
            if node is first:
                continue
            row = op_spec_of(node)
            if row.sizes is not None and node in self.grown:
                self._resize(node, row.sizes)
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["val"] = (row.fake or node.target)(*args, **kwargs)  # type: ignore[operator]
        for node in self.targets:
            for item in node.users:
                if is_item(item):
                    item.meta["val"] = node.meta["val"][item.args[1]]
        for end in self.ends:
            end.replace_all_uses_with(end.args[0])  # type: ignore[arg-type]

    def _resize(self, node: Node, position: int) -> None:
        positions = self.grown[node]
        sizes = list(node.meta["val"].shape)
        sizes[positions.dim] = sizes[positions.dim] // positions.num * (positions.num + 1)
        node.args = (*node.args[:position], sizes, *node.args[position + 1 :])

    def _whole_target(self, target: Node, loss: Node) -> Node:
        """The targets with one that is ignored at the end of each row."""
        given: Any = loss.args
        ignored = given[4 if is_forward(loss) else 5]
        num, made = self.first.num, target
        rows = target.meta["val"].shape[0] // num
        for op, args in (
            (aten.reshape.default, ([rows, num],)),
            (aten.constant_pad_nd.default, ([0, 1], ignored)),
            (aten.reshape.default, ([rows * (num + 1)],)),
        ):
            value = op(made.meta["val"], *args)
            with target.graph.inserting_after(made):
                made = target.graph.call_function(op, (made, *args))
            describe(made, info_of(target), value)
        return made
