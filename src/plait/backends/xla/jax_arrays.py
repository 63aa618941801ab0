"""Tensors of torch as arrays of jax, and back, and the settings of jax under which plait computes, for one thread."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
import torch
from torch import Tensor

from plait.backends.xla.lowerings.table import jax_dtype, torch_dtype

# dtypes that numpy knows only through another package: by an integer dtype of the same size
_BY_BITS = {1: torch.uint8, 2: torch.int16}


def _is_foreign(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 or str(dtype).startswith("torch.float8")


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy of a tensor in host memory."""
    tensor = tensor.detach().cpu().resolve_conj().contiguous()
    if _is_foreign(tensor.dtype):
        return tensor.view(_BY_BITS[tensor.dtype.itemsize]).numpy().view(jax_dtype(tensor.dtype)).copy()
    return tensor.numpy().copy()


def to_torch(array: jax.Array | np.ndarray) -> Tensor:
    """A copy of an array of any sharding, whole, in host memory. Waits for the array."""
    values = np.array(array)
    dtype = torch_dtype(array.dtype)
    if _is_foreign(dtype):
        bits = _BY_BITS[dtype.itemsize]
        return torch.from_numpy(values.view(np.dtype(str(bits).removeprefix("torch.")))).view(dtype)
    return torch.from_numpy(values)


def bytes_on_a_device(array: jax.Array) -> int:
    """The bytes of an array on each of its devices, also of one whose memory an update has taken over."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def put(tensor: Tensor, sharding: jax.sharding.Sharding) -> jax.Array:
    """A copy of a tensor on the devices of a sharding."""
    array: jax.Array = jax.device_put(to_numpy(tensor), sharding)
    return array


@contextmanager
def as_in_torch() -> Iterator[None]:
    """Context in which dtypes and products are those of PyTorch.

    Integers have 64 bits and float64 is there, and float32 is multiplied as float32, where a TPU would by default take
    bfloat16. A user's own jax code is not affected.
    """
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield
