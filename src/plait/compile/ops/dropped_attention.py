"""Attention with dropout as an op of plait's own, which draws the mask by global position.

PyTorch's fused kernels draw it inside, from a seed and a place that they count in the tensors that they are given: a
rank that has some of the samples or heads would drop other elements than one device does, and no argument of theirs
says where a part begins. PyTorch's other form, plain ops, keeps several tensors of the size of all scores for backward.
This op works on a block of scores at a time, in forward and backward, and draws the mask of the block anew where it
needs it (Dao et al. 2022, "FlashAttention", section 3.1, with matrix products instead of one kernel): what it keeps is
what fused kernels keep. It runs on any device, with any mask, and a part of it is exactly a part of the whole. In a
capture it takes the place of scaled_dot_product_attention with dropout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from plait.compile.ops.attention import QUERIES, attention_strategies
from plait.compile.ops.attention_signature import LSE, MASK, OTHER, K, Q, Signature
from plait.compile.ops.base import Args, Builder, Call, Emit, Emitted, Kwargs, OpSpec, Shard, Strategy, register
from plait.compile.ops.dims import HALF, first_operand, put, widened
from plait.compile.ops.draw import DrawCut, fill, kept_by

_BLOCK = {"cpu": 1 << 18}  # scores at a time: few enough for caches of a CPU,
_LARGE_BLOCK = 1 << 25  # and enough to fill a GPU


@dataclass(frozen=True)
class _Scores:
    """The scores of an attention whose tensors are parts of larger ones; `cuts` (see `draw`) in groups of four."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    seed: Tensor
    rate: float
    causal: bool
    scale: float
    cuts: Sequence[int]

    def blocks(self) -> Iterator[_Block]:
        """The scores of some samples and some of their queries at a time."""
        batch, heads, num, _ = self.query.shape
        row = heads * self.key.shape[2]
        most = _BLOCK.get(self.query.device.type, _LARGE_BLOCK)
        queries = max(1, min(num, most // max(row, 1)))
        samples = max(1, most // max(row * queries, 1)) if queries == num else 1
        for sample in range(0, batch, samples):
            for query in range(0, num, queries):
                yield self._block(slice(sample, sample + samples), slice(query, query + queries))

    @functools.cached_property
    def _cuts(self) -> list[DrawCut]:
        groups = [self.cuts[i : i + 4] for i in range(0, len(self.cuts), 4)]
        return [(coordinate, size, dim, blocks) for coordinate, size, dim, blocks in groups]

    @functools.cached_property
    def _shape(self) -> list[int]:
        """The shape of all scores, of which those here are a part."""
        shape = [*self.query.shape[:3], self.key.shape[2]]
        for _, size, dim, _ in self._cuts:
            shape[dim] *= size
        return shape

    def _places(self, device: torch.device) -> list[Tensor]:
        """The indices of each dim in all scores."""
        kept = kept_by(self._cuts, self._shape, device)
        own = zip(kept, self._shape, strict=True)
        return [torch.arange(n, device=device) if some is None else some for some, n in own]

    @functools.cached_property
    def _here(self) -> list[Tensor]:
        return self._places(self.query.device)

    @functools.cached_property
    def _on_host(self) -> list[Tensor]:
        return self._places(torch.device("cpu"))

    def _block(self, samples: slice, queries: slice) -> _Block:
        device = self.query.device
        num_keys = self.key.shape[2]
        last = int(self._on_host[QUERIES][queries][-1]) + 1 if self.causal else num_keys
        keys = slice(0, min(last, num_keys))
        q, k = self.query[samples, :, queries], self.key[samples, :, keys]
        scores = _product(_by_kv_head(q, k), k.mT).mul_(self.scale).view(*q.shape[:3], k.shape[2])
        where = _where(self.mask, samples, queries, keys)
        if self.mask is not None:
            some = self.mask[where]
            scores = scores.masked_fill_(~some, -math.inf) if some.dtype == torch.bool else scores.add_(some)
        if self.causal:
            later = self._here[QUERIES][queries, None] < torch.arange(k.shape[2], device=device)
            # An addition is several times as fast as masked_fill_ on CPU.
            scores = scores.add_(torch.zeros_like(later, dtype=scores.dtype).masked_fill_(later, -math.inf))
        kept_scores = torch.empty(scores.shape, dtype=torch.bool, device=device)

        def kept(device: torch.device) -> list[Tensor | None]:
            places = self._here if device == self.query.device else self._on_host
            parts = zip(places, (samples, slice(None), queries, keys), strict=True)
            some = [indices[part] for indices, part in parts]
            return [*some[:3], None if k.shape[2] == num_keys else some[3]]

        fill(kept_scores, self.seed, 0, self._shape, kept, "bernoulli", (1 - self.rate,))
        return _Block(samples, queries, keys, where, scores, kept_scores)


@dataclass(frozen=True)
class _Block:
    """The scores [b, H, s, t] of a block, where it is, and which of its weights are kept."""

    samples: slice
    queries: slice
    keys: slice
    mask: tuple[slice, ...]
    scores: Tensor
    kept: Tensor


def _where(mask: Tensor | None, samples: slice, queries: slice, keys: slice) -> tuple[slice, ...]:
    """The part of a mask, [B, H, S, T] or 1 in places, for a block."""
    if mask is None:
        return ()
    whole = slice(None)
    return tuple(part if n > 1 else whole for part, n in zip((samples, whole, queries, keys), mask.shape, strict=True))


def _by_kv_head(x: Tensor, k: Tensor) -> Tensor:
    """The rows of query heads [b, H, s, D] that share a key-value head together: [b, K, H/K * s, D]."""
    return x.reshape(k.shape[0], k.shape[1], -1, x.shape[3])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, accumulated and returned in the precision of sums."""
    if a.dtype in HALF and a.is_cuda:
        found = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return found.view(*a.shape[:3], b.shape[3])
    return widened(a) @ widened(b)


def _empty_output(query: Tensor, value: Tensor) -> Tensor:
    if query.shape[3] == value.shape[3]:
        return torch.empty_like(query)
    return query.new_empty(*query.shape[:3], value.shape[3])


def _sums_of(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[:3], dtype=torch.float32 if query.dtype in HALF else query.dtype)


def _raise(rate: float) -> float:
    return 1 / (1 - rate) if rate < 1 else 0.0


@torch.library.custom_op("plait::dropped_attention", mutates_args=())
def dropped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor,
    rate: float,
    causal: bool,
    scale: float,
    cuts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Attention, of whose weights the share `rate` is dropped: the output, [B, H, S, Dv], and the logarithms of the
    sums of softmax, [B, H, S].

    Args:
        query: [B, H, S, D].
        key: [B, K, T, D]; K divides H.
        value: [B, K, T, Dv].
        mask: [B, H, S, T] or 1 in places: boolean, False for what a query does not see, or added to the scores.
        seed: an int64, of which the mask of dropout is drawn.
        rate: the share of weights that are dropped.
        causal: whether query i sees keys up to i only.
        scale: what scores are multiplied by.
        cuts: for each cut of which this is a part, in order: coordinate, size, dim of the scores, blocks.
    """
    out, sums = _empty_output(query, value), _sums_of(query)
    for block in _Scores(query, key, mask, seed, rate, causal, scale, cuts).blocks():
        sum_ = block.scores.logsumexp(-1, keepdim=True)
        weights = block.scores.sub_(sum_.masked_fill(sum_ == -math.inf, 0.0)).exp_()  # a query may see nothing
        weights = weights.mul_(block.kept).to(value.dtype)
        v = value[block.samples, :, block.keys]
        mixed = _product(_by_kv_head(weights, v), v).mul_(_raise(rate))
        out[block.samples, :, block.queries] = mixed.view(*weights.shape[:3], v.shape[3]).to(out.dtype)
        sums[block.samples, :, block.queries] = sum_.squeeze(-1)
    return out, sums


@dropped_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return _empty_output(query, value), _sums_of(query)


@torch.library.custom_op("plait::dropped_attention_backward", mutates_args=())
def dropped_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor,
    out: Tensor,
    sums: Tensor,
    rate: float,
    causal: bool,
    scale: float,
    cuts: Sequence[int],
    wants_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, and with `wants_mask` of the mask, else an empty tensor."""
    like = sums.dtype
    dq, dk, dv = torch.empty_like(query), torch.zeros_like(key, dtype=like), torch.zeros_like(value, dtype=like)
    dmask = torch.zeros_like(mask, dtype=like) if wants_mask and mask is not None else query.new_empty(0)
    for block in _Scores(query, key, mask, seed, rate, causal, scale, cuts).blocks():
        samples, queries, keys = block.samples, block.queries, block.keys
        q, k, v = query[samples, :, queries], key[samples, :, keys], value[samples, :, keys]
        g, own = grad[samples, :, queries], sums[samples, :, queries, None]
        weights = block.scores.sub_(own.masked_fill(own == -math.inf, 0.0)).exp_()
        dropped = (weights * block.kept).mul_(_raise(rate)).to(value.dtype)
        dv[samples, :, keys] += _product(_by_kv_head(dropped, v).mT, _by_kv_head(g, v))
        dweights = _product(_by_kv_head(g, v), v.mT).view_as(weights).mul_(block.kept).mul_(_raise(rate))
        inner = (widened(g) * widened(out[samples, :, queries])).sum(-1, keepdim=True)
        dscores = weights.mul_(dweights.sub_(inner))
        if wants_mask:
            shared = [d for d, n in enumerate(dmask.shape) if n == 1 and dscores.shape[d] > 1]
            dmask[block.mask] += dscores.sum(shared, keepdim=True) if shared else dscores
        narrow = dscores.mul_(scale).to(query.dtype)
        dq[samples, :, queries] = _product(_by_kv_head(narrow, k), k).view_as(q).to(dq.dtype)
        dk[samples, :, keys] += _product(_by_kv_head(narrow, k).mT, _by_kv_head(q, k))
    return dq, dk.to(key.dtype), dv.to(value.dtype), dmask.to(query.dtype if mask is None else mask.dtype)


@dropped_attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: object
) -> tuple[Tensor, ...]:
    dmask = torch.empty_like(mask) if rest[-1] and mask is not None else query.new_empty(0)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), dmask


def _keep(ctx: Any, inputs: Args, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.rate, ctx.causal, ctx.scale, ctx.cuts = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
    numbers = ctx.rate, ctx.causal, ctx.scale, ctx.cuts
    wants_mask = ctx.needs_input_grad[3]
    *found, dmask = dropped_attention_backward(grad, *ctx.saved_tensors, *numbers, wants_mask)
    return (*found, dmask if wants_mask else None, None, None, None, None, None)


dropped_attention.register_autograd(_backward, setup_context=_keep)


def _emit(position: int) -> Emit:
    """The same op with one more cut, among the arguments at `position`."""

    def emit(b: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
        part = strategy.inputs[0]  # of the queries or their gradient
        assert isinstance(part, Shard)
        return b.call(call.op, *put(args, position, [*args[position], b.coordinate(), b.size, part.dim, part.blocks]))

    return emit


_FORWARD, _BACKWARD = dropped_attention._opoverload, dropped_attention_backward._opoverload
register(
    _FORWARD,
    spec=OpSpec(
        strategies=attention_strategies(
            Signature(((0, Q), (1, K), (2, K), (3, MASK), (4, OTHER)), (Q, LSE), 0, emit=_emit(8))
        )
    ),
)
register(
    _BACKWARD,
    spec=OpSpec(
        strategies=attention_strategies(
            Signature(((0, Q), (1, Q), (2, K), (3, K), (4, MASK), (6, Q), (7, LSE)), (Q, K, K, MASK), 1, emit=_emit(11))
        ),
        linear=first_operand,
    ),
)


@register_flop_formula(_FORWARD.overloadpacket)
def _(
    query: torch.Size, key: torch.Size, value: torch.Size, *rest: object, out_shape: object = None, **_: object
) -> int:
    return int(sdpa_flop_count(_alike(query, query), _alike(query, key), _alike(query, value)))


@register_flop_formula(_BACKWARD.overloadpacket)
def _(
    grad: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *rest: object, out_shape: object = None,
    **_: object,
) -> int:  # fmt: skip
    shapes = (_alike(query, grad), _alike(query, query), _alike(query, key), _alike(query, value))
    return int(sdpa_backward_flop_count(*shapes))


def _alike(query: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """The shape with as many heads as there are of queries."""
    return (other[0], query[1], *other[2:])


NUM_SEEDS = 1 << 62


@dataclass(frozen=True)
class _Attention:
    """The arguments of an attention over [B, H, S, D], [B, K, T, D] and [B, K, T, Dv]; the mask has four dims too."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    rate: float
    causal: bool
    scale: float


class DrawnDropout(TorchFunctionMode):
    """Runs attention with dropout as an op that draws the mask by global position (compile/ops/dropped_attention.py).

    An attention of other than three or four dims, or whose samples or heads are broadcast, runs as plain ops instead,
    whose dropout is an op of its own.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention or not _rate(*args, **kwargs) > 0:
            return func(*args, **kwargs)
        given = _attention(*args, **kwargs)
        if given is None:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return func(*args, **kwargs)
        seed = torch.randint(NUM_SEEDS, (), device=given.query.device)  # a random number as any other in a step
        out, _ = dropped_attention(
            given.query, given.key, given.value, given.mask, seed, given.rate, given.causal, given.scale, []
        )
        return out if args[0].ndim == 4 else out.squeeze(1)


def _rate(
    query: object, key: object, value: object, attn_mask: object = None, dropout_p: float = 0.0,
    is_causal: bool = False, **_: object,
) -> float:  # fmt: skip
    return dropout_p


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> _Attention | None:
    """These arguments, without autocast; None if they have another form, which PyTorch may refuse."""
    ndim = query.ndim
    if ndim not in (3, 4) or key.ndim != ndim or value.ndim != ndim or (is_causal and attn_mask is not None):
        return None
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        half = torch.get_autocast_dtype(device)
        query, key, value = (t.to(half) for t in (query, key, value))
        attn_mask = attn_mask.to(half) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    mask = attn_mask
    if mask is not None:
        mask = mask.view((1,) * (ndim - mask.ndim) + mask.shape) if mask.ndim < ndim else mask
    if ndim == 3:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        mask = None if mask is None else mask.unsqueeze(1)
    batch, heads, num, width = query.shape
    kv_heads, num_keys = key.shape[1:3]
    alike = key.shape == (batch, kv_heads, num_keys, width) and value.shape[:3] == key.shape[:3]
    grouped = heads == kv_heads or (enable_gqa and heads % kv_heads == 0)
    one_dtype = query.is_floating_point() and query.dtype == key.dtype == value.dtype
    if not (alike and grouped and one_dtype) or not _fits(mask, (batch, heads, num, num_keys), query.dtype):
        return None
    return _Attention(query, key, value, mask, dropout_p, is_causal, width**-0.5 if scale is None else scale)


def _fits(mask: Tensor | None, scores: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether there is no mask, or one for scores of this shape, of 0s and 1s or to be added."""
    if mask is None:
        return True
    broadcast = mask.ndim == 4 and all(n in (1, m) for n, m in zip(mask.shape, scores, strict=True))
    return broadcast and mask.dtype in (torch.bool, torch.float32, dtype)
