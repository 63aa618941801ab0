"""How the ranks hold what the optimizer keeps of each parameter."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from plait.engine.train_state import TrainState
from plait.engine.trying import state_layouts
from plait.spec.layout import Layout, Only

_layouts: WeakKeyDictionary[torch.optim.Optimizer, dict[str, dict[str, Layout | None]]] = WeakKeyDictionary()


def state_layout(run: TrainState, name: str, key: str, shape: tuple[int, ...], whole: bool = False) -> Layout:
    """How the ranks hold what the optimizer keeps of a parameter, given the shape of a rank's part, or of the whole.

    Scalars and what is averaged over the parameter are whole on every rank that has the parameter.
    """
    replica, world = run.held, run.world
    layout = replica.layouts[name]
    here = world.mesh.coordinates(world.rank)
    for known in (expected_state(run).get(name, {}).get(key), layout):
        if known is not None and shape and shape == (known.shape if whole else known.local_shape(world.mesh, here)):
            return known
    return Layout(layout.dtype, shape, tuple((axis, p) for axis, p in layout.placements if isinstance(p, Only)))


def expected_state(run: TrainState) -> dict[str, dict[str, Layout | None]]:
    """What the optimizer keeps of each parameter that it trains, and how; empty for one that cannot be tried."""
    optimizer = run.optimizer
    assert optimizer is not None
    if optimizer not in _layouts:
        try:
            _layouts[optimizer] = state_layouts(optimizer, run.held.parameters, run.held.layouts)
        except Exception:  # an optimizer of the user's that works on real parameters only
            _layouts[optimizer] = {}
    return _layouts[optimizer]
