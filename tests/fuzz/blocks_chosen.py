"""Layers that work on some of the positions or rows, which a mask, a router or a number of the batch chooses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.blocks_any import first, last
from fuzz.shape import Shape

Batch = dict[str, Any]


class Selected(nn.Module):
    """A layer on what a boolean mask selects: written back in one of the spellings, or as a mean added to all."""

    reads = ("mask", "categories")

    def __init__(self, shape: Shape, kind: str, rows: bool) -> None:
        super().__init__()
        self.kind, self.rows = kind, rows
        self.linear = nn.Linear(shape.width, shape.width)
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return first(self.chosen(last(x), batch))

    def chosen(self, x: Tensor, batch: Batch) -> Tensor:
        mask = batch["categories"][:, 0] > 3  # of rows
        if x.dim() == 3 and not self.rows:
            mask = batch["mask"].bool() if batch["mask"].shape[1] == x.shape[1] else mask[:, None].expand(x.shape[:2])
        wide = mask.reshape(*mask.shape, *(1,) * (x.dim() - mask.dim())).expand_as(x)
        if self.kind == "index":
            out = x.clone()
            out[mask] = torch.tanh(self.linear(x[mask]))
            return out
        if self.kind == "scatter":
            return x.masked_scatter(wide, torch.tanh(self.linear(x[mask])))
        if self.kind == "add":
            where = mask.nonzero(as_tuple=True)
            return x.index_put(where, F.gelu(self.linear(x[where])), accumulate=True)
        if self.kind == "mean":
            found = self.linear(x[mask]).flatten(0, -2)
            return x + found.sum(0) / (found.shape[0] + 1)
        return x + torch.zeros_like(x).masked_scatter(wide, x[mask] * self.linear.bias)


class Numbered(nn.Module):
    """Numbers of the batch that are no tensors: a temperature, a count, a flag."""

    reads = ("temperature", "count")

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind, self.out_shape = kind, shape
        self.scale = nn.Parameter(torch.ones(shape.width))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = last(x)
        if self.kind == "divide":
            y = y / batch["temperature"] * self.scale
        elif self.kind == "count":
            y = y * self.scale ** batch["count"]
        else:
            y = y * (self.scale * batch["temperature"] + batch["count"] * 0.1)
        return first(y)


class GroupedExperts(nn.Module):
    """A mixture of experts as DeepSeek-V3 and torchtitan compute it: tokens sorted by expert, one grouped product."""

    def __init__(self, shape: Shape, experts: int, chosen: int, half: bool, sigmoid: bool) -> None:
        super().__init__()
        self.chosen, self.half, self.sigmoid, width = chosen, half, sigmoid, shape.width
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * width**-0.5)
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        flat = x.flatten(0, -2)
        scores = self.gate(flat)
        scores = scores.sigmoid() if self.sigmoid else scores.softmax(-1)
        weight, index = scores.topk(self.chosen, -1)
        expert = index.flatten()
        order = expert.argsort(stable=True)
        ends = F.one_hot(expert, scores.shape[1]).sum(0).cumsum(0).to(torch.int32)
        dtype = torch.bfloat16 if self.half or x.dtype == torch.bfloat16 else torch.float32
        token = order // self.chosen
        inner = F.silu(torch._grouped_mm(flat[token].to(dtype), self.up.to(dtype), offs=ends))
        out = torch._grouped_mm(inner, self.down.to(dtype), offs=ends).to(x.dtype)
        out = out * weight.flatten()[order][:, None].to(x.dtype)
        return torch.zeros_like(flat).index_add(0, token, out).view(x.shape)


class Conv1d(nn.Module):
    """A convolution over positions: a WaveNet's, a TCN's, Whisper's; with a norm of its own or not."""

    def __init__(
        self, shape: Shape, kernel: int, dilation: int, groups: int, mode: str, causal: bool, norm: str, gated: bool
    ) -> None:
        super().__init__()
        width, self.gated = shape.width, gated
        reach = dilation * (kernel - 1)
        self.pad = (reach, 0) if causal else (reach // 2, reach - reach // 2)
        self.mode = mode
        self.conv = nn.Conv1d(width, width * (1 + gated), kernel, dilation=dilation, groups=groups)
        norms = {"batch": nn.BatchNorm1d, "group": lambda width: nn.GroupNorm(2, width)}
        self.norm = norms[norm](width) if norm != "none" else nn.Identity()
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.conv(F.pad(x.transpose(1, 2), self.pad, mode=self.mode))
        y = F.glu(y, 1) if self.gated else F.relu(y)
        return self.norm(y).transpose(1, 2)


class ListedExperts(nn.Module):
    """A mixture of experts that are modules of their own, in a loop that somebody has written by hand."""

    def __init__(self, shape: Shape, experts: int, chosen: int, loop: str, norm: bool, asks: bool) -> None:
        super().__init__()
        self.chosen, self.loop, self.asks, width = chosen, loop, asks, shape.width
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 2 * width), nn.LayerNorm(2 * width) if norm else nn.Identity(), nn.GELU(),
                nn.Linear(2 * width, width),
            )
            for _ in range(experts)
        )  # fmt: skip
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        flat = x.flatten(0, -2)
        scores, ids = self.gate(flat).softmax(-1).topk(self.chosen, -1)
        out = torch.zeros_like(flat)
        if self.loop == "places":  # DeepSeek
            return self.in_places(flat, scores, ids).view(x.shape)
        if self.loop == "hit":  # transformers
            mask = F.one_hot(ids, len(self.experts)).permute(2, 1, 0)
            for number in (mask.sum((-1, -2)) > 0).nonzero():
                place, token = torch.where(mask[number].squeeze(0))
                out.index_add_(0, token, self.experts[number](flat[token]) * scores[token, place, None])
            return out.view(x.shape)
        for number, expert in enumerate(self.experts):
            if self.loop == "tokens":  # MiniMind and others
                mask = (ids == number).any(-1)
                if self.asks and not mask.any():
                    continue
                out[mask] += expert(flat[mask]) * scores[ids == number][:, None]
                continue
            token, place = torch.where(ids == number)  # Mistral
            if self.asks and token.numel() == 0:
                continue
            if self.loop == "add":
                out[token] += scores[token, place, None] * expert(flat[token])
            else:
                out = out.index_add(0, token, expert(flat[token]) * scores[token, place, None])
        return out.view(x.shape)

    def in_places(self, flat: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        chosen, rows = ids.flatten(), flat.repeat_interleave(self.chosen, 0)
        found = torch.empty_like(rows)
        for number, expert in enumerate(self.experts):
            found[chosen == number] = expert(rows[chosen == number])
        return (found.view(*scores.shape, -1) * scores.unsqueeze(-1)).sum(1)
