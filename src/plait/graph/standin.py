"""Puts fake tensors in the place of a model's parameters and buffers for a while, and puts everything back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.errors import CaptureError


@dataclass
class StandIns:
    """Fake tensors by name; `tied` maps a further name of a tensor to its first one."""

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    places: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)  # of buffers: whose, under which key
    attributes: list[tuple[str, nn.Module, dict[str, Any]]] = field(default_factory=list)  # of modules, as they were

    def replaced_buffers(self) -> dict[str, Tensor]:
        """Buffers that the forward has put another tensor in the place of: `self.ema = 0.9 * self.ema + ...`."""
        now = {name: module._buffers.get(key) for name, (module, key) in self.places.items()}
        return {name: new for name, new in now.items() if new is not None and new is not self.buffers[name]}

    def changed_attributes(self) -> list[tuple[str, Any, Any]]:
        """(name, before, now) of plain Python attributes of modules that the forward has assigned."""
        return [
            (f"{path}.{key}" if path else key, before, module.__dict__[key])
            for path, module, attributes in self.attributes
            for key, before in attributes.items()
            if module.__dict__.get(key, before) is not before
        ]


@contextmanager
def standing_in(
    model: nn.Module, fake_mode: FakeTensorMode, device: torch.device, train: bool, move: bool = False
) -> Iterator[StandIns]:
    """Stand-ins for the model's tensors while the context lasts; a tensor on the meta device gets one on `device`,
    with `move` every tensor does.

    Nothing of the model's size is allocated, and whatever the forward leaves behind on a module is undone. A model
    that is in the mode asked for, training or not, keeps the mode of each submodule; another is switched as a whole.
    """
    before = [(module, dict(module.__dict__), _contents(module)) for module in model.modules()]
    found = StandIns()
    names: dict[int, str] = {}  # by the id of a real tensor, and of its stand-in
    made: dict[int, Tensor] = {}
    try:
        for prefix, module in list(model.named_modules(remove_duplicate=False)):
            for own, where in ((module._parameters, found.parameters), (module._buffers, found.buffers)):
                for key, real in list(own.items()):
                    if real is None:
                        continue
                    name = f"{prefix}.{key}" if prefix else key
                    if id(real) in names:
                        if names[id(real)] != name:
                            found.tied[name] = names[id(real)]
                        own[key] = made.get(id(real), real)  # type: ignore[assignment]
                        continue
                    fake = _stand_in(real, fake_mode, device if move or real.is_meta else real.device)
                    own[key] = where[name] = fake  # type: ignore[assignment]
                    if own is module._buffers:
                        found.places[name] = (module, key)
                    made[id(real)] = fake
                    names[id(real)] = names[id(fake)] = name
        if model.training != train:
            model.train(train)
        found.attributes = [(path, module, dict(module.__dict__)) for path, module in model.named_modules()]
        yield found
    finally:
        for module, attributes, contents in before:
            for key in [key for key in module.__dict__ if key not in attributes]:
                del module.__dict__[key]
            module.__dict__.update(attributes)
            for container, content in contents:
                _restore(container, content)


def _stand_in(real: Tensor, fake_mode: FakeTensorMode, device: torch.device) -> Tensor:
    with fake_mode:
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
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


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """What the module's own dicts, lists and sets hold."""
    return [(v, v.copy()) for v in module.__dict__.values() if isinstance(v, (dict, list, set))]


def _restore(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
    elif container != content if isinstance(container, set) else True:
        container.clear()
        container.update(content)
