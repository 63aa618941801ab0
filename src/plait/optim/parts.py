"""What an optimizer must know where its parameters are parts of whole tensors that lie on several ranks.

An optimizer whose update of one element depends on others has a method `bind(parts)`. Whoever lays the parameters out
calls it once, before the first step; an optimizer that was never bound has whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Parts(Protocol):
    """How this rank's parameters are parts of whole tensors. All ranks make the same calls in the same order."""

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """The shape of the whole."""

    def sums(self, terms: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Of each (parameter, term) the sum of the terms of all parts of the parameter, the same bits on every rank.

        All of them take one all-reduce for each mesh axis (and dtype) along which anything is cut.
        """

    def place(self, parameter: Tensor, part: Tensor, summed: tuple[int, ...] = ()) -> Tensor:
        """A tensor of zeros as large as the whole, with this rank's part in its place: a term whose sum is the whole.

        `part` has the parameter's dims, but for those `summed` (counted from the end), of size 1 in part and whole.
        """

    def take(self, parameter: Tensor, whole: Tensor, summed: tuple[int, ...] = ()) -> Tensor:
        """This rank's part of the whole; the inverse of `place`."""


class WholeTensor:
    """The parts of one device: every parameter is the whole."""

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        return tuple(parameter.shape)

    def sums(self, terms: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [term for _, term in terms]

    def place(self, parameter: Tensor, part: Tensor, summed: tuple[int, ...] = ()) -> Tensor:
        return part

    def take(self, parameter: Tensor, whole: Tensor, summed: tuple[int, ...] = ()) -> Tensor:
        return whole


class OnParts:
    """What such an optimizer has besides its `torch.optim.Optimizer`, which is its second base: it fills in `_move`."""

    _parts: Parts = WholeTensor()

    def bind(self, parts: Parts) -> None:
        """Take the parameters to be parts of whole tensors."""
        self._parts = parts

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._move()
        return loss

    def _move(self) -> None:
        """Update all parameters that have gradients."""
        raise NotImplementedError
