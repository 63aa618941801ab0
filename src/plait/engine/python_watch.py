"""Watches the Python values that a captured step has read, and compares them before each step.

A value has a token, such as ("float", "0.5"). A `Variant` is the set of tokens, by place, that differ from those at the
first capture. Steps of the same variant share a graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.compile.capture.assignments import parts_of, with_parts
from plait.compile.capture.fake_parameters import refuse_scripted
from plait.compile.capture.python_state import MISSING, Buffer
from plait.compile.capture.reachable import PLAIN, Reached
from plait.compile.capture.tracked_numbers import Asked
from plait.errors import PlanError

Variant = tuple[tuple[str, object], ...]


class PythonWatch:
    """Watches one model and loss function. `variant` says how their values differ from those at the beginning."""

    def __init__(self, model: nn.Module, loss_fn: object) -> None:
        refuse_scripted(model)
        self._given = (model, loss_fn)
        self._ignored: set[str] = set()  # places whose values do not affect the graph
        self._asked: dict[str, Asked] = {}  # by place of a number: the conditions on it that affect the graph
        self._compared: dict[str, tuple[float, ...]] = {}
        self._objects = {name: id(module) for name, module in model.named_modules()}
        named = [*model.named_parameters(), *model.named_buffers()]
        self._first = [(name, weakref.ref(tensor)) for name, tensor in named]  # a trainer may free them
        self.reached = Reached(model, loss_fn)
        self._tokens = self._all_tokens()
        self._base, self._first_values = dict(self._tokens), dict(self._values)
        self._variant: Variant = ()

    @property
    def variant(self) -> Variant:
        """The current variant."""
        if not self._is_same():
            self._look_again()
        if not self._compared:
            return self._variant
        return (*self._variant, *self._numbers())

    def walk(self) -> Reached:
        """Everything that the step can reach now."""
        return Reached(*self._given, self._earlier())

    def tensor(self, place: str) -> Tensor:
        """The tensor that is at a place now. Raises PlanError if there is none."""
        holder, key = self.reached.slots.get(place, (None, None))
        found = holder.now().get(key) if holder is not None else self.reached.tensors.get(place)
        if not isinstance(found, Tensor):
            raise PlanError(f"the step reads a tensor at {place}, which was removed after the step was captured")
        return found

    def exchange(self, place: str, tensor: Tensor) -> None:
        """Put another tensor at a place. A tuple that has the place is made anew."""
        slots = self.reached.slots
        slot = place if place in slots else max((each for each in slots if place.startswith(each)), key=len)
        holder, key = slots[slot]
        value = holder.now()[key]
        places = iter([each for each, _ in parts_of(slot, value)])
        holder.put(key, with_parts(value, lambda old: tensor if next(places) == place else old))
        holder.before = holder.now()
        if slot != place:
            self.reached.moved(place, tensor)

    def compare(self, places: Iterable[str]) -> None:
        """From now on, compare the values of the tensors at these places too."""
        for place in frozenset(places) - self._compared.keys():
            self._compared[place] = _numbers_of(self.tensor(place))

    def ignore(self, places: Iterable[str]) -> None:
        """From now on, ignore the values at these places."""
        self._ignored |= set(places)
        self._variant = tuple(pair for pair in self._variant if not self._is_ignored(pair[0]))

    def ask(self, place: str, asked: Asked) -> None:
        """From now on, compare a number only by the results of these conditions."""
        known = self._asked.setdefault(place, Asked())
        known.conditions += asked.conditions
        for tokens, values in ((self._tokens, self._values), (self._base, self._first_values)):
            if place in values:
                tokens[place] = known.answers(values[place])
        self._compare()

    def number(self, place: str) -> int | float | None:
        """The number at a place now; None if there is none."""
        value = self._values.get(place)
        return value if type(value) in (int, float) else None

    def stripped(self, variant: Variant) -> Variant:
        """The variant without the places that are ignored by now."""
        return tuple(pair for pair in variant if not self._is_ignored(pair[0]))

    def at_first(self, place: str) -> object:
        """The token of the value that was at a place at the first capture."""
        return self._base.get(place, self._compared.get(place, "nothing"))

    # what changes

    def _is_same(self) -> bool:
        return self.reached.is_same() and self._flags == [_flag(p) for p in self._parameters_now()]

    def _parameters_now(self) -> list[nn.Parameter | None]:
        return [own.get(key) for _, own, key in self.reached.parameters]

    def _look_again(self) -> None:
        changed = self._follow()
        if changed is None:
            self._same_modules(self._given[0])
            self.reached = self.walk()
            self._tokens = self._all_tokens()
        if changed is not False:
            self._compare()

    def _compare(self) -> None:
        keys = self._tokens.keys() | self._base.keys()
        differing = [k for k in keys if self._tokens.get(k, MISSING) != self._base.get(k, MISSING)]
        self._variant = tuple((k, self._tokens.get(k, "nothing")) for k in sorted(differing) if not self._is_ignored(k))

    def _follow(self) -> bool | None:
        """Take over changes that need no new walk: plain values, and tensors of the same form. Returns whether any
        token changed; None if there are other changes."""
        tokens = dict[str, object]()
        if not all(self._is_ignored(place) for place in self.reached.filled()):
            return None
        for holder in self.reached.holders:
            if holder.is_same():
                continue
            now = holder.now()
            whole = self._is_ignored(holder.place)
            for key in () if whole else now.keys() | holder.before.keys():
                old, new = holder.before.get(key, MISSING), now.get(key, MISSING)
                place = holder.place_of(key)
                if old is new or self._is_ignored(place):
                    continue
                if not all(isinstance(value, PLAIN) for value in (old, new)) and not _same_form(old, new):
                    return None
                if isinstance(new, Tensor):
                    self.reached.moved(place, new)
                else:
                    self._values[place] = new
                    tokens[place] = self._token(place, new)
            holder.before = now
        for i, (place, array, before) in enumerate(self.reached.arrays):
            if array.tobytes() != before:
                self.reached.arrays[i] = (place, array, array.tobytes())
                tokens[place] = _array_token(array)
        self._flags = [_flag(p) for p in self._parameters_now()]
        for (name, _, _), flag in zip(self.reached.parameters, self._flags, strict=True):
            tokens |= _flag_tokens(name, flag)
        changed = any(self._tokens.get(place) != one for place, one in tokens.items())
        self._tokens |= tokens
        return changed

    def _token(self, place: str, value: Any) -> object:
        asked = self._asked.get(place)
        return token(value) if asked is None or type(value) not in (int, float) else asked.answers(value)

    def _earlier(self) -> dict[int, str]:
        alive = ((name, reference()) for name, reference in self._first)
        return {id(tensor): name for name, tensor in alive if tensor is not None}

    def _same_modules(self, model: nn.Module) -> None:
        now = {name: id(module) for name, module in model.named_modules()}
        changed = sorted(name for name in now.keys() | self._objects.keys() if now.get(name) != self._objects.get(name))
        if changed:
            raise PlanError(
                f"the module {changed[0]} of the model was exchanged or taken out after training began, and the trainer"
                " has the parameters of the one before; change the model before the first step, or make a new Trainer"
                " and load the state that you want to keep"
            )

    def _is_ignored(self, place: str) -> bool:
        return place in self._ignored or any(place.startswith(one) for one in self._ignored if one.endswith(("[", ".")))

    def _numbers(self) -> Variant:
        now = ((place, _numbers_of(self.tensor(place))) for place in sorted(self._compared))
        return tuple((place, numbers) for place, numbers in now if numbers != self._compared[place])

    def _all_tokens(self) -> dict[str, object]:
        reached = self.reached
        self._values = dict(reached.values)
        found: dict[str, object] = {place: self._token(place, value) for place, value in reached.values.items()}
        found |= {place: _form(tensor) for place, tensor in reached.tensors.items()}
        found |= {place: _structure(what) for place, what in reached.structure.items()}
        found |= {place: _array_token(array) for place, array, _ in reached.arrays}
        self._flags = [_flag(p) for p in self._parameters_now()]
        for (name, _, _), flag in zip(reached.parameters, self._flags, strict=True):
            found |= _flag_tokens(name, flag)
        return found


def token(value: object) -> tuple[str, str]:
    """The token of a plain value: its type, and how it prints."""
    return type(value).__qualname__, repr(value)


def is_flag(place: str) -> bool:
    """Whether a place says if a parameter trains, or which mode a module is in."""
    return place.endswith((".requires_grad", ".training", ":training"))


def _flag(parameter: nn.Parameter | None) -> tuple[bool, tuple[int, ...]]:
    """Whether a parameter trains, and the ids of its hooks."""
    if parameter is None:
        return False, ()
    return parameter.requires_grad, tuple(parameter._backward_hooks or ())


def _flag_tokens(name: str, flag: tuple[bool, tuple[int, ...]]) -> dict[str, object]:
    return {f"{name}.requires_grad": ("bool", str(flag[0])), f"{name}.hooks": ("tuple", str(flag[1]))}


def _same_form(old: object, new: object) -> bool:
    return isinstance(old, Tensor) and isinstance(new, Tensor) and _form(old) == _form(new)


def _form(tensor: Tensor) -> tuple[object, ...]:
    return ("tensor", str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), tensor.requires_grad)


def _structure(what: Any) -> object:
    if hasattr(what, "co_code"):
        return what.co_filename, what.co_firstlineno, what.co_name, what.co_code
    return what


def _array_token(array: np.ndarray | Buffer) -> tuple[object, ...]:
    return str(array.dtype), array.shape, array.tobytes()


def _numbers_of(tensor: Tensor) -> tuple[float, ...]:
    if tensor.is_meta:
        raise PlanError("the step reads numbers of a tensor that is now on the meta device")
    with torch.no_grad():
        return tuple(tensor.detach().reshape(-1).tolist())
