"""Fake tensors in place of the real ones while a step is captured.

Fake parameters and buffers are put into the model's modules for the time of a capture, and the real ones are put back.
A real tensor that reaches an op in another way, through a closure, a list or a plain attribute, is exchanged for its
fake tensor above autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from plait.compile.capture.tracked_numbers import Tracked, untracked
from plait.compile.ir.dtypes import not_dense, other_format
from plait.compile.ir.shapes import fake_of
from plait.errors import CaptureError, PlanError

_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True, eq=False)
class MadeBuffer:
    """A buffer that the forward has made, such as a table that it keeps: `name` is `key` of `module`."""

    name: str
    module: nn.Module
    key: str
    value: Tensor


_PARAMETER = "a parameter"


@dataclass
class FakeParameters:
    """The fake tensors of a model.

    Attributes:
        parameters: by name.
        buffers: by name.
        tied: from a further name of a tensor to its first name.
        places: for each parameter and buffer its module and its key there.
        placed: what was in these places when the forward began.
        parts: the parameters and modules that each module had then, by name.
        made: fake tensors by the id of the real tensor.
        names: names by the id of the real or the fake tensor.
        modules: the model's modules, by name, each with the buffers that it had before the step.
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    places: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    placed: dict[str, Tensor | None] = field(default_factory=dict)
    parts: dict[str, dict[str, object]] = field(default_factory=dict)
    made: dict[int, Tensor] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    modules: dict[str, tuple[nn.Module, set[str]]] = field(default_factory=dict)

    def made_buffers(self) -> list[MadeBuffer]:
        """The buffers that the forward has made where there were none."""
        return [
            MadeBuffer(f"{prefix}.{key}" if prefix else key, module, key, value)
            for prefix, (module, had) in self.modules.items()
            for key, value in module._buffers.items()
            if value is not None and key not in had
        ]

    def replaced_buffers(self) -> dict[str, Tensor]:
        """New values of buffers that the forward has assigned: `self.ema = 0.9 * self.ema + ...`.

        Raises CaptureError for a value of another dtype or shape.
        """
        return {name: self._kept_form("buffer", name, new) for name, new in self._replaced(self.buffers)}

    def replaced_parameters(self) -> dict[str, Tensor]:
        """New values of frozen parameters that the forward has assigned: `self.code = nn.Parameter(..., False)`.

        Raises CaptureError for a parameter that trains, or a value of another dtype or shape.
        """
        found: dict[str, Tensor] = {}
        for name, new in self._replaced(self.parameters):
            if self.parameters[name].requires_grad:
                raise CaptureError(
                    f"the step puts another parameter in the place of {name}, and an optimizer goes on with the former"
                    " one; make it a buffer, or give it requires_grad=False"
                )
            found[name] = self._kept_form("parameter", name, new).detach()
        return found

    def begin_forward(self) -> None:
        """Note what is in the place of each parameter and buffer: copies in half precision may be."""
        self.placed = {name: self._now(name) for name in self.places}
        self.parts = {prefix: self._parts(module) for prefix, (module, _) in self.modules.items()}

    def check_parts(self) -> None:
        """Raise CaptureError if the forward has put another module in the place of one, or made a parameter or a
        module: the next step would not have it."""
        for prefix, (module, _) in self.modules.items():
            before, now = self.parts[prefix], self._parts(module)
            if key := next((key for key in now if now[key] is not before.get(key)), ""):
                name, kind = f"{prefix}.{key}" if prefix else key, "parameter" if now[key] is _PARAMETER else "module"
                what = f"puts another {kind} in the place of" if key in before else f"makes the {kind}"
                raise CaptureError(
                    f"the step {what} {name}, which an optimizer does not know; make it before training begins, or run"
                    " the model once on a batch, model(x), before you hand it over"
                )

    @staticmethod
    def _parts(module: nn.Module) -> dict[str, object]:
        """The modules of a module by name, and its parameters, of which only the names count."""
        own = {key: _PARAMETER for key, value in module._parameters.items() if value is not None}
        return {**own, **module._modules}

    def _replaced(self, before: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """The names of tensors in whose place the forward has put others, with these."""
        for name in before:
            new = self._now(name)
            if new is not None and new is not self.placed[name]:
                yield name, new

    def _now(self, name: str) -> Tensor | None:
        module, key = self.places[name]
        return module._parameters.get(key, module._buffers.get(key))

    def _kept_form(self, kind: str, name: str, new: Tensor) -> Tensor:
        old = self.buffers[name] if kind == "buffer" else self.parameters[name]
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise CaptureError(
                f"the step replaces the {kind} {name}, {old.dtype} of shape {list(old.shape)}, by a tensor of"
                f" {new.dtype} and shape {list(new.shape)}; a {kind} keeps its type and shape. If only the first"
                " forward makes it so, run the model once on a batch, model(x), before you hand it over"
            )
        return new


def refuse_odd_tensors(model: nn.Module) -> None:
    """Raise PlanError for a model with lazy modules, whose parameters have no shape yet, or with a parameter or buffer
    that is not dense, or that torch lets nobody train."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, UninitializedTensorMixin):
            raise PlanError(
                f"{name} has no shape yet: it is of a lazy module, which takes it from the first batch that it sees;"
                " run the model once on a batch, model(x), before you hand it over"
            )
        if other_format(tensor):
            raise PlanError(not_dense(name, tensor))
        if tensor.is_inference():
            raise PlanError(
                f"{name} was made under torch.inference_mode(), outside of which torch lets nothing change it; make the"
                " model outside, or give copy.deepcopy(model), made outside"
            )


def refuse_scripted(model: nn.Module) -> None:
    """Raise CaptureError for a model with TorchScript modules."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{f'the module {name}' if name else 'the model'} is compiled by TorchScript, into which no capture"
                " sees; use the module that it was made from"
            )


@contextmanager
def fake_parameters(
    model: nn.Module, fake_mode: FakeTensorMode, device: torch.device, train: bool, move: bool = False
) -> Iterator[FakeParameters]:
    """Put fake tensors in place of the model's tensors within the context.

    A fake tensor is on the real tensor's device; on `device` for a tensor on the meta device, and with `move` for all.
    Nothing of the model's size is allocated. Parameters, buffers, submodules and training modes are put back. A model
    whose own mode is `train` keeps the mode of each submodule; any other is switched as a whole.
    """
    refuse_odd_tensors(model)
    modules = list(model.modules())
    dicts = [getattr(module, key) for module in modules for key in ("_parameters", "_buffers", "_modules")]
    before = [(own, dict(own)) for own in dicts]
    modes = [(module, module.training) for module in modules]
    found = FakeParameters()
    seen: dict[int, Tensor] = {}  # real and fake tensors by their ids
    try:
        for prefix, module in model.named_modules():
            found.modules[prefix] = (module, {key for key, value in module._buffers.items() if value is not None})
        for prefix, module in list(model.named_modules(remove_duplicate=False)):
            for own, where in ((module._parameters, found.parameters), (module._buffers, found.buffers)):
                for key, real in list(own.items()):
                    if real is None:
                        continue
                    name = f"{prefix}.{key}" if prefix else key
                    if id(real) in seen:
                        if found.names[id(real)] != name:
                            found.tied[name] = found.names[id(real)]
                        own[key] = found.made.get(id(real), real)
                        continue
                    fake = fake_like(real, fake_mode, device if move or real.is_meta else real.device)
                    own[key] = where[name] = fake  # type: ignore[assignment]
                    found.places[name] = (module, key)
                    found.made[id(real)] = fake
                    found.names[id(real)] = found.names[id(fake)] = name
                    seen |= {id(real): real, id(fake): fake}
        if model.training != train:
            model.train(train)
        yield found
    finally:
        for own, content in before:
            _put_back(own, content)
        for module, mode in modes:
            module.__dict__["training"] = mode


def _put_back(own: dict[str, object], content: dict[str, object]) -> None:
    if list(own) != list(content):
        own.clear()
    own.update(content)


def fake_like(real: Tensor, fake_mode: FakeTensorMode, device: torch.device) -> Tensor:
    """A fake tensor of the same shape, strides and dtype; for a parameter also with the same hooks."""
    fake = fake_of((real.shape, real.stride(), real.dtype, device), fake_mode)
    if not isinstance(real, nn.Parameter):
        return fake
    parameter = nn.Parameter(fake, requires_grad=real.requires_grad)
    parameter.__dict__.update({k: v for k, v in getattr(real, "__dict__", {}).items() if k not in parameter.__dict__})
    if getattr(real, "_post_accumulate_grad_hooks", None):
        raise CaptureError(
            "a parameter has a hook that runs after its gradient is accumulated, which no graph has; use register_hook,"
            " or do it in the optimizer"
        )
    for hook in (real._backward_hooks or {}).values():
        parameter.register_hook(hook)
    return parameter


class Exchange(TorchFunctionMode):
    """Exchanges real tensors for fake ones in the arguments of torch's functions.

    `known` has fake tensors by the ids of real ones, and `outside` makes those of others. Unless `plain`, an assignment
    to `tensor.data` is a copy into the tensor.
    """

    def __init__(self, known: dict[int, Tensor], outside: Callable[[Tensor], Tensor], plain: bool = False) -> None:
        super().__init__()
        self._known = known
        self._outside = outside
        self._plain = plain

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple([self._exchanged(value) for value in args])
        kwargs = {key: self._exchanged(value) for key, value in kwargs.items()} if kwargs else {}
        name = "" if self._plain else getattr(func, "__name__", "")
        if name in ("__get__", "__set__") and getattr(func, "__self__", None) is Tensor.data:
            if name == "__get__":
                return args[0].detach()
            target, value = args
            if value.shape != target.shape or value.dtype != target.dtype:
                raise CaptureError(
                    f"the step assigns a tensor of {value.dtype} and shape {list(value.shape)} to the data of one of"
                    f" {target.dtype} and shape {list(target.shape)}; a tensor keeps its type and shape"
                )
            target.detach().copy_(value)
            return None
        return func(*args, **kwargs)

    def _exchanged(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            found = self._known.get(id(value))
            if found is not None:
                return found
            return self._outside(value) if is_real(value) else value
        kind = type(value)
        if kind is list or kind is tuple:
            if not any(isinstance(one, (Tensor, list, tuple, slice, Tracked)) for one in value):
                return value
            return kind([self._exchanged(one) for one in value])
        if kind is slice:
            return slice(untracked(value.start), untracked(value.stop), untracked(value.step))
        return untracked(value)


def is_real(value: Tensor) -> bool:
    """Whether it is a plain tensor with values: not fake, not of a tensor subclass, not wrapped by torch.func."""
    return type(value) in _PLAIN_TENSORS and not is_functorch_wrapped_tensor(value)


def fake_leaf(leaf: Tensor, fake_mode: FakeTensorMode, device: torch.device | None) -> Tensor:
    """A contiguous fake tensor, so that batches with equal shapes share the graph."""
    with fake_mode:
        where = device or (torch.device("cpu") if leaf.is_meta else leaf.device)
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=where)


def device_of(leaves: dict[str, Tensor]) -> torch.device:
    """The device of fake tensors for tensors on the meta device: that of the batch."""
    return next((leaf.device for leaf in leaves.values() if not leaf.is_meta), torch.device("cpu"))
