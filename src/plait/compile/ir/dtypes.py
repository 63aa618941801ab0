"""Names of dtypes and of formats."""

from __future__ import annotations

import torch
from torch import Tensor

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


def other_format(tensor: Tensor) -> str:
    """The format of a tensor that is not dense, such as sparse_coo or nested; "" for a dense one."""
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    return "" if tensor.layout == torch.strided else str(tensor.layout).removeprefix("torch.").removeprefix("_")


def not_dense(name: str, tensor: Tensor) -> str:
    """The error message for a tensor that is not dense."""
    kind = other_format(tensor)
    if kind.startswith("sparse"):
        instead = "give its indices and values as two dense tensors, for index_add, or to_dense() of it"
    else:
        instead = "give a padded tensor and a mask" if kind in ("nested", "jagged") else "give a dense tensor"
    return f"{name} is a {kind} tensor, and plait computes with dense ones; {instead}"
