"""The state of a run as a checkpoint stores it: this rank's parts of everything that a resumed run needs.

model/NAME                  parameters and persistent buffers
optimizer/state/NAME/KEY    the optimizer state of a parameter, with the parameter's layout or whole
ema/NAME                    the moving average of a parameter, with its layout
random/RANK/NAME            the random state of the process
values                      step, seed, optimizer groups, scheduler, loss scale, and the caller's `extra`
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plait.engine.checkpoint import random_state, replica_state, write
from plait.engine.checkpoint.local_shards import Kept, LocalShard, is_away
from plait.engine.checkpoint.manifest import EMA, MODEL, STATE
from plait.engine.checkpoint.snapshot import group_options, persistent_of, state_layout
from plait.engine.checkpoint.storage import Location
from plait.engine.checkpoint.write import Saver, State
from plait.engine.train_state import TrainState
from plait.errors import CheckpointError
from plait.optim.combined import own_values, tensors_outside_state, title_of


def save(run: TrainState, path: Location, extra: Mapping[str, object], keep: int, saver: Saver, wait: bool) -> None:
    """Write the run's state into the folder or URL; see engine.checkpoint.write.save."""
    state = describe(run, extra)
    write.save(path, state, world=run.world, plan=str(run.plan), keep=keep, saver=saver, wait=wait)


def describe(run: TrainState, extra: Mapping[str, object]) -> State:
    """This rank's parts of the run's state, without copies.

    Raises CheckpointError for an optimizer that keeps tensors outside its `state`.
    """
    held, world, optimizer = run.held, run.world, run.optimizer
    assert optimizer is not None
    if lost := tensors_outside_state(optimizer):
        raise CheckpointError(
            f"{title_of(optimizer)} keeps tensors in its attribute {lost}, and a checkpoint cannot know what they"
            " belong to; let it keep them in state[parameter]"
        )
    tensors: dict[str, LocalShard] = {}
    own: dict[str, object] = {}
    means = _means(run)
    for name, parameter in held.parameters.items():
        data: Any = means.get(MODEL + name, parameter.detach())
        if is_away(data):
            data = Kept(tuple(data.shape), data.dtype, functools.partial(_local, run, name))
        tensors[MODEL + name] = LocalShard.laid_out(data, held.layouts[name], world)
    if world.rank == 0:
        persistent = persistent_of(held)
        buffers = {MODEL + name: b for name, b in held.buffers.items() if name in persistent}
        tensors |= {name: LocalShard.whole(means.get(name, buffer)) for name, buffer in buffers.items()}
    for name, parameter in held.parameters.items():
        away = _OffloadedState(run, parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            full = f"{STATE}{name}/{key}"
            value = means.get(full, value)
            if torch.is_tensor(value):
                layout = state_layout(run, name, key, tuple(value.shape))
                tensors[full] = LocalShard.laid_out(away.kept(key, value) if is_away(value) else value, layout, world)
            elif LocalShard.laid_out(None, state_layout(run, name, key, ()), world).copy == 0:
                own[full] = value
    if run.average is not None:
        for name, part in run.average.tensors.items():
            tensors[EMA + name] = LocalShard.laid_out(part, held.layouts[name], world)
    if random_state.has_own(world):
        states, own[f"random/{world.rank}"] = random_state.take(world)
        tensors |= {f"random/{world.rank}/{name}": LocalShard.whole(tensor) for name, tensor in states.items()}
    values = {
        "step": run.step_number,
        "seed": run.seed,
        "optimizer": title_of(optimizer),
        **({"optimizer_values": found} if (found := own_values(optimizer)) else {}),
        "groups": group_options(run),
        "scheduler": run.scheduler.state_dict() if run.scheduler is not None else None,
        "loss_scale": run.loss_scale.state_dict() if run.loss_scale is not None else None,
        "replicas": replica_state.values(run),
        "extra": dict(extra),
        "model_config": config_of(held.model),
    }
    return State(tensors | replica_state.local_shards(run), values, own)


def config_of(model: nn.Module) -> str | None:
    """The model's configuration as the text of a config.json; None if it has none, or one that JSON cannot hold.

    Covers transformers and diffusers models, mappings and dataclasses.
    """
    config: Any = getattr(model, "config", None)
    try:
        if hasattr(config, "to_dict"):
            plain = dict(config.to_dict())
        elif dataclasses.is_dataclass(config) and not isinstance(config, type):
            plain = dataclasses.asdict(config)
        elif isinstance(config, Mapping):
            plain = dict(config)
        else:
            return None
        if "model_type" in plain and not plain.get("architectures"):
            plain["architectures"] = [type(model).__name__]
        return json.dumps(plain, indent=2, sort_keys=True)
    except Exception:  # raised by the user's config, which the checkpoint does not need
        return None


def _means(run: TrainState) -> dict[str, Tensor]:
    """The means over replicas of tensors that replicas have each for themselves, by their names in a checkpoint."""
    replicas, optimizer = run.replicas, run.optimizer
    if replicas is None:
        return {}
    assert optimizer is not None
    found = {MODEL + name: mean for name, mean in replicas.means(run.step_number).items()}
    if replicas.local is not None:
        state = {
            f"{STATE}{name}/{key}": value
            for name, parameter in replicas.trained.items()
            for key, value in optimizer.state.get(parameter, {}).items()
            if torch.is_tensor(value) and value.is_floating_point() and not is_away(value)
        }
        found |= {name: mean.to(state[name].dtype) for name, mean in replicas.mean_of(state).items()}
    return found


def _local(run: TrainState, name: str) -> Tensor:
    found: Tensor | None = run.held.local(name)
    assert found is not None
    return found


class _OffloadedState:
    """A parameter's offloaded optimizer state, read once for all its tensors."""

    def __init__(self, run: TrainState, parameter: nn.Parameter) -> None:
        self._run, self._parameter = run, parameter
        self._asked: set[str] = set()
        self._read: dict[str, Any] = {}

    def kept(self, key: str, form: Tensor) -> Kept:
        """The tensor `key` of the state, to be read later."""
        return Kept(tuple(form.shape), form.dtype, functools.partial(self._get, key))

    def _get(self, key: str) -> Tensor:
        if not self._read:
            self._read = self._run.update.state_of(self._parameter)
        found: Tensor = self._read[key]
        self._asked.add(key)
        if all(key in self._asked for key, value in self._read.items() if torch.is_tensor(value) and value.ndim):
            self._read, self._asked = {}, set()
        return found
