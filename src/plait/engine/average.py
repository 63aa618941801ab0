"""An exponential moving average of the weights, kept as each rank has them (Polyak and Juditsky 1992)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.errors import PlanError


class _Holder(Protocol):
    @property
    def parameters(self) -> Mapping[str, Any]: ...
    def local(self, name: str) -> Tensor | None: ...
    def set_local(self, name: str, part: Tensor) -> None: ...
    def updated(self) -> None: ...


class MovingAverage:
    """After each step average = decay * average + (1 - decay) * weights; it begins with the weights that are there.

    Of weights in half precision it is float32. Buffers, such as running statistics, are those of the model.
    """

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise PlanError(f"decay={decay}: of a moving average it is at least 0 and below 1, such as 0.999")
        self.decay = decay
        self.tensors: dict[str, Tensor] = {}  # this rank's part of each, by name
        self._holder: _Holder | None = None

    def begin(self, holder: _Holder) -> None:
        """Take the weights that are there as the average."""
        self._holder = holder
        for name in holder.parameters:
            part = holder.local(name)
            assert part is not None
            self.tensors[name] = part.to(self.dtype_of(part.dtype), copy=True)

    @staticmethod
    def dtype_of(dtype: torch.dtype) -> torch.dtype:
        """Of the average of a parameter of this type."""
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

    @torch.no_grad()
    def update(self) -> None:
        """A step was taken."""
        assert self._holder is not None
        for name, average in self.tensors.items():
            part = self._holder.local(name)
            assert part is not None
            average.lerp_(part.to(average), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the trainer's weights are the average: to evaluate, export, or gather it. Do not step."""
        if self._holder is None:
            raise PlanError("there is no average yet: call trainer.prepare(batch) or trainer.step(batch) first")
        replica = self._holder
        own = {name: part.clone() for name in self.tensors if (part := replica.local(name)) is not None}
        self._put(self.tensors)
        try:
            yield
        finally:
            self._put(own)

    def _put(self, values: dict[str, Tensor]) -> None:
        assert self._holder is not None
        for name, value in values.items():
            self._holder.set_local(name, value)
        self._holder.updated()
