"""Samples of the kernels of attention that only a GPU runs, with what they compute written for a CPU."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from oracle import Sample
from rule_makers import Args, f, op_of
from torch import Tensor
from torch.nn import functional as F


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores if bias is None else scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).tril().logical_not(), float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _attend_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Args:
    leaves = [t.detach().requires_grad_() for t in (q, k, v, *(() if bias is None else (bias,)))]
    out, _ = _attend(*leaves[:3], leaves[3] if bias is not None else None, causal)
    return (*torch.autograd.grad(out, leaves, grad), *(() if bias is not None else (None,)))


def _padded(lse: Tensor) -> Tensor:
    """As the memory-efficient kernel gives it, and expects it."""
    return F.pad(lse, (0, -lse.shape[-1] % 32), value=7.0)


class Attention:
    """One call of an attention, in the forms of each kernel's arguments and results. Kernels check what they are told:
    the sums of softmax and the number of queries are those of what they are given."""

    def __init__(self, heads: int, kv_heads: int, num: int, bias: Tensor | None, causal: bool) -> None:
        self.q, self.k, self.v = f(2, heads, num, 4), f(2, kv_heads, 6, 4), f(2, kv_heads, 6, 4)
        self.k, self.v = (f(2, kv_heads, num, 4) for _ in range(2)) if causal else (self.k, self.v)
        self.bias, self.causal = bias, causal
        self.out, self.lse = _attend(self.q, self.k, self.v, bias, causal)
        self.grad = f(*self.q.shape)

    @staticmethod
    def forward(padded: bool, column: bool, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Args:
        out, lse = _attend(q, k, v, bias, causal)
        return out, _padded(lse) if padded else lse[..., None] if column else lse

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, out: Tensor, lse: Tensor,
        padded: bool = False, num_queries: int | None = None,
    ) -> Args:  # fmt: skip
        assert num_queries in (None, q.shape[2]), "the number of queries is that of the whole"
        wanted = _attend(q, k, v, bias, causal)
        sums = lse if lse.ndim == 3 else lse[..., 0]
        assert torch.allclose(out, wanted[0]) and torch.allclose(sums[..., : q.shape[2]], wanted[1])
        assert sums.shape[-1] == (-(-q.shape[2] // 32) * 32 if padded else q.shape[2])
        return _attend_backward(grad, q, k, v, bias, causal)


def attention_samples() -> list[tuple[str, list[Sample]]]:
    """The kernels with their signatures, without dropout, with masks of every kind where they take one."""
    none = torch.zeros(2, dtype=torch.int64)
    plain = [Attention(6, 6, 6, None, False), Attention(6, 3, 6, None, False), Attention(6, 6, 6, None, True)]
    masks = [f(2, 6, 6, 6), f(2, 1, 6, 6), f(1, 1, 1, 6).expand(2, 6, 6, 6), f(6, 6)]
    masked = [Attention(6, 6, 6, mask, False) for mask in masks]
    wide = [Attention(6, 6, 64, mask, False) for mask in (None, f(1, 1, 64, 6))]
    name = "_scaled_dot_product_{}_attention{}".format

    def twin(op: str, cases: list[Args], function: Any) -> tuple[str, list[Sample]]:
        return op, [Sample(op_of(op), args, {}, twin=function) for args in cases]

    def wide_lse(a: Attention) -> Tensor:
        return _padded(a.lse)

    over = "_scaled_dot_product_fused_attention_overrideable"
    forward, backward = Attention.forward, Attention.backward
    every, four = [*plain, *masked, *wide], [True] * 4
    return [
        twin(name("flash", ""), [(a.q, a.k, a.v, 0.0, a.causal, False) for a in plain],
             lambda q, k, v, p, c, m: (*forward(False, False, q, k, v, None, c), None, None, 6, 4, none, none, none)),
        twin(name("efficient", ""), [(a.q, a.k, a.v, a.bias, True, 0.0, a.causal) for a in every],
             lambda q, k, v, b, _, p, c: (*forward(True, False, q, k, v, b, c), none, none)),
        twin(name("cudnn", ""), [(a.q, a.k, a.v, a.bias, True, 0.0, a.causal) for a in every],
             lambda q, k, v, b, _, p, c: (*forward(False, True, q, k, v, b, c), None, None, 6, 4, none, none, None)),
        twin(over, [(a.q, a.k, a.v, a.bias, 0.0, a.causal) for a in every],
             lambda q, k, v, b, p, c: (*forward(False, False, q, k, v, b, c), None, None, 6, 4, none, none, None)),
        twin(name("flash", "_backward"),
             [(a.grad, a.q, a.k, a.v, a.out, a.lse, None, None, a.q.shape[2], a.k.shape[2], 0.0, a.causal, none, none)
              for a in plain],
             lambda g, q, k, v, o, lse, cq, ck, nq, nk, p, c, *_:
                 backward(g, q, k, v, None, c, o, lse, num_queries=nq)[:3]),
        twin(name("efficient", "_backward"),
             [(a.grad, a.q, a.k, a.v, a.bias, a.out, wide_lse(a), none, none, 0.0, four, a.causal) for a in every],
             lambda g, q, k, v, b, o, lse, s, t, p, m, c: backward(g, q, k, v, b, c, o, lse, padded=True)),
        twin(name("cudnn", "_backward"),
             [(a.grad, a.q, a.k, a.v, a.out, a.lse[..., None], none, none, a.bias, None, None, a.q.shape[2],
               a.k.shape[2], 0.0, a.causal) for a in every],
             lambda g, q, k, v, o, lse, s, t, b, cq, ck, nq, nk, p, c:
                 backward(g, q, k, v, b, c, o, lse, num_queries=nq)[:3]),
        twin(f"{over}_backward",
             [(a.grad, a.q, a.k, a.v, a.bias, four, a.out, a.lse, None, None, a.q.shape[2], a.k.shape[2], 0.0,
               a.causal, none, none) for a in every],
             lambda g, q, k, v, b, m, o, lse, cq, ck, nq, nk, p, c, *_:
                 backward(g, q, k, v, b, c, o, lse, num_queries=nq)),
    ]  # fmt: skip


def packed_samples() -> list[tuple[str, list[Sample]]]:
    """The same kernels on [B, S, H, D], and on sequences of several lengths laid end to end."""
    none, ends = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2, 6], dtype=torch.int32)
    mask = f(2, 1, 6, 6)
    dense = [Attention(6, 6, 6, None, False), Attention(6, 3, 6, None, True)]
    masked = [Attention(6, 6, 6, mask, False), Attention(6, 6, 6, f(1, 6, 6, 6), False)]

    def whole(function: Any) -> Any:
        """On dims in another order."""

        def run(*tensors: Tensor) -> Any:
            return function(*(t.transpose(1, 2) if t.ndim == 4 else t for t in tensors))

        return run

    def each(function: Any, ends: Tensor | None, *tensors: Tensor) -> Args:
        """The results on each sequence, laid end to end; sums of softmax have positions last."""
        if ends is None:
            return whole(function)(*tensors)
        parts = []
        for start, end in itertools.pairwise(ends.tolist()):
            own = [t[start:end][None] if t.ndim == 3 else t[:, start:end][None] for t in tensors]
            parts.append(whole(function)(*own))
        return tuple(
            torch.cat([p.transpose(1, 2)[0] for p in some]) if some[0].ndim == 4 else torch.cat([p[0] for p in some], 1)
            for some in zip(*parts, strict=True)
        )

    def back(found: Args) -> Args:
        return tuple(t.transpose(1, 2) if t is not None and t.ndim == 4 else t for t in found)

    def forward(q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None, causal: bool) -> Args:
        found = each(lambda q, k, v: _attend(q, k, v, None, causal), ends, q, k, v)
        return found if ends is not None else back(found)

    def backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, s: Tensor, ends: Any, causal: bool) -> Args:
        def run(g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, s: Tensor) -> Args:
            return Attention.backward(g, q, k, v, None, causal, o, s)[:3]

        found = each(run, ends, g, q, k, v, o, s)
        return found if ends is not None else back(found)

    def other(t: Tensor) -> Tensor:
        return t.transpose(1, 2)

    def one(op: str, args: Args, function: Any) -> Sample:
        return Sample(op_of(op), args, {}, twin=function)

    q, k, v, g = f(6, 6, 4), f(6, 3, 4), f(6, 3, 4), f(6, 6, 4)
    out, sums = forward(q, k, v, ends, True)
    plain = [(other(a.q), other(a.k), other(a.v), None, None, 6, 6, 0.0, a.causal, False) for a in dense]
    flash = [*plain, (q, k, v, ends, ends, 4, 4, 0.0, True, False)]
    grads = [(other(a.grad), other(a.q), other(a.k), other(a.v), other(a.out), a.lse, None, None, 6, 6, 0.0, a.causal,
              none, none) for a in dense]  # fmt: skip
    grads.append((g, q, k, v, out, sums, ends, ends, 4, 4, 0.0, True, none, none))
    efficient = [(other(a.q), other(a.k), other(a.v), a.bias, None, None, None, None, 0.0, int(a.causal), True)
                 for a in (*dense, *masked)]  # fmt: skip
    of_efficient = [(other(a.grad), other(a.q), other(a.k), other(a.v), a.bias, other(a.out), None, None, 6, 6,
                     _padded(a.lse), 0.0, none, none, int(a.causal), a.bias is not None)
                    for a in (*dense, *masked)]  # fmt: skip

    def efficient_forward(q: Tensor, k: Tensor, v: Tensor, b: Any, cq: Any, ck: Any, m: Any, n: Any, p: float,
                          kind: int, _: bool) -> Args:  # fmt: skip
        found, lse = _attend(other(q), other(k), other(v), b, kind == 1)
        return other(found), _padded(lse), none, none, 6, 6

    def efficient_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Any, o: Tensor, cq: Any, ck: Any, m: int,
                           n: int, s: Tensor, p: float, seed: Any, at: Any, kind: int, _: bool) -> Args:  # fmt: skip
        given = (other(g), other(q), other(k), other(v), b, kind == 1, other(o), s)
        *found, of_mask = Attention.backward(*given, padded=True)
        return (*back(tuple(found)), of_mask)

    name = "_{}_attention_{}".format
    return [
        (name("flash", "forward"), [one(name("flash", "forward"), args, lambda q, k, v, cq, ck, m, n, p, c, _:
            (*forward(q, k, v, cq, c), none, none, none)) for args in flash]),
        (name("flash", "backward"), [one(name("flash", "backward"), args, lambda g, q, k, v, o, s, cq, ck, m, n, p, c,
            *_: backward(g, q, k, v, o, s, cq, c)) for args in grads]),
        (name("efficient", "forward"), [one(name("efficient", "forward"), a, efficient_forward) for a in efficient]),
        (name("efficient", "backward"),
         [one(name("efficient", "backward"), a, efficient_backward) for a in of_efficient]),
    ]  # fmt: skip
