"""Random number generators and iterators of Python that a step may use: their states, and an error if it does."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from plait.errors import CaptureError, PlanError

_SYSTEM = "the system's random bytes (uuid4, secrets, SystemRandom)"


def is_source(value: Any) -> bool:
    """Whether the value is a random number generator with a state of its own."""
    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def state_of(source: Any) -> Any:
    """The state of a random number generator."""
    if isinstance(source, random.Random):
        return source.getstate()
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    return source.get_state()


def set_state(source: Any, state: Any) -> None:
    """The inverse of `state_of`."""
    if isinstance(source, random.Random):
        source.setstate(state)
    elif isinstance(source, np.random.Generator):
        source.bit_generator.state = state
    else:
        source.set_state(state)


def same_state(state: Any, other: Any) -> bool:
    """Whether two states of a generator are equal."""
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(same_state(value, other[key]) for key, value in state.items())
    if isinstance(state, tuple):  # of RandomState: a name, an array, and where it stands
        return all(map(same_state, state, other))
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    return bool(np.array_equal(state, other)) if isinstance(state, np.ndarray) else bool(state == other)


def position(iterator: Any) -> Any:
    """A value that changes when an item is taken from an iterator, as far as that can be seen."""
    if hasattr(iterator, "gi_frame"):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, frame.f_lineno)
    hint = getattr(iterator, "__length_hint__", None)
    return repr(iterator) if hint is None else hint()


@contextmanager
def nothing_drawn(sources: Sequence[tuple[str, Any]], iterators: Sequence[tuple[str, Any]]) -> Iterator[None]:
    """Refuse that the context draws random numbers in Python or takes items of iterators.

    `sources` are generators and `iterators` iterators, each with its place in the user's code. States of generators,
    with those of Python and numpy, are restored.

    Raises:
        CaptureError: random numbers are drawn from one of the generators, Python, numpy or the system.
        PlanError: an item is taken from one of the iterators.
    """
    states = random.getstate(), np.random.get_state(legacy=False)
    own = [(place, source, state_of(source)) for place, source in sources]
    drawn: list[str] = []
    stack = ExitStack()
    for module, name in ((os, "urandom"), (random, "_urandom")):
        stack.enter_context(_noticed(module, name, drawn))
    begun = [(place, iterator, position(iterator)) for place, iterator in iterators]
    try:
        with stack:
            yield
    finally:
        if random.getstate() != states[0]:
            random.setstate(states[0])
            drawn.append("Python's random")
        if not same_state(np.random.get_state(legacy=False), states[1]):
            np.random.set_state(states[1])
            drawn.append("numpy.random")
        for place, source, state in own:
            if not same_state(state_of(source), state):
                set_state(source, state)
                drawn.append(place)
    for place, iterator, before in begun:
        if position(iterator) != before:
            raise PlanError(  # no CaptureError, after which the model would run uncaptured: an item is gone
                f"the step takes an item from the iterator {place}, and a graph would have the same item at every step;"
                " take it in the training loop and put it into the batch"
            )
    if drawn:
        raise CaptureError(
            f"cannot capture the training step: it draws from {' and '.join(drawn)}, and a graph would have the"
            " same numbers at every step; draw in the data loader and put the numbers into the batch, or draw with"
            " torch, whose random numbers are new at every step"
        )


@contextmanager
def _noticed(module: Any, name: str, drawn: list[str]) -> Iterator[None]:
    """Record when this thread asks the system for random bytes, as uuid4, secrets and SystemRandom do."""
    function, thread = getattr(module, name), threading.get_ident()

    def called(*args: Any) -> Any:
        if threading.get_ident() == thread and _SYSTEM not in drawn and not _importing():
            drawn.append(_SYSTEM)
        return function(*args)

    setattr(module, name, called)
    try:
        yield
    finally:
        setattr(module, name, function)


def _importing() -> bool:
    """Whether a module is being imported: some, such as multiprocessing, ask for random bytes then."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
