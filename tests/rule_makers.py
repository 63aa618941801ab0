"""Small random tensors, the same in every run. Sizes in samples are multiples of 2 and 3: most shards divide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_made = torch.Generator().manual_seed(0)
Args = tuple[Any, ...]


def f(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_made)


def u(*shape: int) -> Tensor:
    """Between 0.1 and 0.9."""
    return torch.rand(shape, dtype=torch.float64, generator=_made) * 0.8 + 0.1


def i(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=_made)


def b(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_made) > 0.5


def op_of(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload or "default", None)


def split(args: Args) -> tuple[Args, dict[str, Any]]:
    """A dict at the end holds keyword arguments."""
    return (args[:-1], args[-1]) if args and isinstance(args[-1], dict) else (args, {})
