"""Layers on any kind of value: norms, MLPs, noise, buffers that change, bottlenecks, and those on vectors alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fuzz.shape import Shape

Batch = dict[str, Tensor]


def last(x: Tensor) -> Tensor:
    """Channels last, whatever the kind."""
    return x.movedim(1, -1) if x.dim() > 3 else x


def first(x: Tensor) -> Tensor:
    """Channels at dim 1, of what has them last."""
    return x.movedim(-1, 1) if x.dim() > 3 else x


class RMSNormByHand(nn.Module):
    """Llama's spelling: in float32, or in float64 where that is the model's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x if x.dtype == torch.float64 else x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Norm(nn.Module):
    """A norm, on the dim where its kind has its channels."""

    def __init__(self, shape: Shape, kind: str, affine: bool, running: bool) -> None:
        super().__init__()
        width, self.kind = shape.width, kind
        if kind == "layer":
            self.norm: nn.Module = nn.LayerNorm(width, elementwise_affine=affine)
        elif kind == "rms":
            self.norm = nn.RMSNorm(width, elementwise_affine=affine)
        elif kind == "rms by hand":
            self.norm = RMSNormByHand(width)
        elif kind == "group":
            self.norm = nn.GroupNorm(2, width, affine=affine)
        elif kind == "instance":
            of = {"image": nn.InstanceNorm2d, "video": nn.InstanceNorm3d}.get(shape.kind, nn.InstanceNorm1d)
            self.norm = of(width, affine=affine, track_running_stats=running)
        else:
            of = {"image": nn.BatchNorm2d, "video": nn.BatchNorm3d}.get(shape.kind, nn.BatchNorm1d)
            self.norm = of(width, affine=affine, track_running_stats=running, momentum=None if kind == "mean" else 0.1)
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if self.kind in ("layer", "rms", "rms by hand"):
            return first(self.norm(last(x)))
        if x.dim() == 3:
            return self.norm(x.transpose(1, 2)).transpose(1, 2)
        if self.kind == "instance" and x.dim() == 2:
            return self.norm(x[..., None].expand(-1, -1, 3).cumsum(-1))[..., 0]
        return self.norm(x)


class MLP(nn.Module):
    """Two linear layers, or a gated unit in one of its spellings."""

    def __init__(self, shape: Shape, inner: int, activation: str, gate: str, bias: bool, dropout: float) -> None:
        super().__init__()
        width, self.activation, self.gate = shape.width, activation, gate
        self.up = nn.Linear(width, inner * (2 if gate in ("chunk", "interleaved") else 1), bias=bias)
        if gate == "separate":
            self.gated = nn.Linear(width, inner, bias=bias)
        self.down, self.drop = nn.Linear(inner, width, bias=bias), nn.Dropout(dropout)
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = last(x)
        act = getattr(F, self.activation)
        if self.gate == "separate":
            y = act(self.gated(x)) * self.up(x)
        elif self.gate == "chunk":
            one, two = self.up(x).chunk(2, -1)
            y = act(one) * two
        elif self.gate == "interleaved":
            y = self.up(x)
            y = act(y[..., ::2]) * y[..., 1::2]
        else:
            y = act(self.up(x))
        return first(self.down(self.drop(y)))


class Linear(nn.Module):
    """One linear layer to another width; also with weight norm or spectral norm."""

    def __init__(self, shape: Shape, out: int, normed: str) -> None:
        super().__init__()
        self.linear = nn.Linear(shape.width, out)
        if normed == "weight":
            self.linear = parametrizations.weight_norm(self.linear)
        elif normed == "spectral":
            self.linear = parametrizations.spectral_norm(self.linear)
        self.out_shape = shape.with_width(out)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return first(self.linear(last(x)))


class LowRank(nn.Module):
    """A frozen linear layer and a trained change of low rank (LoRA)."""

    def __init__(self, shape: Shape, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(shape.width, shape.width).requires_grad_(False)
        self.down, self.up = nn.Linear(shape.width, rank, bias=False), nn.Linear(rank, shape.width, bias=False)
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = last(x)
        return first(self.base(x) + 0.5 * self.up(self.down(x)))


class Activation(nn.Module):
    """An activation alone, with or without parameters, in place or not."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        made = {
            "prelu": lambda: nn.PReLU(shape.width if shape.kind != "sequence" else 1),
            "leaky": lambda: nn.LeakyReLU(0.1, inplace=True),
            "hardswish": nn.Hardswish,
            "softplus": nn.Softplus,
            "mish": nn.Mish,
            "celu": nn.CELU,
            "tanh": nn.Tanh,
            "softmax": lambda: nn.Softmax(dim=1),
        }
        self.act = made[kind]()
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.act(x * 1.0)


class Noise(nn.Module):
    """Random draws: dropout of elements, of channels, of whole rows (stochastic depth), or noise added."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind, self.out_shape = kind, shape
        self.drop = nn.AlphaDropout(0.2) if kind == "alpha" else nn.Dropout(0.2)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if self.kind == "rows":
            keep = torch.rand(x.shape[0], *(1,) * (x.dim() - 1), device=x.device, dtype=x.dtype) < 0.8
            return x * keep / 0.8
        if self.kind == "bernoulli":
            return x * torch.empty_like(x[:, :1]).bernoulli_(0.8)
        if self.kind == "normal":
            return x + 0.1 * torch.randn_like(x)
        if self.kind == "channels":
            drop = {3: F.dropout1d, 4: F.dropout2d, 5: F.dropout3d}.get(x.dim())
            return self.drop(x) if drop is None else drop(x, 0.2)
        return self.drop(x)


class Memory(nn.Module):
    """Buffers that the step changes: a running mean, a counter, a running largest."""

    def __init__(self, shape: Shape, kind: str, read: bool) -> None:
        super().__init__()
        self.kind, self.read, self.out_shape = kind, read, shape
        self.register_buffer("mean", torch.zeros(shape.width))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.scale = nn.Parameter(torch.ones(shape.width))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = last(x)
        now = y.detach().flatten(0, -2)
        if self.kind == "ema":
            self.mean.mul_(0.9).add_(now.mean(0), alpha=0.1)
        elif self.kind == "assigned":
            self.mean = 0.9 * self.mean + 0.1 * now.mean(0)
        elif self.kind == "largest":
            self.mean.copy_(torch.maximum(self.mean, now.amax(0)))
        else:
            with torch.no_grad():
                self.mean.lerp_(now.std(0), 0.1)
        self.count += 1
        return first((y - self.mean if self.read else y) * self.scale)


class Scaled(nn.Module):
    """A learned scale and shift, of channels or one number; or a parameter of no use."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind, self.out_shape = kind, shape
        self.scale = nn.Parameter(torch.ones(() if kind == "scalar" else (shape.width,)) * 0.9)
        if kind == "unused":
            self.unused = nn.Parameter(torch.randn(shape.width))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return first(last(x) * self.scale) + (0.1 if self.kind == "scalar" else 0.0)


class Conditioned(nn.Module):
    """Scale and shift from the batch's conditions (FiLM, DiT's adaLN)."""

    reads = ("condition",)

    def __init__(self, shape: Shape, zero: bool) -> None:
        super().__init__()
        self.to_both = nn.Linear(4, 2 * shape.width)
        self.out_shape = shape
        if zero:
            nn.init.zeros_(self.to_both.bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        scale, shift = self.to_both(F.silu(batch["condition"])).chunk(2, -1)
        y = last(x)
        between = (slice(None), *(None,) * (y.dim() - 2))
        return first(y * (1 + scale[between]) + shift[between])


class Variational(nn.Module):
    """A VAE's bottleneck: mean and log variance, a sample, and the divergence as a term of the loss."""

    def __init__(self, shape: Shape, inner: int, aux: bool) -> None:
        super().__init__()
        self.aux = aux
        self.encode, self.decode = nn.Linear(shape.width, 2 * inner), nn.Linear(inner, shape.width)
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Any:
        mean, log = self.encode(last(x)).chunk(2, -1)
        y = first(self.decode(mean + torch.randn_like(mean) * torch.exp(0.5 * log)))
        return (y, -0.5 * (1 + log - mean.pow(2) - log.exp()).mean()) if self.aux else y


class Quantised(nn.Module):
    """VQ-VAE's bottleneck: the nearest entry of a codebook, straight through; the codebook is learned or a buffer."""

    def __init__(self, shape: Shape, entries: int, ema: bool) -> None:
        super().__init__()
        self.ema, self.out_shape = ema, shape
        if ema:
            self.register_buffer("codebook", torch.randn(entries, shape.width))
        else:
            self.codebook = nn.Parameter(torch.randn(entries, shape.width))

    def forward(self, x: Tensor, batch: Batch) -> Any:
        y = last(x)
        flat = y.flatten(0, -2)
        distances = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codebook.t() + self.codebook.pow(2).sum(1)
        index = distances.argmin(1)
        near = F.embedding(index, self.codebook).view(y.shape)
        if self.ema:
            chosen = F.one_hot(index, self.codebook.shape[0]).to(y.dtype)
            with torch.no_grad():
                mean = (chosen.t() @ flat) / chosen.sum(0).clamp(min=1)[:, None]
                self.codebook.mul_(0.9).add_(mean, alpha=0.1)
            term = F.mse_loss(y, near.detach())
        else:
            term = F.mse_loss(near, y.detach()) + 0.25 * F.mse_loss(y, near.detach())
        return first(y + (near - y).detach()), term


class Crossed(nn.Module):
    """Products of features: a deep-and-cross layer, DLRM's pairs, a bilinear form, a highway gate."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        width, self.kind = shape.width, kind
        self.linear = nn.Linear(width, width)
        if kind == "bilinear":
            self.form = nn.Bilinear(width, width, width)
        elif kind == "pairs":
            self.join = nn.Linear(width + 6, width)
        elif kind == "gate":
            self.gate = nn.Linear(width, width)
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if self.kind == "bilinear":
            return self.form(x, torch.tanh(self.linear(x)))
        if self.kind == "pairs":
            parts = self.linear(x).view(x.shape[0], 4, -1)
            products = torch.bmm(parts, parts.transpose(1, 2))
            row, column = torch.tril_indices(4, 4, offset=-1, device=x.device)
            return self.join(torch.cat([x, products[:, row, column]], 1))
        if self.kind == "gate":
            gate = torch.sigmoid(self.gate(x))
            return gate * torch.tanh(self.linear(x)) + (1 - gate) * x
        return x * self.linear(x) + x


class Bag(nn.Module):
    """Embeddings of the batch's categories, added to a vector: looked up and summed, or an EmbeddingBag."""

    reads = ("categories",)

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind, self.out_shape = kind, shape
        of = nn.EmbeddingBag if kind in ("sum", "mean") else nn.Embedding
        self.table = of(12, shape.width, mode=kind) if kind in ("sum", "mean") else of(12, shape.width, padding_idx=0)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        found = self.table(batch["categories"])
        return x + (found if found.dim() == 2 else found.sum(1))
