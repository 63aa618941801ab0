"""Compression of float32 tensors for transfer: lossy codes, and whole tensors that the receiver decompresses alone.

The codes are bf16, fp8, int8 and int4. Codes coarser than bf16 work on blocks of 256 numbers. Each block has a scale,
which maps its largest number to the largest code (Dettmers 2016, "8-Bit Approximations for Parallelism in Deep
Learning"). Coding rounds to nearest.

Replicas compress together in exchange.py. The one difference is PowerSGD: here its two products are those of one
tensor, there those of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from plait.cost.wire_bytes import BLOCK, as_matrix, coded_bytes, num_kept, num_owned
from plait.plan.compression import Compression

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


def first_factor(name: str, num_columns: int, rank: int) -> Tensor:
    """The initial Q of a matrix, [columns, rank], the same on every replica."""
    generator = torch.Generator().manual_seed(sum(name.encode()) + num_columns)
    return torch.randn(num_columns, rank, generator=generator, dtype=torch.float32)


def num_bytes(shape: Sequence[int], compression: Compression) -> int:
    """The size in bytes of a compressed tensor of this shape."""
    num = math.prod(shape)
    if compression.kind == "topk":
        return 8 * num_kept(num, compression)
    if compression.kind == "powersgd":
        return 4 * sum(as_matrix(shape)) * compression.rank
    return coded_bytes(num_owned(num, 1), compression.kind)


def compress(tensor: Tensor, compression: Compression, factors: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Compress a float32 tensor. Returns its bytes, flat uint8, and the tensor that the receiver will decompress.

    `factors` holds PowerSGD's warm start, and is updated: by name, the right factor of the last tensor sent under it.
    """
    flat = tensor.reshape(-1)
    if compression.kind == "topk":
        indices = flat.abs().topk(num_kept(flat.numel(), compression), sorted=False).indices.sort().values
        coded = torch.cat([indices.to(torch.int32).view(torch.uint8), flat[indices].view(torch.uint8)])
    elif compression.kind == "powersgd":
        matrix = tensor.reshape(as_matrix(tensor.shape))
        if name not in factors:
            factors[name] = first_factor(name, matrix.shape[1], compression.rank)
        left = torch.linalg.qr(matrix @ factors[name]).Q
        left = functional.pad(left, (0, compression.rank - left.shape[1]))  # a matrix may have fewer rows than the rank
        factors[name] = right = matrix.T @ left
        coded = torch.cat([left.reshape(-1), right.reshape(-1)]).view(torch.uint8)
    else:
        padded = functional.pad(flat, (0, num_owned(flat.numel(), 1) - flat.numel()))
        coded = encode(padded, compression.kind)
    return coded, decompress(coded, tensor.shape, compression)


def decompress(coded: Tensor, shape: Sequence[int], compression: Compression) -> Tensor:
    """Decompress a tensor of this shape, float32."""
    num = math.prod(shape)
    if compression.kind == "topk":
        indices, values = coded.chunk(2)
        whole = torch.zeros(num, dtype=torch.float32)
        whole[indices.view(torch.int32).long()] = values.view(torch.float32)
    elif compression.kind == "powersgd":
        rows, columns = as_matrix(shape)
        left, right = coded.view(torch.float32).split([rows * compression.rank, columns * compression.rank])
        whole = left.view(rows, -1) @ right.view(columns, -1).T
    else:
        whole = decode(coded, compression.kind, num_owned(num, 1))[:num]
    return whole.reshape(tuple(shape))
