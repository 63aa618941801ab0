"""Gradients on one device, rounded as ranks round their terms of a sum."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from plait.compile.ops.split_sums import LargestParts


class RoundedGradients:
    """Changes gradients by what the rounding of their parts may come to.

    bits   the relative rounding, by parameter
    parts  the parts of the sums of the run: they may cancel, so that they are far larger than the gradient
    """

    def __init__(self, bits: Mapping[str, float], parts: LargestParts) -> None:
        self._bits = bits
        self._parts = parts

    def attach(self, model: nn.Module, generator: torch.Generator) -> None:
        """Change the gradients that the model's parameters get from now on, by random numbers of the generator."""
        named = dict(model.named_parameters())
        for name, bits in self._bits.items():
            if named[name].requires_grad:
                named[name].register_hook(functools.partial(self._changed, bits, generator))

    def _changed(self, bits: float, generator: torch.Generator, gradient: Tensor) -> Tensor:
        if not gradient.numel() or gradient.layout != torch.strided:
            return gradient
        noise = torch.randn(gradient.shape, generator=generator).to(gradient)
        return gradient + bits * self._parts.largest(gradient) * noise
