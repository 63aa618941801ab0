"""Layers on sequences, [rows, length, width] -> the same: attention in its spellings, recurrence, experts, positions.

A layer is made of `Shape` and options, and called with x and the batch; it returns x, or x and a term of the loss.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.shape import Shape

Batch = dict[str, Tensor]


def rotate_half(x: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat([-two, one], -1)


def rotary(x: Tensor, spelling: str) -> Tensor:
    """Positions by rotation of [rows, heads, length, head width], as Llama, GPT-J, torchtitan and GPT-NeoX spell it."""
    if spelling == "none":
        return x
    length, width = x.shape[-2], x.shape[-1]
    if spelling == "partial":
        half = width // 2
        return torch.cat([rotary(x[..., :half], "half"), x[..., half:]], -1)
    frequency = 1.0 / (100.0 ** (torch.arange(0, width, 2, device=x.device, dtype=torch.float32) / width))
    angles = torch.outer(torch.arange(length, device=x.device, dtype=torch.float32), frequency)
    if spelling == "complex":
        y = x if x.dtype == torch.float64 else x.float()
        turn = torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(torch.view_as_complex(y.reshape(*x.shape[:-1], -1, 2)) * turn).flatten(-2).type_as(x)
    if spelling == "half":
        both = torch.cat([angles, angles], -1)
        return x * both.cos().to(x.dtype) + rotate_half(x) * both.sin().to(x.dtype)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class Attention(nn.Module):
    """Self-attention: spellings of query, key and value, of positions, of masks, and of the product."""

    reads = ("mask",)

    def __init__(
        self, shape: Shape, heads: int, kv_heads: int, qkv: str, positions: str, mask: str, product: str,
        dropout: float, bias: bool, norm: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        width = shape.width
        self.heads, self.kv_heads, self.each = heads, kv_heads, width // heads
        self.qkv, self.positions, self.mask, self.product, self.dropout = qkv, positions, mask, product, dropout
        q_width, kv_width = width, kv_heads * self.each
        if qkv == "separate":
            self.query = nn.Linear(width, q_width, bias=bias)
            self.key = nn.Linear(width, kv_width, bias=bias)
            self.value = nn.Linear(width, kv_width, bias=bias)
        elif qkv == "half":
            self.query = nn.Linear(width, q_width, bias=bias)
            self.key_value = nn.Linear(width, 2 * kv_width, bias=bias)
        else:
            self.fused = nn.Linear(width, q_width + 2 * kv_width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        if norm:
            self.query_norm, self.key_norm = nn.RMSNorm(self.each), nn.RMSNorm(self.each)
        if positions == "t5":
            self.distances = nn.Embedding(8, heads)
        if mask == "buffer":
            self.register_buffer("allowed", torch.ones(shape.length + 4, shape.length + 4).tril().bool())
        self.out_shape = shape

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each [rows, heads, length, head width]."""
        rows, length, width = x.shape
        heads, kv_heads, each = self.heads, self.kv_heads, self.each
        if self.qkv == "separate":
            query, key, value = self.query(x), self.key(x), self.value(x)
        elif self.qkv == "half":
            query = self.query(x)
            key, value = self.key_value(x).chunk(2, -1)
        elif self.qkv == "split":  # GPT-2, Phi-3
            query, key, value = self.fused(x).split([width, kv_heads * each, kv_heads * each], -1)
        elif self.qkv == "three":  # ViT of timm; only with as many key heads
            query, key, value = self.fused(x).reshape(rows, length, 3, heads, each).permute(2, 0, 3, 1, 4)
            return query, key, value
        elif self.qkv == "by head":  # GPT-NeoX, BLOOM
            query, key, value = self.fused(x).view(rows, length, heads, 3, each).transpose(1, 2).unbind(-2)
            return query, key, value
        else:  # Falcon, litgpt: each group's queries beside its key and value
            fused = self.fused(x).view(rows, length, kv_heads, heads // kv_heads + 2, each)
            query = fused[..., :-2, :].flatten(2, 3).transpose(1, 2)
            return query, fused[..., -2, :].transpose(1, 2), fused[..., -1, :].transpose(1, 2)
        query = query.view(rows, length, heads, each).transpose(1, 2)
        key = key.view(rows, length, kv_heads, each).transpose(1, 2)
        return query, key, value.view(rows, length, kv_heads, each).transpose(1, 2)

    def allowed_pairs(self, x: Tensor, batch: Batch) -> Tensor | None:
        """Which positions see which: [..., length, length] bool, or None for all."""
        length = x.shape[1]
        place = torch.arange(length, device=x.device)
        causal = place[:, None] >= place[None, :]
        if self.mask == "none":
            return None
        if self.mask == "buffer":
            return self.allowed[:length, :length]
        if self.mask == "sliding":
            return causal & (place[:, None] - place[None, :] < 3)
        if self.mask == "padding" and batch["mask"].shape[1] == length:
            return batch["mask"][:, None, None, :].bool()
        if self.mask == "both" and batch["mask"].shape[1] == length:
            return causal & batch["mask"][:, None, None, :].bool()
        return causal

    def bias_of(self, x: Tensor) -> Tensor | None:
        length = x.shape[1]
        place = torch.arange(length, device=x.device)
        if self.positions == "alibi":
            slopes = 2.0 ** (-8.0 * torch.arange(1, self.heads + 1, device=x.device, dtype=x.dtype) / self.heads)
            return slopes[:, None, None] * (place[None, :] - place[:, None]).to(x.dtype)
        if self.positions == "t5":
            return self.distances((place[None, :] - place[:, None]).clamp(-4, 3) + 4).permute(2, 0, 1)
        return None

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        query, key, value = self.split(x)
        if hasattr(self, "query_norm"):
            query, key = self.query_norm(query), self.key_norm(key)
        if self.positions in ("half", "pairs", "complex", "partial"):
            query, key = rotary(query, self.positions), rotary(key, self.positions)
        groups = self.heads // self.kv_heads
        shared = self.product == "grouped"
        if groups > 1 and not shared:
            if self.product == "expand":
                key, value = (
                    y[:, :, None].expand(-1, -1, groups, -1, -1).reshape(y.shape[0], self.heads, *y.shape[2:])
                    for y in (key, value)
                )
            else:
                key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        allowed, bias = self.allowed_pairs(x, batch), self.bias_of(x)
        dropout = self.dropout if self.training else 0.0
        if self.product in ("sdpa", "grouped", "expand"):
            if bias is not None and allowed is not None:
                allowed = bias.masked_fill(~allowed, torch.finfo(x.dtype).min)
            elif bias is not None:
                allowed = bias
            causal = self.mask == "causal" and bias is None
            mixed = F.scaled_dot_product_attention(
                query, key, value, attn_mask=None if causal else allowed, dropout_p=dropout, is_causal=causal,
                enable_gqa=shared and groups > 1,
            )  # fmt: skip
        else:
            if self.product == "einsum":
                scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(self.each)
            else:
                scores = query @ key.transpose(-2, -1) * self.each**-0.5
            if self.product == "softcap":
                scores = 5.0 * torch.tanh(scores / 5.0)
            if bias is not None:
                scores = scores + bias
            if allowed is not None:
                scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
            weights = F.dropout(scores.softmax(-1), dropout)
            mixed = torch.einsum("bhqk,bhkd->bhqd", weights, value) if self.product == "einsum" else weights @ value
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class TorchAttention(nn.Module):
    """nn.MultiheadAttention, on x or on the batch's memory."""

    reads = ("mask", "memory")

    def __init__(self, shape: Shape, heads: int, cross: bool, mask: str, weights: bool, dropout: float) -> None:
        super().__init__()
        extra: dict[str, Any] = {"kdim": shape.memory, "vdim": shape.memory} if cross else {}
        self.attention = nn.MultiheadAttention(shape.width, heads, dropout=dropout, batch_first=True, **extra)
        self.cross, self.mask, self.weights = cross, mask, weights
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        other = batch["memory"] if self.cross else x
        options: dict[str, Any] = {"need_weights": self.weights}
        if self.mask == "causal" and not self.cross:
            length = x.shape[1]
            options["attn_mask"] = torch.full((length, length), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        if self.mask == "padding" and not self.cross and batch["mask"].shape[1] == x.shape[1]:
            options["key_padding_mask"] = ~batch["mask"].bool()
        return self.attention(x, other, other, **options)[0]


class CrossAttention(nn.Module):
    """Attention to the batch's memory: query beside a fused key and value."""

    reads = ("memory",)

    def __init__(self, shape: Shape, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.query = nn.Linear(shape.width, shape.width)
        if fused:
            self.key_value = nn.Linear(shape.memory, 2 * shape.width)
        else:
            self.key, self.value = nn.Linear(shape.memory, shape.width), nn.Linear(shape.memory, shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        memory = batch["memory"]
        key, value = self.key_value(memory).chunk(2, -1) if self.fused else (self.key(memory), self.value(memory))
        query, key, value = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.query(x), key, value))
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class TorchEncoderLayer(nn.Module):
    """nn.TransformerEncoderLayer."""

    def __init__(self, shape: Shape, heads: int, norm_first: bool, activation: str, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            shape.width, heads, 2 * shape.width, dropout, activation, batch_first=True, norm_first=norm_first
        )
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.layer(x)


class TorchDecoderLayer(nn.Module):
    """nn.TransformerDecoderLayer, with the batch's memory of the same width."""

    reads = ("memory",)

    def __init__(self, shape: Shape, heads: int, dropout: float) -> None:
        super().__init__()
        self.widen = nn.Linear(shape.memory, shape.width)
        self.layer = nn.TransformerDecoderLayer(shape.width, heads, 2 * shape.width, dropout, batch_first=True)
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.layer(x, self.widen(batch["memory"]))


class LinearAttention(nn.Module):
    """Attention without softmax, causal by a running sum."""

    def __init__(self, shape: Shape, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.fused, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        query, key, value = (y.unflatten(-1, (self.heads, -1)) for y in self.fused(x).chunk(3, -1))
        query, key = F.elu(query) + 1, F.elu(key) + 1
        state = torch.einsum("blhd,blhe->blhde", key, value).cumsum(1)
        total = torch.einsum("blhd,blhd->blh", query, key.cumsum(1))
        return self.out((torch.einsum("blhd,blhde->blhe", query, state) / total[..., None]).flatten(2))


class Recurrent(nn.Module):
    """nn.LSTM, nn.GRU or nn.RNN."""

    def __init__(self, shape: Shape, kind: str, layers: int, both: bool, dropout: float, first: bool) -> None:
        super().__init__()
        width = shape.width // 2 if both else shape.width
        self.cell = getattr(nn, kind)(
            shape.width, width, num_layers=layers, bidirectional=both, dropout=dropout if layers > 1 else 0.0,
            batch_first=first,
        )  # fmt: skip
        self.first, self.out_shape = first, shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if self.first:
            return self.cell(x)[0]
        return self.cell(x.transpose(0, 1))[0].transpose(0, 1)


class RecurrentLoop(nn.Module):
    """A cell called step by step, as pytorch/examples' time sequence prediction does."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(shape.width, shape.width)
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        hidden = x.new_zeros(x.shape[0], x.shape[2])
        memory = torch.zeros_like(hidden)
        found = []
        for now in x.unbind(1):
            if isinstance(self.cell, nn.LSTMCell):
                hidden, memory = self.cell(now, (hidden, memory))
            else:
                hidden = self.cell(now, hidden)
            found.append(hidden)
        return torch.stack(found, 1)


class Experts(nn.Module):
    """A mixture of experts: how tokens find their experts, in several spellings, with the balance as a loss."""

    def __init__(self, shape: Shape, experts: int, chosen: int, spelling: str, balance: bool) -> None:
        super().__init__()
        self.chosen, self.spelling, self.balance = chosen, spelling, balance
        self.gate = nn.Linear(shape.width, experts, bias=False)
        if spelling in ("dense", "loop", "index_add"):
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(shape.width, shape.width), nn.SiLU(), nn.Linear(shape.width, shape.width))
                for _ in range(experts)
            )
        else:
            self.up = nn.Parameter(torch.randn(experts, shape.width, 2 * shape.width) * shape.width**-0.5)
            self.down = nn.Parameter(torch.randn(experts, 2 * shape.width, shape.width) * shape.width**-0.5)
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Any:
        flat = x.flatten(0, 1)
        weights = self.gate(flat).softmax(-1)
        top, index = weights.topk(self.chosen, -1)
        top = top / top.sum(-1, keepdim=True)
        number = weights.shape[1]
        chosen = torch.zeros_like(weights).scatter(1, index, top)
        if self.spelling == "dense":
            out = torch.stack([expert(flat) for expert in self.experts], 1)
            out = (out * weights[..., None]).sum(1)
        elif self.spelling == "loop":
            out = torch.zeros_like(flat)
            for place, expert in enumerate(self.experts):
                out = out + expert(flat) * chosen[:, place, None]
        elif self.spelling == "index_add":
            out = torch.zeros_like(flat)
            for place, expert in enumerate(self.experts):
                rows, which = torch.where(index == place)
                out.index_add_(0, rows, expert(flat[rows]) * top[rows, which, None])
        elif self.spelling == "einsum":
            inner = F.gelu(torch.einsum("tw,ewi->tei", flat, self.up))
            out = torch.einsum("tei,eiw,te->tw", inner, self.down, chosen)
        elif self.spelling == "gather":
            inner = F.gelu(torch.einsum("tw,tkwi->tki", flat, self.up[index]))
            out = torch.einsum("tki,tkiw,tk->tw", inner, self.down[index], top)
        elif self.spelling == "batched":  # as transformers' batched_mm
            rows, expert = flat.repeat_interleave(self.chosen, 0), index.flatten()
            inner = F.silu(torch.bmm(rows.unsqueeze(1), self.up[expert]))
            found = torch.bmm(inner, self.down[expert]).squeeze(1) * top.flatten()[:, None]
            out = found.view(*index.shape, -1).sum(1)
        elif self.spelling == "hit":  # as transformers loops over the experts that are hit
            out = torch.zeros_like(flat)
            mask = F.one_hot(index, number).permute(2, 1, 0)
            for place in mask.sum((-1, -2)).greater(0).nonzero():
                which, rows = torch.where(mask[place[0]])
                found = F.silu(flat[rows] @ self.up[place[0]]) @ self.down[place[0]]
                out.index_add_(0, rows, found * top[rows, which, None])
        else:  # bmm: every expert on every token
            inner = F.silu(torch.bmm(flat.expand(number, -1, -1), self.up))
            out = (torch.bmm(inner, self.down) * chosen.t()[..., None]).sum(0)
        out = out.view(x.shape)
        if not self.balance:
            return out
        share = F.one_hot(index, number).to(x.dtype).sum(1).mean(0)
        return out, number * (share * weights.mean(0)).sum()


class Positions(nn.Module):
    """Positions added: learned, looked up, or a buffer of sines."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind, self.out_shape = kind, shape
        if kind == "parameter":
            self.table = nn.Parameter(torch.randn(1, shape.length, shape.width) * 0.1)
        elif kind == "embedding":
            self.embedding = nn.Embedding(shape.length, shape.width)
        else:
            place = torch.arange(shape.length)[:, None] / 10.0 ** torch.linspace(0, 2, shape.width)
            self.register_buffer("table", torch.sin(place), persistent=kind == "buffer")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if self.kind == "embedding":
            return x + self.embedding(torch.arange(x.shape[1], device=x.device))
        return x + self.table[..., : x.shape[1], :]


class ClassToken(nn.Module):
    """A learned token in front of the others, or some of them behind."""

    def __init__(self, shape: Shape, num: int, front: bool) -> None:
        super().__init__()
        self.token, self.front = nn.Parameter(torch.randn(1, num, shape.width)), front
        self.out_shape = shape.with_length(shape.length + num)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        token = self.token.expand(x.shape[0], -1, -1)
        return torch.cat([token, x] if self.front else [x, token], 1)


class TokenMix(nn.Module):
    """Weights over positions, as MLP-Mixer has them, or a shift, a causal convolution, a running mean."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind, self.out_shape = kind, shape
        if kind == "linear":
            self.mix = nn.Linear(shape.length, shape.length)
        elif kind in ("conv", "depthwise"):
            self.conv = nn.Conv1d(
                shape.width, shape.width, 3, padding=2, groups=shape.width if kind == "depthwise" else 1
            )
        else:
            self.weight = nn.Parameter(torch.rand(shape.width))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if self.kind == "linear":
            return self.mix(x.transpose(1, 2)).transpose(1, 2)
        if self.kind in ("conv", "depthwise"):
            return self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        if self.kind == "shift":
            before = F.pad(x, (0, 0, 1, -1))
        elif self.kind == "roll":
            before = x.roll(1, 1)
        elif self.kind == "flip":
            before = x.flip(1)
        else:
            before = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        return x * self.weight + before * (1 - self.weight)


class Masked(nn.Module):
    """The batch's mask: positions set to zero, or replaced by a learned token."""

    reads = ("mask",)

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind, self.out_shape = kind, shape
        self.token = nn.Parameter(torch.randn(shape.width))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if batch["mask"].shape[1] != x.shape[1]:
            return x * self.token
        mask = batch["mask"][..., None]
        if self.kind == "zero":
            return x * mask.to(x.dtype) + self.token
        if self.kind == "fill":
            return x.masked_fill(mask == 0, 0.5) * self.token
        return torch.where(mask.bool(), x, self.token)


class Pool(nn.Module):
    """From a sequence to a vector."""

    reads = ("mask",)

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.out_shape = shape.as_kind("vector", shape.width * shape.length if kind == "flat" else shape.width)
        if kind == "attention":
            self.score = nn.Linear(shape.width, 1)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if self.kind == "mean":
            return x.mean(1)
        if self.kind == "max":
            return x.amax(1)
        if self.kind == "flat":
            return x.flatten(1)
        if self.kind == "attention":
            return (self.score(x).softmax(1) * x).sum(1)
        if self.kind == "masked" and batch["mask"].shape[1] == x.shape[1]:
            mask = batch["mask"].to(x.dtype)[..., None]
            return (x * mask).sum(1) / mask.sum(1).clamp(min=1)
        if self.kind == "gather":
            last = batch["mask"].sum(1).long().clamp(1, x.shape[1]) - 1
            return x[torch.arange(x.shape[0], device=x.device), last]
        return x[:, 0] if self.kind == "first" else x[:, -1]
