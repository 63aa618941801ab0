"""Memoized shapes of results: layers repeat, and a call on tensors of the same shapes and strides has known results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.utils._mode_utils import no_dispatch

_Spec = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def spec_of(tensor: Tensor) -> _Spec:
    """The shape, strides, dtype and device of a tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def fake_of(spec: _Spec, mode: FakeTensorMode) -> FakeTensor:
    """A new fake tensor of that geometry, with a memory of its own."""
    shape, stride, dtype, device = spec
    with no_dispatch():
        return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


class ShapeMemo:
    """Remembers the results of calls on fake tensors. Only for ops whose results have memory of their own."""

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}

    def call(
        self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any], mode: FakeTensorMode | None = None
    ) -> Any:
        """`run(*args, **kwargs)`, or its earlier result for tensors of the same shapes, strides and dtypes.

        With `mode` every call gets new tensors. Without it calls share tensors, which must not be changed or bound.
        """
        key = (func, frozen(args, spec_of), frozen(kwargs, spec_of))
        if key not in self._found:
            result = run(*args, **kwargs)
            self._found[key] = result if mode is None else _map(result, spec_of)
            return result
        found = self._found[key]
        return found if mode is None else _unmap(found, mode)


class StepMode(FakeTensorMode):
    """The mode of one step's fake tensors. Passes and plans of the step share what they find out about calls on them.

    shapes          results of calls, which must not be changed or bound
    decompositions  graphs of the simpler ops of a call, by the call and its arguments
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.shapes = ShapeMemo()
        self.decompositions: dict[Any, GraphModule] = {}


def _map(result: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(result, (tuple, list)):
        return [_map(part, change) for part in result]
    return change(result) if isinstance(result, Tensor) else result


def _unmap(found: Any, mode: FakeTensorMode) -> Any:
    if isinstance(found, list):
        return tuple(_unmap(part, mode) for part in found)
    return fake_of(found, mode) if isinstance(found, tuple) else found


def frozen(value: Any, tensor: Callable[[Tensor], Any]) -> Any:
    """A hashable key for the arguments of a call, which distinguishes 1 from 1.0 and True; `tensor` makes that of
    one."""
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, (tuple, list)):
        return tuple([frozen(part, tensor) for part in value])
    if isinstance(value, dict):
        return tuple([(key, frozen(part, tensor)) for key, part in value.items()])
    if isinstance(value, slice):
        return (slice, *(frozen(part, tensor) for part in (value.start, value.stop, value.step)))
    if isinstance(value, float):
        return (float, value.hex())
    return (type(value), value)
