"""Hooks that tell the recorder in which module's forward or backward the current op runs, and contexts in which modules
run as they can be recorded."""

from __future__ import annotations

import bisect
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from plait.compile.capture.graph_recorder import GraphRecorder
from plait.errors import CaptureError

_APPLY = nn.Module._apply


@contextmanager
def modules_stay() -> Iterator[None]:
    """Context in which `module.to(...)`, called in this thread, returns the module if its tensors have that device and
    dtype already. Otherwise it raises CaptureError: the tensors of a capture stay where they are."""
    thread = threading.get_ident()

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if threading.get_ident() != thread:
            moved: nn.Module = _APPLY(module, fn, recurse)
            return moved
        own = [*module.parameters(recurse), *module.buffers(recurse)]
        if any(fn(tensor) is not tensor for tensor in own):
            raise CaptureError(
                f"the step moves or casts a {type(module).__name__}, with .to() or the like; do that before training"
                " begins, and cast the module's inputs instead"
            )
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = _APPLY  # type: ignore[method-assign]


@contextmanager
def plain_kernels() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Disable kernels that fuse a recurrent or transformer layer or hide batch-norm state, so that plain ops run.

    Yields a context for single ops, in which libraries are enabled as they were: how the result of a convolution lies
    in memory depends on the library that computes it, and that says whether a reshape of it is a view or a copy.
    """
    chosen = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _libraries(mkldnn=False, cudnn=False):
            yield lambda: _libraries(*chosen)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def _libraries(mkldnn: bool, cudnn: bool) -> Iterator[None]:
    """Context in which torch may use these libraries, or may not."""
    before = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(mkldnn)
    torch._C._set_cudnn_enabled(cudnn)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch._C._set_cudnn_enabled(before[1])


def autograd_nodes(result: Tensor) -> Iterator[torch.autograd.graph.Node]:
    """The nodes of autograd's graph behind a tensor, each once."""
    seen: set[Hashable] = set()
    stack: list[torch.autograd.graph.Node | None] = [result.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [following for following, _ in node.next_functions]
            yield node


class ForwardModules:
    """While entered, sets `recorder.module` to the name of the model's module whose forward runs in this thread."""

    def __init__(self, model: nn.Module, recorder: GraphRecorder) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._recorder = recorder
        self._thread = threading.get_ident()
        self._stack: list[str] = []
        self._numbers: list[int] = []  # autograd's sequence number at each change of module
        self._modules: list[str] = []
        self._raised: tuple[BaseException | None, str] = (None, "")

    def __enter__(self) -> ForwardModules:
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def at(self, number: int) -> str:
        """The module that was running when autograd made the node with this sequence number."""
        i = bisect.bisect_right(self._numbers, number) - 1
        return self._modules[i] if i >= 0 else ""

    def _enter(self, module: nn.Module, args: object) -> None:
        if threading.get_ident() == self._thread and id(module) in self._names:
            self._stack.append(self._names[id(module)])
            self._change()

    def _leave(self, module: nn.Module, args: object, result: object) -> None:
        if threading.get_ident() == self._thread and id(module) in self._names and self._stack:
            name, error = self._stack.pop(), sys.exc_info()[1]
            if error is not None and error is not self._raised[0]:
                self._raised = error, name  # the innermost module leaves first
            self._change()

    def module_of(self, error: BaseException) -> str:
        """The module whose forward raised an error; '' if none did."""
        return self._raised[1] if self._raised[0] is error else ""

    def _change(self) -> None:
        self._recorder.module = self._stack[-1] if self._stack else ""
        number = torch._C._autograd._get_sequence_nr()
        if self._recorder.phase == "forward":
            self._numbers.append(number)
            self._modules.append(self._recorder.module)


class BackwardModules:
    """While entered, sets `recorder.module` to the module of the forward op whose backward runs, and `recorder.at` to
    the place of that op."""

    def __init__(self, loss: Tensor, forward: ForwardModules, recorder: GraphRecorder) -> None:
        self._forward = forward
        self._recorder = recorder
        self._loss = loss

    def __enter__(self) -> None:
        self._hooks = []
        for node in autograd_nodes(self._loss):
            number = node._sequence_nr()
            if number < 1 << 63:  # not an AccumulateGrad
                before = self._setter(self._forward.at(number), self._recorder.place_of(number))
                self._hooks.append(node.register_prehook(before))

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._recorder.at = None

    def _setter(self, name: str, place: int) -> Any:
        def before(gradients: object) -> None:
            self._recorder.module = name
            self._recorder.at = place

        return before
