"""Loops over positions as single calls for all of them, so that an axis that cuts the sequence cuts the loop.

    for i in range(length):                      states = linear_scan(a, b)
        state = a[:, i] * state + b[:, i]   ->   out = (a * states + b) @ c
        out.append(state @ c[:, i])

What a loop carries from round to round must be a sum of what the round before had, times something, and of other terms;
these are found by following the round's calls. Positions are dim 0 of what is written here.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_unflatten

from plait.compile.ir.calls import call_of, copy_graph, drop_dead_calls, is_item, op_spec_of, output_node, output_values
from plait.compile.ir.node_info import describe, info_of, is_backward, is_forward, set_info
from plait.compile.ops import op_spec
from plait.compile.ops.dims import pointwise_factors
from plait.compile.ops.linear_scan import linear_scan, state_at
from plait.compile.passes.loop_ends import Gathered, GradientSum, gathers, stack_writes
from plait.compile.passes.loop_rounds import (
    EDGES,
    ZERO,
    Before,
    Lanes,
    LoopRounds,
    NotALoopError,
    Operand,
    has_slices,
    is_operand,
    reads_alone,
    whole_loops,
)
from plait.compile.sharding.decompose import decompose_node, tracing

aten = torch.ops.aten
_SHORT = 3  # rounds: fewer have no middle by which edges are told


def roll_loops(graph: Graph, lengths: Collection[int]) -> Graph:
    """The graph with one call for all rounds of a loop over as many positions as one of `lengths`."""
    for num in sorted({n for n in lengths if n >= _SHORT and has_slices(graph, n)}):
        rolled = copy_graph(graph)
        stack_writes(rolled, num)
        rounds = LoopRounds(num)
        ends, sums = gathers(rolled, rounds)
        whole = whole_loops(rounds, _readers(ends), _is_linear)
        kept = [each for each in ends if _lanes_of(each.operand) in whole and _computes(each.operand)]
        if kept:
            try:
                _Writer(rolled, rounds, whole).write(kept, sums)
            except NotALoopError:
                continue
            graph = rolled
    return graph


def loops_left(graph: Graph, lengths: Collection[int]) -> tuple[str, ...]:
    """The modules with a loop over as many positions as one of `lengths` that is not one call for all rounds, each with
    the calls through which a round reads the state of the round before, and which are not linear in it."""
    found: dict[str, dict[str, None]] = {}
    for num in sorted({n for n in lengths if n >= _SHORT and has_slices(graph, n)}):
        copied, rounds = copy_graph(graph), LoopRounds(num)
        stack_writes(copied, num)
        gathers(copied, rounds)
        for before in rounds.befores():
            like = before.lanes.like
            if is_forward(like) and reaches(before.lanes, before) and not _is_linear(before):
                found.setdefault(info_of(like).module or "the loss", {}).update(_not_linear(before))
    return tuple(f"{module} ({', '.join(calls)} of the state)" for module, calls in found.items())


def _not_linear(state: Before) -> dict[str, None]:
    """The calls that read a state and are not linear in it; if each by itself is, the one that makes the next state."""
    left, found, seen = [state.lanes], dict[str, None](), set[Lanes]()
    for lanes in left:
        if lanes not in seen and reaches(lanes, state):
            seen.add(lanes)
            if not is_item(lanes.like) and op_spec_of(lanes.like).view is None and _linear_places(lanes, state) is None:
                found[str(lanes.like.target)] = None
            left += [each for each in lanes.reads() if isinstance(each, Lanes)]
    return found or {str(state.lanes.like.target): None}


def _readers(ends: Iterable[Gathered]) -> set[Node]:
    return {reader for each in ends for reader in each.readers}


def _lanes_of(operand: Operand) -> Lanes | None:
    if isinstance(operand, Before):
        return operand.lanes
    return operand if isinstance(operand, Lanes) else None


def _computes(operand: Operand) -> bool:
    return isinstance(operand, Before) or (isinstance(operand, Lanes) and operand.source is None)


def _form(node: Node) -> Any:
    value = node.meta["val"]
    return value.shape, value.dtype


# What a round reads of the round before


def reaches(operand: object, target: Before) -> bool:
    """Whether an operand is computed from what a round reads of the round before."""
    found: list[Any] = [operand]
    seen = {id(operand)}
    for each in found:
        if each is target:
            return True
        reads: Iterable[Any] = ()
        if isinstance(each, (Lanes, Before)):
            reads = each.reads() if isinstance(each, Lanes) else (each.lanes,)
        new = [read for read in reads if id(read) not in seen]
        seen.update(map(id, new))
        found += new
    return False


def _is_linear(before: Before) -> bool:
    """Whether what a round reads of the round before can be computed for all rounds."""
    value, first = before.lanes.like.meta["val"], before.first
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return False
    if isinstance(first, Node) and _form(first) != _form(before.lanes.like):
        return False
    return not reaches(before.lanes, before) or _is_affine(before.lanes, before)


def _is_affine(operand: Operand, state: Before) -> bool:
    """Whether an operand is a product with the state plus a term, each position of a state by itself."""
    if operand is state or not reaches(operand, state):
        return True
    if not isinstance(operand, Lanes) or _linear_places(operand, state) is None:
        return False
    return all(_is_affine(each, state) for each in operand.reads())


def _linear_places(lanes: Lanes, state: Before) -> set[int] | None:
    """The places in which a pointwise op is linear together, if all operands that reach the state are among these."""
    row, places = op_spec_of(lanes.like), [at for at, each in enumerate(lanes.operands) if is_operand(each)]
    if lanes.source is not None or row.factors is not pointwise_factors:
        return None
    if not lanes.like.meta["val"].dtype.is_floating_point:
        return None
    carry = {at for at in places if reaches(lanes.operands[at], state)}
    groups = [{places[i] for i in group} for group in row.linear(call_of(lanes.like))]
    return next((group for group in groups if carry <= group), None)


@dataclass(frozen=True)
class OverRounds:
    """An op on the values of all rounds: of the tensors among its arguments, those that are `stacked` along dim 0."""

    op: Callable[..., Any]
    stacked: tuple[bool, ...]

    @property
    def __name__(self) -> str:
        return f"{self.op} in all rounds"

    def _has_one_weight(self) -> bool:
        """Whether it is a product with a matrix that all rounds read."""
        if self.op is aten.addmm.default:
            return self.stacked == (False, True, False)
        return self.op is aten.mm.default and self.stacked == (True, False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._has_one_weight():
            *bias, a, weight = args
            return self.op(*bias, _joined(a), weight, **kwargs).view(*a.shape[:2], -1)
        leaves, structure = tree_flatten((args, kwargs))
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def run(*tensors: torch.Tensor) -> Any:
            own = list(leaves)
            for at, tensor in zip(places, tensors, strict=True):
                own[at] = tensor
            given, named = tree_unflatten(own, structure)
            return self.op(*given, **named)

        dims = tuple(0 if each else None for each in self.stacked)
        functorch: Any = torch._C._functorch
        enabled = functorch._is_vmap_fallback_enabled()
        functorch._set_vmap_fallback_enabled(False)  # which would be a loop
        try:
            return torch.vmap(run, dims)(*(leaves[at] for at in places))
        finally:
            functorch._set_vmap_fallback_enabled(enabled)


def _as_state(tensor: torch.Tensor, ndim: int) -> torch.Tensor:
    return tensor.reshape((1,) * (ndim - tensor.ndim) + tensor.shape)


def summed_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sum over rounds of products of matrices, [rounds, m, k] and [rounds, k, n]."""
    return _joined(a.transpose(1, 2)).t() @ _joined(b)


def _joined(matrices: torch.Tensor) -> torch.Tensor:
    """The rows of all matrices as one matrix. They are copied: a part of a tensor may lie in memory otherwise than the
    whole, which could be viewed."""
    dense = matrices.clone(memory_format=torch.contiguous_format)
    return dense.view(-1, matrices.shape[2])


def _is_product(operand: object) -> bool:
    """Whether values are products of two matrices of each round, or transposes of such."""
    if not isinstance(operand, Lanes) or operand.source is not None:
        return False
    op, reads = operand.like.target, operand.operands
    if op is aten.t.default:
        return _is_product(reads[0])
    return op is aten.mm.default and not any(isinstance(each, Node) for each in reads)


def _is_kept(node: Node) -> bool:
    """Whether a call of backward reads the value of one of forward, or a view of it."""
    return is_backward(node) or any(is_backward(user) or (_is_view(user) and _is_kept(user)) for user in node.users)


def _is_view(node: Node) -> bool:
    op = node.target.op if isinstance(node.target, OverRounds) else node.target
    return op is aten.reshape.default or op_spec(op).view is not None


class _Writer:
    """Writes loops as calls for all rounds."""

    def __init__(self, graph: Graph, rounds: LoopRounds, whole: set[Lanes]) -> None:
        self.graph, self.rounds, self.whole = graph, rounds, whole
        self._written: dict[Lanes | Before, Node] = {}
        self._order = {node: float(place) for place, node in enumerate(graph.nodes)}
        self._stacked: set[Node] = set()
        self._end = output_node(graph)
        self._results: list[tuple[Node, Node]] = []  # old values and those that take their places

    def write(self, ends: list[Gathered], sums: list[GradientSum]) -> None:
        """Write the calls that these gather values of, and let their readers read the results. Changes the graph."""
        alone = reads_alone(self.rounds, _readers(ends))
        of_sums: dict[Node, list[Gathered]] = {}
        for each in ends:
            if each.terms:
                of_sums.setdefault(each.node, []).append(each)
            else:
                self._results.append((each.node, self._gathered(each)))
        for sum_ in sums:
            if parts := of_sums.get(sum_.total):
                self._sum(sum_, parts)
        for lanes, values in alone.items():
            if lanes in self.whole and len(values) <= EDGES:
                every = self._emit(lanes)
                self._results += [(value, self._call(value, state_at, every, at)) for at, value in values.items()]
        for old, new in self._results:
            old.replace_all_uses_with(new, lambda user: user not in self.rounds.home)
        drop_dead_calls(self.graph)
        for before, states in list(self._written.items()):
            if isinstance(before, Before) and (after := self._written.get(before.lanes)) is not None:
                self._keep_one(before, states, after)
        _in_order(self.graph, self._order)
        for node in list(self.graph.nodes):
            if isinstance(node.target, OverRounds) or node.target is summed_products:
                decompose_node(node, node.target)

    def _sum(self, each: GradientSum, parts: list[Gathered]) -> None:
        gathered = {term for part in parts for term in part.terms}
        terms = [term for term in each.terms if term not in gathered] + [self._gathered(part) for part in parts]
        total = terms[0]
        for term in terms[1:]:
            total = self._call(each.total, aten.add.Tensor, total, term)
        self._results.append((each.total, total))

    def _gathered(self, each: Gathered) -> Node:
        """The values of all rounds as they were gathered."""
        like, num = each.node, self.rounds.num
        if each.dim is None and not each.without:
            return self._total(like, each.operand)
        every = self._emit(each.operand)
        if each.without:
            every = self._without(like, every, each.without)
        if each.dim is None:
            return self._call(like, aten.sum.dim_IntList, every, [0])
        ndim = every.meta["val"].ndim
        order = [*range(1, ndim)]
        order.insert(each.dim, 0)
        moved = self._call(like, aten.permute.default, every, order)
        dense = self._call(like, aten.clone.default, moved, memory_format=torch.contiguous_format)
        if not each.joins:
            return dense
        shape = [n for d, n in enumerate(dense.meta["val"].shape) if d != each.dim + 1]
        assert shape[each.dim] == num
        return self._call(like, aten.view.default, dense, shape)

    def _total(self, like: Node, operand: Operand) -> Node:
        """The sum of the values of all rounds; of products as one product, which needs no memory for each round's."""
        if isinstance(operand, Lanes) and operand.source is None:
            reads, op = operand.operands, operand.like.target
            if op is aten.t.default and _is_product(operand):
                return self._call(like, op, self._total(like, reads[0]), *reads[1:])
            if _is_product(operand):
                return self._call(like, summed_products, *map(self._emit, reads))
        return self._call(like, aten.sum.dim_IntList, self._emit(operand), [0])

    def _without(self, like: Node, every: Node, rounds: Collection[int]) -> Node:
        """The values with zeros in some rounds."""
        value, num = every.meta["val"], self.rounds.num
        places = self._call(like, aten.arange.default, num, device=value.device)
        for at in rounds:
            shown = self._call(like, aten.ne.Scalar, places, at)
            shown = self._call(like, aten.view.default, shown, [num] + [1] * (value.ndim - 1))
            zero = self._call(like, aten.full.default, [], 0.0, **_of(value))
            every = self._call(like, aten.where.self, shown, every, zero)
        return every

    def _emit(self, operand: Operand) -> Node:
        """The value for all rounds; that of every round for a value that all read."""
        if isinstance(operand, Node):
            return operand
        if operand not in self._written:
            made = self._carried(operand) if isinstance(operand, Before) else self._lanes(operand)
            self._stacked.add(made)
            self._written[operand] = made
        return self._written[operand]

    def _lanes(self, lanes: Lanes) -> Node:
        like = lanes.like
        if lanes.source is not None:
            tensor, dim = lanes.source
            order = [dim, *(d for d in range(tensor.meta["val"].ndim) if d != dim)]
            moved = self._call(like, aten.permute.default, tensor, order)
            return self._call(like, aten.unsqueeze.default, moved, dim + 1) if lanes.keeps else moved
        operands = [self._emit(each) if isinstance(each, (Lanes, Before)) else each for each in lanes.operands]
        assert lanes.structure is not None
        args, kwargs = tree_unflatten(operands, lanes.structure)
        if is_item(like):
            return self._call(like, operator.getitem, *args)
        return self._over_rounds(like, like.target, *args, **kwargs)

    def _over_rounds(self, like: Node, op: Any, *args: Any, **kwargs: Any) -> Node:
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Node)]
        op = aten.reshape.default if op is aten.view.default else op
        run = OverRounds(op, tuple(each in self._stacked for each in tensors))
        made = self._call(like, run, *args, **kwargs)
        self._stacked.add(made)
        return made

    def _call(self, like: Node, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self._end):
            node = self.graph.call_function(op, args, kwargs)
        given, named = map_arg((args, kwargs), lambda n: n.meta["val"])
        mode = next(v.fake_mode for v in output_values(like) if isinstance(v, torch.Tensor))  # type: ignore[attr-defined]
        run = op_spec_of(node).fake or op
        try:
            with tracing, mode, torch.no_grad():
                value = run(*given, **named)
        except RuntimeError as error:  # of vmap, for an op that it cannot batch: the loop stays as it is
            raise NotALoopError(f"{op} cannot be called for all rounds") from error
        describe(node, info_of(like)._replace(formats=None), value)
        self._order[node] = self._order[like] + 0.5
        return node

    # What a round reads of the round before

    def _carried(self, before: Before) -> Node:
        like, first = before.lanes.like, None if before.first in (None, ZERO) else before.first
        if not reaches(before.lanes, before):
            return self._call(like, linear_scan, None, self._emit(before.lanes), first, before.reverse)
        factor, term = self._affine(before.lanes, before)
        value = like.meta["val"]
        num = self.rounds.num
        factor = None if factor is None else self._stack(like, factor)
        term = None if term is None else self._stack(like, term)
        if factor is None:
            factor = self._call(like, aten.full.default, [num, *[1] * value.ndim], 1.0, **_of(value))
        if term is None:
            term = self._call(like, aten.full.default, [num, *value.shape], 0.0, **_of(value))
        self._stacked |= {factor, term}
        factor, term = (self._with_dtype(like, each) for each in (factor, term))
        if factor.meta["val"].ndim < value.ndim + 1:
            factor = self._over_rounds(like, _as_state, factor, value.ndim)
        if term.meta["val"].shape[1:] != value.shape:
            term = self._over_rounds(like, aten.expand.default, term, list(value.shape))
        return self._call(like, linear_scan, factor, term, first, before.reverse)

    def _keep_one(self, before: Before, states: Node, after: Node) -> None:
        """Let backward read the states before each round from those after it, where these are kept for it anyway."""
        later = [user for user in states.users if is_backward(user)]
        if is_backward(states) or not later or not _is_kept(after):
            return
        shifted = self._call(before.lanes.like, linear_scan, None, after, *states.args[2:])
        set_info(shifted, **{name: getattr(info_of(later[0]), name) for name in ("phase", "module", "position")})
        self._order[shifted] = min(self._order[user] for user in later) - 0.25
        for user in later:
            user.replace_input_with(states, shifted)

    def _stack(self, like: Node, value: Node) -> Node:
        """A value for all rounds, if it is one that all read."""
        if value in self._stacked:
            return value
        sizes = [self.rounds.num, *value.meta["val"].shape]
        made = self._call(like, aten.expand.default, self._call(like, aten.unsqueeze.default, value, 0), sizes)
        self._stacked.add(made)
        return made

    def _with_dtype(self, like: Node, value: Node) -> Node:
        dtype = like.meta["val"].dtype
        return (
            value if value.meta["val"].dtype == dtype else self._call(like, aten._to_copy.default, value, dtype=dtype)
        )

    def _affine(self, operand: Operand, state: Before) -> tuple[Node | None, Node | None]:
        """The factor and the term of an operand that is factor * state + term; None is a factor 1, or a term 0."""
        if operand is state:
            return None, None
        assert isinstance(operand, Lanes)
        like, places = operand.like, _linear_places(operand, state)
        assert places is not None
        found = {at: self._affine(operand.operands[at], state)
                 for at in places if reaches(operand.operands[at], state)}  # fmt: skip
        others = [each for at, each in enumerate(operand.operands) if at not in found]
        if len(found) == len(others) == 1 and is_operand(others[0]):
            ((at, (factor, term)),) = found.items()
            if like.target is aten.mul.Tensor:
                return (self._emit(others[0]) if factor is None else self._apply(operand, {at: factor}),
                        None if term is None else self._apply(operand, {at: term}))  # fmt: skip
            if like.target is aten.add.Tensor:
                return factor, self._emit(others[0]) if term is None else self._apply(operand, {at: term})
        one, zero = self._scalar(like, 1.0), self._scalar(like, 0.0)
        rest = dict.fromkeys(places - {*found}, zero)
        factors = {at: one if factor is None else factor for at, (factor, _) in found.items()}
        terms = {at: zero if term is None else term for at, (_, term) in found.items()}
        has_term = bool(rest) or any(term is not None for _, term in found.values())
        return self._apply(operand, factors | rest), self._apply(operand, terms) if has_term else None

    def _apply(self, operand: Lanes, others: Mapping[int, Node]) -> Node:
        """The operand's op on other values in some places."""
        given = [self._stack(operand.like, others[at]) if at in others
                 else self._emit(each) if is_operand(each) else each
                 for at, each in enumerate(operand.operands)]  # fmt: skip
        assert operand.structure is not None
        args, kwargs = tree_unflatten(given, operand.structure)
        return self._over_rounds(operand.like, operand.like.target, *args, **kwargs)

    def _scalar(self, like: Node, number: float) -> Node:
        made = self._call(like, aten.full.default, [self.rounds.num], number, **_of(like.meta["val"]))
        self._stacked.add(made)
        return made


def _of(value: torch.Tensor) -> dict[str, Any]:
    return {"dtype": value.dtype, "device": value.device}


def _in_order(graph: Graph, order: dict[Node, float]) -> None:
    """Sort the calls of a graph so that each comes after what it reads, otherwise by `order`. Changes the graph."""
    nodes = list(graph.nodes)
    waits = {node: len(node.all_input_nodes) for node in nodes}
    ready = [(order[node], place, node) for place, node in enumerate(nodes) if not waits[node] and node.op != "output"]
    places = {node: place for place, node in enumerate(nodes)}
    heapq.heapify(ready)
    end, num = output_node(graph), 1
    while ready:
        node = heapq.heappop(ready)[2]
        end.prepend(node)
        num += 1
        for user in node.users:
            waits[user] -= 1
            if not waits[user] and user is not end:
                heapq.heappush(ready, (order[user], places[user], user))
    if num < len(nodes):
        raise NotALoopError("calls for all rounds would wait for each other")
