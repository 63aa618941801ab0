"""Higher-order operators as plain ops: flex_attention, scan, associative_scan, map.

Each is run by PyTorch's own definition of it, but for scan. flex_attention becomes products, the user's functions of
scores and positions, and a softmax over written-out scores; a scan becomes its steps. All of that is cut by the rules
of the ops that it is made of: over rows, heads and queries, with what the user's functions read of the batch or of
other tensors. The blocks of a block mask, which say what a kernel may leave out, are not needed.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode

from plait.compile.ops.base import state
from plait.errors import CaptureError

# By the name of the operator, the module of torch._higher_order_ops and the function in it that define it, and the
# names of the function's arguments from the third on, where they are others.
_DEFINITIONS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "flex_attention": ("flex_attention", "math_attention", ()),
    "associative_scan": ("associative_scan", "generic_associative_scan", ("additional_inputs",)),
    "map_impl": ("map", "map_dense", ()),
}
_CHOOSE = ("cond", "while_loop", "switch")
_FLEX = "torch.nn.attention.flex_attention"
_COMPILES = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"


class WrittenOut(TorchFunctionMode):
    """Runs higher-order operators as the ops that define them, and functions under torch.compile as they were written.

    Raises CaptureError for an operator that chooses by a tensor what is computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entered = ExitStack()

    def __enter__(self) -> WrittenOut:
        if (module := sys.modules.get(_FLEX)) is not None:  # else it would compile what it calls
            self._entered.callback(setattr, module, _COMPILES, getattr(module, _COMPILES))
            setattr(module, _COMPILES, True)
        if "torch._dynamo" in sys.modules:
            self._entered.enter_context(torch.compiler.set_stance("force_eager"))
            self._entered.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._entered.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            func = _written(func)
        return func(*args, **(kwargs or {}))


def _written(op: HigherOrderOperator) -> Callable[..., Any]:
    """The function that defines an operator; the operator itself if there is none here."""
    name = op.name()
    if name in _CHOOSE:
        raise CaptureError(
            f"torch.{name} chooses by a tensor what is computed, which a graph cannot; compute both and choose with"
            " torch.where, or write a loop of a fixed number of steps"
        )
    if name == "scan":
        return _scanned
    if name not in _DEFINITIONS:
        return op
    if name == "flex_attention":
        state(torch.ops.flex_lib.zeros_and_scatter.default, instead=_scattered)  # there is none before flex_attention
    module, function, names = _DEFINITIONS[name]
    found: Callable[..., Any] = getattr(importlib.import_module(f"torch._higher_order_ops.{module}"), function)
    if not names:
        return found
    return lambda *args, **kwargs: found(*args[:2], **dict(zip(names, args[2:], strict=False)), **kwargs)


def _scanned(
    step: Callable[..., Any], init: Sequence[Tensor], xs: Sequence[Tensor], additional_inputs: Sequence[Tensor] = ()
) -> tuple[Tensor | None, ...]:
    """The steps of a scan over dim 0, and stacks of their results: torch's own definition writes these to tensors."""
    carry, rows = tuple(init), []
    for i in range(xs[0].shape[0]):
        found = tuple(step(*carry, *(x.select(0, i) for x in xs), *additional_inputs))
        carry, row = found[: len(init)], found[len(init) :]
        rows.append(row)
    return (*carry, *(None if each[0] is None else torch.stack(each) for each in zip(*rows, strict=True)))


def _scattered(shape: list[int], indices: list[Tensor], values: Tensor) -> Tensor:
    """The gradient of what a function of scores reads by position."""
    return values.new_zeros(shape).index_put(tuple(indices), values, accumulate=True)
