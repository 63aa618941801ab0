"""A model with other values, run through the user's own modules: for runs that must leave the model unchanged."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.compile.capture.fake_parameters import Exchange
from plait.compile.capture.python_state import set_state, state_of
from plait.compile.capture.reachable import Reached
from plait.compile.ops.dims import HALF

_KINDS = ("_parameters", "_buffers", "_modules")


class Twin(nn.Module):
    """Copies of a model's parameters and buffers.

    Floating-point values are converted to `dtype`, if it is given. While `installed`, they replace the originals in the
    model's modules and wherever else code refers to the originals. Copying the modules instead would miss what a
    closure calls.
    """

    model: nn.Module

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.__dict__["model"] = model  # not registered as a submodule
        self._made: dict[int, Tensor] = {}  # by the id of the original
        self._originals = [*model.parameters(), *model.buffers()]
        for original in self._originals:
            self._made[id(original)] = _copy_of(original, dtype)
        self._held = [
            (module, {kind: self._copied(getattr(module, kind)) for kind in _KINDS}) for module in model.modules()
        ]
        self._modes = {id(m): m.training if model.training else True for m in model.modules()}

    def _copied(self, held: dict[str, object]) -> dict[str, object]:
        return {key: self._made.get(id(value), value) for key, value in held.items()}

    def __deepcopy__(self, memo: object) -> Twin:
        with self.installed() as model:
            return Twin(model).of(self)

    def of(self, other: Twin) -> Twin:
        """Make this twin, built from an installed twin, stand for the originals of that one."""
        self._made = {id(original): self._made[id(other._made[id(original)])] for original in other._originals}
        self._originals = other._originals
        return self

    def widen(self) -> None:
        """Convert half-precision values to float32."""
        for made in self._made.values():
            if made.dtype in HALF:
                made.data = made.data.float()

    @property
    def stand_ins(self) -> Mapping[int, Tensor]:
        """The twin's tensors by the ids of the originals."""
        return self._made

    @contextmanager
    def installed(self) -> Iterator[nn.Module]:
        """Context in which the model has the twin's values and mode. Afterwards the modules' own values are back;
        what a forward pass has put into the modules stays with the twin."""
        before = [(module, {kind: dict(getattr(module, kind)) for kind in _KINDS}) for module, _ in self._held]
        modes = [(module, module.training) for module, _ in self._held]
        try:
            for module, held in self._held:
                for kind in _KINDS:
                    _fill(getattr(module, kind), held[kind])
                module.training = self._modes[id(module)]
            with Exchange(self._made, lambda real: real, plain=True):
                yield self.model
        finally:
            self._held = [(module, {kind: dict(getattr(module, kind)) for kind in _KINDS}) for module, _ in self._held]
            for module, held in before:
                for kind in _KINDS:
                    _fill(getattr(module, kind), held[kind])
            for module, mode in modes:
                module.training = mode

    # the interface of a module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        with self.installed() as model:
            return iter(list(model.named_parameters(*args, **kwargs)))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        with self.installed() as model:
            return iter(list(model.named_buffers(*args, **kwargs)))


def _fill(held: dict[str, object], values: dict[str, object]) -> None:
    if list(held) != list(values):
        held.clear()
    held.update(values)


def _copy_of(original: Tensor, dtype: torch.dtype | None) -> Tensor:
    value = original.detach().clone()
    if dtype is not None and value.is_floating_point():
        value = value.to(dtype)
    if not isinstance(original, nn.Parameter):
        return value
    made = nn.Parameter(value, requires_grad=original.requires_grad)
    made.__dict__.update({k: v for k, v in original.__dict__.items() if k not in made.__dict__})
    for hook in (original._backward_hooks or {}).values():
        made.register_hook(hook)
    return made


@contextmanager
def preserved(model: nn.Module, loss_fn: object) -> Iterator[None]:
    """Context that restores what model and loss reach in Python: values, tensors outside the model and their
    gradients, and the random state of torch, numpy and Python."""
    reached = Reached(model, loss_fn)
    tensors = [
        (t, t.detach().clone(), t.grad if t.is_leaf else None) for t in reached.tensors.values() if not t.is_meta
    ]
    state = torch.get_rng_state()
    drawn = random.getstate(), np.random.get_state(legacy=False)
    sources = [(source, state_of(source)) for _, source in reached.sources]
    for tensor, _, gradient in tensors:
        if gradient is not None:
            tensor.grad = gradient.clone()
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value, gradient in tensors:
                if not torch.equal(tensor, value):
                    tensor.detach().copy_(value)
                if tensor.is_leaf:
                    tensor.grad = gradient
        reached.put_back()
        torch.set_rng_state(state)
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        for source, before in sources:
            set_state(source, before)
