"""The rows of the op table. A rule describes one mesh axis; propagation applies it axis by axis.

A rule names the **factors** of an op: index ranges that run through its tensors. In einsum notation
`m k, k n -> m n` has three. Sharding a factor shards every tensor dim that it runs through, and leaves a partial sum in
an output without it. A factor that cannot be sharded is not named, or is written in capitals (`softmax: m N -> m N`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch.fx import Node
from torch.fx.node import Target

from plait.cost.collective_time import CollectiveKind
from plait.spec.layout import REPLICATE, Blocks, Partial, Placement, Replicate, Shard

Args = tuple[Any, ...]  # of a call in a graph: nodes, plain values, and lists of both
Kwargs = dict[str, Any]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one input or output of an op; `index` is its position among the inputs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    index: int = 0

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Call:
    """One call of an op.

    Attributes:
        op: the op.
        args: as in the graph, with each tensor replaced by its TensorSpec.
        kwargs: the same.
        inputs: these specs in the order of args, then kwargs; lists and tuples are flattened, None is skipped.
        outputs: the spec of each output, None for an output that is not a tensor.
    """

    op: Target
    args: Args
    kwargs: Kwargs
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec | None, ...]

    def arg(self, position: int, name: str = "", default: object = None) -> Any:
        """The argument at `position`, or by `name`, or the default: schemas allow each."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


@dataclass(frozen=True)
class Factor:
    """One index range: its dim in each input and each output (None if it has none), and how its terms are reduced."""

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    reduce: str = "sum"  # the op of Partial, for an output without the factor


class Builder(Protocol):
    """Writes the nodes of the graph that one rank runs; shapes in it are local. `size` is the axis's number of
    ranks. `context_kind` is how attention is computed where the sequence is cut: ulysses, gather or ring, or auto
    for what sends least."""

    axis: str
    size: int
    context_kind: str

    def call(self, op: Target, *args: Any, **kwargs: Any) -> Node:
        """Append a call and return its node, whose local value is computed at once, for `shape`."""

    def collective(self, op: Target, tensor: Node, shape: tuple[int, ...], *args: Any, axis: str = "") -> Node:
        """Append a call `op(tensor, axis, *args)` of ops.comm_ops, whose result has this local shape. By default it is
        along the builder's own axis."""

    def node(self, op: Target, args: Args, kwargs: Kwargs, value: object, num_bytes: int = 0, what: str = "") -> Node:
        """Append a call whose local value, of fake tensors, is given. If it moves several tensors, `num_bytes` are the
        bytes of these and `what` says what they are."""

    def convert(self, node: Node, have: Placement, want: Placement) -> Node:
        """Append the collectives that change the placement of a value along the axis. Returns the new value."""

    def on_rank(self, index: int) -> AbstractContextManager[None]:
        """Context in which calls are appended that only one rank of the axis runs."""

    def value(self, node: Node) -> torch.Tensor:
        """The local tensor that a node stands for; it may be a fake one."""

    def shape(self, node: Node) -> tuple[int, ...]: ...

    def dtype(self, node: Node) -> torch.dtype: ...

    def coordinate(self) -> Node:
        """This rank's index along the axis: an int when the graph runs, for use in `call(operator.mul, ...)`."""


Emitted = Node | tuple[Node | None, ...]
# Writes the local op or ops: (builder, call, strategy, args, kwargs). Tensors in the args are local nodes, already in
# the placements that the strategy asks for. Returns one node (with a tuple as its value if there are several outputs),
# or a tuple with a node for each output.
Emit = Callable[["Builder", "Call", "Strategy", Args, Kwargs], Emitted]


@dataclass(frozen=True)
class Strategy:
    """One way to run an op along one axis: the placement that each input must have, and that of each output."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    emit: Emit | None = None  # by default the rule's own, or the same op on local tensors
    sends: bool = False  # whether what `emit` writes communicates


Placements = tuple[Placement, ...]


def by_number(blocks: Blocks) -> tuple[int, ...]:
    """A sort key for the order in which blocks are tried: equal ones first."""
    return (0, blocks) if isinstance(blocks, int) else (1, *blocks)


def no_strategies(call: Call, given: Placements, size: int) -> Sequence[Strategy]:
    """The strategies of an op that only runs on whole inputs."""
    return ()


def no_groups(call: Call) -> Sequence[tuple[int, ...]]:
    """The linear groups of an op that is linear in no operand."""
    return ()


class View(enum.Enum):
    """How a view relates to its first input."""

    ALIAS = "the input itself; a view that tracing leaves behind and that can be removed"
    RESHAPE = "the same elements in the same order; on a rank's local tensor it may have to copy"
    WHOLE = "each element once: a write to one is a write to the other"
    PART = "some of the elements, or some of them several times"

    @property
    def is_whole(self) -> bool:
        """Whether the view has every element of its input once."""
        return self is not View.PART


@dataclass(frozen=True)
class Communication:
    """The collective that a call does, starts or ends.

    Attributes:
        kind: the collective; for a `wait` that ends several kinds, any of them.
        part: whether the call is the whole collective, its start or its end.
        tensor: position of the tensor.
        axis: position of the axis's name, or of several names; the result is then all-reduced over the further ones.
        counted: whether NodeInfo.num_bytes has the bytes of its input; else the tensor does.
    """

    kind: CollectiveKind
    part: Literal["whole", "start", "wait"] = "whole"
    tensor: int = 0
    axis: int = 1
    counted: bool = False


@dataclass(frozen=True)
class MemoryUse:
    """The class of memory (cost.memory_model) that a call allocates, and of that which it frees when it is done."""

    makes: str
    gives: str = ""


@dataclass(frozen=True)
class RowAccess:
    """A read or a write of the rows of a table, whose first dims are indexed.

    Attributes:
        table: the tensor.
        indices: the index of each of its first dims; they are broadcast together.
        values: what is written at the rows; None for a read.
        adds: whether the values are added to the rows, so that a row may be written several times.
        by_element: whether the one index has a number for each element of the rows, as gather's.
    """

    table: Node
    indices: tuple[Node, ...]
    values: Any = None
    adds: bool = False
    by_element: bool = False


Role = Literal["lookup", "softmax", "class loss", "norm", "attention", "sort", "grouped product"]
Reads = Literal["values", "shape", "memory"]


@dataclass(frozen=True)
class OpSpec:
    """All facts about one op that passes use.

    Sharding along one axis:
        known: whether there is a row; without one the op runs on whole inputs, and the user is told.
        factors: index ranges that may be sharded.
        linear: groups of inputs in which the op is jointly linear: if all inputs of a group are partial sums and the
            others whole, each output is a partial sum (add: ((0, 1),); mul: ((0,), (1,)); a view: ((0,),)).
        strategies: further strategies, which factors cannot express, from the inputs' present placements and the number
            of ranks.
        sizes: position of an argument with the output's shape, which must be made local.
        emit: writes the local op, if it is not the same op with the same arguments.
        formats: whether the kernel relies on its inputs' memory formats, which are then those at capture
            (compile/sharding/formats.py).
        strided: whether, besides, the kernel reads elements that repeat where they are, and its rows must begin as
            evenly in memory as they did.
        decompose: a function of the op's arguments that computes the same by simpler ops, used if an input is sharded
            along a dim that no factor names.
        weighted: whether the op is a sum weighted by an operand, such as a model's weight.
        role: what passes look for: a lookup in a table, a softmax that may lead to a loss, a loss over classes, a norm
            (whose sums over a sharded dim are small), a fused attention, a sort along a dim, or the product of rows
            sorted by group with a matrix for each group, (rows, matrices, ends of the groups).
        batch_statistics: whether the op, in training, computes or reads statistics of the whole batch.

    Results and inputs:
        view: how its result relates to its first input, if the result has no memory of its own.
        copies: position of the argument that the result copies, possibly in another dtype.
        moves: whether it only brings its tensor to other ranks or into another layout.
        reads: what it reads of its tensors: values, shape and dtype only, or memory with its strides and offsets.
        fake: computes the result on fake tensors, if the op's own shape function is wrong.
        instead: the op in terms of others, which a capture records in its place.
        advice: what a model can do instead of an op whose results have shapes that depend on numbers.
        access: the rows that it reads or writes by number, from its arguments; None if they are indexed otherwise.
        picks: position of the output that has places along a dim, from 0 to its size.
        fills: the number that every element of its result has.
        by_device: whether the shapes, strides or dtypes of its results depend on the kind of device.
        random: the op in terms of `draw(shape, dtype, device, kind, params)`, its first argument (ops/random.py).
        dropout: position of the rate (dropout_p) of an op that is random only if the rate is not 0.
        communicates: its collective.
        transfers: whether it begins or awaits a copy between the device and a home on the host or on disk.
        memory: the class of its memory, if that is not activations.
        ties: whether all calls that read its result, and the calls between them, are on one stage of a pipeline.
        puts: position of the tensor that the call copies into a buffer of several.
        flops: floating-point operations of a call, for ops whose formula torch.utils.flop_counter lacks.
        skips: the fraction of them that its kernel does not carry out, because a mask hides their results.
    """

    known: bool = True
    factors: Callable[[Call], Sequence[Factor]] = field(default=lambda call: ())
    linear: Callable[[Call], Sequence[tuple[int, ...]]] = no_groups
    strategies: Callable[[Call, Placements, int], Sequence[Strategy]] = no_strategies
    sizes: int | None = None
    emit: Emit | None = None
    formats: bool = False
    strided: bool = False
    decompose: Callable[..., Any] | None = None
    weighted: bool = False
    role: Role | None = None
    batch_statistics: bool = False
    view: View | None = None
    copies: int | None = None
    moves: bool = False
    reads: Reads = "values"
    fake: Callable[..., Any] | None = None
    instead: Callable[..., Any] | None = None
    advice: str = ""
    access: Callable[..., RowAccess | None] = field(default=lambda *args, **kwargs: None)
    picks: int | None = None
    fills: int | None = None
    by_device: bool = False
    random: Callable[..., Any] | None = None
    dropout: int | None = None
    communicates: Communication | None = None
    transfers: bool = False
    memory: MemoryUse | None = None
    ties: bool = False
    puts: int | None = None
    flops: Callable[[Call], float] | None = None
    skips: Callable[[Call], float] | None = None


NO_OP_SPEC = OpSpec(known=False)  # for an op without a row
OP_SPECS: dict[Target, OpSpec] = {}


def register(*ops: Target, spec: OpSpec) -> None:
    """Make `spec` the row of these ops, which must not have one."""
    for op in ops:
        assert op not in OP_SPECS, f"{op} has two rows"
        OP_SPECS[op] = spec


def state(*ops: Target, **facts: Any) -> None:
    """Add facts to the rows of ops. An op without a row gets one that is not `known`. Only for facts that several
    families share."""
    for op in ops:
        OP_SPECS[op] = replace(OP_SPECS.get(op, NO_OP_SPEC), **facts)


def einsum(text: str) -> Callable[[Call], Sequence[Factor]]:
    """Factors from einsum notation: `m k, k n -> m n`. Names in capitals stay whole; several outputs are `-> m n,
    m`."""
    left, _, right = text.partition("->")
    inputs = [part.split() for part in left.split(",")]
    outputs = [part.split() for part in right.split(",")]
    names = sorted({name for part in inputs + outputs for name in part if name.islower()})

    def place(name: str, part: list[str]) -> int | None:
        return part.index(name) if name in part else None

    fixed = tuple(Factor(tuple(place(n, p) for p in inputs), tuple(place(n, p) for p in outputs)) for n in names)
    return lambda call: fixed


def strategies_of(rule: OpSpec, call: Call, given: Placements, size: int) -> list[Strategy]:
    """All strategies for `call` along one axis of `size` ranks, the fully replicated one first.

    `given` are the inputs' present placements, which decide the numbers of blocks that are tried.
    """
    found = [Strategy((REPLICATE,) * len(call.inputs), (REPLICATE,) * len(call.outputs))]
    for factor in rule.factors(call):
        blocks = {1} | {
            p.blocks for p, dim in zip(given, factor.inputs, strict=True) if isinstance(p, Shard) and p.dim == dim
        }
        found += [
            Strategy(
                tuple(REPLICATE if dim is None else Shard(dim, b) for dim in factor.inputs),
                tuple(Partial(factor.reduce) if dim is None else Shard(dim, b) for dim in factor.outputs),
            )
            for b in sorted(blocks, key=by_number)
        ]
    for group in rule.linear(call):
        inputs = tuple(Partial() if i in group else REPLICATE for i in range(len(call.inputs)))
        found.append(Strategy(inputs, (Partial(),) * len(call.outputs)))
    found += rule.strategies(call, given, size)
    return found


__all__ = [
    "NO_OP_SPEC",
    "OP_SPECS",
    "REPLICATE",
    "Builder",
    "Call",
    "CollectiveKind",
    "Communication",
    "Emit",
    "Factor",
    "MemoryUse",
    "OpSpec",
    "Partial",
    "Placement",
    "Replicate",
    "RowAccess",
    "Shard",
    "Strategy",
    "TensorSpec",
    "View",
    "einsum",
    "register",
    "state",
    "strategies_of",
]  # fmt: skip
