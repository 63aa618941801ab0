"""The settings of jax under which plait computes, for the present thread only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def as_in_torch() -> Iterator[None]:
    """Context in which dtypes and products are those of PyTorch.

    Integers have 64 bits and float64 is there, and float32 is multiplied as float32, where a TPU would by default take
    bfloat16. A user's own jax code is not affected.
    """
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield
