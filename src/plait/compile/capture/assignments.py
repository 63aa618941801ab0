"""What a step assigns in Python: attributes, items of lists and dicts, globals."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from plait.compile.capture.batch_numbers import BatchNumber, plain_numbers
from plait.compile.capture.captured import Effect
from plait.compile.capture.fake_parameters import is_real
from plait.compile.capture.graph_recorder import GraphRecorder
from plait.compile.capture.outside_tensors import Outside
from plait.compile.capture.python_state import MISSING
from plait.compile.capture.reachable import PLAIN, Reached, is_searched
from plait.errors import CaptureError

_DEEPEST = 6  # containers in containers, for tensors that a step leaves in them
_MOST = 1 << 18  # values in one value


def assigned(reached: Reached, outside: Outside, recorder: GraphRecorder) -> tuple[dict[str, Tensor], list[Effect]]:
    """The Python values that the step has assigned: new values of tensors that it also reads, by place, and all
    others."""
    rebound: dict[str, Tensor] = {}
    effects: list[Effect] = []
    for holder, key, before, now in reached.changes():
        now = plain_numbers(now) if isinstance(now, BatchNumber) else now
        place = holder.place_of(key)
        parts = dict(parts_of(place, now))
        read = [part for part, _ in parts_of(place, before) if part in outside.fakes]
        if place in read or (read and _same_but_tensors(before, now)):
            _refuse_shared(dict(parts_of(place, before)), parts, reached)
            rebound |= _handed_on(read, parts, type(now), outside, recorder)
        else:
            nodes = [recorder.nodes.get(id(part)) for part in parts.values()]
            varies = any(node is not None and _varies(node) for node in nodes)
            effects.append(Effect(holder, key, before, now, varies))
    if _prepares(reached, effects):  # a flag for "is prepared" is undone with the preparation
        effects = [e for e in effects if not (e.before is MISSING and isinstance(e.now, bool))]
    return rebound, effects


def _handed_on(
    read: Sequence[str], parts: dict[str, Tensor], kind: type, outside: Outside, recorder: GraphRecorder
) -> dict[str, Tensor]:
    """The new values of tensors that the step reads and replaces, by place: of one, or of those in a container, such as
    the (h, c) of an LSTM. Raises CaptureError for one of another dtype or shape."""
    found: dict[str, Tensor] = {}
    for place in read:
        old, new = outside.fakes[place], parts.get(place)
        if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
            what = kind.__name__ if new is None else f"{new.dtype} of shape {list(new.shape)}"
            raise CaptureError(
                f"the step reads {place}, {old.dtype} of shape {list(old.shape)}, and puts {what} in its place; a value"
                " that the step hands on to the next keeps its type and shape"
            )
        if is_real(new):  # one from outside, such as the next of a queue that moves up
            new = outside.fake_of(new)
        if new is not old and id(new) in recorder.nodes:
            found[place] = new
    return found


def _refuse_shared(before: dict[str, Tensor], parts: dict[str, Tensor], reached: Reached) -> None:
    """Raise CaptureError if one tensor at two places becomes two tensors: it is one input of the graph."""
    for place, tensor in before.items():
        other = reached.places.get(id(tensor), place)
        if other in before and parts.get(place) is not parts.get(other):
            raise CaptureError(
                f"the step reads one tensor at {place} and {other}, and puts two in its place; give each place a tensor"
                " of its own to begin with"
            )


def parts_of(place: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value, in its containers and in attributes of objects, with the places that `Reached` gives
    them. Raises CaptureError for a value that holds too many others, as objects do that refer to each other."""
    waiting: list[tuple[str, object, int]] = [(place, value, 0)]
    num_seen = 0
    while waiting:
        at, one, depth = waiting.pop()
        num_seen += 1
        if num_seen > _MOST:
            raise CaptureError(
                f"the step assigns {place} an object of {type(value).__name__} through which more than {_MOST} values"
                " are reached, so that the tensors among them cannot be found; keep tensors in buffers of the model"
            )
        if isinstance(one, Tensor):
            yield at, one
        elif depth < _DEEPEST:
            waiting += reversed([(f"{at}{key}", part, depth + 1) for key, part in _inside(one)])


def with_parts(value: Any, change: Callable[[Tensor], object], depth: int = 0) -> Any:
    """A value with each of the tensors changed that `parts_of` finds. What has none stays the same object."""
    if isinstance(value, Tensor):
        return change(value)
    inside = dict(_inside(value)) if depth < _DEEPEST else {}
    news = {key: with_parts(part, change, depth + 1) for key, part in inside.items()}
    if all(news[key] is part for key, part in inside.items()):
        return value
    if isinstance(value, tuple):
        return type(value)(*news.values()) if hasattr(value, "_fields") else type(value)(news.values())
    found = copy.copy(value)
    if isinstance(value, (list, deque)):
        for number, new in enumerate(news.values()):
            found[number] = new
    elif isinstance(value, dict):
        found.update(zip(value, news.values(), strict=True))
    else:
        found.__dict__.update(zip(vars(value), news.values(), strict=True))
    return found


def _inside(value: object) -> Iterator[tuple[str, object]]:
    """The values in a container or an object, with what their places add to its own."""
    if isinstance(value, (tuple, list, deque)):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif is_searched(value):
        yield from ((f".{name}", part) for name, part in vars(value).items())


def _same_but_tensors(one: object, other: object, depth: int = 0) -> bool:
    """Whether two values are alike in all but the values of tensors."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor)
    if one is other or type(one) is not type(other) or depth == _DEEPEST:
        return one is other
    if isinstance(one, PLAIN):
        return one == other
    parts, others = dict(_inside(one)), dict(_inside(other))
    alike = (_same_but_tensors(part, others[key], depth + 1) for key, part in parts.items() if key in others)
    return bool(parts) and parts.keys() == others.keys() and all(alike)


def _prepares(reached: Reached, effects: Sequence[Effect]) -> bool:
    """Whether the step has created an object that is neither a plain value nor a tensor, such as a hook, which is
    undone."""
    made = (e for e in effects if e.before is MISSING and not isinstance(e.now, (*PLAIN, Tensor)))
    return any(reached.empty) or any(made)


def _varies(node: Node) -> bool:
    """Whether a value depends on an input of the graph that is not a constant, or on random numbers."""
    seen, stack = {node}, [node]
    while stack:
        one = stack.pop()
        if one.op == "placeholder" and not one.name.startswith("constant_"):
            return True
        stack += [source for source in one.all_input_nodes if source not in seen]
        seen.update(one.all_input_nodes)
    return False
