"""An exponential moving average of the weights, sharded as the weights are (Polyak and Juditsky 1992)."""

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
    """After each step, average = decay * average + (1 - decay) * weights. It begins with the current weights.

    The average of half-precision weights is float32. Buffers, such as running statistics, are not averaged. Raises
    PlanError for a decay outside [0, 1).
    """

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise PlanError(f"decay={decay}: the decay of a moving average is at least 0 and below 1, such as 0.999")
        self.decay = decay
        self.tensors: dict[str, Tensor] = {}  # by parameter name: this rank's part of the average
        self._holder: _Holder | None = None

    def begin(self, holder: _Holder) -> None:
        """Start the average with the current weights of `holder`."""
        self._holder = holder
        for name in holder.parameters:
            part = holder.local(name)
            assert part is not None
            self.tensors[name] = part.to(self.dtype_of(part.dtype), copy=True)

    @staticmethod
    def dtype_of(dtype: torch.dtype) -> torch.dtype:
        """The dtype of the average of a parameter of this dtype."""
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

    @torch.no_grad()
    def update(self, skipped: Tensor | None = None) -> None:
        """Update the average after a step. `skipped` is 1 if the step made no update, else 0, as a 0-d tensor."""
        assert self._holder is not None
        share = 1 - self.decay
        for name, average in self.tensors.items():
            part = self._holder.local(name)
            assert part is not None
            average.lerp_(part.to(average), share if skipped is None else ((1 - skipped) * share).to(average.dtype))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the trainer's weights are the average, to evaluate, export or gather them. Do not step
        inside."""
        if self._holder is None:
            raise PlanError("there is no average yet: call trainer.prepare(batch) or trainer.step(batch) first")
        parts = self._holder
        own = {name: part.clone() for name in self.tensors if (part := parts.local(name)) is not None}
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
