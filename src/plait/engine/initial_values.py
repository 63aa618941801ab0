"""The initial values of parameters: the same under every plan, and from the meta device one module at a time."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from plait.comm.device import random_devices
from plait.comm.protocol import World
from plait.engine.local_tensors import lies_here, local_part
from plait.errors import PlaitError
from plait.spec.layout import Layout


def initial_parameters(
    model: nn.Module, layouts: Mapping[str, Layout], world: World, seed: int
) -> Iterator[tuple[str, Tensor | None]]:
    """(name, this rank's part) of every parameter, under its first name. The part is None if only other ranks have
    one.

    Rank 0's values go to all ranks. A model on the meta device is initialised module by module, by the module's own
    `reset_parameters` (or `_init_weights` of a transformers model), with a seed that depends on the module's name. No
    rank ever has more than one module whole. Raises PlaitError for a module that leaves values uninitialised.
    """
    if any(p.is_meta for p in model.parameters()):
        yield from _from_meta(model, layouts, world, seed)
        return
    for name, parameter in model.named_parameters():
        value = _of_rank_0(parameter.detach(), world)
        yield name, local_part(value, layouts[name], world) if lies_here(layouts[name], world) else None


def with_values(model: nn.Module, seed: int) -> nn.Module:
    """The model if it has values; of a model on the meta device a copy in host memory, initialised as in training.

    Raises PlaitError for a module that leaves values uninitialised.
    """
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return model
    made = copy.deepcopy(model)
    for path, module in made.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if any(tensor.is_meta for _, tensor in own):
            _fill(made, module, path, torch.device("cpu"), seed)
    return made


def initial_buffers(model: nn.Module, world: World) -> dict[str, Tensor]:
    """Every buffer with rank 0's values: the model's own tensor, or a new one if the values differ."""
    return {name: _of_rank_0(buffer, world) for name, buffer in model.named_buffers()}


def _of_rank_0(mine: Tensor, world: World) -> Tensor:
    """Rank 0's values of a tensor; the given tensor itself if they are equal, so that the model stays as it is."""
    everyone = world.everyone()
    if everyone.size == 1:
        return mine
    found = everyone.broadcast(mine.contiguous(), 0).wait()
    same = everyone.rank == 0 or isinstance(mine, FakeTensor) or torch.equal(found, mine)
    return mine if same else torch.empty_like(mine).copy_(found)


def _from_meta(
    model: nn.Module, layouts: Mapping[str, Layout], world: World, seed: int
) -> Iterator[tuple[str, Tensor | None]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: set[str] = set()
    for path, module in model.named_modules():
        mine = {k: p for k, p in module.named_parameters(recurse=False) if p.is_meta}
        buffers = {k: b for k, b in module.named_buffers(recurse=False) if b.is_meta}
        if not mine and not buffers:
            continue
        _fill(model, module, path, world.device, seed)
        wholes = {names[id(meta)]: module._parameters[key] for key, meta in mine.items()}
        module._parameters.update(mine)
        for name, whole in wholes.items():
            if name not in found:
                found.add(name)
                assert whole is not None
                here = lies_here(layouts[name], world)
                yield name, local_part(whole.detach(), layouts[name], world) if here else None
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            here = lies_here(layouts[name], world)
            yield name, local_part(parameter.detach(), layouts[name], world) if here else None


def _fill(model: nn.Module, module: nn.Module, path: str, device: torch.device, seed: int) -> None:
    """Give the module's own parameters and buffers memory and values."""
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    module.to_empty(device=device, recurse=False)
    floats = [(key, t) for key, _ in tensors if (t := getattr(module, key)) is not None and t.is_floating_point()]
    with torch.no_grad(), torch.random.fork_rng(devices=random_devices(device)):
        for _, tensor in floats:
            tensor.fill_(float("nan"))  # values that stay nan were not initialised
        torch.manual_seed(_seed(seed, path))
        owner = _initialiser(model, path)
        reset = getattr(module, "reset_parameters", None)
        if owner is not None:
            owner._init_weights(module)  # type: ignore[operator]
        elif callable(reset):
            reset()
    for key, tensor in floats:
        if bool(tensor.isnan().any()):
            raise PlaitError(
                f"{path + '.' if path else ''}{key} is on the meta device and {type(module).__name__} does not"
                " initialise it; give the module a reset_parameters() that does, or build the model on the CPU"
            )


def _initialiser(model: nn.Module, path: str) -> nn.Module | None:
    """The nearest module around `path` that can initialise others (transformers' convention)."""
    parts = path.split(".") if path else []
    for end in range(len(parts), -1, -1):
        around = model.get_submodule(".".join(parts[:end]))
        if callable(getattr(around, "_init_weights", None)):
            return around
    return None


def _seed(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:8], "little") >> 1
