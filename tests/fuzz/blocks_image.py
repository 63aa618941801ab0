"""Layers on images, [rows, width, height, height] -> the same or smaller."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.shape import Shape

Batch = dict[str, Tensor]


class Conv(nn.Module):
    """A convolution, with an activation behind it."""

    def __init__(
        self, shape: Shape, out: int, kernel: int, stride: int, groups: int, mode: str, bias: bool, activation: str
    ) -> None:
        super().__init__()
        padding = kernel // 2
        self.conv = nn.Conv2d(shape.width, out, kernel, stride, padding, groups=groups, bias=bias, padding_mode=mode)
        self.activation = activation
        height = (shape.length + 2 * padding - kernel) // stride + 1
        self.out_shape = shape.with_width(out).with_length(height)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return getattr(F, self.activation)(self.conv(x))


class Up(nn.Module):
    """Twice the height: transposed convolution, interpolation, or pixel shuffle."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "transposed":
            self.conv: nn.Module = nn.ConvTranspose2d(shape.width, shape.width, 2, 2)
        else:
            self.conv = nn.Conv2d(shape.width, shape.width * (4 if kind == "shuffle" else 1), 3, padding=1)
        self.out_shape = shape.with_length(2 * shape.length)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if self.kind == "shuffle":
            return F.pixel_shuffle(self.conv(x), 2)
        if self.kind == "transposed":
            return self.conv(x)
        return self.conv(F.interpolate(x, scale_factor=2, mode=self.kind))


class Down(nn.Module):
    """Half the height, by pooling or a reshape."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.out_shape = shape.with_length(shape.length // 2)
        if kind == "unshuffle":
            self.conv = nn.Conv2d(4 * shape.width, shape.width, 1)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if self.kind == "max":
            return F.max_pool2d(x, 2)
        if self.kind == "adaptive":
            return F.adaptive_avg_pool2d(x, x.shape[-1] // 2)
        if self.kind == "unshuffle":
            return self.conv(F.pixel_unshuffle(x, 2))
        return F.avg_pool2d(x, 2)


class SqueezeExcite(nn.Module):
    """Channels weighted by their means."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(shape.width, 4, 1), nn.Conv2d(4, shape.width, 1)
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))


class ConvNeXt(nn.Module):
    """Depthwise convolution, layer norm over channels behind a permutation, an MLP, a layer scale."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape.width, shape.width, 3, padding=1, groups=shape.width)
        self.norm = nn.LayerNorm(shape.width)
        self.up, self.down = nn.Linear(shape.width, 2 * shape.width), nn.Linear(2 * shape.width, shape.width)
        self.scale = nn.Parameter(torch.full((shape.width,), 0.5))
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class SpatialAttention(nn.Module):
    """Attention over the places of an image, as diffusion U-Nets have it."""

    def __init__(self, shape: Shape, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(2, shape.width)
        self.fused, self.out = nn.Conv2d(shape.width, 3 * shape.width, 1), nn.Conv2d(shape.width, shape.width, 1)
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        rows, width, height, _ = x.shape
        query, key, value = self.fused(self.norm(x)).view(rows, 3, self.heads, -1, height * height).unbind(1)
        mixed = F.scaled_dot_product_attention(query.transpose(-2, -1), key.transpose(-2, -1), value.transpose(-2, -1))
        return x + self.out(mixed.transpose(-2, -1).reshape(rows, width, height, height))


class Bottleneck(nn.Module):
    """ResNet's block: three convolutions with batch norm, in place where it can be, and a skip."""

    def __init__(self, shape: Shape, inplace: bool) -> None:
        super().__init__()
        width = shape.width
        self.body = nn.Sequential(
            nn.Conv2d(width, width // 2, 1, bias=False), nn.BatchNorm2d(width // 2), nn.ReLU(inplace),
            nn.Conv2d(width // 2, width // 2, 3, padding=1, bias=False), nn.BatchNorm2d(width // 2), nn.ReLU(inplace),
            nn.Conv2d(width // 2, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.act = nn.ReLU(inplace)
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.act(self.body(x) + x)


class Branches(nn.Module):
    """Inception's block: branches joined over channels, or summed, or stacked and mixed."""

    def __init__(self, shape: Shape, join: str) -> None:
        super().__init__()
        width, self.join = shape.width, join
        self.one = nn.Conv2d(width, width // 2 if join == "cat" else width, 1)
        self.two = nn.Sequential(
            nn.Conv2d(width, 4, 1),
            nn.ReLU(),
            nn.Conv2d(4, width - width // 2 if join == "cat" else width, 3, padding=1),
        )
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if self.join == "cat":
            return torch.cat([self.one(x), self.two(x)], 1)
        if self.join == "stack":
            return torch.stack([self.one(x), self.two(x)], 1).amax(1)
        return self.one(x) + self.two(x)


class InnerUNet(nn.Module):
    """Down, up, and a skip by concatenation."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.down = nn.Conv2d(width, width, 3, 2, 1)
        self.up = nn.ConvTranspose2d(width, width, 2, 2)
        self.join = nn.Conv2d(2 * width, width, 3, padding=1)
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        up = self.up(F.silu(self.down(x)))[..., : x.shape[2], : x.shape[3]]
        return self.join(torch.cat([x, up], 1))


class ToChannelsLast(nn.Module):
    """The same numbers in another memory format."""

    def __init__(self, shape: Shape, back: bool) -> None:
        super().__init__()
        self.format = torch.contiguous_format if back else torch.channels_last
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return x.contiguous(memory_format=self.format)


class Patches(nn.Module):
    """From an image to a sequence of patches, by a convolution, a flattening or unfold."""

    def __init__(self, shape: Shape, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "flat":
            self.out_shape = shape.as_kind("sequence", shape.width, shape.length**2)
            return
        self.out_shape = shape.as_kind("sequence", width, (shape.length // 2) ** 2)
        if kind == "conv":
            self.conv = nn.Conv2d(shape.width, width, 2, 2)
        else:
            self.linear = nn.Linear(4 * shape.width, width)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if self.kind == "flat":
            return x.flatten(2).transpose(1, 2)
        if self.kind == "conv":
            return self.conv(x).flatten(2).transpose(1, 2)
        if self.kind == "unfold":
            return self.linear(F.unfold(x, 2, stride=2).transpose(1, 2))
        rows, width, height, _ = x.shape
        half = height // 2
        y = x[..., : 2 * half, : 2 * half].reshape(rows, width, half, 2, half, 2).permute(0, 2, 4, 1, 3, 5)
        return self.linear(y.reshape(rows, half * half, 4 * width))


class PoolImage(nn.Module):
    """From an image to a vector."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.out_shape = shape.as_kind("vector", shape.width * shape.length**2 if kind == "flat" else shape.width)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if self.kind == "flat":
            return x.flatten(1)
        if self.kind == "max":
            return x.amax((2, 3))
        if self.kind == "adaptive":
            return F.adaptive_avg_pool2d(x, 1).flatten(1)
        return x.mean((2, 3))
