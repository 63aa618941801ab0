"""Sources of random numbers and iterators that a step may take from: their state, and where they stand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def is_source(value: Any) -> bool:
    """Whether it draws random numbers."""
    return isinstance(value, (np.random.Generator, np.random.RandomState, random.Random, torch.Generator))


def state_of(source: Any) -> Any:
    """The state of a source of random numbers."""
    if isinstance(source, random.Random):
        return source.getstate()
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    return source.get_state()


def set_state(source: Any, state: Any) -> None:
    if isinstance(source, random.Random):
        source.setstate(state)
    elif isinstance(source, np.random.Generator):
        source.bit_generator.state = state
    else:
        source.set_state(state)


def position(iterator: Any) -> Any:
    """What changes when an item is taken from an iterator, as far as it can be seen."""
    if hasattr(iterator, "gi_frame"):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, frame.f_lineno)
    hint = getattr(iterator, "__length_hint__", None)
    return repr(iterator) if hint is None else hint()
