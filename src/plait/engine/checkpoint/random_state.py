"""The random state of torch, numpy and Python in this process, in a checkpoint.

A step draws by (seed, step number) and does not need it, but the user's data may. If ranks are threads they share one
state, which rank 0 saves.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.comm.device import random_state, set_random_state
from plait.comm.process_world import ProcessWorld
from plait.comm.protocol import World


def has_own(world: World) -> bool:
    """Whether the rank saves a random state."""
    return world.rank == 0 or isinstance(world, ProcessWorld)


def take(world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The random state of this process: large values as tensors, and the rest as plain values."""
    version, words, gauss = random.getstate()
    found: Any = np.random.get_state(legacy=False)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(found["state"]["key"].astype(np.int64)),
    }
    if (own := random_state(world.device)) is not None:
        tensors[world.device.type] = own
    values = {
        "python": (version, gauss),
        "numpy": (found["bit_generator"], int(found["state"]["pos"]), int(found["has_gauss"]), float(found["gauss"])),
    }
    return tensors, values


def restore(world: World, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """The inverse of `take`."""
    torch.set_rng_state(tensors["torch"])
    if world.device.type in tensors:
        set_random_state(world.device, tensors[world.device.type])
    version, gauss = values["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    kind, position, has_gauss, cached = values["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
