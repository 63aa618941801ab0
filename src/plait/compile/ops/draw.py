"""Random numbers by global position: an element of a tensor gets the same number under every plan, and on every device.

The number of an element is a function of the step's key, of the number of the random op in the step, and of the
element's place in the global tensor (compile/ops/fill_random.py), so that a rank draws the part that it has.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from plait.compile.ops.comm_ops import take
from plait.compile.ops.fill_random import FILLS, KeptIndices, fill_part
from plait.compile.ops.philox import Seed
from plait.spec.layout import Blocks

_MASK = (1 << 64) - 1

DrawCut = tuple[int, int, int, Blocks]  # coordinate, size, dim, blocks


def draw(
    key: int,
    index: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    kind: str,
    params: tuple[float, ...],
    cuts: tuple[DrawCut, ...] = (),
) -> Tensor:
    """Draw a rank's part of a random tensor.

    Args:
        key: the step's key.
        index: number of the random op in the step.
        shape: the global shape.
        dtype: of the result.
        device: of the result.
        kind: the distribution, with its params: `bernoulli` (p,), `uniform` (low, high), `normal` (mean, std),
            `randint` (low, high exclusive), `exponential` (rate,), `geometric` (p,), `cauchy` (median, sigma),
            `log_normal` (mean, std).
        params: see `kind`.
        cuts: (coordinate, size, dim, blocks), applied in order, each as `comm_ops.take` does.
    """
    local = list(shape)
    for _, size, dim, _ in cuts:
        local[dim] //= size
    out = torch.empty(local, dtype=dtype, device=device)
    if out.is_meta or isinstance(out, FakeTensor) or out.numel() == 0:
        return out
    fill(out, seed_of(key), index, shape, functools.partial(kept_by, cuts, shape), kind, params)
    return out


def fill(
    out: Tensor,
    seed: Seed,
    index: int,
    shape: Sequence[int],
    kept: KeptIndices,
    kind: str,
    params: Iterable[float],
) -> None:
    """Fill a contiguous tensor with the part `kept` of a random tensor of this shape."""
    named = FILLS[kind]
    fill_part(out, seed, index, shape, kept, lambda words, block: named(words, block, *params))


def kept_by(cuts: Iterable[DrawCut], shape: Sequence[int], device: torch.device) -> list[Tensor | None]:
    """For each dim of a global tensor the indices that a rank has, or None for all of them."""
    kept: list[Tensor | None] = [None] * len(shape)
    for coordinate, size, dim, blocks in cuts:
        before = kept[dim]
        indices = torch.arange(shape[dim], device=device) if before is None else before
        kept[dim] = take(indices, coordinate, size, 0, blocks)
    return kept


def seed_of(key: int) -> int:
    """The 64 bits from which the numbers of a step with this key follow."""
    return _mix(key & _MASK)


def _mix(x: int) -> int:
    """The finalizer of splitmix64: similar inputs give unrelated 64-bit numbers."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def micro_key(key: int, index: int) -> int:
    """The key of a microbatch's random draws; that of the first is the step's key."""
    return (key + index * 0x9E3779B97F4A7C15) & ((1 << 62) - 1)
