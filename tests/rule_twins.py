"""Samples of ops that only a GPU runs, with what they compute written for a CPU."""

from __future__ import annotations

from typing import Any

import torch
from oracle import Sample
from rule_attention import attention_samples, packed_samples
from rule_makers import Args, aten, f, op_of, u
from rule_table import ALL, STATS
from torch import Tensor


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
            *attention_samples(),
            *packed_samples(),
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
