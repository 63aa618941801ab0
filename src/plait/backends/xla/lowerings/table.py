"""The table of lowerings: for each ATen op of a captured graph, a function that computes it in jax.numpy.

A lowering takes the op's arguments, with jax arrays in place of tensors, and returns an array or a tuple of them. Who
calls it (backends/xla/graph_function.py) converts results to the dtypes that the graph says, so that a lowering only
cares about dtypes in which it computes. One that is registered with `result=True` is also given the shapes and dtypes
of the results, as `result=`.

Ops without a row are written by simpler ones first (backends/xla/graph_function.py), so that the table is short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from jax.typing import DTypeLike
from torch._ops import OpOverload
from torch.fx.node import Target

aten = torch.ops.aten
Lowering = Callable[..., Any]  # -> an array, or a tuple of them
_LoweringT = TypeVar("_LoweringT", bound=Lowering)


@dataclass(frozen=True)
class Result:
    """The shape and dtype of a result, as the captured graph has it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Row:
    """A lowering, and whether it is given the shapes and dtypes of its results."""

    function: Lowering
    wants_result: bool = False


class CannotLower(Exception):
    """An op has a row, but not for these arguments. The text says what is missing."""


LOWERINGS: dict[Target, Row] = {}


def lowers(*ops: OpOverload, result: bool = False) -> Callable[[_LoweringT], _LoweringT]:
    """Register a function as the lowering of these ops."""

    def register(function: _LoweringT) -> _LoweringT:
        for op in ops:
            assert op not in LOWERINGS, f"{op} has two lowerings"
            LOWERINGS[op] = Row(function, result)
        return function

    return register


def jax_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The dtype of jax with the name of torch's."""
    return jnp.dtype(str(dtype).removeprefix("torch."))


def torch_dtype(dtype: DTypeLike) -> torch.dtype:
    """The inverse of `jax_dtype`."""
    return getattr(torch, str(jnp.dtype(dtype)))  # type: ignore[no-any-return]


def is_float(x: Any) -> bool:
    """Whether an array has real or complex numbers."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def wide(x: Array) -> Array:
    """Half precision as float32, in which sums and functions of it are computed; other dtypes as they are."""
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


def floating(x: Array) -> Array:
    """Integers and bools as float32, the default dtype; half precision as float32 too."""
    return wide(x) if is_float(x) else x.astype(jnp.float32)
