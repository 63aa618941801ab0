"""Lossy coding of float32 for transfer: as bf16, fp8, int8 or int4, and back.

Codes coarser than bf16 work on blocks of 256 numbers. Each block has a scale, which maps its largest number to the
largest code (Dettmers 2016, "8-Bit Approximations for Parallelism in Deep Learning"). Coding rounds to nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.cost.compressed_bytes import BLOCK

_LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}  # the largest code; fp8 is e4m3


def encode(numbers: Tensor, kind: str) -> Tensor:
    """Encode [..., n] float32, n a multiple of BLOCK, as [..., coded_bytes(n)] uint8."""
    if kind == "bf16":
        return numbers.to(torch.bfloat16).view(torch.uint8)
    blocks = numbers.unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True) / _LARGEST[kind]
    scaled = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)
    if kind == "fp8":
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    else:
        codes = scaled.round_().to(torch.int8).view(torch.uint8).flatten(-2)
        if kind == "int4":
            low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
            codes = (low & 15) | (high << 4)
    return torch.cat([codes, scales.flatten(-2).contiguous().view(torch.uint8)], -1)


def decode(coded: Tensor, kind: str, num: int) -> Tensor:
    """The inverse of `encode`: [..., num] float32 from the bytes."""
    if kind == "bf16":
        return coded.contiguous().view(torch.bfloat16).float()
    num_scales = num // BLOCK * 4
    codes, scales = coded.split([coded.shape[-1] - num_scales, num_scales], -1)
    if kind == "fp8":
        numbers = codes.contiguous().view(torch.float8_e4m3fn).float()
    else:
        if kind == "int4":  # shift up, then arithmetically down, to extend the sign
            codes = torch.stack([codes << 4, codes & 240], -1).flatten(-2).view(torch.int8) >> 4
        numbers = codes.contiguous().view(torch.int8).float()
    blocks = numbers.unflatten(-1, (-1, BLOCK)) * scales.contiguous().view(torch.float32).unsqueeze(-1)
    return blocks.flatten(-2)  # type: ignore[no-any-return]
