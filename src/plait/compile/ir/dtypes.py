"""Names of dtypes."""

from __future__ import annotations

import torch

_SHORT = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.bool: "bool"}


def torch_name(dtype: torch.dtype) -> str:
    """The name in torch and in checkpoints: float32, bfloat16..."""
    return str(dtype).removeprefix("torch.")


def dtype_name(dtype: torch.dtype) -> str:
    """The short name that layouts print: f32, bf16, int64..."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def dtype_named(name: str) -> torch.dtype:
    """The inverse of `dtype_name`."""
    found = next((dtype for dtype, short in _SHORT.items() if short == name), None)
    return getattr(torch, name) if found is None else found
