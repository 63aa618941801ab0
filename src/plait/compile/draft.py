"""A step while it is lowered, and what a pass over it is."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from plait.compile.capture.capture import Captured
from plait.compile.ir.calls import num_bytes, output_values
from plait.compile.ir.node_info import info_of
from plait.compile.ir.views import is_view
from plait.compile.lowered import Settled
from plait.compile.passes.accumulation import StepGraph
from plait.compile.sharding.flat_shards import Cut, cuts_of
from plait.compile.sharding.split_share import SplitShare
from plait.compile.stages.split import Pipeline
from plait.errors import PlanError
from plait.plan.annotation import Annotations
from plait.plan.plan import Plan
from plait.spec.layout import Layout, Placement


@dataclass
class Draft:
    """A step on its way from the graph that was captured to those that ranks run. Passes change it."""

    captured: Captured
    plan: Plan
    annotations: Annotations
    settled: Settled
    parts: dict[str, StepGraph]  # by cell, then by cell and turn; at first one, with the name ""

    # what sharding decides
    chosen: dict[str, tuple[dict[str, Placement], dict[str, str]]] = field(default_factory=dict)  # by axis
    reasons: dict[str, str] = field(default_factory=dict)  # why parameters are whole, by name
    layouts: dict[str, Layout] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    without_rule: set[str] = field(default_factory=set)
    share: SplitShare | None = None

    # what a pipeline decides
    begins: list[float] | None = None  # positions with which its stages begin
    pipeline: Pipeline | None = None

    # what ZeRO decides
    states: dict[str, Layout] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The only graph, before the step is split."""
        (part,) = self.parts.values()
        return part.graph

    @graph.setter
    def graph(self, graph: Graph) -> None:
        (part,) = self.parts.values()
        part.graph = graph

    @property
    def device(self) -> str:
        """The type of device that the step runs on."""
        values = (value for part in self.parts.values() for node in part.graph.nodes for value in output_values(node))
        return next((value.device.type for value in values if isinstance(value, torch.Tensor)), "cpu")

    @property
    def cuts(self) -> dict[str, Cut]:
        """How ZeRO cuts parameters, by name."""
        return cuts_of(self.layouts, self.states, self.plan.sharding)


@dataclass(frozen=True)
class Pass:
    """One transformation of a step, by the name that `plait explain --diff` takes.

    `requires` and `provides` are facts, in words; a test holds the order of all passes against them.
    """

    name: str
    about: str
    run: Callable[[Draft], None]
    requires: Collection[str] = ()
    provides: Collection[str] = ()
    when: Callable[[Draft], bool] = lambda draft: True


def check_order(passes: Sequence[Pass]) -> None:
    """Raise PlanError for a pass that comes before one that provides what it requires."""
    known: set[str] = set()
    for each in passes:
        if missing := sorted({*each.requires} - known):
            raise PlanError(f"the pass {each.name!r} requires {missing[0]!r}, which no pass before it provides")
        known |= {*each.provides}


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

    def run(self, each: Pass, draft: Draft) -> None:
        texts = _texts(draft) if each.name == self._diff else {}
        before = _sizes(draft)
        each.run(draft)
        after = _sizes(draft)
        diff = _difference(texts, _texts(draft)) if each.name == self._diff else ""
        report = PassReport(each.name, each.about, (before[0], after[0]), (before[1], after[1]), diff)
        self.reports.append(report)


def _sizes(draft: Draft) -> tuple[int, int]:
    calls = [node for part in draft.parts.values() for node in part.graph.nodes if node.op == "call_function"]
    made = [value for node in calls if not is_view(node) for value in output_values(node)]
    return len(calls), sum(num_bytes(value) for value in made if isinstance(value, torch.Tensor))


def _texts(draft: Draft) -> dict[str, list[str]]:
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
