"""Layers on videos or volumes, [rows, width, depth, height, height], whose three sizes are alike; and out of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.shape import Shape

Batch = dict[str, Tensor]


class PaddedConv3d(nn.Conv3d):
    """A convolution that pads its input itself where its kernel is deeper than that.

    Of such a convolution the gradient of the weight, in bfloat16 on CPU, has numbers of memory that nothing was written
    to (torch 2.13 with oneDNN: a kernel of 3 x 1 x 1, padded by 1, on 2 frames shows it).
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.padding_mode != "zeros" or x.shape[2] >= self.kernel_size[0]:
            return super().forward(x)
        depth, *rest = self.padding
        x = F.pad(x, (0, 0, 0, 0, depth, depth))
        return F.conv3d(x, self.weight, self.bias, self.stride, (0, *rest), self.dilation, self.groups)


class Conv3d(nn.Module):
    """A convolution over depth, height and width: whole, or in space and then in time (R(2+1)D); with a norm or not."""

    def __init__(
        self, shape: Shape, out: int, kernel: int, stride: int, groups: int, mode: str, apart: bool, norm: str
    ) -> None:
        super().__init__()
        width, pad = shape.width, kernel // 2
        if apart:
            self.conv: nn.Module = nn.Sequential(
                PaddedConv3d(width, out, (1, kernel, kernel), stride, (0, pad, pad), bias=False),
                PaddedConv3d(out, out, (kernel, 1, 1), 1, (pad, 0, 0)),
            )
        else:
            self.conv = PaddedConv3d(
                width, out, kernel, stride, pad, groups=groups, padding_mode=mode, bias=norm == "none"
            )
        norms = {"batch": nn.BatchNorm3d, "group": lambda out: nn.GroupNorm(2, out), "instance": nn.InstanceNorm3d}
        self.norm = norms[norm](out) if norm != "none" else nn.Identity()
        size = (shape.length - 1) // stride + 1
        self.out_shape = shape.with_width(out).with_length(size)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class Up3d(nn.Module):
    """Twice the size: a transposed convolution, or interpolation and a convolution."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind, width = kind, shape.width
        self.conv: nn.Module = (
            nn.ConvTranspose3d(width, width, 2, 2) if kind == "transposed" else PaddedConv3d(width, width, 3, padding=1)
        )
        self.out_shape = shape.with_length(2 * shape.length)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.conv(x if self.kind == "transposed" else F.interpolate(x, scale_factor=2, mode=self.kind))


class Down3d(nn.Module):
    """Half the size, by pooling."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.out_shape = shape.with_length(shape.length // 2)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return F.max_pool3d(x, 2) if self.kind == "max" else F.avg_pool3d(x, 2)


class PoolVideo(nn.Module):
    """From a video to an image, a sequence of frames or a vector."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind, width, size = kind, shape.width, shape.length
        if kind in ("depth", "middle"):
            self.out_shape = shape.as_kind("image", width, size)
        elif kind == "frames":
            self.out_shape = shape.as_kind("sequence", width, size)
        else:
            self.out_shape = shape.as_kind("vector", width * size**3 if kind == "flat" else width)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if self.kind == "depth":
            return x.amax(2)
        if self.kind == "middle":
            return x[:, :, x.shape[2] // 2]
        if self.kind == "frames":
            return x.mean((3, 4)).transpose(1, 2)
        if self.kind == "flat":
            return x.flatten(1)
        return F.adaptive_avg_pool3d(x, 1).flatten(1) if self.kind == "adaptive" else x.mean((2, 3, 4))


class ToChannelsLast3d(nn.Module):
    """The same numbers in another memory format."""

    def __init__(self, shape: Shape, back: bool) -> None:
        super().__init__()
        self.format = torch.contiguous_format if back else torch.channels_last_3d
        self.out_shape = shape

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return x.contiguous(memory_format=self.format)
