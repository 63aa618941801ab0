"""Random numbers by global position: an element of a tensor gets the same number under every plan, and on every device.

The number of an element is a function of the step's key, of the number of the random op in the step, and of the
element's place in the global tensor, so that a rank draws the part that it has.

A tensor is seen as rows of its last dim (of dims of size 1 at the end none counts), each in groups of four elements,
the last of which may be cut short. The counter of a group is its number in the whole tensor, so that a part is drawn
without the rest, and without state. On CPU the words are computed in blocks that fit its caches, on other devices at
once: by one kernel where there is Triton, else by calls of torch (compile/ops/philox.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from plait.compile.ops import philox
from plait.compile.ops.comm_ops import take
from plait.compile.ops.philox import CalledWords, Groups, Seed, Words
from plait.spec.layout import Blocks

_CACHED, _AT_ONCE = 1 << 15, 1 << 25  # groups in a block, for each thread of a CPU, and on other devices


# For each dim of a whole tensor the ascending indices that a part has, or None for all: on the device that is asked
# for, because to send them there would make the host wait.
KeptIndices = Callable[[torch.device], Sequence[Tensor | None]]


def fill_part(
    out: Tensor, seed: Seed, stream: int, shape: Sequence[int], kept: KeptIndices, fill: Callable[[Words, Tensor], None]
) -> None:
    """Fill a part of a random tensor.

    Args:
        out: the part, contiguous.
        seed: of the numbers.
        stream: which of the tensors with this seed it is, from 0 to 2**32 - 1.
        shape: of the whole tensor.
        kept: the part.
        fill: writes numbers of words into a tensor of shape [..., 4].
    """
    groups, places = _groups(list(shape), kept, out.device)
    num_rows, num_columns = len(groups.rows), len(groups.columns)
    target = out if places is None else out.new_empty(num_rows * num_columns * 4)
    target = target.view(num_rows, num_columns, 4)
    most = _CACHED * torch.get_num_threads() if out.device.type == "cpu" else _AT_ONCE
    for rows, columns in _blocks(num_rows, num_columns, most):
        block = Groups(groups.rows[rows], groups.columns[columns], groups.width)
        fill(_words_of(block, seed, stream), target[rows, columns])
    if places is not None:
        out.view(num_rows, -1).copy_(target.flatten(1).index_select(1, places))


def _groups(shape: list[int], kept: KeptIndices, device: torch.device) -> tuple[Groups, Tensor | None]:
    """The groups that a part needs, and the places of its elements in them, or None if it has all, in their order."""
    indices = list(kept(device))
    while shape and shape[-1] == 1:
        shape, indices = shape[:-1], indices[:-1]
    last = shape[-1] if shape else 1
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for n, some in zip(shape[:-1], indices[:-1], strict=True):
        own = torch.arange(n, device=device) if some is None else some
        rows = (rows[:, None] * n + own).view(-1)
    width = -(-last // 4)
    some = indices[-1] if shape else None
    if some is None:
        places = None if last % 4 == 0 else torch.arange(last, device=device)
        return Groups(rows, torch.arange(width, device=device), width), places
    on_host = kept(torch.device("cpu"))[len(shape) - 1]
    assert on_host is not None
    if _has_whole_groups(on_host):
        return Groups(rows, some[::4] // 4, width), None
    return Groups(rows, some // 4, width), torch.arange(0, 4 * len(some), 4, device=device) + some % 4


def _has_whole_groups(indices: Tensor) -> bool:
    if len(indices) % 4:
        return False
    fours = indices.view(-1, 4)
    return bool((fours == fours[:, :1] // 4 * 4 + torch.arange(4)).all())


def _blocks(num_rows: int, num_columns: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Slices of rows and columns with up to `most` groups each."""
    across = max(1, min(num_columns, most))
    down = max(1, most // across)
    for row in range(0, num_rows, down):
        for column in range(0, num_columns, across):
            yield slice(row, row + down), slice(column, column + across)


def _words_of(groups: Groups, seed: Seed, stream: int) -> Words:
    on_gpu = groups.rows.device.type == "cuda" and philox.AVAILABLE
    return philox.KernelWords(groups, seed, stream) if on_gpu else CalledWords(groups, seed, stream)


# Distributions. Logarithms and the like are computed in float64, so that kernels that round the last bit differently
# give the same float32.


def _unit(words: Words, bits: int) -> Tensor:
    """Multiples of 2**-bits in [0, 1), float64."""
    ints = torch.stack(tuple(words.four(0)), -1)
    if bits > 32:
        ints = (ints << (bits - 32)) | (torch.stack(tuple(words.four(1)), -1) >> (64 - bits))
    else:
        ints = ints >> (32 - bits)
    return ints.double().mul_(2.0**-bits)


def _inside(words: Words, out: Tensor) -> Tensor:
    """Numbers in (0, 1), float64, as fine as is of use for the dtype of `out`."""
    bits = 52 if out.dtype == torch.float64 else 32
    return _unit(words, bits).add_(2.0 ** -(bits + 1))


def _normal(words: Words, out: Tensor, mean: float, std: float) -> Tensor:
    """By the method of Box and Muller (1958)."""
    one, two = _inside(words, out).unflatten(-1, (2, 2)).unbind(-1)
    radius, angle = one.log_().mul_(-2).sqrt_(), two.mul_(2 * math.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), -1).flatten(-2).mul_(std).add_(mean)


def bernoulli(words: Words, out: Tensor, p: float) -> None:
    words.below(round(p * (1 << 32)), out)


def uniform(words: Words, out: Tensor, low: float, high: float) -> None:
    bits = {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}.get(out.dtype, 24)
    out.copy_(_unit(words, bits).mul_(high - low).add_(low))


def normal(words: Words, out: Tensor, mean: float, std: float) -> None:
    out.copy_(_normal(words, out, mean, std))


def log_normal(words: Words, out: Tensor, mean: float, std: float) -> None:
    out.copy_(_normal(words, out, mean, std).exp_())


def randint(words: Words, out: Tensor, low: int, high: int) -> None:
    low, span = int(low), int(high) - int(low)
    ints = torch.stack(tuple(words.four(0)), -1)
    if span <= 1 << 16:  # beyond, the numbers would not be equally likely
        out.copy_(((ints * span) >> 32).add_(low))
    else:
        more = torch.stack(tuple(words.four(1)), -1)
        out.copy_((((ints << 31) | (more >> 1)) % span).add_(low))


def exponential(words: Words, out: Tensor, rate: float) -> None:
    out.copy_(_inside(words, out).log_().div_(-rate))


def geometric(words: Words, out: Tensor, p: float) -> None:
    trials = _inside(words, out).log_().div_(math.log1p(-p)).ceil_() if p < 1 else torch.ones_like(out)
    out.copy_(trials.clamp_(min=1))


def cauchy(words: Words, out: Tensor, median: float, sigma: float) -> None:
    out.copy_(_inside(words, out).sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median))


FILLS: dict[str, Callable[..., None]] = {
    fill.__name__: fill
    for fill in (bernoulli, uniform, normal, randint, exponential, geometric, cauchy, log_normal)
}  # fmt: skip


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
