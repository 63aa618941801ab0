"""Computes values of nodes on the CPU: from constants, and from samples of the ids of the experts of rows.

A property that holds for all samples is taken to hold for the model, whatever ops compute the value.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from plait.compile.ir.calls import is_item, op_spec_of, output_values, tensor_inputs
from plait.compile.ir.rewriting import same_order
from plait.compile.ir.shapes import StepMode, frozen, spec_of
from plait.compile.ops.draw import draw

_MOST_BYTES = 1 << 31  # of a value that is worked out before the step runs


def known_value(node: Node, given: Mapping[Node, Tensor], memo: dict[Node, object]) -> Any:
    """The value of a node that is computed from `given` values and constants, on the CPU. `memo` keeps values.

    None if the node depends on anything else, or if its value is large.
    """
    stack = [node]
    while stack:
        one = stack[-1]
        if one in memo:
            stack.pop()
        elif one in given:
            memo[one] = given[one]
        elif one.op != "call_function" or one.target is draw or _is_large(one):
            memo[one] = None
        elif missing := [source for source in one.all_input_nodes if source not in memo]:
            stack += missing
        else:
            memo[one] = _run(one, memo)
    return memo[node]


def computes_same(one: Node, two: Node, known: set[tuple[Node, Node]] | None = None) -> bool:
    """Whether two nodes compute the same from the same nodes. `known` has pairs that do, and gets more."""
    known = set() if known is None else known
    if one is two or (one, two) in known:
        return True
    if one.op != "call_function" or one.target is not two.target or one.target is draw:
        return False
    mine, theirs = [pytree.tree_flatten((node.args, node.kwargs)) for node in (one, two)]
    if mine[1] != theirs[1] or not all(
        computes_same(a, b, known) if isinstance(a, Node) and isinstance(b, Node) else type(a) is type(b) and a == b
        for a, b in zip(mine[0], theirs[0], strict=True)
    ):
        return False
    known.add((one, two))
    return True


def _is_large(node: Node) -> bool:
    values = [value for value in output_values(node) if isinstance(value, Tensor)]
    return any(value.numel() * value.element_size() > _MOST_BYTES for value in values)


def _run(node: Node, memo: Mapping[Node, Any]) -> Any:
    if any(memo[source] is None for source in node.all_input_nodes):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: memo[source])
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, IndexError, TypeError):
        return None


def whole_numbers(node: Node) -> Node:
    """The integers that views and casts turn into the node's value; the node itself if they are not integers."""
    while True:
        source = same_order(node)
        if source is None and op_spec_of(node).copies == 0:
            source = tensor_inputs(node)[0]
        if source is None or source.meta["val"].dtype.is_floating_point:
            return node
        node = source


def holds_for_samples(
    node: Node, root: Node, num_experts: int, agrees: Callable[[Tensor, dict[Node, Tensor]], bool], *how: object
) -> bool:
    """Whether `agrees(ids, values)` is true for all samples: flat ids of the experts of rows, and {root: its value}.

    `agrees` must depend only on `how` and on how `node` is computed from `root`, because layers that compute it alike
    are tried once.
    """
    value = root.meta["val"]
    mode, key = value.fake_mode, (agrees.__qualname__, num_experts, how, signature(node, root))
    known = mode.holds if isinstance(mode, StepMode) else {}
    if key not in known:
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            samples = sample_ids(value.numel(), num_experts)
            known[key] = all(agrees(ids, {root: ids.to(value.dtype).reshape(value.shape)}) for ids in samples)
    return known[key]


def signature(node: Node, root: Node) -> tuple[Any, ...]:
    """How a node is computed from a root: equal for nodes of different layers that are computed alike."""
    numbers: dict[Node, int] = {root: 0}
    found: list[Hashable] = [spec_of(root.meta["val"])]
    stack = [node]
    while stack:
        one = stack[-1]
        is_given = one.op != "call_function" or one.target is draw
        looked_up = () if is_given or one in numbers else one.all_input_nodes
        if missing := [source for source in looked_up if source not in numbers]:
            stack += missing
            continue
        stack.pop()
        if one in numbers:
            continue
        numbers[one] = len(numbers)
        if is_given:
            found.append((one.op, one.name))
        else:
            args, kwargs = map_arg((one.args, one.kwargs), lambda source: ("node", numbers[source]))
            found.append((one.target, frozen(args, spec_of), frozen(kwargs, spec_of)))
    return tuple(found)


def sample_ids(num_rows: int, num_experts: int) -> list[Tensor]:
    """Experts of rows: about as many of each, all of one, half of two, one of the last, in the order of the rows and
    against it."""
    place = torch.arange(num_rows)
    order = place * num_experts // num_rows
    mixed = place * 7 * (place + 3) % num_experts
    few = [torch.zeros_like(place), place % 2 * (num_experts - 1), (place == 0) * (num_experts - 1)]
    return [place % num_experts, order, num_experts - 1 - order, mixed, *few]


def bound_of(node: Node) -> int | None:
    """An upper bound: the integers are from 0 to below it. None if no bound is known."""
    node = whole_numbers(node)
    while (made := same_order(node) or _part_of(node)) is not None:
        node = whole_numbers(made)
    source, output = (node.args[0], node.args[1]) if is_item(node) else (node, 0)
    if not isinstance(source, Node) or op_spec_of(source).picks != output:
        return None
    (x,) = tensor_inputs(source)
    shape, out = x.meta["val"].shape, node.meta["val"].shape
    shorter = [n for n, m in zip(shape, out, strict=True) if n != m] if len(shape) == len(out) else []
    return int(max(shorter or shape))


def _part_of(node: Node) -> Node | None:
    """The value of which this one is a view, if it is one."""
    return tensor_inputs(node)[0] if op_spec_of(node).view is not None and not is_item(node) else None
