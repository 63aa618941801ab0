"""A run's state as a checkpoint has it: what this rank holds of everything that a resumed run needs.

model/NAME                  parameters and persistent buffers
optimizer/state/NAME/KEY    what the optimizer keeps of a parameter, laid out as it or whole
random/RANK/NAME            the process's own random numbers
values                      step, seed, optimizer groups, scheduler, loss scale, and the caller's `extra`
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from plait.run.optimizers import state_layouts
from plait.run.saving import checkpoint, randomstate
from plait.run.saving.checkpoint import State
from plait.run.saving.fitting import MODEL, STATE
from plait.run.saving.holding import Holding, Kept, is_away
from plait.run.saving.saver import Saver
from plait.run.saving.snapshot import Run, group_options, model_of, persistent_buffers
from plait.run.saving.storage import Location
from plait.spec.layout import Layout, Only

_layouts: WeakKeyDictionary[torch.optim.Optimizer, dict[str, dict[str, Layout | None]]] = WeakKeyDictionary()


def save(run: Run, path: Location, extra: Mapping[str, Any], keep: int, saver: Saver, wait: bool) -> None:
    """Write the run's state into the folder or URL; see run.checkpoint.save."""
    state = describe(run, extra)
    checkpoint.save(path, state, world=run.world, plan=str(run.plan), keep=keep, saver=saver, wait=wait)


def describe(run: Run, extra: Mapping[str, Any]) -> State:
    """What this rank holds of the run's state. Nothing is copied."""
    replica, world, optimizer = run.replica, run.world, run.optimizer
    assert optimizer is not None
    tensors: dict[str, Holding] = {}
    own: dict[str, Any] = {}
    for name, parameter in replica.parameters.items():
        data = parameter.detach()
        if is_away(data):
            data = Kept(tuple(data.shape), data.dtype, functools.partial(_local, run, name))
        tensors[MODEL + name] = Holding.laid_out(data, replica.layouts[name], world)
    if world.rank == 0:
        persistent = persistent_buffers(model_of(replica))
        tensors |= {MODEL + name: Holding.whole(b) for name, b in replica.buffers.items() if name in persistent}
    for name, parameter in replica.parameters.items():
        away = _Away(run, parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            full = f"{STATE}{name}/{key}"
            if torch.is_tensor(value):
                layout = state_layout(run, name, key, tuple(value.shape))
                tensors[full] = Holding.laid_out(away.kept(key, value) if is_away(value) else value, layout, world)
            elif Holding.laid_out(None, state_layout(run, name, key, ()), world).copy == 0:
                own[full] = value
    if randomstate.has_own(world):
        found, own[f"random/{world.rank}"] = randomstate.take(world)
        tensors |= {f"random/{world.rank}/{name}": Holding.whole(tensor) for name, tensor in found.items()}
    values = {
        "step": run.step_number,
        "seed": run.seed,
        "optimizer": type(optimizer).__name__,
        "groups": group_options(run),
        "scheduler": run.scheduler.state_dict() if run.scheduler is not None else None,
        "loss_scale": run.loss_scale.state_dict() if run.loss_scale is not None else None,
        "extra": dict(extra),
    }
    return State(tensors, values, own)


def state_layout(run: Run, name: str, key: str, shape: tuple[int, ...], whole: bool = False) -> Layout:
    """How the ranks hold what the optimizer keeps of a parameter, given the shape of a rank's part, or of the whole.

    Scalars and what is averaged over the parameter are whole on every rank that has the parameter.
    """
    replica, world = run.replica, run.world
    layout = replica.layouts[name]
    here = world.mesh.coordinates(world.rank)
    for known in (expected_state(run).get(name, {}).get(key), layout):
        if known is not None and shape and shape == (known.shape if whole else known.local_shape(world.mesh, here)):
            return known
    return Layout(layout.dtype, shape, tuple((axis, p) for axis, p in layout.placements if isinstance(p, Only)))


def expected_state(run: Run) -> dict[str, dict[str, Layout | None]]:
    """What the optimizer keeps of each parameter that it trains, and how; empty for one that cannot be tried."""
    optimizer = run.optimizer
    assert optimizer is not None
    if optimizer not in _layouts:
        try:
            _layouts[optimizer] = state_layouts(optimizer, run.replica.parameters, run.replica.layouts)
        except Exception:  # an optimizer of the user's that works on real parameters only
            _layouts[optimizer] = {}
    return _layouts[optimizer]


def _local(run: Run, name: str) -> Tensor:
    found = run.replica.local(name)
    assert found is not None
    return found


class _Away:
    """A parameter's state that is kept outside memory, read once for all that is asked of it."""

    def __init__(self, run: Run, parameter: nn.Parameter) -> None:
        self._run, self._parameter = run, parameter
        self._asked: set[str] = set()
        self._read: dict[str, Any] = {}

    def kept(self, key: str, form: Tensor) -> Kept:
        return Kept(tuple(form.shape), form.dtype, functools.partial(self._get, key))

    def _get(self, key: str) -> Tensor:
        if not self._read:
            self._read = self._run.update.state_of(self._parameter)
        found: Tensor = self._read[key]
        self._asked.add(key)
        if all(key in self._asked for key, value in self._read.items() if torch.is_tensor(value) and value.ndim):
            self._read, self._asked = {}, set()
        return found
