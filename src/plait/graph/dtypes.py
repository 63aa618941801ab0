"""Names of dtypes."""

from __future__ import annotations

import torch


def torch_name(dtype: torch.dtype) -> str:
    """The name that torch and checkpoints know it by: float32, bfloat16..."""
    return str(dtype).removeprefix("torch.")
