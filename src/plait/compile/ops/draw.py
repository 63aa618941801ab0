"""Random numbers by global position: an element of a tensor gets the same number under every plan.

A global tensor is divided into chunks along its leading dims. Each chunk has a generator of its own, seeded by
(key, index of the random op in the step, chunk), so that a rank draws only the chunks that its part touches.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from plait.compile.ops.comm_ops import take
from plait.spec.layout import Blocks

CHUNK = 1 << 16  # elements: few enough that a part wastes little, enough that seeding costs little
_MASK = (1 << 64) - 1
_local = threading.local()

Cut = tuple[int, int, int, Blocks]  # coordinate, size, dim, blocks


def draw(
    key: int,
    index: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    kind: str,
    params: tuple[float, ...],
    cuts: tuple[Cut, ...] = (),
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
    fill = _FILL[kind]
    generator = _generator(out.device)
    lead, rows = chunking(tuple(shape))
    seed = _mix(_mix(key & _MASK) ^ index)
    if not cuts:
        flat = out.view(-1)
        for number, (start, stop) in enumerate(_spans(tuple(shape), lead, rows)):
            fill(flat[start:stop], generator.manual_seed(_mix(seed ^ number)), params)
        return out
    kept = [torch.arange(n) for n in shape]
    for coordinate, size, dim, blocks in cuts:
        kept[dim] = take(kept[dim], coordinate, size, 0, blocks)
    tail = [(d, k) for d, k in enumerate(kept) if d > lead and len(k) != shape[d]]
    per_row = math.ceil(shape[lead] / rows) if shape else 1
    wanted = kept[lead].tolist() if shape else [0]
    for place in itertools.product(*(range(len(kept[d])) for d in range(lead))):
        first = 0
        for d, i in enumerate(place):
            first = first * shape[d] + int(kept[d][i])
        target = out[place] if place else out
        for block, (start, stop) in _runs(wanted, rows):
            low = block * rows
            high = min(low + rows, shape[lead])
            generator.manual_seed(_mix(seed ^ (first * per_row + block)))
            whole = stop - start == high - low and not tail
            if whole:
                fill(target[start:stop].view(-1), generator, params)
                continue
            chunk = torch.empty((high - low, *shape[lead + 1 :]), dtype=dtype, device=device)
            fill(chunk.view(-1), generator, params)
            if stop - start != high - low:
                chunk = chunk[torch.tensor([r - low for r in wanted[start:stop]], device=chunk.device)]
            for d, k in tail:
                chunk = chunk.index_select(d - lead, k.to(chunk.device))
            target[start:stop] = chunk
    return out


def chunking(shape: tuple[int, ...]) -> tuple[int, int]:
    """(lead, rows): a chunk has up to `rows` indices along dim `lead`, and all of the dims after it."""
    for lead in range(len(shape)):
        inner = math.prod(shape[lead + 1 :])
        if inner <= CHUNK:
            return lead, max(1, min(shape[lead], CHUNK // max(inner, 1)))
    return 0, 1


def _spans(shape: tuple[int, ...], lead: int, rows: int) -> Iterator[tuple[int, int]]:
    """The range of each chunk in the flat tensor."""
    if not shape:
        yield 0, 1
        return
    inner = math.prod(shape[lead + 1 :])
    slab = shape[lead] * inner
    for start in range(0, math.prod(shape), slab):
        for low in range(0, slab, rows * inner):
            yield start + low, start + min(low + rows * inner, slab)


def _runs(wanted: list[int], rows: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """For each chunk that the ascending `wanted` rows touch: its number, and the range of positions in `wanted`."""
    start = 0
    while start < len(wanted):
        block, stop = wanted[start] // rows, start
        while stop < len(wanted) and wanted[stop] // rows == block:
            stop += 1
        yield block, (start, stop)
        start = stop


def _mix(x: int) -> int:
    """The finalizer of splitmix64: similar inputs give unrelated 64-bit numbers."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _generator(device: torch.device) -> torch.Generator:
    """This thread's generator for the device."""
    made: dict[torch.device, torch.Generator] = _local.__dict__.setdefault("generators", {})
    if device not in made:
        made[device] = torch.Generator(device)
    return made[device]


_FILL: dict[str, Callable[[Tensor, torch.Generator, tuple[float, ...]], Any]] = {
    "bernoulli": lambda t, g, p: t.bernoulli_(p[0], generator=g),
    "uniform": lambda t, g, p: t.uniform_(p[0], p[1], generator=g),
    "normal": lambda t, g, p: t.normal_(p[0], p[1], generator=g),
    "randint": lambda t, g, p: t.random_(int(p[0]), int(p[1]), generator=g),
    "exponential": lambda t, g, p: t.exponential_(p[0], generator=g),
    "geometric": lambda t, g, p: t.geometric_(p[0], generator=g),
    "cauchy": lambda t, g, p: t.cauchy_(p[0], p[1], generator=g),
    "log_normal": lambda t, g, p: t.log_normal_(p[0], p[1], generator=g),
}


def micro_key(key: int, index: int) -> int:
    """The key of a microbatch's random draws; that of the first is the step's key."""
    return (key + index * 0x9E3779B97F4A7C15) & ((1 << 62) - 1)
