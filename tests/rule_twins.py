"""Samples of ops that only a GPU runs, with what they compute written for a CPU."""

from __future__ import annotations

from typing import Any

import torch
from oracle import Sample
from rule_makers import Args, aten, f, op_of, u
from rule_table import ALL, STATS
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


def _attentions() -> list[tuple[str, list[Sample]]]:
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


def _rms_backward(
    grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> Args:
    leaves = [x.detach().requires_grad_(), *([] if weight is None else [weight.detach().requires_grad_()])]
    dims = list(range(x.ndim - len(shape), x.ndim))
    out = leaves[0] * (leaves[0].square().mean(dims, keepdim=True) + 1e-5).rsqrt()
    found = torch.autograd.grad(out if weight is None else out * leaves[1], leaves, grad)
    return (*found, None)[:2]


def _lstm_cell(x: Tensor, h: Tensor, cx: Tensor, bx: Tensor, bh: Tensor) -> Args:
    gates = x + h + bx + bh
    i, f, g, o = gates.chunk(4, -1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    return o.sigmoid() * cy.tanh(), cy, gates


def _lstm_cell_backward(hy: Tensor, cy: Tensor, cx: Tensor, new_cx: Tensor, gates: Tensor, has_bias: bool) -> Args:
    leaves = [gates.detach().requires_grad_(), cx.detach().requires_grad_()]
    zero = torch.zeros_like(gates[0])
    outs = _lstm_cell(leaves[0], torch.zeros_like(gates), leaves[1], zero, zero)[:2]
    dgates, dcx = torch.autograd.grad(outs, leaves, (hy, cy))
    return dgates, dcx, dgates.sum(0)


def _gru_cell(x: Tensor, h: Tensor, hx: Tensor, bx: Tensor, bh: Tensor) -> Args:
    (rx, zx, nx), (rh, zh, nh) = (x + bx).chunk(3, -1), (h + bh).chunk(3, -1)
    reset, keep = (rx + rh).sigmoid(), (zx + zh).sigmoid()
    new = (nx + reset * nh).tanh()
    return new + keep * (hx - new), torch.cat([reset, keep, new, hx, nh], -1)


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> Args:
    reset, keep, new, hx, nh = workspace.chunk(5, -1)
    dkeep = grad * (hx - new) * keep * (1 - keep)
    dnew = grad * (1 - keep) * (1 - new * new)
    dreset = dnew * nh * reset * (1 - reset)
    dx, dh = torch.cat([dreset, dkeep, dnew], -1), torch.cat([dreset, dkeep, dnew * reset], -1)
    return dx, dh, grad * keep, dx.sum(0), dh.sum(0)


def gpu_samples() -> dict[str, list[Sample]]:
    x = f(6, 12, 4)
    rstd = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    _, mean, invstd = aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    reserve = torch.zeros(0, dtype=torch.uint8)

    def twin(name: str, args: Args, function: Any) -> tuple[str, list[Sample]]:
        return name, [Sample(op_of(name), args, {}, twin=function)]

    return dict(
        [
            *_attentions(),
            twin("_fused_rms_norm_backward", (f(6, 12, 4), x, [4], rstd, f(4), [True, True]), _rms_backward),
            twin("batch_norm_backward", (f(6, 12, 4), x, u(12), *STATS, mean, invstd, True, 1e-5, ALL, reserve),
                 lambda *args: aten.native_batch_norm_backward(*args[:-1])),
            twin("_thnn_fused_lstm_cell", (f(6, 24), f(6, 24), f(6, 6), f(24), f(24)), _lstm_cell),
            twin("_thnn_fused_lstm_cell_backward_impl", (f(6, 6), f(6, 6), f(6, 6), f(6, 6), f(6, 24), True),
                 _lstm_cell_backward),
            twin("_thnn_fused_gru_cell", (f(6, 18), f(6, 18), f(6, 6), f(18), f(18)), _gru_cell),
            twin("_thnn_fused_gru_cell_backward", (f(6, 6), f(6, 30), True), _gru_cell_backward),
            twin("_grouped_mm", (f(6, 12), f(2, 12, 6), torch.tensor([2, 6])), _grouped),
        ]
    )  # fmt: skip


def _grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    parts = torch.tensor_split(a, ends[:-1])
    return torch.cat([rows @ matrix for rows, matrix in zip(parts, b, strict=True)])
