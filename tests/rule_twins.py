"""Samples of ops that only a GPU runs, with what they compute written for a CPU."""

from __future__ import annotations

from typing import Any

import torch
from oracle import Sample
from rule_makers import Args, aten, f, op_of, u
from rule_table import ALL, NORM, STATS, K, Q, V
from torch import Tensor


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores if bias is None else scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).tril().logical_not(), float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _attend_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Args:
    leaves = [t.detach().requires_grad_() for t in (q, k, v, *(() if bias is None else (bias,)))]
    out, _ = _attend(*leaves[:3], leaves[3] if bias is not None else None, causal)
    return torch.autograd.grad(out, leaves, grad)


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
    out, lse = _attend(Q, K, V, None, False)
    none, bias = torch.zeros(2, dtype=torch.int64), f(6, 1, 6, 4).expand(6, 12, 6, 4)
    grad, x = f(*Q.shape), f(6, 12, 4)
    rstd = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    _, mean, invstd = aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    reserve = torch.zeros(0, dtype=torch.uint8)

    def twin(name: str, args: Args, function: Any) -> tuple[str, list[Sample]]:
        return name, [Sample(op_of(name), args, {}, twin=function)]

    sdpa = "_scaled_dot_product_"
    return dict(
        [
            twin(f"{sdpa}flash_attention", (Q, K, V, 0.0, False, False),
                 lambda q, k, v, p, c, m: (*_attend(q, k, v, None, c), none, none, 6, 4, none, none, none)),
            twin(f"{sdpa}efficient_attention", (Q, K, V, bias, True),
                 lambda q, k, v, bias, _: (*_attend(q, k, v, bias, False), none, none)),
            twin(f"{sdpa}cudnn_attention", (Q, K, V, bias, True),
                 lambda q, k, v, bias, _: (*_attend(q, k, v, bias, False), None, None, 6, 4, none, none, none)),
            twin(f"{sdpa}flash_attention_backward",
                 (grad, Q, K, V, out, lse, none, none, 6, 4, 0.0, False, none, none),
                 lambda g, q, k, v, *rest: _attend_backward(g, q, k, v, None, False)),
            twin(f"{sdpa}efficient_attention_backward",
                 (grad, Q, K, V, f(1, 12, 6, 4), out, lse, none, none, 0.0, [True] * 4, False),
                 lambda g, q, k, v, bias, *rest: _attend_backward(g, q, k, v, bias, False)),
            twin(f"{sdpa}cudnn_attention_backward",
                 (grad, Q, K, V, out, lse, none, none, bias, None, None, 6, 4, 0.0, False),
                 lambda g, q, k, v, *rest: _attend_backward(g, q, k, v, rest[4], False)[:3]),
            twin("_fused_rms_norm_backward", (f(6, 12, 4), x, [4], rstd, f(4), [True, True]), _rms_backward),
            twin("cudnn_batch_norm", (*NORM, True, 0.1, 1e-5),
                 lambda *args: (*aten.native_batch_norm(*args), reserve)),
            twin("cudnn_batch_norm_backward", (x, f(6, 12, 4), u(12), *STATS, mean, invstd, 1e-5, reserve),
                 lambda x, g, *rest: aten.native_batch_norm_backward(g, x, *rest[:5], True, rest[5], ALL)),
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
