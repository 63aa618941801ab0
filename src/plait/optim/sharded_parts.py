"""Optimizers on parameters that are parts of whole tensors on several ranks.

An optimizer whose update of one element depends on others has a method `bind(parts)`, which is called once, before the
first step. An optimizer that was never bound treats its parameters as whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Parts(Protocol):
    """Maps this rank's parameters to the whole tensors that they are parts of.

    All ranks make the same calls in the same order.
    """

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """The shape of the whole tensor."""

    def sums(self, terms: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """For each (parameter, term), the sum of the terms over all parts of the parameter; the same bits on all ranks.

        One call does one all-reduce per mesh axis along which any parameter is sharded, and dtype.
        """

    def place(self, parameter: Tensor, part: Tensor, summed: tuple[int, ...] = ()) -> Tensor:
        """Zeros in the shape of the whole tensor with this rank's part filled in: a term whose sum is the whole.

        `part` has the parameter's dims, except that the dims in `summed`, which count from the end, have size 1 in both
        the part and the whole.
        """

    def take(self, parameter: Tensor, whole: Tensor, summed: tuple[int, ...] = ()) -> Tensor:
        """This rank's part of a whole tensor: the inverse of `place`."""


class WholeTensor:
    """The Parts of one device: every parameter is a whole tensor."""

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        return tuple(parameter.shape)

    def sums(self, terms: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [term for _, term in terms]

    def place(self, parameter: Tensor, part: Tensor, summed: tuple[int, ...] = ()) -> Tensor:
        return part

    def take(self, parameter: Tensor, whole: Tensor, summed: tuple[int, ...] = ()) -> Tensor:
        return whole


class ShardedOptimizer:
    """Base class of optimizers whose updates depend on whole tensors, beside `torch.optim.Optimizer`.

    A subclass implements `_move`.
    """

    _parts: Parts = WholeTensor()

    def bind(self, parts: Parts) -> None:
        """Set the map from parameters to whole tensors."""
        self._parts = parts

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._move()
        return loss

    def _move(self) -> None:
        """Update all parameters that have gradients."""
        raise NotImplementedError
