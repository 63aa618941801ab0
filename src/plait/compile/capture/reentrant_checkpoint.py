"""Activation checkpointing of torch with use_reentrant=True, in a step that is captured.

Its backward pass calls `backward` on leaves, which torch.autograd.grad refuses. The function runs as it is instead: the
gradients are the same, and the plan says which activations are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

_CHECKPOINT_FUNCTION = torch.utils.checkpoint.CheckpointFunction


class _Plain:
    """In place of the autograd function behind checkpoint(use_reentrant=True)."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """The function's result. As torch's it has no gradient if none of the arguments has one."""
        differentiable = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            return function(*args)


@contextmanager
def without_reentrance() -> Iterator[None]:
    """Context in which such checkpoints run their functions as they are."""
    torch.utils.checkpoint.CheckpointFunction = _Plain  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.utils.checkpoint.CheckpointFunction = _CHECKPOINT_FUNCTION  # type: ignore[misc]
