"""The effects of a step on Python values, such as counters and flags, which a captured step reproduces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.compile.capture.assignments import parts_of, with_parts
from plait.compile.capture.captured import Captured, Effect, same_step
from plait.compile.capture.late_values import LateNumber
from plait.compile.capture.outside_tensors import hands_on
from plait.compile.capture.python_state import MISSING
from plait.compile.capture.reachable import PLAIN
from plait.compile.capture.tracked_numbers import Asked, Tracked
from plait.engine.python_watch import PythonWatch
from plait.errors import CaptureError

_NUMBERS = (int, float)


@dataclass(frozen=True)
class Changes:
    """Plain values that a captured step changes. `steady`: the step's graph is the same with the changed values."""

    effects: tuple[Effect, ...] = ()
    steady: bool = True

    def begin(self) -> list[Any]:
        """The values before a step."""
        return [effect.holder.now().get(effect.key, MISSING) for effect in self.effects]

    def end(self, before: list[object], times: int) -> None:
        """Change the values as `times` runs of the step would."""
        for effect, value in zip(self.effects, before, strict=True):
            if _is_number(effect.before) and _is_number(effect.now) and _is_number(value):
                effect.holder.put(effect.key, value + (effect.now - effect.before) * times)
            else:
                effect.holder.put(effect.key, effect.now)


def settled(found: Captured, watch: PythonWatch, again: Callable[[], Captured]) -> Changes:
    """The effects of a captured step, once it is established that its graph is valid for the following steps.

    `again` captures the step once more from the current Python values, while the changes are in place. Raises
    CaptureError for a number that the step both changes and computes with, and for a tensor that one step leaves for
    the next.
    """
    _check_made(found, again)
    plain = [
        e for e in found.effects if isinstance(e.now, PLAIN) and (e.before is MISSING or isinstance(e.before, PLAIN))
    ]
    kept = [e for e in found.effects if e.derived]
    late = {e.place: e for e in found.effects if isinstance(e.now, LateNumber) and _is_number(e.before)}
    if not plain and not kept and not late:
        return Changes()
    numbers = {e.place: e for e in plain if _is_number(e.before) and _is_number(e.now)}
    asked, second = _tracked(
        watch,
        again,
        {place: (e.holder, e.key, e.now) for place, e in numbers.items()}
        | {place: (e.holder, e.key, e.before) for place, e in late.items()},
        plain,
        kept,
    )
    for place in late:
        if second is None or asked[place].used or asked[place].conditions:
            raise CaptureError(
                f"the step leaves at {place} a number that it reads of a tensor, and computes with it in the next step;"
                " leave .item() out and keep it as a tensor, in a buffer of the model"
            )
    later = {e.place: e for e in second.effects} if second is not None else {}
    for place, effect in numbers.items():
        increment = _increment(later.get(place))
        if second is None or asked[place].used or (asked[place].conditions and increment != effect.now - effect.before):
            raise CaptureError(
                f"the step changes {place} from {effect.before} to {effect.now} and computes with it, so that each step"
                " would be another graph; make it a buffer with register_buffer, and compute with the tensor"
            )
        if asked[place].conditions:
            watch.ask(place, asked[place])
        else:
            watch.ignore([place])
    if second is None:
        second = found
    for effect in kept:
        places = [place for place, _ in parts_of(effect.place, effect.now)]
        grows = second is found and isinstance(effect.holder.of, (list, deque))
        if grows or any(place in second.outside for place in places):
            lazy = "" if effect.before is not MISSING else ", or read it once, if it is computed on its first use,"
            raise CaptureError(
                f"the step leaves a tensor at {effect.place} that the next step reads; make it a buffer with"
                f" register_buffer{lazy} before training begins, so that its value is kept"
            )
    return Changes(tuple(plain), same_step(found, second))


def _check_made(found: Captured, again: Callable[[], Captured]) -> None:
    """Raise CaptureError if the next step changes a buffer that this one has made."""
    if not found.made:
        return
    before = [dict(each.module._buffers) for each in found.made]
    try:
        for each in found.made:
            each.module._buffers[each.key] = torch.empty(each.value.shape, dtype=each.value.dtype, device="meta")
        changed = {output.name for output in again().outputs if output.kind == "buffer"}
    except CaptureError:  # it reads numbers of these, which are not known here
        return
    finally:
        for each, buffers in reversed(list(zip(found.made, before, strict=True))):
            each.module._buffers.clear()
            each.module._buffers.update(buffers)
    for each in found.made:
        if each.name in changed:
            raise CaptureError(hands_on(each.name))


def examine(watch: PythonWatch, again: Callable[[], Captured], places: Iterable[str]) -> None:
    """Find out how the step uses numbers that have changed without changing its graph.

    From then on such a number is ignored, or compared by the conditions that the step evaluates on it, or compared by
    value if the step computes with it.
    """
    slots = {place: watch.reached.slots[place] for place in places if place in watch.reached.slots}
    numbers = {place: (holder, key, holder.now()[key]) for place, (holder, key) in slots.items()}
    asked, second = _tracked(watch, again, {p: one for p, one in numbers.items() if _is_number(one[2])})
    for place, one in asked.items():
        if second is not None and not one.used and one.conditions:
            watch.ask(place, one)
        elif second is not None and not one.used:
            watch.ignore([place])


def _tracked(
    watch: PythonWatch,
    again: Callable[[], Captured],
    numbers: Mapping[str, tuple[Any, Any, Any]],
    plain: Iterable[Effect] = (),
    kept: Iterable[Effect] = (),
) -> tuple[dict[str, Asked], Captured | None]:
    """Capture the step with tracked numbers, and the other effects, in place. Returns the uses that were found, by
    place, and the capture; None if the capture fails with them."""
    asked = {place: Asked() for place in numbers}
    try:
        for effect in plain:
            effect.holder.put(effect.key, effect.now)
        for effect in kept:
            effect.holder.put(effect.key, with_parts(effect.now, _without_values))
        for place, (holder, key, value) in numbers.items():
            holder.put(key, Tracked(value, asked[place]))
        return asked, again()
    except CaptureError:
        return asked, None
    finally:
        watch.reached.put_back()


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _is_number(value: object) -> bool:
    return type(value) in _NUMBERS


def _increment(effect: Effect | None) -> float | None:
    """The amount by which an effect changes a number; None if it is no number."""
    if effect is None:
        return None
    before, now = (v.value if isinstance(v, Tracked) else v for v in (effect.before, effect.now))
    return now - before if _is_number(before) and _is_number(now) else None
