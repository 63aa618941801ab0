"""Compression of one tensor by a sender, for a receiver that decompresses it alone.

Replicas compress together in exchange.py. The one difference is PowerSGD: here its two products are those of one
tensor, there those of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from plait.cost.compressed_bytes import as_matrix, coded_bytes, num_kept, num_owned
from plait.engine.local_sgd.codec import decode, encode
from plait.engine.local_sgd.exchange import first_factor
from plait.plan.compression import Compression


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
        whole = torch.zeros(num)
        whole[indices.view(torch.int32).long()] = values.view(torch.float32)
    elif compression.kind == "powersgd":
        rows, columns = as_matrix(shape)
        left, right = coded.view(torch.float32).split([rows * compression.rank, columns * compression.rank])
        whole = left.view(rows, -1) @ right.view(columns, -1).T
    else:
        whole = decode(coded, compression.kind, num_owned(num, 1))[:num]
    return whole.reshape(tuple(shape))
