"""What an op rule is. A rule speaks of ONE mesh axis; the engine applies it axis by axis.

A rule names the **factors** of an op: index ranges that run through its tensors. In einsum notation
`m k, k n -> m n` has three. Sharding a factor shards every tensor dim that it runs through; one that is missing from
the output leaves a partial sum there. A factor that cannot be cut is simply not named (or written in capitals:
`softmax: m N -> m N`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch.fx import Node

from plait.spec.layout import REPLICATE, Blocks, Partial, Placement, Replicate, Shard


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor that goes into an op or comes out; `index` is its place among the inputs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    index: int = 0

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Call:
    """One call of an op: `args` and `kwargs` as in the graph, each tensor replaced by its TensorSpec.

    `inputs` are those Specs in the order of args, then kwargs (lists and tuples flattened, None skipped).
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec | None, ...]  # None for an output that is not a tensor

    def arg(self, position: int, name: str = "", default: Any = None) -> Any:
        """Argument by position, or by name, or the default: schemas allow each."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


@dataclass(frozen=True)
class Factor:
    """One index range: the dim it is in each input and each output (None: not in it), and how absence adds up."""

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    reduce: str = "sum"  # the Partial op of an output that lacks the factor


class Builder(Protocol):
    """Writes the nodes of the graph that one rank runs. Shapes in it are local."""

    axis: str
    size: int  # number of ranks along the axis

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """Append a call and return its node; its local value is worked out at once, so `shape` knows it."""

    def collective(self, op: Any, tensor: Node, shape: tuple[int, ...], *args: Any, axis: str = "") -> Node:
        """Append a call `op(tensor, axis, *args)` of ops.comm_ops, whose result has this local shape; the axis
        is the builder's own where none is named."""

    def shape(self, node: Node) -> tuple[int, ...]: ...

    def dtype(self, node: Node) -> torch.dtype: ...

    def coordinate(self) -> Node:
        """This rank's index along the axis: an int when the graph runs, to be used in `call(operator.mul, ...)`."""


# Writes the local op(s): (builder, call, strategy, args, kwargs), the args with tensors replaced by local nodes,
# each already in the placement that the strategy asks for. Returns one node (a tuple-valued one for several outputs)
# or a tuple of nodes, one an output.
Emit = Callable[["Builder", "Call", "Strategy", tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Strategy:
    """One way to run an op on one axis: what each input must be, and what each output then is."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    emit: Emit | None = None  # None: the rule's own, or the same op on local tensors


Placements = tuple[Placement, ...]


def by_number(blocks: Blocks) -> tuple[int, ...]:
    """The order in which blocks are tried: those that are equal first."""
    return (0, blocks) if isinstance(blocks, int) else (1, *blocks)


def no_strategies(call: Call, given: Placements, size: int) -> Sequence[Strategy]:
    return ()


def no_groups(call: Call) -> Sequence[tuple[int, ...]]:
    return ()


class View(enum.Enum):
    """What a view shows of its first input."""

    ALIAS = "the input itself: tracing leaves it behind, and it can go"
    RESHAPE = "the same numbers in the same order; of a rank's local tensor it may have to copy"
    WHOLE = "each number once: what is written to one is written to the other"
    PART = "some of the numbers, or some of them several times"

    @property
    def is_whole(self) -> bool:
        """Whether the view shows all of what it views, each number once."""
        return self is not View.PART


class CollectiveKind(enum.Enum):
    """What ranks do together, and how often the (N-1)/N of the whole tensor travel round the ring."""

    ALL_REDUCE = "all_reduce", 2.0
    ALL_GATHER = "all_gather", 1.0
    REDUCE_SCATTER = "reduce_scatter", 1.0
    ALL_TO_ALL = "all_to_all", 1.0
    BROADCAST = "broadcast", 1.0

    def __init__(self, title: str, ways: float) -> None:
        self.title = title
        self._ways = ways

    def sent_bytes(self, held: int, size: int) -> float:
        """What each of `size` ranks sends by the ring formula, if each gives a tensor of `held` bytes."""
        whole = held * size if self is CollectiveKind.ALL_GATHER else held
        return self._ways * whole * (size - 1) / size


@dataclass(frozen=True)
class Communication:
    """The collective that a call is, begins or ends.

    kind    the collective; of a `wait` that ends several kinds, any
    part    whether the call is the whole of it, its start or its end
    tensor  position of the tensor
    axis    position of the axis's name, or of several: the result is then all-reduced over the further ones
    counted whether the node's record says how many bytes go in (NodeInfo.num_bytes), else the tensor does
    """

    kind: CollectiveKind
    part: Literal["whole", "start", "wait"] = "whole"
    tensor: int = 0
    axis: int = 1
    counted: bool = False


@dataclass(frozen=True)
class MemoryUse:
    """The class of the memory that a call makes, and of what it gives back once it is done (cost.memory_model)."""

    makes: str
    gives: str = ""


Role = Literal["lookup", "softmax", "class loss", "norm"]
Reads = Literal["values", "shape", "memory"]


@dataclass(frozen=True)
class OpSpec:
    """Every fact of one op that anybody needs. How it behaves under sharding along one axis:

    known       whether the row says so; False: the op runs on whole inputs, and the user is told
    factors     index ranges that may be sharded
    linear      groups of inputs in which the op is jointly linear: if all inputs of a group are partial sums and the
                others whole, so is each output (add: ((0, 1),); mul: ((0,), (1,)); a view: ((0,),))
    strategies  further ways that factors cannot say, given the placements that the inputs have now and the number of
                ranks
    sizes       position of an argument that holds the output's shape, to be made local
    emit        how the local op is written, when it is not the same op with the same arguments
    formats     whether the kernel relies on its inputs' memory: each comes in its format at capture
                (compile/sharding/formats.py)
    decompose   a function of the op's arguments that computes the same from simpler ops, used when an input is sharded
                along a dim that no factor names
    weighted    whether the op is a sum that an operand, such as a model's weight, weighs
    role        what the search for a layout looks for: a lookup of rows of a table, a softmax that may lead to a loss,
                a loss over classes, a norm (whose sums over a cut dim are small)
    batch_statistics   whether the op, in training, works out or reads statistics of the whole batch

    What it gives, and what it reads:

    view        what it shows of its first input, where its result has no memory of its own
    copies      position of the argument whose numbers the result has, in memory of its own or in another dtype
    moves       whether it only brings its tensor to where that is read: other ranks, another layout
    reads       of its tensors: their values, only their shape and dtype, or memory as it lies (strides and offsets)
    fake        works out a result on fake tensors, where the op's own shape function is wrong
    random      the op in terms of `draw(shape, dtype, device, kind, params)`, the first argument (ops/random.py)
    dropout     position of the rate of an op that is random only where that is not 0; its name is dropout_p
    communicates   what it sends to other ranks
    memory      the class of its memory, where that is not an activation
    """

    known: bool = True
    factors: Callable[[Call], Sequence[Factor]] = field(default=lambda call: ())
    linear: Callable[[Call], Sequence[tuple[int, ...]]] = no_groups
    strategies: Callable[[Call, Placements, int], Sequence[Strategy]] = no_strategies
    sizes: int | None = None
    emit: Emit | None = None
    formats: bool = False
    decompose: Callable[..., Any] | None = None
    weighted: bool = False
    role: Role | None = None
    batch_statistics: bool = False
    view: View | None = None
    copies: int | None = None
    moves: bool = False
    reads: Reads = "values"
    fake: Callable[..., Any] | None = None
    random: Callable[..., Any] | None = None
    dropout: int | None = None
    communicates: Communication | None = None
    memory: MemoryUse | None = None


NO_OP_SPEC = OpSpec(known=False)  # of an op without a row
OP_SPECS: dict[Any, OpSpec] = {}


def register(*ops: Any, spec: OpSpec) -> None:
    for op in ops:
        assert op not in OP_SPECS, f"{op} has two rows"
        OP_SPECS[op] = spec


def state(*ops: Any, **facts: Any) -> None:
    """Write facts into the rows of ops, or into new ones that say nothing of sharding. Only where a family registers
    many ops at once."""
    for op in ops:
        OP_SPECS[op] = replace(OP_SPECS.get(op, NO_OP_SPEC), **facts)


def einsum(text: str) -> Callable[[Call], Sequence[Factor]]:
    """Factors from einsum notation: `m k, k n -> m n`. Names in capitals stay whole. Several outputs: `-> m n, m`."""
    left, _, right = text.partition("->")
    inputs = [part.split() for part in left.split(",")]
    outputs = [part.split() for part in right.split(",")]
    names = sorted({name for part in inputs + outputs for name in part if name.islower()})

    def place(name: str, part: list[str]) -> int | None:
        return part.index(name) if name in part else None

    fixed = tuple(Factor(tuple(place(n, p) for p in inputs), tuple(place(n, p) for p in outputs)) for n in names)
    return lambda call: fixed


def strategies_of(rule: OpSpec, call: Call, given: Placements, size: int) -> list[Strategy]:
    """Every way to run `call` along one axis of `size` ranks, the fully replicated one first.

    `given` are the placements that the inputs have now; they say which numbers of blocks are worth trying.
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
    "Shard",
    "Strategy",
    "TensorSpec",
    "View",
    "einsum",
    "register",
    "state",
    "strategies_of",
]  # fmt: skip
