"""Values of nodes worked out on the CPU: of constants, and of what is computed from the experts of rows, for samples of
these. A property of what a model computes from them is known if all samples have it, however it is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from plait.compile.ir.calls import op_spec_of, output_values, tensor_inputs
from plait.compile.ir.rewriting import same_order
from plait.compile.ops.draw import draw

_MOST_BYTES = 1 << 28  # of a value that is worked out before the step runs


def known_value(node: Node, given: Mapping[Node, Tensor], memo: dict[Node, Any]) -> Any:
    """The value of a node that is computed from `given` values and constants, on the CPU. `memo` has what was found.

    None if it depends on anything else, or is large.
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
    """The first integers of which views and casts make the node's value; the node itself if these are no integers."""
    while True:
        source = same_order(node)
        if source is None and op_spec_of(node).copies == 0:
            source = tensor_inputs(node)[0]
        if source is None or source.meta["val"].dtype.is_floating_point:
            return node
        node = source


def sample_ids(num_rows: int, num_experts: int) -> list[Tensor]:
    """Experts of rows: about as many of each, of one alone, of few, in the order of the rows and against it."""
    place = torch.arange(num_rows)
    spread = [place * num_experts // num_rows, place * 7 * (place + 3) % num_experts]
    few = [torch.zeros_like(place), torch.full_like(place, num_experts - 1), place % 2 * (num_experts - 1)]
    return [place % num_experts, *spread, num_experts - 1 - spread[0], *few]
