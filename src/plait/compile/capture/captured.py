"""A captured step: its graph, what is known of it, and whether two captures are the same."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_aggregate, map_arg

from plait.compile.capture.batch_numbers import Fed, NumberAsked
from plait.compile.capture.fake_parameters import MadeBuffer
from plait.compile.capture.parts_left_out import NOTHING, LeftOut
from plait.compile.capture.python_state import Holder
from plait.compile.ir.node_info import info_of


@dataclass(frozen=True)
class Input:
    """A placeholder of the graph.

    Attributes:
        kind: parameter, buffer, batch, constant, key (an int that changes at every step) or scale (a scalar tensor by
            which the loss is multiplied before it is differentiated). A buffer is a buffer of the model, a parameter
            that does not train and that the step changes, or a tensor from outside the model.
        name: of a parameter, buffer or batch leaf its name; of a tensor from outside its place.
        node: the placeholder's name.
    """

    kind: str
    name: str
    node: str


@dataclass(frozen=True)
class Output:
    """An element of the graph's output.

    `kind` is loss, sum, weight, gradient, buffer (its new value), or for what the loss function returned beside the
    loss aux, and for a ratio also aux_weight.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Effect:
    """An assignment in Python that the step made, and that the capture has undone.

    Attributes:
        holder: the object in which the value was assigned.
        key: where in it.
        before: the value before the step.
        now: the value after the step.
        derived: whether a tensor in it depends on the graph's inputs or on random numbers.
    """

    holder: Holder
    key: object
    before: Any
    now: Any
    derived: bool = False

    @property
    def place(self) -> str:
        return self.holder.place_of(self.key)


@dataclass(frozen=True)
class Captured:
    """A step as a graph. Each node has a NodeInfo, and `val` (a fake tensor, or a tuple of them) in its meta.

    Attributes:
        graph: the graph, on global shapes.
        inputs: its placeholders, in order.
        outputs: the elements of the tuple that it returns.
        constants: values of inputs of kind constant, by name.
        tied: from a further name of a parameter or buffer to its first name.
        unused: parameters that train but do not reach the loss.
        frozen: parameters with requires_grad=False.
        checks: source lines with a condition that must hold when the step runs, or else the loss is NaN.
        rows: the number of rows of the batch.
        row_dims: for each tensor of the batch that has rows, their dim.
        sequence_dims: for each tensor of the batch that has a sequence of positions, their dim.
        aux: kinds (LossPart.kind) of the outputs beside the loss, by name; None if there were none.
        changing: frozen parameters that the step changes; their inputs are of kind buffer.
        outside: tensors from outside the model, by place.
        rebound: places of these where the step assigns another tensor.
        compared: places of these whose numbers Python has read.
        differentiable: places of these that autograd would give gradients.
        effects: assignments in Python that the step makes, other than of tensors in `rebound`.
        numbers: inputs of kind batch that are computed from the batch's numbers, by name.
        asked: conditions on the batch's numbers under which the graph is valid.
        fixed: numbers of the batch that are not inputs.
        made: buffers that the step makes, and that the capture has undone.
        unmerged: the line of a loop over experts whose rounds are not computed together, and the line that is why.
        left_out: parameters that the step may leave without a gradient; the output COUNTS then says which.
    """

    graph: Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    constants: dict[str, Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    rows: int = 0
    row_dims: Mapping[str, int] = field(default_factory=dict)
    sequence_dims: Mapping[str, int] = field(default_factory=dict)
    aux: Mapping[str, str] | None = None
    changing: frozenset[str] = frozenset()
    outside: dict[str, Tensor] = field(default_factory=dict)
    rebound: frozenset[str] = frozenset()
    compared: frozenset[str] = frozenset()
    differentiable: tuple[str, ...] = ()
    effects: tuple[Effect, ...] = ()
    numbers: dict[str, Fed] = field(default_factory=dict)
    asked: NumberAsked = field(default_factory=NumberAsked)
    fixed: frozenset[str] = frozenset()
    made: tuple[MadeBuffer, ...] = ()
    unmerged: str = ""
    left_out: LeftOut = NOTHING


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


def _plain(args: Argument, numbers: dict[Node, int]) -> str:
    """Arguments with each node replaced by its number, as text, in which 1, 1.0 and True differ."""
    return repr(map_aggregate(args, lambda a: _Number(numbers[a]) if isinstance(a, Node) else a))  # type: ignore[arg-type,return-value]


class _Number:
    def __init__(self, number: int) -> None:
        self._number = number

    def __repr__(self) -> str:
        return f"%{self._number}"


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _form(value: object) -> Any:
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
