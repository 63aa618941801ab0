"""How large an optimizer's state will be, before it has any: found out on a small tensor of as many dims."""

from __future__ import annotations

import math
from typing import Any

import torch

from plait.backends.eager.rewrites.offload_ops import is_large
from plait.engine.trying import tried

_Forms = list[tuple[tuple[int, ...], torch.dtype]]


class Foresight:
    """Tries the optimizer once for each kind of parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._found: dict[Any, _Forms] = {}

    def state_bytes(self, group: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> list[int]:
        """Bytes of each large tensor of a parameter's state. Empty for an optimizer that cannot be tried."""
        small = tuple(min(n, 2 + dim) for dim, n in enumerate(shape))
        key = (id(group), small, dtype)
        if key not in self._found:
            self._found[key] = self._try(group, small, dtype)
        found = [(math.prod(_enlarged(form, small, shape)), d) for form, d in self._found[key]]
        return [num * d.itemsize for num, d in found if is_large(num)]

    def _try(self, group: dict[str, Any], small: tuple[int, ...], dtype: torch.dtype) -> _Forms:
        toy = torch.zeros(small, dtype=dtype)
        try:
            state = tried(self._optimizer, group, [toy])[toy]
        except Exception:  # any optimizer is welcome; room is then set aside as its state appears
            return []
        return [(tuple(value.shape), value.dtype) for value in state.values() if torch.is_tensor(value)]


def _enlarged(found: tuple[int, ...], small: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(found) != len(shape):
        return found
    return tuple(n if f == s else f for f, s, n in zip(found, small, shape, strict=True))
