"""Memoized shapes of results: layers repeat, and a call on tensors of the same shapes and strides has known results.

What is not known yet is worked out by the op's kernel for the meta device where that is all there is to it. The fake
tensors' own mode takes four to ten times as long for the same shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_impls import op_implementations_checks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from plait.compile.ops import op_spec

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
    """Remembers the results of calls on fake tensors. Only for ops whose results have memory of their own.

    Calls without tensors, such as arange, run in `mode`, or what they make would have values.
    """

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        self._found: dict[Any, Any] = {}
        self._mode = mode

    def call(
        self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any], mode: FakeTensorMode | None = None
    ) -> Any:
        """`run(*args, **kwargs)`, or its earlier result for tensors of the same shapes, strides and dtypes.

        With `mode` every call gets new tensors. Without it calls share tensors, which must not be changed or bound.
        """
        key = (func, frozen(args, spec_of), frozen(kwargs, spec_of))
        if key not in self._found:
            result = on_meta(func, args, kwargs) if run is func and needs_shapes_only(func) else None
            if result is None:
                with self._mode_without(args, kwargs):
                    result = run(*args, **kwargs)
            self._found[key] = result if mode is None else _map(result, spec_of)
            return result
        found = self._found[key]
        return found if mode is None else _unmap(found, mode)

    def _mode_without(self, args: Any, kwargs: Any) -> AbstractContextManager[Any]:
        """The mode, for a call without tensors."""
        given = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs)))
        return nullcontext() if given or self._mode is None else self._mode


@functools.cache
def needs_shapes_only(op: Any) -> bool:
    """Whether an op's kernel for the meta device tells what its results are like on any device: it has one that does
    not ask, and the mode of fake tensors has nothing of its own for the op."""
    row = op_spec(op)
    if not isinstance(op, OpOverload) or not row.known or row.by_device or row.random is not None:
        return False
    keys = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    has_kernel = any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)
    return has_kernel and not any(is_own(op) for is_own, _ in op_implementations_checks)


class _HasValues(Exception):
    """A tensor has values, on which the result may depend."""


def on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a call on fake tensors of one device, by the op's kernel for the meta device; None if that does not
    do, or raises what the call itself will."""
    fakes: list[FakeTensor] = []

    def to_meta(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            raise _HasValues
        fakes.append(tensor)
        shape, stride, dtype, _ = spec_of(tensor)
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def to_fake(tensor: Tensor) -> FakeTensor:
        return FakeTensor(fakes[0].fake_mode, tensor, fakes[0].device)

    if kwargs.get("device") is not None:
        return None
    try:
        with torch._C.DisableTorchFunction(), no_dispatch():
            found = func(*_replaced(args, to_meta), **{key: _replaced(value, to_meta) for key, value in kwargs.items()})
            same_device = len({fake.device for fake in fakes}) == 1
            return _replaced(found, to_fake) if same_device else None
    except Exception:
        return None


def _replaced(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A value with the tensors in its tuples and lists changed."""
    if isinstance(value, (tuple, list)):
        return type(value)([_replaced(part, change) for part in value])
    return change(value) if isinstance(value, Tensor) else value


class StepMode(FakeTensorMode):
    """The mode of one step's fake tensors. Passes and plans of the step share what they find out about calls on them.

    shapes          results of calls, which must not be changed or bound
    decompositions  graphs of the simpler ops of a call, by the call and its arguments
    holds           properties of computations that were tried on samples (ir/samples.py), by what is computed how
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.shapes = ShapeMemo(self)
        self.decompositions: dict[Any, GraphModule] = {}
        self.holds: dict[Any, bool] = {}


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
