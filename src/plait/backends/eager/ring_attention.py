"""Ring attention: keys and values travel from rank to rank while each computes with those that it has.

Each rank has a part of the queries, keys and values. The attention to each part is computed by a fused kernel, and the
results are combined by their log-sum-exp (Liu et al. 2023, "Ring Attention with Blockwise Transformers for
Near-Infinite Context"). With a causal mask ranks have every n-th position, so that all compute as much (Brandon et al.
2023, "Striped Attention"). In the backward pass the gradients of a part of keys and values travel after it, one rank
behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.backends.eager.collectives import carries_out
from plait.comm.protocol import Comm, Work, World
from plait.compile.ops import comm_ops
from plait.compile.ops.comm_ops import Ring, summed_dtype, take

aten = torch.ops.aten
_KEYS, _VALUES, _KEY_GRADIENTS, _VALUE_GRADIENTS = range(4)  # tags of messages


# A CPU's kernel computes the scores of 512 keys at a time, hidden or not; fewer than these are little work.
_FEWEST_KEYS = 128
_ALL = slice(None)


@dataclass(frozen=True)
class _Block:
    """Some queries, and some keys of one part, that are computed together: each query sees all of these keys or, if
    `causal`, those that are not behind it. `mask` are the scores that are added."""

    causal: bool
    queries: slice
    keys: slice
    mask: Tensor | None = None


def _triangle(query: int, key: int, num: int, fewest: int) -> Iterator[_Block]:
    """Blocks in which each of `num` queries, the first of which is `query`, sees the keys from `key` to its own one.
    While half of them are `fewest` or more: the two halves by themselves, and the second's view of the first."""
    if num < 2 * fewest:
        yield _Block(True, slice(query, query + num), slice(key, key + num))
        return
    half = num // 2
    yield from _triangle(query, key, half, fewest)
    yield from _triangle(query + half, key + half, num - half, fewest)
    yield _Block(False, slice(query + half, query + num), slice(key, key + half))


class _Parts:
    """The parts of the keys that the queries of one rank see."""

    def __init__(self, rank: int, size: int, ring: Ring, query: Tensor, key: Tensor, mask: Tensor | None) -> None:
        self.rank, self.size = rank, size
        self.causal, self.blocks, self.scale = ring
        self.query, self.mask = query, mask
        self.num_queries, self.num_keys = query.shape[2], key.shape[2]

    def blocks_of(self, source: int) -> list[_Block]:
        """What is computed of the part of the keys that belongs to rank `source`."""
        if self.mask is not None:
            mask = take(self.mask, source, self.size, self.mask.ndim - 1, self.blocks)
            return [_Block(False, _ALL, _ALL, mask if self.mask.shape[-1] > 1 else self.mask)]
        if not self.causal:
            return [_Block(False, _ALL, _ALL)]
        if self.num_queries == self.num_keys:
            fewest = _FEWEST_KEYS if self.query.device.type == "cpu" else self.num_keys
            if source == self.rank:
                return [*_triangle(0, 0, self.num_keys, fewest)]
            if self.blocks == 1:  # all positions of a rank before all of the next
                return [_Block(False, _ALL, _ALL)] if source < self.rank else []
            if self.blocks == self.num_keys:  # every n-th position: those of a rank behind this one count from the next
                late = int(source > self.rank)
                return [*_triangle(late, 0, self.num_keys - late, fewest)]
        hidden = self._positions(source, self.num_keys) > self._positions(self.rank, self.num_queries)[:, None]
        mask = torch.zeros_like(hidden, dtype=self.query.dtype).masked_fill_(hidden, float("-inf"))
        return [_Block(False, _ALL, _ALL, mask)]

    def _positions(self, rank: int, num: int) -> Tensor:
        """Which of all positions are the `num` of a rank."""
        everything = torch.arange(num * self.size, device=self.query.device)
        return take(everything, rank, self.size, 0, self.blocks)


@carries_out(comm_ops.ring_attention)
def ring_attention(
    world: World, query: Tensor, key: Tensor, value: Tensor, axis: str, ring: Ring, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The attention of this rank's queries to the keys and values of all ranks.

    Args:
        query: [samples, heads, queries, width] of this rank.
        key, value: [samples, key heads, keys, width] of this rank.
        ring: (causal, blocks of Shard(2, blocks), scale of the scores).
        mask: added to the scores: its last dim has the keys of all ranks, the one before it this rank's queries.

    Returns:
        The output, like `query`, and the log-sum-exp of the scores, [samples, heads, queries].
    """
    comm = world.comm(axis)
    parts = _Parts(comm.rank, comm.size, ring, query, key, mask)
    wide = summed_dtype(query.dtype)
    num_samples, num_heads, num_queries, _ = query.shape
    shape = num_samples, num_queries, num_heads, value.shape[3]
    out = torch.zeros(shape, dtype=wide, device=query.device).transpose(1, 2)
    sums = torch.full(query.shape[:3], float("-inf"), dtype=wide, device=query.device)
    for source, (k, v) in _travel(comm, [key, value], (_KEYS, _VALUES)):
        for block in parts.blocks_of(source):
            seen = block.queries
            more, logs = _attend(query[:, :, seen], k[:, :, block.keys], v[:, :, block.keys], block, parts.scale)
            _add(out[:, :, seen], sums[:, :, seen], *_without_hidden(more.to(wide), logs.to(wide), block.mask))
            del more, logs  # what is not read again must not take memory while the next part travels
        del k, v
    return out.to(query.dtype), sums.masked_fill_(sums.isinf(), 0.0)  # as kernels say of queries that see no key


@carries_out(comm_ops.ring_attention_backward)
def ring_attention_backward(
    world: World,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axis: str,
    ring: Ring,
    mask: Tensor | None,
    grad: Tensor,
    out: Tensor,
    sums: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `ring_attention` with respect to this rank's query, key and value."""
    comm = world.comm(axis)
    parts = _Parts(comm.rank, comm.size, ring, query, key, mask)
    wide = summed_dtype(query.dtype)
    of_query = torch.zeros(query.shape, dtype=wide, device=query.device)
    own: list[Tensor] = []  # this rank's share in the gradients of its own keys and values
    sent: list[Work] = []
    coming: list[Work] = []  # the shares of the ranks before this one in the gradients of the next part
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    tags = (_KEY_GRADIENTS, _VALUE_GRADIENTS)
    for source, (k, v) in _travel(comm, [key, value], (_KEYS, _VALUES)):
        shares = [torch.zeros(each.shape, dtype=wide, device=each.device) for each in (k, v)]
        for block in parts.blocks_of(source):
            seen = block.queries
            found = _attend_backward(
                grad[:, :, seen],
                query[:, :, seen],
                out[:, :, seen],
                sums[:, :, seen],
                k[:, :, block.keys],
                v[:, :, block.keys],
                block,
                parts.scale,
            )
            _add_gradients(of_query[:, :, seen], [share[:, :, block.keys] for share in shares], found)
            del found
        del k, v
        if source == comm.rank:
            own = shares
            continue
        _add_arrived(shares, coming)
        _wait_for(sent)
        sent = [comm.send(share, after, tag) for share, tag in zip(shares, tags, strict=True)]
        coming = [comm.recv(share, before, tag) for share, tag in zip(shares, tags, strict=True)]
        del shares
    _add_arrived(own, coming)
    _wait_for(sent)
    return of_query.to(query.dtype), own[0].to(key.dtype), own[1].to(value.dtype)


def _add_gradients(of_query: Tensor, shares: list[Tensor], found: tuple[Tensor, Tensor, Tensor]) -> None:
    """Add the gradients of one part to those of the queries, and to the shares of its keys and values."""
    for total, more in zip([of_query, *shares], found, strict=True):
        total += more


def _add_arrived(shares: list[Tensor], coming: list[Work]) -> None:
    """Add the shares of other ranks as they arrive. Empties `coming`, so that these take no more memory."""
    for share in shares if coming else ():
        share += coming.pop(0).wait()


def _wait_for(sent: list[Work]) -> None:
    """Wait until what is sent has left. Empties the list."""
    while sent:
        sent.pop().wait()


def _travel(comm: Comm, tensors: list[Tensor], tags: tuple[int, ...]) -> Iterator[tuple[int, list[Tensor]]]:
    """The tensors of each rank, beginning with this one's, then those of the rank before it. The next ones travel while
    the caller computes."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    held = [tensor.contiguous() for tensor in tensors]
    for step in range(comm.size):
        last = step == comm.size - 1
        sent = [] if last else [comm.send(each, after, tag) for each, tag in zip(held, tags, strict=True)]
        coming = [] if last else [comm.recv(each, before, tag) for each, tag in zip(held, tags, strict=True)]
        yield (comm.rank - step) % comm.size, held
        held = [coming.pop(0).wait() for _ in tensors] if coming else []
        _wait_for(sent)


def _add(out: Tensor, sums: Tensor, more: Tensor, logs: Tensor) -> None:
    """Add the attention to more keys. Changes `out` and `sums`."""
    share = torch.sigmoid(logs - sums).masked_fill_(logs.isneginf(), 0.0)  # also where no key has been seen yet
    out.lerp_(more, share[..., None])
    sums.copy_(torch.logaddexp(sums, logs))


def _without_hidden(out: Tensor, logs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, 0 and -inf for queries that see no key of the part: of these kernels say 0."""
    if mask is None:
        return out, logs
    hidden = mask.isneginf().all(-1).expand(logs.shape)
    return out.masked_fill(hidden[..., None], 0.0), logs.masked_fill(hidden, float("-inf"))


def _attend(query: Tensor, key: Tensor, value: Tensor, block: _Block, scale: float | None) -> tuple[Tensor, Tensor]:
    """The output of attention to one part of the keys, and the log-sum-exp of the scores."""
    if query.device.type == "cpu":
        flash = aten._scaled_dot_product_flash_attention_for_cpu.default
        return flash(query, key, value, 0.0, block.causal, attn_mask=block.mask, scale=scale)  # type: ignore[no-any-return]
    bias = _bias(block.mask, query, key)
    found = aten._scaled_dot_product_efficient_attention.default(
        query, _per_head(key, query), _per_head(value, query), bias, True, 0.0, block.causal, scale=scale
    )
    return found[0], found[1][:, :, : query.shape[2]]


def _attend_backward(
    grad: Tensor,
    query: Tensor,
    out: Tensor,
    sums: Tensor,
    key: Tensor,
    value: Tensor,
    block: _Block,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one part, from the output and the log-sum-exp over all parts."""
    if query.device.type == "cpu":
        flash = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return flash(  # type: ignore[no-any-return]
            grad, query, key, value, out, sums, 0.0, block.causal, attn_mask=block.mask, scale=scale
        )
    padded = torch.nn.functional.pad(sums, (0, -sums.shape[2] % 32), value=float("inf"))
    none = torch.zeros((), dtype=torch.int64, device=query.device)  # seed and offset of the dropout that there is not
    k, v = _per_head(key, query), _per_head(value, query)
    found = aten._scaled_dot_product_efficient_attention_backward.default(
        grad, query, k, v, _bias(block.mask, query, key), out, padded, none, none, 0.0, [True, True, True, False],
        block.causal, scale=scale,
    )  # fmt: skip
    groups = query.shape[1] // key.shape[1]
    of_keys = (each.unflatten(1, (-1, groups)).sum(2) for each in found[1:3])
    return found[0], *of_keys


def _per_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values for each head of the queries, of which several may share one."""
    groups = query.shape[1] // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, 1)


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask for every sample and head, as the kernel takes it: rows at multiples of 8 elements in memory."""
    if mask is None:
        return None
    num = key.shape[2]
    room = mask.new_empty((*query.shape[:3], num + -num % 8))[..., :num]
    return room.copy_(mask)
