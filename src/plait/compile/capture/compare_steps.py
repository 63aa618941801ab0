"""Compare captured steps: two captures on one rank, or, by a digest, those of several ranks."""

from __future__ import annotations

import hashlib
import re
import zlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from plait.compile.capture.captured import Captured
from plait.compile.ir.node_info import info_of


def same_step(one: Captured, other: Captured) -> bool:
    """Whether two captures compute the same from the same inputs."""
    if (one.inputs, one.outputs, one.tied, one.unused, one.frozen, one.changing, one.row_dims, one.left_out) != (
        other.inputs, other.outputs, other.tied, other.unused, other.frozen, other.changing, other.row_dims,
        other.left_out,
    ):  # fmt: skip
        return False
    if one.outside.keys() != other.outside.keys() or one.rebound != other.rebound:
        return False
    if any(not _equal(value, other.constants[name]) for name, value in one.constants.items()):
        return False
    nodes, others = list(one.graph.nodes), list(other.graph.nodes)
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


_MOST_BYTES = 1 << 20  # bytes read of each constant
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of a function or an object, which differs between processes
_known: WeakKeyDictionary[Graph, str] = WeakKeyDictionary()  # ranks that are threads share captures


def captured_digest(captured: Captured) -> str:
    """A short text that differs between steps: the number of calls, and a checksum of them, their shapes and constants.

    Ranks compare it before they run their graphs together.
    """
    found = _known.get(captured.graph)
    if found is None:
        sums = hashlib.sha256()
        num_calls = 0
        places: dict[Node, str] = {}  # not names, which also count removed nodes, such as a number that one rank prints
        for node in captured.graph.nodes:
            num_calls += node.op == "call_function"
            places[node] = f"%{len(places)}"
            value = node.meta.get("val")
            shape = tuple(value.shape) if torch.is_tensor(value) else ()
            target = node.target if node.op == "call_function" else ""
            args = map_arg((node.args, node.kwargs), places.__getitem__)
            sums.update(_ADDRESS.sub("", f"{node.op} {target} {args} {shape}\n").encode())
        for constant in captured.constants.values():
            sums.update(f"{_checksum(constant)}\n".encode())
        inputs = [(i.kind, "" if i.kind == "constant" else i.name) for i in captured.inputs]
        sums.update(f"{inputs} {captured.frozen} {captured.outputs}".encode())
        found = _known[captured.graph] = f"{num_calls} calls, checksum {sums.hexdigest()[:8]}"
    return found


def _checksum(tensor: Tensor) -> str:
    if isinstance(tensor, FakeTensor):  # in a dry run, whose ranks are compared with none
        return f"{tensor.dtype} {tuple(tensor.shape)}"
    flat = tensor.detach().reshape(-1)
    flat = flat[: _MOST_BYTES // max(flat.element_size(), 1)].cpu().contiguous()
    return f"{tensor.dtype} {tuple(tensor.shape)} {zlib.crc32(flat.view(torch.uint8).numpy().tobytes()):08x}"
