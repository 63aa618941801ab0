"""Products of rows with the weights of experts: row s with those of expert ids[s].

    expert_mm(x[S, k], weight[E, k, n], ids[S]) -> [S, n]        x[s] @ weight[ids[s]]
    expert_addmm(bias[E, n], x, weight, ids) -> [S, n]           bias[ids[s]] + x[s] @ weight[ids[s]], rounded once
    expert_outer(x[S, k], grad[S, n], ids[S], E) -> [E, k, n]    the sum of x[s] (outer) grad[s] over an expert's rows
    expert_rows(table[E, ...], ids[S]) -> [S, ...]               table[ids[s]]
    expert_sums(rows[S, ...], ids[S], E) -> [E, ...]             the sum of rows[s] over an expert's rows

A mixture of experts has S = tokens * experts per token rows. Models write these products in many ways: a loop over
experts, weights looked up for each row, rows sorted by expert and multiplied in groups. compile/passes/find_experts.py
finds them and writes these calls, in which rows are in the order of the tokens, so that an axis can cut them like
any others. An axis that cuts experts marks them with its name first (`mark_experts`). Of such a call each of `parts`
ranks has E / parts experts, in order, and rows of its own. compile/passes/group_experts.py then sorts the rows by
expert, or sends them to the ranks that have their experts.

A row whose id is E or more belongs to no expert: its results are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.node import Target
from torch.utils.flop_counter import register_flop_formula

from plait.compile.ops.base import (
    Args,
    Builder,
    Call,
    Emitted,
    Factor,
    Kwargs,
    OpSpec,
    Partial,
    Placements,
    Shard,
    Strategy,
    einsum,
    register,
)
from plait.compile.ops.dims import HALF, blocks_of, sharded_strategy

# ---- rows sorted by expert ----


def expert_order(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The order that sorts rows by expert, the place of each row in it, and the end of each expert's rows: [S], [S],
    [E], int64. Rows without an expert come last."""
    known = ids.long().clamp(max=num_experts)
    order = known.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    counts = known.new_zeros(num_experts + 1).scatter_add_(0, known, torch.ones_like(known))
    return order, places, counts[:num_experts].cumsum(0)


def take_rows(x: Tensor, order: Tensor, times: int = 1) -> Tensor:
    """Row order[i] // times of `x` for each i: each row of x stands for `times` rows one after the other."""
    return x.index_select(0, order // times if times > 1 else order)


@torch.library.custom_op("plait::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x[R, k] sorted by expert, times weight[E, k, n]: [R, n]. Rows after the last end are zero."""
    if x.is_cuda and x.dtype is torch.bfloat16 and _is_aligned(x.shape[1]) and _is_aligned(weight.shape[2]):
        out = torch._grouped_mm(x, weight, ends.int())
        return out.masked_fill_((torch.arange(len(x), device=x.device) >= ends[-1]).unsqueeze(1), 0)
    out = x.new_empty(x.shape[0], weight.shape[2])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[expert], out=out[start:end])
        start = end
    out[start:].zero_()
    return out


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("plait::grouped_addmm", mutates_args=())
def grouped_addmm(bias: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """grouped_mm, with the row of bias[E, n] of each row's expert added before the sum is rounded, as addmm does."""
    if x.is_cuda and x.dtype is torch.bfloat16 and _is_aligned(x.shape[1]) and _is_aligned(weight.shape[2]):
        return grouped_mm(*with_bias(bias, x, weight), ends)  # type: ignore[no-any-return]
    out = x.new_empty(x.shape[0], weight.shape[2])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.addmm(bias[expert], x[start:end], weight[expert], out=out[start:end])
        start = end
    out[start:].zero_()
    return out


@grouped_addmm.register_fake
def _(bias: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def with_bias(bias: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and weights whose products are those of x[R, k] and weight[E, k, n] plus bias[E, n], for a kernel that knows
    no bias: a column of ones beside x, and the bias as a row of each weight. Both stay aligned."""
    ones = torch.eye(1, _ALIGNED, dtype=x.dtype, device=x.device).expand(len(x), -1)
    rows = torch.nn.functional.pad(bias.unsqueeze(1), (0, 0, 0, _ALIGNED - 1))
    return torch.cat([x, ones], 1), torch.cat([weight, rows], 1)


@torch.library.custom_op("plait::grouped_outer", mutates_args=())
def grouped_outer(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """The sums of x[r] (outer) grad[r] over the rows of each expert: [E, k, n]."""
    if x.is_cuda and x.dtype is torch.bfloat16 and _is_aligned(x.shape[1]) and _is_aligned(grad.shape[1]):
        # The kernel sums rows up to each end, and leaves experts without rows as they were.
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        out = torch._grouped_mm(x.t(), grad, ends.int())
        return out.masked_fill_((counts == 0).view(-1, 1, 1), 0)
    out = x.new_empty(len(ends), x.shape[1], grad.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end].t(), grad[start:end], out=out[expert])
        else:
            out[expert].zero_()
        start = end
    return out


@grouped_outer.register_fake
def _(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], grad.shape[1])


def grouped_rows(table: Tensor, ends: Tensor, order: Tensor) -> Tensor:
    """The row of table[E, ...] of each of the rows in `order`'s length: [R, ...]. Rows after the last end are zero."""
    place = torch.arange(len(order), device=ends.device)
    expert = torch.searchsorted(ends, place, right=True)
    out = table.index_select(0, expert.clamp(max=len(ends) - 1))
    return out.mul_(_by_row(place < ends[-1], out.ndim))


def grouped_sums(rows: Tensor, ends: Tensor) -> Tensor:
    """The sum of the rows of each expert: [E, ...]."""
    place = torch.arange(len(rows), device=ends.device)
    expert = torch.searchsorted(ends, place, right=True)
    wide = rows.float() if rows.dtype in HALF else rows
    out = wide.new_zeros(len(ends) + 1, *rows.shape[1:]).index_add_(0, expert, wide)
    return out[:-1].to(rows.dtype)


_ALIGNED = 8  # numbers of bfloat16 in 16 bytes, of which a row must be a multiple for the kernel


def _is_aligned(num: int) -> bool:
    return num % _ALIGNED == 0


def _by_row(mask: Tensor, ndim: int) -> Tensor:
    """A mask of rows, for tensors of so many dims."""
    return mask.view(-1, *[1] * (ndim - 1))


# ---- rows sent to the ranks that have their experts ----


def pair_rows(num_rows: int, parts: int, capacity: float) -> int:
    """The number of rows that a rank with `num_rows` rows sends to each of `parts` ranks, unused room included."""
    if not capacity:
        return num_rows
    return min(num_rows, max(1, -(-round(num_rows * capacity * 1000) // (1000 * parts))))


def expert_slots(ids: Tensor, num_experts: int, parts: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where a rank's rows travel: to each of `parts` ranks, which have num_experts experts each, `room` rows.

    Returns:
        slots: [S], the place of each row among the rows that are sent; parts * room for one that is not: it has no
            expert, or there is no room.
        rows: [parts * room], the row at each place; where there is none row 0, of which elementwise ops are finite.
        local: [parts * room], the expert of the row at each place, among those of the rank that it is sent to;
            num_experts where there is none.
    """
    ids = ids.long()
    known = ids.clamp(max=num_experts * parts)
    _, places, ends = expert_order(known // num_experts, parts)
    starts = torch.cat([ends.new_zeros(1), ends])  # also of rows without an expert, which come last
    target = known // num_experts
    within = places - starts[target]
    nowhere = parts * room
    slots = torch.where((target < parts) & (within < room), target * room + within, nowhere)
    rows = ids.new_zeros(nowhere + 1).scatter_(0, slots, torch.arange(len(ids), device=ids.device))[:-1]
    local = ids.new_full((nowhere + 1,), num_experts).scatter_(0, slots, known % num_experts)[:-1]
    return slots, rows, local


def return_rows(rows: Tensor, slots: Tensor) -> Tensor:
    """The row of each place in `slots`; zero for a row that was not sent, whose place is len(rows) or more."""
    nowhere = len(rows)
    if nowhere == 0:
        return rows.new_zeros(len(slots), *rows.shape[1:])
    out = rows.index_select(0, slots.clamp(max=nowhere - 1))
    return out.masked_fill_(_by_row(slots >= nowhere, out.ndim), 0)


# ---- as many rows as there are ----


def expert_counts(ends: Tensor) -> Tensor:
    """The number of rows of each expert, [E], from the end of each expert's rows."""
    return torch.diff(ends, prepend=ends.new_zeros(1))


@torch.library.custom_op("plait::rank_counts", mutates_args=())
def rank_counts(sent: Tensor, received: Tensor, parts: int) -> Tensor:
    """How many rows travel, [2, parts] in host memory: to each rank, and from each. `sent` has the number of rows for
    each expert, in the order of the ranks that have them, `received` that from each rank for each expert of this
    rank. The host waits for both."""
    return torch.stack([sent, received]).view(2, parts, -1).sum(2).cpu()


@rank_counts.register_fake
def _(sent: Tensor, received: Tensor, parts: int) -> Tensor:
    return sent.new_empty(2, parts, device="cpu")


@torch.library.custom_op("plait::arrived_order", mutates_args=())
def arrived_order(received: Tensor, counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `expert_order` returns, of rows that have arrived: from each rank some for each expert of this rank, sorted
    by expert.

    Args:
        received: the number of rows from each rank for each expert.
        counts: what `rank_counts` returns, in host memory.
        num_rows: how many rows arrive if each rank has as many as any other.
    """
    parts, num_experts = counts.shape[1], len(received) // counts.shape[1]
    expert = torch.arange(num_experts, device=received.device).repeat(parts)
    return expert_order(expert.repeat_interleave(received, output_size=int(counts[1].sum())), num_experts)


@arrived_order.register_fake
def _(received: Tensor, counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    order, ends = received.new_empty(num_rows), received.new_empty(len(received) // counts.shape[1])
    return order, torch.empty_like(order), ends


def num_rows_of(rows: Tensor) -> int:
    """The number of rows that have arrived."""
    return len(rows)


# ---- in the order of the tokens ----


@torch.library.custom_op("plait::expert_mm", mutates_args=())
def expert_mm(x: Tensor, weight: Tensor, ids: Tensor, axis: str = "", parts: int = 1) -> Tensor:
    """Row s of x[S, k] times the weight of its expert, of weight[E, k, n]: [S, n]."""
    order, places, ends = expert_order(ids, len(weight))
    return take_rows(grouped_mm(take_rows(x, order), weight, ends), places)


@expert_mm.register_fake
def _(x: Tensor, weight: Tensor, ids: Tensor, axis: str = "", parts: int = 1) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("plait::expert_addmm", mutates_args=())
def expert_addmm(bias: Tensor, x: Tensor, weight: Tensor, ids: Tensor, axis: str = "", parts: int = 1) -> Tensor:
    """expert_mm plus the row of bias[E, n] of each row's expert: [S, n], rounded once."""
    order, places, ends = expert_order(ids, len(weight))
    return take_rows(grouped_addmm(bias, take_rows(x, order), weight, ends), places)


@expert_addmm.register_fake
def _(bias: Tensor, x: Tensor, weight: Tensor, ids: Tensor, axis: str = "", parts: int = 1) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("plait::expert_outer", mutates_args=())
def expert_outer(x: Tensor, grad: Tensor, ids: Tensor, num_experts: int, axis: str = "", parts: int = 1) -> Tensor:
    """The sums of x[s] (outer) grad[s] over the rows of each expert, x[S, k] and grad[S, n]: [E, k, n]."""
    order, _, ends = expert_order(ids, num_experts)
    sums: Tensor = grouped_outer(take_rows(x, order), take_rows(grad, order), ends)
    return sums


@expert_outer.register_fake
def _(x: Tensor, grad: Tensor, ids: Tensor, num_experts: int, axis: str = "", parts: int = 1) -> Tensor:
    return x.new_empty(num_experts, x.shape[1], grad.shape[1])


@torch.library.custom_op("plait::expert_rows", mutates_args=())
def expert_rows(table: Tensor, ids: Tensor, axis: str = "", parts: int = 1) -> Tensor:
    """The row of table[E, ...] of each row's expert: [S, ...]."""
    order, places, ends = expert_order(ids, len(table))
    return take_rows(grouped_rows(table, ends, order), places)


@expert_rows.register_fake
def _(table: Tensor, ids: Tensor, axis: str = "", parts: int = 1) -> Tensor:
    return table.new_empty(ids.shape[0], *table.shape[1:])


@torch.library.custom_op("plait::expert_sums", mutates_args=())
def expert_sums(rows: Tensor, ids: Tensor, num_experts: int, axis: str = "", parts: int = 1) -> Tensor:
    """The sum of the rows of each expert, of rows[S, ...]: [E, ...]."""
    order, _, ends = expert_order(ids, num_experts)
    return grouped_sums(take_rows(rows, order), ends)


@expert_sums.register_fake
def _(rows: Tensor, ids: Tensor, num_experts: int, axis: str = "", parts: int = 1) -> Tensor:
    return rows.new_empty(num_experts, *rows.shape[1:])


def _keep_product(ctx: Any, inputs: Args, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ids = ctx.saved_tensors
    wants_x, wants_weight = ctx.needs_input_grad[:2]
    dx = expert_mm(grad, weight.transpose(1, 2), ids) if wants_x else None
    return dx, expert_outer(x, grad, ids, len(weight)) if wants_weight else None, None, None, None


def _keep_sum(ctx: Any, inputs: Args, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:4])


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ids = ctx.saved_tensors
    wants_bias, wants_x, wants_weight = ctx.needs_input_grad[:3]
    dbias = expert_sums(grad, ids, len(weight)) if wants_bias else None
    dx = expert_mm(grad, weight.transpose(1, 2), ids) if wants_x else None
    return dbias, dx, expert_outer(x, grad, ids, len(weight)) if wants_weight else None, None, None, None


def _keep_rows(ctx: Any, inputs: Args, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.num_experts = len(inputs[0])


def _rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    return expert_sums(grad, ids, ctx.num_experts), None, None, None


expert_mm.register_autograd(_product_backward, setup_context=_keep_product)
expert_addmm.register_autograd(_sum_backward, setup_context=_keep_sum)
expert_rows.register_autograd(_rows_backward, setup_context=_keep_rows)

EXPERT_MM, EXPERT_ADDMM, EXPERT_OUTER = expert_mm._opoverload, expert_addmm._opoverload, expert_outer._opoverload
EXPERT_ROWS, EXPERT_SUMS = expert_rows._opoverload, expert_sums._opoverload


def axis_of(args: Args, op: Target) -> tuple[str, int]:
    """The axis whose ranks each have a part of the experts, and the number of parts; ("", 1) for a call that has all
    experts. The number is 0 until the axis is applied."""
    rest = args[_WHERE[op] :]
    return (rest[0], rest[1]) if rest and rest[0] else ("", 1)


def mark_experts(graph: Graph, axis: str) -> None:
    """Mark the calls of experts: the axis is to cut their experts. Changes the graph."""
    for node in graph.nodes:
        if node.target in _WHERE:
            node.args = (*node.args[: _WHERE[node.target]], axis, 0)


# Positions of `axis` and of `ids`.
_WHERE: dict[Target, int] = {EXPERT_MM: 3, EXPERT_ADDMM: 4, EXPERT_OUTER: 4, EXPERT_ROWS: 2, EXPERT_SUMS: 3}
IDS: dict[Target, int] = {EXPERT_MM: 2, EXPERT_ADDMM: 3, EXPERT_OUTER: 2, EXPERT_ROWS: 1, EXPERT_SUMS: 1}


def _cut_experts(call: Call, given: Placements, size: int) -> list[Strategy]:
    """The strategy of a marked call: ranks have parts of the experts and rows of their own. All tensors are cut along
    dim 0; the rows that the caller has stay where they are."""
    if axis_of(call.args, call.op)[1] != 0:
        return []
    return [Strategy((Shard(0),) * len(call.inputs), (Shard(0),), _emit, sends=True)]


def _unmarked(rule: Callable[[Call], Sequence[Any]]) -> Callable[[Call], Sequence[Any]]:
    """What a rule says of a call whose experts are whole, or else nothing."""
    return lambda call: () if axis_of(call.args, call.op)[0] else rule(call)


def _emit(b: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    """The same call, of a part of the experts. Rows travel as compile/passes/group_experts.py writes it."""
    first = list(args[: _WHERE[call.op]])
    if isinstance(first[-1], int):
        first[-1] //= b.size
    return b.call(call.op, *first, b.axis, b.size)


def _spec(
    factors: Callable[[Call], Sequence[Factor]], linear: Sequence[tuple[int, ...]], weighted: bool = False
) -> OpSpec:
    return OpSpec(
        factors=_unmarked(factors), strategies=_cut_experts, linear=_unmarked(lambda call: linear), weighted=weighted
    )


def _cut_sums(call: Call, given: Placements, size: int) -> list[Strategy]:
    """Of a sum with a bias: the strategies of a marked call, or that which cuts what the product sums over. Then each
    rank adds its share of the bias."""
    if axis_of(call.args, call.op)[0]:
        return _cut_experts(call, given, size)
    dims = (None, 1, 1, None)
    cut = [sharded_strategy(call, dims, (None,), blocks, Partial()) for blocks in blocks_of(given, dims)]
    return [replace(each, emit=_emit_share) for each in cut]


def _emit_share(b: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    return b.call(call.op, b.call(torch.ops.aten.div.Scalar, args[0], b.size), *args[1:])


def _rows_factors(call: Call) -> Sequence[Factor]:
    """Dims behind the first stay as they are."""
    rest = " ".join(f"d{i}" for i in range(1, call.inputs[0].ndim))
    text = f"s {rest}, s -> E {rest}" if call.op is EXPERT_SUMS else f"E {rest}, s -> s {rest}"
    return einsum(text)(call)


register(EXPERT_MM, spec=_spec(einsum("s k, E k n, s -> s n"), [(0,), (1,)], weighted=True))
register(
    EXPERT_ADDMM,
    spec=OpSpec(
        factors=_unmarked(einsum("E n, s K, E K n, s -> s n")),
        strategies=_cut_sums,
        linear=_unmarked(lambda call: [(0, 1), (0, 2)]),
        weighted=True,
    ),
)
register(EXPERT_OUTER, spec=_spec(einsum("s k, s n, s -> E k n"), [(0,), (1,)]))
register(EXPERT_ROWS, EXPERT_SUMS, spec=_spec(_rows_factors, [(0,)]))
GROUPED_MM, GROUPED_ADDMM = grouped_mm._opoverload, grouped_addmm._opoverload
GROUPED_OUTER = grouped_outer._opoverload
register(GROUPED_MM, GROUPED_ADDMM, GROUPED_OUTER, spec=OpSpec(weighted=True))
ARRIVED_ORDER, RANK_COUNTS = arrived_order._opoverload, rank_counts._opoverload
register(
    expert_order, expert_slots, expert_counts, take_rows, return_rows, grouped_rows, grouped_sums, num_rows_of,
    ARRIVED_ORDER, spec=OpSpec(),
)  # fmt: skip
register(RANK_COUNTS, spec=OpSpec(ties=True, by_device=True))


@register_flop_formula([EXPERT_MM.overloadpacket, GROUPED_MM.overloadpacket])
def _(x: torch.Size, weight: torch.Size, ids: torch.Size, *rest: object, out_shape: object = None, **_: object) -> int:
    return int(2 * x[0] * x[1] * weight[2])


@register_flop_formula([EXPERT_ADDMM.overloadpacket, GROUPED_ADDMM.overloadpacket])
def _(
    bias: torch.Size, x: torch.Size, weight: torch.Size, ids: torch.Size, *rest: object, out_shape: object = None,
    **_: object,
) -> int:  # fmt: skip
    return int(2 * x[0] * x[1] * weight[2])


@register_flop_formula([EXPERT_OUTER.overloadpacket, GROUPED_OUTER.overloadpacket])
def _(x: torch.Size, grad: torch.Size, ids: torch.Size, *rest: object, out_shape: object = None, **_: object) -> int:
    return int(2 * x[0] * x[1] * grad[1])
