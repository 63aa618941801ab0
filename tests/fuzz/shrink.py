"""A failing case made smaller, for as long as it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz import texts
from fuzz.grammar import Layer, Spec, runs
from fuzz.outcome import Outcome

Check = Callable[[Spec, str], Outcome]


def shrink(spec: Spec, plan: str, fault: Outcome, check: Check, seconds: float = 60.0) -> tuple[Spec, str, Outcome]:
    """The smallest case found, and its outcome; `check` runs a case. Greedy: what still fails is taken at once."""
    end = time.monotonic() + seconds
    tried: set[tuple[Spec, str]] = {(spec, plan)}
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(spec, plan):
            if time.monotonic() > end:
                return spec, plan, fault
            if candidate in tried:
                continue
            tried.add(candidate)
            if candidate[0] != spec and not runs(candidate[0]):
                continue
            found = check(*candidate)
            if found.same_fault(fault):
                (spec, plan), fault, smaller = candidate, found, True
                break
    return spec, plan, fault


def candidates(spec: Spec, plan: str) -> Iterator[tuple[Spec, str]]:
    """Cases that are a step smaller, those that take away most first."""
    for place in range(len(spec.layers)):
        yield replace(spec, layers=spec.layers[:place] + spec.layers[place + 1 :]), plan
    plan, layouts = texts.split(plan)
    for pattern in layouts:
        yield spec, texts.join(plan, {p: layout for p, layout in layouts.items() if p != pattern})
    yield from _smaller(spec, plan, layouts)


def _smaller(spec: Spec, plan: str, layouts: dict[str, str]) -> Iterator[tuple[Spec, str]]:
    """With less in the plan, or less in a layer."""
    whole = texts.join(plan, layouts)
    words = plan.split()
    if len(words) > 1:
        for place in range(len(words)):
            yield spec, texts.join(" ".join(words[:place] + words[place + 1 :]), layouts)
    for place, word in enumerate(words):
        for less in smaller_word(word):
            yield spec, texts.join(" ".join([*words[:place], less, *words[place + 1 :]]), layouts)
    plain = Spec(spec.source, spec.rows, spec.length, spec.width, spec.out, spec.layers, "regress", seed=spec.seed)
    for name in _FIELDS:
        if getattr(spec, name) != getattr(plain, name):
            yield replace(spec, **{name: getattr(plain, name)}), whole
    for place, layer in enumerate(spec.layers):
        for smaller in smaller_layers(layer):
            yield replace(spec, layers=(*spec.layers[:place], smaller, *spec.layers[place + 1 :])), whole
    for name, low in (("rows", 4), ("length", 2), ("width", 8), ("out", 4)):
        for size in {low, getattr(spec, name) // 2}:
            if low <= size < getattr(spec, name):
                yield replace(spec, **{name: size}), whole


def smaller_word(word: str) -> Iterator[str]:
    """A plan's word with smaller numbers."""
    key, _, value = word.partition("=")
    if value.isdecimal():
        for size in (2, int(value) // 2, int(value) - 1):
            if 1 < size < int(value):
                yield f"{key}={size}"
    elif key == "schedule":
        for simple in ("gpipe", "1f1b"):
            if value not in ("gpipe", "1f1b"):
                yield f"schedule={simple}"


def smaller_layers(layer: Layer) -> Iterator[Layer]:
    """The layer called plainly, not frozen, or with one option simpler."""
    if layer.how != "plain":
        yield replace(layer, how="plain")
    if layer.frozen:
        yield replace(layer, frozen=False)
    for place, (name, value) in enumerate(layer.options):
        simple: tuple[object, ...] = (_WORDS[name],) if name in _WORDS else _SIMPLE.get(type(value), ())
        for less in simple:
            if less != value and not (isinstance(value, int) and isinstance(less, int) and less > value):
                yield replace(layer, options=(*layer.options[:place], (name, less), *layer.options[place + 1 :]))


_FIELDS = (
    "outputs", "extra", "form", "dtype", "channels_last", "tied", "frozen_embed", "all_leaves", "container", "task",
    "optimizer", "clip_norm", "autocast",
)  # fmt: skip
_SIMPLE: dict[type, tuple[object, ...]] = {bool: (False,), float: (0.0,), int: (1, 2)}
_WORDS = {
    "qkv": "separate", "product": "sdpa", "mask": "none", "positions": "none", "gate": "none", "normed": "",
    "mode": "zeros", "activation": "relu",
}  # fmt: skip
