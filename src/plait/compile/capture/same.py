"""Whether two captures are of one step."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from plait.compile.capture.capture import Captured
from plait.compile.ir.node_info import info_of


def same_step(one: Captured, other: Captured) -> bool:
    """Whether two graphs compute the same from the same inputs."""
    if (one.inputs, one.outputs, one.tied, one.unused, one.frozen, one.changing, one.row_dims) != (
        other.inputs, other.outputs, other.tied, other.unused, other.frozen, other.changing, other.row_dims,
    ):  # fmt: skip
        return False
    if one.outside.keys() != other.outside.keys() or one.rebound != other.rebound:
        return False
    if any(not _equal(value, other.constants[name]) for name, value in one.constants.items()):
        return False
    nodes, others = list(one.graph.graph.nodes), list(other.graph.graph.nodes)
    if len(nodes) != len(others):
        return False
    numbers = ({n: i for i, n in enumerate(nodes)}, {n: i for i, n in enumerate(others)})
    for a, b in zip(nodes, others, strict=True):
        if (a.op, a.target) != (b.op, b.target) or info_of(a).module != info_of(b).module:
            return False
        if _plain((a.args, a.kwargs), numbers[0]) != _plain((b.args, b.kwargs), numbers[1]):
            return False
        if a.op == "placeholder" and _form(a.meta["val"]) != _form(b.meta["val"]):
            return False
    return True


def _plain(args: Any, numbers: dict[Node, int]) -> str:
    """Arguments with each node replaced by its number, as text, in which 1, 1.0 and True differ."""
    return repr(map_aggregate(args, lambda a: _Number(numbers[a]) if isinstance(a, Node) else a))  # type: ignore[arg-type,return-value]


class _Number:
    def __init__(self, number: int) -> None:
        self._number = number

    def __repr__(self) -> str:
        return f"%{self._number}"


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _form(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.shape, value.stride(), value.device
