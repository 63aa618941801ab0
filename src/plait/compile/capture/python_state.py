"""The mutable Python objects that a step can read, and restoring them: dicts, lists, attributes, cells of closures.

Random number generators and iterators are among them: a step that uses one is refused.
"""

from __future__ import annotations

import array
import contextvars
import os
import random
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any, TypeGuard

import numpy as np
import torch

from plait.errors import CaptureError, PlanError

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()


class Holder:
    """A mutable object, with the values that it had when the holder was created."""

    __slots__ = ("before", "keys", "of", "place")

    def __init__(self, place: str, of: Any, keys: list[Any] | None = None) -> None:
        self.place = place
        self.of = of
        self.keys = keys  # the keys to look at, None for all
        self.before: dict[Hashable, Any] = self.now()

    def now(self) -> dict[Hashable, Any]:
        """The values by key."""
        raise NotImplementedError

    def put(self, key: Any, value: object) -> None:
        """Set one value; MISSING removes it."""
        raise NotImplementedError

    def is_same(self) -> bool:
        """Whether every value is still the same object."""
        now = self.now()
        return len(now) == len(self.before) and all(map(is_, now.values(), self.before.values()))

    def put_back(self) -> None:
        """Restore the values that the object had."""
        now = self.now()
        for key in now.keys() | self.before.keys():
            if now.get(key, MISSING) is not self.before.get(key, MISSING):
                self.put(key, self.before.get(key, MISSING))

    def place_of(self, key: Any) -> str:
        return f"{self.place}[{key!r}]"


class DictHolder(Holder):
    """A whole dict."""

    __slots__ = ()

    def now(self) -> dict[Hashable, Any]:
        if type(self.of) is dict or not isinstance(self.of, dict):
            return dict(self.of)
        keys = OrderedDict.keys(self.of) if isinstance(self.of, OrderedDict) else dict.keys(self.of)
        return {key: dict.__getitem__(self.of, key) for key in keys}  # its class may have a __getitem__ of its own

    def is_same(self) -> bool:
        now = self.of if type(self.of) is dict else self.now()
        return len(now) == len(self.before) and all(map(is_, now.values(), self.before.values()))

    def put(self, key: Any, value: object) -> None:
        if value is MISSING:
            del self.of[key]
        else:
            self.of[key] = value

    def put_back(self) -> None:
        if list(self.of) == list(self.before):
            super().put_back()
        else:  # restores the order of the keys too
            self.of.clear()
            self.of.update(self.before)


class AttributesHolder(DictHolder):
    """The __dict__ of an object or module."""

    __slots__ = ()

    def place_of(self, key: Any) -> str:
        return f"{self.place}{'' if self.place.endswith(':') else '.'}{key}"


class ListHolder(Holder):
    """A list or deque."""

    __slots__ = ()

    def now(self) -> dict[Hashable, Any]:
        return dict(enumerate(self.of))

    def is_same(self) -> bool:
        return len(self.of) == len(self.before) and all(map(is_, self.of, self.before.values()))

    def put(self, key: Any, value: object) -> None:
        if value is not MISSING and key < len(self.of):
            self.of[key] = value
        elif value is not MISSING:
            self.of.append(value)

    def put_back(self) -> None:
        self.of.clear()
        self.of.extend(self.before.values())


class SetHolder(Holder):
    """A set of plain values, each of which is its own key."""

    __slots__ = ()

    def now(self) -> dict[Hashable, Any]:
        return {value: value for value in self.of}

    def is_same(self) -> bool:
        return len(self.of) == len(self.before) and all(value in self.before for value in self.of)

    def put(self, key: Any, value: object) -> None:
        self.of.discard(key) if value is MISSING else self.of.add(key)


class NamesHolder(Holder):
    """Some names of globals, of a class, or of an object with slots; or the content of a closure's cell."""

    __slots__ = ()

    def now(self) -> dict[Hashable, Any]:
        assert self.keys is not None
        if isinstance(self.of, types.CellType):
            try:
                return {self.keys[0]: self.of.cell_contents}
            except ValueError:  # empty
                return {self.keys[0]: MISSING}
        if isinstance(self.of, dict):
            return {key: self.of.get(key, MISSING) for key in self.keys}
        if isinstance(self.of, type):
            return {key: self.of.__dict__.get(key, MISSING) for key in self.keys}
        return {key: getattr(self.of, key, MISSING) for key in self.keys}

    def put(self, key: Any, value: object) -> None:
        if isinstance(self.of, types.CellType):
            self.of.cell_contents = value
        elif isinstance(self.of, dict):
            if value is MISSING:
                self.of.pop(key, None)
            else:
                self.of[key] = value
        elif value is MISSING:
            delattr(self.of, key)
        else:
            setattr(self.of, key, value)

    def place_of(self, key: Any) -> str:
        root = self.place
        return f"{root}{key}" if root.endswith(":") else f"{root}.{key}"


class ProxyHolder(DictHolder):
    """A read-only view of a dict that may change."""

    __slots__ = ()

    def put(self, key: Any, value: object) -> None:
        raise AssertionError("a mapping proxy takes no values")

    def put_back(self) -> None:
        """Does nothing: the holder of the dict restores it."""


class ContextHolder(Holder):
    """The value of a ContextVar."""

    __slots__ = ()
    of: contextvars.ContextVar[Any]

    def now(self) -> dict[Hashable, Any]:
        return {"get()": self.of.get(MISSING)}

    def put(self, key: Any, value: object) -> None:
        if value is not MISSING:
            self.of.set(value)

    def place_of(self, key: Any) -> str:
        return f"{self.place}.{key}"


class Buffer:
    """A bytearray, memoryview or array.array, with the interface of a numpy array that is needed here."""

    def __init__(self, of: bytearray | memoryview | array.array[Any]) -> None:
        self.of = of
        self.dtype = f"{type(of).__name__} {getattr(of, 'typecode', getattr(of, 'format', ''))}"

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.of),)

    def tobytes(self) -> bytes:
        return bytes(self.of) if isinstance(self.of, bytearray) else bytes(self.of.tobytes())

    def put_back(self, before: bytes) -> None:
        if isinstance(self.of, bytearray):
            self.of[:] = before
        elif isinstance(self.of, array.array):
            del self.of[:]
            self.of.frombytes(before)
        elif not self.of.readonly:
            self.of.cast("B")[:] = before


def put_bytes_back(values: np.ndarray | Buffer, before: bytes) -> None:
    """Restore the content of an array or a Buffer."""
    if values.tobytes() == before:
        return
    if isinstance(values, Buffer):
        values.put_back(before)
    elif values.flags.writeable:
        values[...] = np.frombuffer(before, values.dtype).reshape(values.shape)


_SYSTEM = "the system's random bytes (uuid4, secrets, SystemRandom)"
RandomSource = np.random.Generator | np.random.RandomState | random.Random | torch.Generator


def is_source(value: object) -> TypeGuard[RandomSource]:
    """Whether the value is a random number generator with a state of its own."""
    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def state_of(source: RandomSource) -> object:
    """The state of a random number generator."""
    if isinstance(source, random.Random):
        return source.getstate()
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    return source.get_state()


def set_state(source: RandomSource, state: Any) -> None:
    """The inverse of `state_of`."""
    if isinstance(source, random.Random):
        source.setstate(state)
    elif isinstance(source, np.random.Generator):
        source.bit_generator.state = state
    else:
        source.set_state(state)


def same_state(state: object, other: Any) -> bool:
    """Whether two states of a generator are equal."""
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(same_state(value, other[key]) for key, value in state.items())
    if isinstance(state, tuple):  # of RandomState: a name, an array, and where it stands
        return all(map(same_state, state, other))
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    return bool(np.array_equal(state, other)) if isinstance(state, np.ndarray) else bool(state == other)


def position(iterator: object) -> object:
    """A value that changes when an item is taken from an iterator, as far as that can be seen."""
    if hasattr(iterator, "gi_frame"):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, frame.f_lineno)
    hint = getattr(iterator, "__length_hint__", None)
    return repr(iterator) if hint is None else hint()


@contextmanager
def nothing_drawn(
    sources: Sequence[tuple[str, RandomSource]], iterators: Sequence[tuple[str, object]]
) -> Iterator[None]:
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
def _noticed(module: types.ModuleType, name: str, drawn: list[str]) -> Iterator[None]:
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
