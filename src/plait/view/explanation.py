"""explain: the layout of every tensor, where it came from, and every collective with its bytes."""

from __future__ import annotations

import difflib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from plait.errors import LayoutError
from plait.graph.bucket import bucket_wait, rows_start, rows_wait
from plait.graph.calls import is_item, output_node
from plait.graph.lower import Lowered, dtype_name
from plait.graph.wire import Collective, step_collectives
from plait.spec.layout import Layout


@dataclass(frozen=True)
class Explanation:
    """What a plan does to one captured step. `str` gives the whole page, `tensor` one tensor."""

    lowered: Lowered
    collectives: tuple[Collective, ...]

    @property
    def sent_bytes(self) -> dict[str, float]:
        """Bytes that each rank sends in one step, by axis."""
        found: dict[str, float] = defaultdict(float)
        for item in self.collectives:
            found[item.axis] += item.sent_bytes
        return dict(found)

    def __str__(self) -> str:
        parameters = [i.name for i in self.lowered.captured.inputs if i.kind == "parameter"]
        batch = [i.name for i in self.lowered.captured.inputs if i.kind == "batch"]
        lines = [f"plan {self.lowered.plan.title}", "", "batch"]
        lines += [f"  {name:40} {self.lowered.layouts[name]}" for name in batch if name in self.lowered.layouts]
        lines += ["", "parameters"]
        lines += [f"  {name:40} {self.lowered.layouts[name]}{self._origin(name)}" for name in parameters]
        lines += ["", "collectives of one step, in order (bytes that each rank sends)"]
        lines += [f"  {_row(item)}" for item in self.collectives] or ["  none"]
        lines += ["", *self._totals()]
        if self.lowered.without_rule:
            lines += ["", f"ops without a rule, run on whole inputs: {', '.join(sorted(self.lowered.without_rule))}"]
        return "\n".join(lines)

    def tensor(self, name: str) -> str:
        """One tensor: a parameter, a leaf of the batch, or a value of the graph by its node's name."""
        if name in self.lowered.layouts:
            return self._input(name)
        nodes = {node.name: node for node in self.lowered.graph.nodes if node.op == "call_function"}
        if name not in nodes:
            near = difflib.get_close_matches(name, [*self.lowered.layouts, *nodes], n=5, cutoff=0.4)
            hint = f"did you mean {', '.join(near)}?" if near else "run explain without a tensor to see the names"
            raise LayoutError(f"the step has no tensor {name!r}; {hint}")
        return _describe(nodes[name])

    def _input(self, name: str) -> str:
        """A parameter, buffer or leaf of the batch: its layout, its readers, what becomes of its gradient."""
        lowered = self.lowered
        layout, captured = lowered.layouts[name], lowered.captured
        local = list(layout.local_shape(lowered.plan.mesh))
        part = (
            "the whole tensor on every rank" if local == list(layout.shape) else f"{layout.dtype}{local} on each rank"
        )
        lines = [f"{name}  {layout}{self._origin(name)}", f"  local     {part}"]
        placeholder = next((i.node for i in captured.inputs if i.name == name), "")
        node = next((n for n in lowered.graph.nodes if n.op == "placeholder" and n.name == placeholder), None)
        if node is not None:
            modules = sorted({u.meta.get("module") or "the loss" for u in node.users if u.op == "call_function"})
            lines.append(f"  read by   {', '.join(modules) or 'nothing'}")
        index = next((i for i, o in enumerate(captured.outputs) if (o.kind, o.name) == ("gradient", name)), None)
        if index is not None:
            (results,) = output_node(lowered.graph).args
            lines.append(f"  gradient  {_way_of_gradient(results[index])}")  # type: ignore[index]
        related = [c for c in self.collectives if name in c.value or name in c.origin]
        return "\n".join([*lines, *(f"  {_row(item)}" for item in related)])

    def _origin(self, name: str) -> str:
        origin = self.lowered.origins.get(name)
        return f"   <- {origin}" if origin else ""

    def _totals(self) -> list[str]:
        lines = ["in all"]
        mesh = self.lowered.plan.mesh
        for axis, sent in self.sent_bytes.items():
            size = mesh.axis_size(axis)
            lines.append(f"  {axis:8} {size} ranks, each sends {human_bytes(sent)} a step")
        for kind, what, ways in _FORMULAS:
            mine = [c for c in self.collectives if c.kind == kind and c.axis == "data" and c.value.endswith(what)]
            if not mine:
                continue
            size = mesh.axis_size("data")
            held = sum(c.tensor_bytes for c in mine) * (size if kind == "all_gather" else 1)
            formula = f"{ways}({size} - 1)/{size} x {human_bytes(held)}"
            lines.append(f"  {what} over data, {kind}: {formula} = {human_bytes(sum(c.sent_bytes for c in mine))}")
        return lines


# Kind of collective, of what, and how often the (N-1)/N of a ring go round.
_FORMULAS = (
    ("all_reduce", "gradients", "2 x "),
    ("reduce_scatter", "gradients", ""),
    ("all_gather", "parameters", ""),
)


def explanation(lowered: Lowered) -> Explanation:
    return Explanation(lowered, tuple(step_collectives(lowered)))


def human_bytes(number: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


def _row(item: Collective) -> str:
    place = f" in {item.module}" if item.module else ""
    origin = f"   <- {item.origin}" if item.origin else ""
    return (
        f"{item.phase:8} {item.kind:14} {item.axis:7} {human_bytes(item.sent_bytes):>10}  {item.value}{place}{origin}"
    )


def _way_of_gradient(node: Any) -> str:
    """How a gradient is summed, from the node that leaves the graph."""
    if isinstance(node, Node) and is_item(node) and node.args[0].target in (bucket_wait, rows_wait):  # type: ignore[union-attr]
        start = node.args[0].args[1]  # type: ignore[union-attr]
        assert isinstance(start, Node)
        axes = " and ".join(start.args[2])  # type: ignore[arg-type]
        kept = ", of which each rank keeps its part" if start.target is rows_start else ""
        held = human_bytes(start.meta["bytes"])
        return f"summed over {axes} in a bucket of {start.meta['what']}, {held}{kept}"
    return "made on each rank, not summed over any axis"


def _describe(node: Node) -> str:
    value = node.meta.get("val")
    lines = [node.name]
    if isinstance(value, torch.Tensor):
        shape = node.meta.get("global_shape", tuple(value.shape))
        layout = Layout(dtype_name(value.dtype), shape, node.meta.get("placements", ()))
        origin = node.meta.get("origin")
        lines = [f"{node.name}  {layout}" + (f"   <- {origin}" if origin else "")]
        lines.append(f"  local     {dtype_name(value.dtype)}{list(value.shape)}")
    lines.append(f"  made by   {node.target} in {node.meta.get('module') or 'the loss'}")
    lines.append(f"  from      {', '.join(n.name for n in node.all_input_nodes)}")
    lines.append(f"  read by   {', '.join(n.name for n in node.users)}")
    return "\n".join(lines)
