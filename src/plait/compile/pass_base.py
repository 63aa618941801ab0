"""Passes: one transformation each, lists of them that are run in order, and reports of what each changes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.fx import Node

from plait.compile.ir.calls import is_view, num_bytes, output_values
from plait.compile.ir.node_info import info_of
from plait.compile.rank_program import StepGraph
from plait.errors import PlanError


class HasParts(Protocol):
    """The object that passes change: a Draft, or the eager backend's own."""

    parts: dict[str, StepGraph]  # the graphs of the step


D = TypeVar("D", bound=HasParts)


@dataclass(frozen=True)
class Pass(Generic[D]):
    """One transformation of a step.

    name      what `plait explain --diff` takes
    about     what the pass does, for `plait explain --passes`
    run       changes the draft
    requires  facts, in words, that passes before it must provide
    provides  facts that hold after it
    when      whether the pass runs for a draft
    """

    name: str
    about: str
    run: Callable[[D], None]
    requires: Collection[str] = ()
    provides: Collection[str] = ()
    when: Callable[[D], bool] = lambda draft: True


def check_order(passes: Sequence[Pass[Any]]) -> None:
    """Raise PlanError for a pass that requires a fact which no pass before it provides."""
    known: set[str] = set()
    for each in passes:
        if missing := sorted({*each.requires} - known):
            raise PlanError(f"the pass {each.name!r} requires {missing[0]!r}, which no pass before it provides")
        known |= {*each.provides}


def run_passes(passes: Sequence[Pass[D]], draft: D, watcher: Watcher | None = None) -> None:
    """Run the passes, in order, whose `when` is true for the draft. The `watcher` sees each of them."""
    for each in passes:
        if not each.when(draft):
            continue
        if watcher is None:
            each.run(draft)
        else:
            watcher.run(each, draft)


@dataclass(frozen=True)
class PassReport:
    """What one pass has changed: the calls of all graphs of the step, and the bytes of the tensors that they return."""

    name: str
    about: str
    num_calls: tuple[int, int]  # before the pass and after it
    num_bytes: tuple[int, int]
    diff: str = ""  # a unified diff of the graphs as text, if it was asked for


class Watcher:
    """Reports on passes as they run. `diff` names the pass whose graphs are compared as text."""

    def __init__(self, diff: str = "") -> None:
        self.reports: list[PassReport] = []
        self._diff = diff

    def run(self, each: Pass[D], draft: D) -> None:
        texts = _texts(draft) if each.name == self._diff else {}
        before = _sizes(draft)
        each.run(draft)
        after = _sizes(draft)
        diff = _difference(texts, _texts(draft)) if each.name == self._diff else ""
        report = PassReport(each.name, each.about, (before[0], after[0]), (before[1], after[1]), diff)
        self.reports.append(report)


def _sizes(draft: HasParts) -> tuple[int, int]:
    calls = [node for part in draft.parts.values() for node in part.graph.nodes if node.op == "call_function"]
    made = [value for node in calls if not is_view(node) for value in output_values(node)]
    return len(calls), sum(num_bytes(value) for value in made if isinstance(value, torch.Tensor))


def _texts(draft: HasParts) -> dict[str, list[str]]:
    return {name: [_line(node) for node in part.graph.nodes] for name, part in draft.parts.items()}


def _line(node: Node) -> str:
    values = [value for value in output_values(node) if isinstance(value, torch.Tensor)]
    forms = ", ".join(f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}" for v in values)
    args = ", ".join([*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())])
    target = getattr(node.target, "__name__", "") if callable(node.target) else ""
    name = f"{node.target}" if isinstance(node.target, torch._ops.OpOverload) else target
    info = info_of(node)
    where = " ".join(text for text in (info.phase, info.module) if text)
    return f"{node.name} = {name or node.op}({args})" + f" : {forms}" * bool(forms) + f"  # {where}" * bool(where)


def _difference(before: Mapping[str, list[str]], after: Mapping[str, list[str]]) -> str:
    """A unified diff of each graph and the one that it was made from."""
    found: list[str] = []
    for name, lines in after.items():
        old = before.get(name, before.get(name.rpartition(".")[0], before.get("", [])))
        found += difflib.unified_diff(old, lines, f"{name or 'step'} before", f"{name or 'step'} after", lineterm="")
    return "\n".join(found)
