"""What a pass is, and lists of passes: their order, and what each of them changes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.fx import Node

from plait.compile.ir.calls import num_bytes, output_values
from plait.compile.ir.node_info import info_of
from plait.compile.ir.views import is_view
from plait.compile.rank_program import StepGraph
from plait.errors import PlanError


class HasParts(Protocol):
    """What passes change."""

    parts: dict[str, StepGraph]  # the graphs of the step


D = TypeVar("D", bound=HasParts)


@dataclass(frozen=True)
class Pass(Generic[D]):
    """One transformation of a step, by the name that `plait explain --diff` takes.

    `requires` and `provides` are facts, in words; a test holds the order of all passes against them.
    """

    name: str
    about: str
    run: Callable[[D], None]
    requires: Collection[str] = ()
    provides: Collection[str] = ()
    when: Callable[[D], bool] = lambda draft: True


def check_order(passes: Sequence[Pass[Any]]) -> None:
    """Raise PlanError for a pass that comes before one that provides what it requires."""
    known: set[str] = set()
    for each in passes:
        if missing := sorted({*each.requires} - known):
            raise PlanError(f"the pass {each.name!r} requires {missing[0]!r}, which no pass before it provides")
        known |= {*each.provides}


def run_passes(passes: Sequence[Pass[D]], draft: D, watcher: Watcher | None = None) -> None:
    """Run the passes whose `when` holds for the draft, one after the other; `watcher` sees each."""
    for each in passes:
        if not each.when(draft):
            continue
        if watcher is None:
            each.run(draft)
        else:
            watcher.run(each, draft)


@dataclass(frozen=True)
class PassReport:
    """What one pass has changed: calls, and bytes of the tensors that they make, over all graphs of the step."""

    name: str
    about: str
    num_calls: tuple[int, int]  # before and after
    num_bytes: tuple[int, int]
    diff: str = ""  # of the graphs as text, where it was asked for


class Watcher:
    """Sees passes as they run. `diff` names the one whose graphs are compared as text."""

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
    """Of each graph with what it was made from."""
    found: list[str] = []
    for name, lines in after.items():
        old = before.get(name, before.get(name.rpartition(".")[0], before.get("", [])))
        found += difflib.unified_diff(old, lines, f"{name or 'step'} before", f"{name or 'step'} after", lineterm="")
    return "\n".join(found)
