"""The collectives of eager execution. Each takes the rank's World, which a graph has as the placeholder `world`.

Each function takes the World first, and then the arguments of the call of `compile.ops.comm_ops` that it carries out.
No global is read. A start returns the work that its wait takes; the rank computes in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import Target

from plait.comm.protocol import Comm, Work, World
from plait.compile.ir.calls import placeholders
from plait.compile.ir.node_info import NodeInfo, describe
from plait.compile.ops import CollectiveKind, Communication, MemoryUse, OpSpec, comm_ops, op_spec, register
from plait.compile.ops.comm_ops import CommOp, PlainCut, take
from plait.compile.sharding.flat_shards import rows_of
from plait.cost.memory_model import BUFFERS
from plait.spec.layout import Blocks, block_lengths

WORLD = "world"  # name of the placeholder that stands for the rank's World
F = TypeVar("F", bound=Callable[..., Any])
_CARRIED_OUT: dict[CommOp, Callable[..., Any]] = {}


def carries_out(op: CommOp) -> Callable[[F], F]:
    """Register a function as what carries out a call of comm_ops. It gets that call's OpSpec, with the places of the
    arguments moved by one for the World."""

    def note(function: F) -> F:
        row = op_spec(op)
        does = row.communicates
        moved = None if does is None else replace(does, tensor=does.tensor + 1, axis=does.axis + 1)
        copies = None if row.copies is None else row.copies + 1
        register(function, spec=OpSpec(communicates=moved, memory=row.memory, moves=row.moves, copies=copies))
        _CARRIED_OUT[op] = function
        return function

    return note


def function_of(op: Any) -> Callable[..., Any] | None:
    """The function that carries out a call of comm_ops; None for any other op."""
    return _CARRIED_OUT.get(op)


def world_of(graph: Graph) -> Node:
    """The World's placeholder, which is added to the graph if it has none."""
    found = next((node for node in placeholders(graph) if node.name == WORLD), None)
    if found is None:
        with graph.inserting_before(next(iter(graph.nodes))):
            found = graph.placeholder(WORLD)
        describe(found, NodeInfo(), None)
    return found


def bind_world(graph: Graph) -> Graph:
    """Replace the calls of comm_ops by functions that take the rank's World, and give the graph its placeholder.

    Changes `graph` and returns it."""
    calls = [node for node in graph.nodes if function_of(node.target) is not None]
    world = world_of(graph)
    for node in calls:
        node.args = (world, *node.args)
        node.target = function_of(node.target)
    return graph


@carries_out(comm_ops.coordinate)
def coordinate(world: World, axis: str) -> int:
    """This rank's index along the axis."""
    return world.comm(axis).rank


@carries_out(comm_ops.all_reduce)
def all_reduce(world: World, tensor: Tensor, axis: str, op: str = "sum") -> Tensor:
    return world.comm(axis).all_reduce(tensor.contiguous(), op).wait()


@carries_out(comm_ops.all_gather)
def all_gather(world: World, tensor: Tensor, axis: str, dim: int, blocks: Blocks) -> Tensor:
    """Shard(dim, blocks) -> whole."""
    return _Gather(world.comm(axis), tensor, dim, blocks).wait()


@carries_out(comm_ops.reduce_scatter)
def reduce_scatter(world: World, tensor: Tensor, axis: str, dim: int, blocks: Blocks) -> Tensor:
    """Partial sums -> Shard(dim, blocks)."""
    return _reduce_scatter(world.comm(axis), tensor, dim, blocks).wait()


@carries_out(comm_ops.shard)
def own_shard(world: World, tensor: Tensor, axis: str, dim: int, blocks: Blocks) -> Tensor:
    """Whole -> Shard(dim, blocks): this rank's part. Sends nothing."""
    comm = world.comm(axis)
    part = take(tensor, comm.rank, comm.size, dim, blocks)
    # A part of the outermost dim is contiguous already. A copy of any other part has no gaps and the same dim order.
    return part if part.is_contiguous() else part.clone(memory_format=torch.preserve_format)


@carries_out(comm_ops.all_to_all)
def all_to_all(
    world: World, tensor: Tensor, axis: str, dim: int, blocks: Blocks, to_dim: int, to_blocks: Blocks
) -> Tensor:
    """Shard(dim, blocks) -> Shard(to_dim, to_blocks), on another dim."""
    comm = world.comm(axis)
    rows = comm.all_to_all(_parts(tensor, comm.size, to_dim, to_blocks)).wait()
    return _join(rows, dim, blocks)


@carries_out(comm_ops.exchange)
def exchange(world: World, tensor: Tensor, axis: str) -> Tensor:
    """Part i of dim 0 goes to rank i; part j of the result is from rank j."""
    comm = world.comm(axis)
    parts = tensor.contiguous().view(comm.size, tensor.shape[0] // comm.size, *tensor.shape[1:])
    return comm.all_to_all(parts).wait().view(tensor.shape)


@carries_out(comm_ops.halo)
def halo(world: World, tensor: Tensor, axis: str, dim: int, before: int, after: int) -> Tensor:
    """A part with `before` and `after` positions of its neighbours; zeros beyond the ends."""
    num = tensor.shape[dim]
    edges = tensor.narrow(dim, num - before, before), tensor.narrow(dim, 0, after)
    left, right = _to_neighbours(world.comm(axis), *edges)
    return torch.cat([left, tensor, right], dim)


@carries_out(comm_ops.halo_sum)
def halo_sum(world: World, tensor: Tensor, axis: str, dim: int, before: int, after: int) -> Tensor:
    """The terms for a part, and its neighbours' for its edges."""
    num = tensor.shape[dim] - before - after
    edges = tensor.narrow(dim, num + before, after), tensor.narrow(dim, 0, before)
    left, right = _to_neighbours(world.comm(axis), *edges)
    own = tensor.narrow(dim, before, num).clone(memory_format=torch.contiguous_format)
    own.narrow(dim, 0, after).add_(left)
    own.narrow(dim, num - before, before).add_(right)
    return own


_TO_NEXT, _TO_PREVIOUS = range(2)  # tags of messages


def _to_neighbours(comm: Comm, to_next: Tensor, to_previous: Tensor) -> tuple[Tensor, Tensor]:
    """Send edges to the next rank and to the one before. Returns theirs, from the rank before first; zeros where there
    is no such rank."""
    rank, last = comm.rank, comm.size - 1
    works: list[Work] = []
    arriving: list[Work | None] = [None, None]
    if to_next.numel():
        works += [comm.send(to_next.contiguous(), rank + 1, _TO_NEXT)] if rank < last else []
        arriving[0] = comm.recv(to_next.contiguous(), rank - 1, _TO_NEXT) if rank > 0 else None
    if to_previous.numel():
        works += [comm.send(to_previous.contiguous(), rank - 1, _TO_PREVIOUS)] if rank > 0 else []
        arriving[1] = comm.recv(to_previous.contiguous(), rank + 1, _TO_PREVIOUS) if rank < last else None
    like = to_next, to_previous
    left, right = (
        torch.zeros_like(edge) if work is None else work.wait() for work, edge in zip(arriving, like, strict=True)
    )
    for work in works:
        work.wait()
    return left, right


@carries_out(comm_ops.pass_state)
def pass_state(
    world: World, term: Tensor, axis: str, factor: Tensor | None, first: Tensor | None, reverse: bool
) -> Tensor:
    """The state before this rank's steps, from the rank before it; the next rank gets that after them."""
    comm = world.comm(axis)
    before, after = (comm.rank + 1, comm.rank - 1) if reverse else (comm.rank - 1, comm.rank + 1)
    if 0 <= before < comm.size:
        state = comm.recv(term, before).wait()
    else:
        state = torch.zeros_like(term) if first is None else first.contiguous()
    if 0 <= after < comm.size:
        comm.send(term if factor is None else torch.addcmul(term, factor, state), after).wait()
    return state


@carries_out(comm_ops.exchange_rows)
def exchange_rows(world: World, tensor: Tensor, axis: str, counts: Tensor, back: bool) -> Tensor:
    """Rank i gets the next counts[0, i] rows of the tensor; the result has counts[1, j] rows from rank j. With `back`
    the two rows of `counts` change places."""
    return world.comm(axis).all_to_all_rows(tensor.contiguous(), counts.flip(0) if back else counts).wait()


@carries_out(comm_ops.broadcast)
def broadcast(world: World, tensor: Tensor, axis: str, root: int) -> Tensor:
    """Only(root) -> whole. Other ranks than the root pass any tensor of the shape."""
    return world.comm(axis).broadcast(tensor.contiguous(), root).wait()


@carries_out(comm_ops.gather_part)
def gather_part(world: World, part: Tensor, axis: str, cut: PlainCut) -> Tensor:
    rows = rows_of((cut,))
    comm = world.comm(axis)
    row = part.new_empty(rows.length)
    rows.place(row, 0, comm.rank).copy_(part)
    whole = part.new_empty(cut[0])
    for rank, other in enumerate(comm.all_gather(row).wait()):
        rows.take(other, rank, [whole])
    return whole


@carries_out(comm_ops.scatter_part)
def scatter_part(world: World, tensor: Tensor, axis: str, cut: PlainCut) -> Tensor:
    rows = rows_of((cut,))
    comm = world.comm(axis)
    flat = tensor.new_zeros(rows.num_ranks, rows.length)
    rows.put(flat, 0, tensor)
    return rows.place(comm.reduce_scatter(flat).wait(), 0, comm.rank)


@carries_out(comm_ops.take_part)
def take_part(world: World, tensor: Tensor, axis: str, cut: PlainCut) -> Tensor:
    (each,) = rows_of((cut,)).cuts
    return each.part(tensor, world.comm(axis).rank).clone(memory_format=torch.contiguous_format)


class _Gather:
    """An all-gather in flight of a tensor whose dim is cut. Where ranks read each other's memory, each part is copied
    once, to its place."""

    def __init__(self, comm: Comm, tensor: Tensor, dim: int, blocks: Blocks) -> None:
        self._dim, self._blocks, self._size = dim, blocks, comm.size
        self._local = tensor.shape
        self._whole: Tensor | None = None
        self._places = comm.takes and comm.size > 1 and isinstance(blocks, int)
        part = tensor.contiguous()
        self._work: Work | None = comm.all_gather(part, take=self._place) if self._places else comm.all_gather(part)

    def _place(self, rank: int, row: Tensor) -> None:
        if self._whole is None:  # new memory only once there is something to copy into it
            shape = list(self._local)
            shape[self._dim] *= self._size
            self._whole = row.new_empty(shape)
        assert isinstance(self._blocks, int)
        place = _by_rank(self._whole, self._size, self._dim, self._blocks)[rank]
        place.copy_(row.view(place.shape))

    def wait(self) -> Tensor:
        """The whole tensor."""
        work, self._work = self._work, None  # it refers to this object: a cycle would keep the rows alive
        assert work is not None
        rows = work.wait()
        whole, self._whole = self._whole, None
        return _join(rows, self._dim, self._blocks) if whole is None else whole


def _reduce_scatter(comm: Comm, tensor: Tensor, dim: int, blocks: Blocks) -> Work:
    if isinstance(blocks, int):
        split = _by_rank(tensor, comm.size, dim, blocks)
        if not split.is_contiguous() and (flat := comm.buffer(tensor.numel(), tensor.dtype)) is not None:
            parts = flat.view(split.shape).copy_(split)
            return comm.reduce_scatter(parts.flatten(dim + 1, dim + 2), consume=True)
    return comm.reduce_scatter(_parts(tensor, comm.size, dim, blocks))


def _by_rank(tensor: Tensor, size: int, dim: int, blocks: int) -> Tensor:
    """Every rank's part, as a view: [size, ..., blocks, length, ...]."""
    split: Tensor = tensor.unflatten(dim, (blocks, size, tensor.shape[dim] // (blocks * size)))
    return split.movedim(dim + 1, 0)


def _parts(tensor: Tensor, size: int, dim: int, blocks: Blocks) -> Tensor:
    """Every rank's part, stacked: [size, *local shape]."""
    if not isinstance(blocks, int):
        return torch.stack([take(tensor, rank, size, dim, blocks) for rank in range(size)])
    return _by_rank(tensor, size, dim, blocks).flatten(dim + 1, dim + 2).contiguous()


def _join(rows: Tensor, dim: int, blocks: Blocks) -> Tensor:
    """The inverse of `_parts`."""
    size = rows.shape[0]
    if not isinstance(blocks, int):
        pieces = rows.split(block_lengths(rows.shape[dim + 1], blocks), dim + 1)
        return torch.cat([_join(piece, dim, 1) for piece in pieces], dim)
    split = rows.unflatten(dim + 1, (blocks, rows.shape[dim + 1] // blocks))
    return split.movedim(0, dim + 1).flatten(dim, dim + 2).contiguous() if size > 1 else rows[0]


@dataclass(frozen=True)
class Halves:
    """A collective as two calls, between which the rank computes: `start` takes what the whole call takes and returns a
    Work; `wait` takes this and the arguments at `rest` of the whole call, and returns the result."""

    start: Callable[..., Work]
    wait: Callable[..., Tensor]
    rest: tuple[int, ...] = ()


_HALVES: dict[Target, Halves] = {}


def halves_of(op: Target) -> Halves | None:
    """The two halves of a collective; None if it has none."""
    return _HALVES.get(op)


def starts(whole: Callable[..., Tensor], wait: Callable[..., Tensor], rest: tuple[int, ...] = ()) -> Callable[[F], F]:
    """Register a function as what starts the collective `whole`, which `wait` ends."""

    def note(function: F) -> F:
        does = op_spec(whole).communicates
        assert does is not None
        register(function, spec=OpSpec(communicates=replace(does, part="start"), memory=MemoryUse(BUFFERS)))
        _HALVES[whole] = Halves(function, wait, rest)
        return function

    return note


def wait(work: Work) -> Tensor:
    return work.wait()


def wait_and_join(work: Work, dim: int, blocks: Blocks) -> Tensor:
    return _join(work.wait(), dim, blocks)


register(
    wait,
    wait_and_join,
    spec=OpSpec(
        moves=True,
        communicates=Communication(CollectiveKind.ALL_REDUCE, "wait"),
        memory=op_spec(comm_ops.all_reduce).memory,
    ),
)


@starts(all_reduce, wait)
def all_reduce_start(world: World, tensor: Tensor, axis: str, op: str = "sum") -> Work:
    return world.comm(axis).all_reduce(tensor.contiguous(), op)


@starts(all_gather, wait)
def all_gather_start(world: World, tensor: Tensor, axis: str, dim: int, blocks: Blocks) -> Work:
    return _Gather(world.comm(axis), tensor, dim, blocks)


@starts(reduce_scatter, wait)
def reduce_scatter_start(world: World, tensor: Tensor, axis: str, dim: int, blocks: Blocks) -> Work:
    return _reduce_scatter(world.comm(axis), tensor, dim, blocks)


@starts(all_to_all, wait_and_join, (3, 4))
def all_to_all_start(
    world: World, tensor: Tensor, axis: str, dim: int, blocks: Blocks, to_dim: int, to_blocks: Blocks
) -> Work:
    comm = world.comm(axis)
    return comm.all_to_all(_parts(tensor, comm.size, to_dim, to_blocks))
