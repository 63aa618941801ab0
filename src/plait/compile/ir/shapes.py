"""Memoized shapes of results: layers repeat, and a call on tensors of the same shapes and strides has known results.

A result that is not known yet comes from the op's kernel for the meta device, if that kernel alone decides it: the mode
of fake tensors takes four to ten times as long for the same shapes. Results of such ATen kernels depend on nothing
else, so all steps of the process share them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_impls import op_implementations_checks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.node import Target
from torch.utils._mode_utils import no_dispatch

from plait.compile.ops import op_spec
from plait.compile.ops.base import Args, Kwargs

_Spec = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def spec_of(tensor: Tensor) -> _Spec:
    """The shape, strides, dtype and device of a tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def fake_of(spec: _Spec, mode: FakeTensorMode) -> FakeTensor:
    """A new fake tensor of that geometry, with a memory of its own."""
    shape, stride, dtype, device = spec
    with no_dispatch():
        return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


MOST_KEPT = 1 << 16  # results that the process remembers


class ProcessMemo(dict[Hashable, Any]):
    """A dict that all steps of a process share; it begins anew when it has grown too large."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: object, value: object) -> None:
        if len(self) >= self._most:
            self.clear()
        super().__setitem__(key, value)


_by_kernel = ProcessMemo(MOST_KEPT)  # what kernels for the meta device gave, by the call and the default dtype


class ShapeMemo:
    """Remembers the results of calls on fake tensors. Only for ops whose results have memory of their own.

    Calls without tensors, such as arange, run in `mode`, or what they make would have values.
    """

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        self._found: dict[Hashable, Any] = {}
        self._mode = mode

    def call(
        self, func: Target, args: Args, kwargs: Kwargs, run: Callable[..., Any], mode: FakeTensorMode | None = None
    ) -> Any:
        """`run(*args, **kwargs)`, or its earlier result for tensors of the same shapes, strides and dtypes.

        With `mode` every call gets new tensors. Without it calls share tensors, which must not be changed or bound.
        """
        key = (func, frozen(args, spec_of), frozen(kwargs, spec_of))
        if key not in self._found:
            result = on_meta(func, args, kwargs, key) if run is func and needs_shapes_only(func) else None
            if result is None:
                with self._mode_without(args, kwargs):
                    result = run(*args, **kwargs)
            self._found[key] = result if mode is None else specs_of(result)
            return result
        found = self._found[key]
        return found if mode is None else fakes_of(found, mode)

    def _mode_without(self, args: Any, kwargs: Any) -> AbstractContextManager[object]:
        """The mode, for a call without tensors."""
        given = any(True for _ in _tensors((*args, *kwargs.values())))
        return nullcontext() if given or self._mode is None else self._mode


@functools.cache
def needs_shapes_only(op: Target) -> bool:
    """Whether an op's kernel for the meta device gives the shapes, strides and dtypes of its results on every device,
    and the mode of fake tensors has no rule of its own for the op."""
    return _runs_on_meta(op) and not any(is_own(op) for is_own, _ in op_implementations_checks)


@functools.cache
def _runs_on_meta(op: Target) -> bool:
    """Whether an op has a kernel for the meta device, and its results are alike on all devices."""
    row = op_spec(op)
    if not isinstance(op, OpOverload) or not row.known or row.by_device or row.random is not None:
        return False
    keys = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)


def on_meta(func: Any, args: Args, kwargs: Kwargs, key: tuple[object, ...] | None = None) -> Any:
    """The result of a call on fake tensors of one device, by the op's kernel for the meta device.

    None if that kernel is not enough, or if it raises, as the call itself then will. `key` identifies the call by the
    geometry of its tensors; with it, an earlier result in this process is used again."""
    if kwargs.get("device") is not None:
        return None
    fakes = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
    first = fakes[0] if fakes else None
    if not isinstance(first, FakeTensor) or any(_has_values(fake) for fake in fakes):
        return None
    mode, device = first.fake_mode, first.device
    known = None if key is None or func.namespace != "aten" else (*key, torch.get_default_dtype())
    if known in _by_kernel:
        return fakes_of(_by_kernel[known], mode)
    if any(fake.device != device for fake in fakes):
        return None
    try:
        with torch._C.DisableTorchFunction(), no_dispatch():
            given = _replaced(args, _meta_like), {name: _replaced(value, _meta_like) for name, value in kwargs.items()}
            result = _replaced(func(*given[0], **given[1]), lambda meta: FakeTensor(mode, meta, device))
    except Exception:
        return None
    if known is not None:
        _by_kernel[known] = specs_of(result)
    return result


def _has_values(tensor: Tensor) -> bool:
    """Whether a result may depend on more than the tensor's geometry."""
    return not isinstance(tensor, FakeTensor) or tensor.constant is not None


def _meta_like(tensor: Tensor) -> Tensor:
    shape, stride, dtype, _ = spec_of(tensor)
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def view_on_meta(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """The views that a view op returns of one fake tensor, by the op's kernel for the meta device. They share its
    memory.

    None if that kernel is not enough, or if it raises, as the call itself then will. The rules for views in the mode of
    fake tensors are not needed, because they are for symbolic sizes."""
    base = args[0] if args else None
    if not isinstance(base, FakeTensor) or _has_values(base) or not _runs_on_meta(func):
        return None
    if any(True for _ in _tensors((*args[1:], *kwargs.values()))):
        return None
    try:
        with torch._C.DisableTorchFunction(), in_kernel_invocation_manager(base.fake_mode):
            found = func(*args, **kwargs)
    except Exception:
        return None
    return _replaced(found, lambda view: FakeTensor(base.fake_mode, view, base.device))


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors in a value, and in its tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def _replaced(value: object, change: Callable[[Tensor], Tensor]) -> Any:
    """A value with the tensors in its tuples and lists changed."""
    if isinstance(value, (tuple, list)):
        return type(value)([_replaced(part, change) for part in value])
    return change(value) if isinstance(value, Tensor) else value


class StepMode(FakeTensorMode):
    """The mode of one step's fake tensors. Passes and plans of the step share its results.

    shapes  results of calls, which must not be changed or bound
    holds   properties that were tried on samples (ir/samples.py), by the computation that was tried
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.shapes = ShapeMemo(self)
        self.holds: dict[Hashable, bool] = {}


def specs_of(result: object) -> Any:
    """A result of a call with each tensor as its geometry, for `fakes_of`."""
    if isinstance(result, (tuple, list)):
        return [specs_of(part) for part in result]
    return spec_of(result) if isinstance(result, Tensor) else result


def fakes_of(specs: object, mode: FakeTensorMode) -> Any:
    """New fake tensors of the geometry that `specs_of` found, several as a tuple."""
    if isinstance(specs, list):
        return tuple(fakes_of(part, mode) for part in specs)
    return fake_of(specs, mode) if isinstance(specs, tuple) else specs


def frozen(value: object, tensor: Callable[[Tensor], Hashable]) -> Hashable:
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
