"""Random numbers that an optimizer draws, such as noise: equal on all ranks, whatever else a rank has drawn before.

Replicas that drew others would drift apart.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from plait.comm.device import random_devices
from plait.optim.combined import optimizers_within

_drawing = threading.RLock()  # ranks that are threads have one generator


@contextmanager
def equal_draws(optimizer: torch.optim.Optimizer, key: int) -> Iterator[None]:
    """Context for a step of the optimizer, in which torch, numpy and Python draw what `key` determines.

    Their states are as before afterwards. Optimizers of torch draw nothing. Those that communicate between ranks, with
    a method bind(parts), are left alone: they cannot step one rank after the other.
    """
    members = optimizers_within(optimizer).values()
    of_torch = all(type(each).__module__.startswith("torch.optim.") for each in members)
    if of_torch or any(hasattr(each, "bind") for each in members):
        yield
        return
    devices = {p.device for each in members for group in each.param_groups for p in group["params"]}
    with _drawing, torch.random.fork_rng(devices=random_devices(*devices)):
        before = random.getstate(), np.random.get_state(legacy=False)
        torch.manual_seed(key)
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
