"""The text of `plait explain`: the layout and origin of each tensor, each collective and its bytes, stages, passes."""

from __future__ import annotations

import difflib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from plait.backends.choose import chooses_collectives, make_graphs, passes_of
from plait.backends.eager.passes import eager_graphs
from plait.backends.eager.rewrites.bucket_gradients import bucket_part
from plait.backends.eager.rewrites.read_ahead import gather_start
from plait.backends.inductor.inductor_backend import describe_regions
from plait.compile.compiled import Compiled
from plait.compile.ir.calls import is_item, is_view, op_spec_of, output_node
from plait.compile.ir.dtypes import dtype_name
from plait.compile.ir.node_info import info_of
from plait.compile.ops import CollectiveKind
from plait.compile.pass_base import PassReport, Watcher
from plait.compile.pipeline import PASSES, compile
from plait.compile.rank_program import RankProgram
from plait.compile.stage_costs import estimate_costs
from plait.compile.step_collectives import Collective, step_collectives
from plait.cost.memory_model import human_bytes
from plait.errors import LayoutError, PlanError
from plait.plan.annotation import Annotations
from plait.plan.axes import stage_axis
from plait.plan.sharding_plan import DEVICE, Gather, ParameterSharding, state_axes
from plait.spec.layout import Layout, Only
from plait.spec.schedule import BACKWARD, FORWARD


@dataclass(frozen=True)
class Explanation:
    """The explanation of one captured step under a plan. `str` gives the whole text, `tensor` that of one tensor.

    Attributes:
        compiled: the step under the plan.
        collectives: the collectives of one step, in order; none if the plan's backend chooses them itself.
        about: what replicas, or workers and servers, exchange, for plans that have them.
        layouts: the layouts that the user gave.
    """

    compiled: Compiled
    collectives: tuple[Collective, ...]
    about: str = ""
    layouts: Annotations | None = None

    @property
    def program(self) -> RankProgram:
        """The program that the ranks run."""
        return self.compiled.program

    @property
    def sent_bytes(self) -> dict[str, float]:
        """Bytes that each rank sends in one step, by axis; in a pipeline, those of the rank that sends most."""
        pipeline = self.program.pipeline
        by_rank: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for item in self.collectives:
            holders = [(0, 0)] if pipeline is None or item.stage is None else pipeline.schedule.holders(item.stage)
            for rank, _ in holders:
                by_rank[rank][item.axis] += item.sent_bytes
        axes = dict.fromkeys(item.axis for item in self.collectives)
        return {axis: max(sent[axis] for sent in by_rank.values()) for axis in axes}

    def __str__(self) -> str:
        parameters = [i.name for i in self.program.captured.inputs if i.kind == "parameter"]
        batch = [i.name for i in self.program.captured.inputs if i.kind == "batch"]
        title = f"plan {self.program.plan.title}"
        lines = [*([self.about, "", f"each of them: {title}"] if self.about else [title]), "", "batch"]
        layouts = self.program.layouts
        lines += [f"  {name:40} {layouts[name]}{self._origin(name)}" for name in batch if name in layouts]
        lines += ["", "parameters"]
        lines += [f"  {name:40} {self.program.layouts[name]}{self._origin(name)}" for name in parameters]
        if self.compiled.share is not None:
            lines += ["", str(self.compiled.share)]
        if whole := self.compiled.whole_sequences:
            more = f" and {len(whole) - _NAMED} more" if len(whole) > _NAMED else ""
            lines += ["", f"read whole sequences, on every rank: {', '.join(whole[:_NAMED])}{more}"]
        if loops := self.compiled.whole_loops:
            why = "the next state is not a sum of products with the one before: "
            lines += ["", f"run all rounds of a loop over positions, on every rank, as {why}{', '.join(loops)}"]
        if stages := describe_stages(self.program):
            lines += ["", *stages]
        if chooses_collectives(self.program.plan):
            lines += [
                "",
                "collectives",
                "  XLA's partitioner inserts them from these layouts when it compiles the step",
            ]
        else:
            lines += ["", "collectives of one step, in order (bytes that each rank sends)"]
            lines += [f"  {_row(item)}" for item in self.collectives] or ["  none"]
            lines += ["", *self._totals()]
        if self.program.plan.compile != "none":
            lines += ["", *describe_regions(self.program)]
        if self.compiled.without_rule:
            lines += ["", f"ops without a rule, run on whole inputs: {', '.join(sorted(self.compiled.without_rule))}"]
        return "\n".join(lines)

    def passes(self) -> str:
        """A table of the passes that ran, in order, with the calls and bytes that each of them changed."""
        return pass_table(self._watched().reports)

    def diff(self, name: str) -> str:
        """The changes of one pass, as a unified diff of the graphs. Raises PlanError for an unknown pass."""
        names = [each.name for each in PASSES] + [each.name for each in passes_of(self.program.plan)]
        return pass_diff(self._watched(name).reports, name, names)

    def _watched(self, diff: str = "") -> Watcher:
        watcher = Watcher(diff)
        found = compile(
            self.program.captured, self.program.plan, self.layouts, watcher=watcher, cluster=self.program.cluster
        )
        make_graphs(found.program, watcher)
        return watcher

    def tensor(self, name: str) -> str:
        """One tensor as text: a parameter, a leaf of the batch, or a value of the graph by its node's name.

        Raises LayoutError, with near matches, for an unknown name.
        """
        if name in self.program.layouts:
            return self._input(name)
        nodes = {node.name: node for graph in self._graphs() for node in graph.nodes if node.op == "call_function"}
        if name not in nodes:
            near = difflib.get_close_matches(name, [*self.program.layouts, *nodes], n=5, cutoff=0.4)
            hint = f"did you mean {', '.join(near)}?" if near else "run explain without a tensor to see the names"
            raise LayoutError(f"the step has no tensor {name!r}; {hint}")
        return _describe(nodes[name])

    def _input(self, name: str) -> str:
        """A parameter, buffer or leaf of the batch as text: its layout, the modules that read it, and how its gradient
        is summed."""
        program = self.program
        layout, captured = program.layouts[name], program.captured
        local = list(layout.local_shape(program.plan.mesh))
        part = "the whole tensor" if local == list(layout.shape) else f"{layout.dtype}{local}"
        holds = any(isinstance(placement, Only) for _, placement in layout.placements)
        part += (
            " on each rank that has it" if holds else " on every rank" if part.startswith("the") else " on each rank"
        )
        lines = [f"{name}  {layout}{self._origin(name)}", f"  local     {part}"]
        if program.pipeline is not None and name in program.pipeline.stages:
            lines.append(f"  stage     {', '.join(map(str, program.pipeline.stages[name]))}")
        placeholder = next((i.node for i in captured.inputs if i.name == name), "")
        readers = [
            user
            for graph in self._graphs()
            for node in graph.nodes
            if node.op == "placeholder" and node.name == placeholder
            for user in _readers(node)
        ]
        modules = sorted({info_of(user).module or "the loss" for user in readers})
        lines.append(f"  read by   {', '.join(modules) or 'nothing'}")
        if (parameter := program.sharding.parameters.get(name)) is not None:
            within = [axis for axis in parameter.reduce_axes if axis != stage_axis()]
            if chooses_collectives(program.plan):
                where = [f"  state     {parameter.state}"] if parameter.cut_dim is not None else []
                over = " and ".join(within)
                lines += [*([f"  gradient  summed over {over}, as XLA's partitioner chooses"] if over else []), *where]
            else:
                ways = list(dict.fromkeys(_way_of_gradient(each, within) for each in self._gradients(name)))
                lines += [*(f"  gradient  {way}" for way in ways), *_as_held(parameter)]
        related = [c for c in self.collectives if name in c.value or name in c.origin]
        return "\n".join([*lines, *(f"  {_row(item)}" for item in related)])

    def _graphs(self) -> list[Graph]:
        """The graph of the last microbatch; in a pipeline, one for each cell."""
        program = self.program
        graphs = eager_graphs(program)
        if program.pipeline is None:
            return [graphs[program.micro_graphs[-1]]]
        return [graphs[name] for name, part in program.graphs.items() if part.accumulation in ("alone", "last", "more")]

    def _gradients(self, name: str) -> list[Argument]:
        """The nodes that the graphs return as the gradient of parameter `name`."""
        program = self.program
        graphs = eager_graphs(program)
        if program.pipeline is None:
            pairs = [(program.captured.outputs, graphs[program.micro_graphs[-1]])]
        else:
            cells = program.pipeline.cells.graphs
            pairs = [(cells[cell].outputs, graph) for cell, graph in program.of_cells(graphs).items()]
        found = []
        for outputs, graph in pairs:
            (results,) = output_node(graph).args
            found += [r for o, r in zip(outputs, results, strict=True) if (o.kind, o.name) == ("gradient", name)]  # type: ignore[arg-type]
        return found

    def _origin(self, name: str) -> str:
        origin = self.compiled.origins.get(name)
        return f"   <- {origin}" if origin else ""

    def _totals(self) -> list[str]:
        lines = ["in all"]
        mesh = self.program.plan.mesh
        most = "" if self.program.pipeline is None else "up to "
        for axis, sent in self.sent_bytes.items():
            size = mesh.axis_size(axis)
            lines.append(f"  {axis:8} {size} ranks, each sends {most}{human_bytes(sent)} a step")
        every = [*state_axes(mesh), *mesh.joined]
        for over, (kind, what) in itertools.product(every, _FORMULAS):
            mine = [c for c in self.collectives if c.kind == kind.title and c.axis == over and c.value.endswith(what)]
            if not mine:
                continue
            size = mesh.axis_size(over)
            held = kind.whole_bytes(sum(c.tensor_bytes for c in mine), size)
            ways = f"{kind.ways} x " if kind.ways > 1 else ""
            formula = f"{ways}({size} - 1)/{size} x {human_bytes(held)}"
            lines.append(
                f"  {what} over {over}, {kind.title}: {formula} = {human_bytes(sum(c.sent_bytes for c in mine))}"
            )
        return lines


_NAMED = 4  # ops that read whole sequences, of those that are listed

# Collectives of which the formula is shown, and what they move.
_FORMULAS = (
    (CollectiveKind.ALL_REDUCE, "gradients"),
    (CollectiveKind.REDUCE_SCATTER, "gradients"),
    (CollectiveKind.ALL_GATHER, "parameters"),
)


def explanation(compiled: Compiled) -> Explanation:
    """The explanation of a compiled step, with its collectives."""
    program = compiled.program
    if chooses_collectives(program.plan):
        return Explanation(compiled, ())
    return Explanation(compiled, tuple(step_collectives(program, eager_graphs(program))))


def _as_held(parameter: ParameterSharding) -> list[str]:
    """Lines about how the ranks hold a parameter."""
    lines = []
    if stage_axis() in parameter.reduce_axes:
        lines.append("  gradient  added up over the ranks of the pipeline that have it")
    if parameter.cut_dim is not None:
        how = f"gathered {parameter.gather.value}" if parameter.gather is not Gather.NEVER else "in common memory"
        lines.append(f"  state     {parameter.state}, {how}")
    if parameter.memory != DEVICE:
        lines.append(f"  memory    {parameter.memory}")
    return lines


def _row(item: Collective) -> str:
    place = f" in {item.module}" if item.module else ""
    if item.stage is not None:
        place += f", stage {item.stage}"
    origin = f"   <- {item.origin}" if item.origin else ""
    return (
        f"{item.phase:8} {item.kind:14} {item.axis:7} {human_bytes(item.sent_bytes):>10}  {item.value}{place}{origin}"
    )


def _readers(node: Node) -> list[Node]:
    """The calls that read a value, directly or through calls of plait's own that gather or move it."""
    found: list[Node] = []
    for user in node.users:
        if user.op != "call_function":
            continue
        target = user.target
        if target is gather_start:
            parts = list(user.args[4:])  # after world, axis, rows and dtypes
            items = [item for wait in user.users for item in wait.users if is_item(item)]
            for item in items:
                if parts[item.args[1]] is node:  # type: ignore[index]
                    found += _readers(item)
        elif op_spec_of(user).moves:
            found += _readers(user)
        else:
            found.append(user)
    return found


def _way_of_gradient(node: Argument, axes: Sequence[str]) -> str:
    """The sum of a gradient over these axes, described in words. `node` is what the graph returns for the gradient."""
    done = node.args[0] if isinstance(node, Node) and is_item(node) else None
    if isinstance(done, Node) and bucket_part(done) == "wait":
        start = done.args[1]
        assert isinstance(start, Node)
        does, held = op_spec_of(start).communicates, human_bytes(info_of(start).num_bytes)
        scattered = does is not None and does.kind is CollectiveKind.REDUCE_SCATTER
        kept = ", of which each rank keeps its part" if scattered else ""
        return f"summed over {' and '.join(axes)} in a bucket of {info_of(start).what}, {held}{kept}"
    return f"summed over {' and '.join(axes)}" if axes else "made on each rank, not summed over any axis"


def _describe(node: Node) -> str:
    value = node.meta.get("val")
    lines = [node.name]
    if isinstance(value, torch.Tensor):
        info = info_of(node)
        shape = tuple(value.shape) if info.global_shape is None else info.global_shape
        layout = Layout(dtype_name(value.dtype), shape, info.placements)
        origin = info.origin
        lines = [f"{node.name}  {layout}" + (f"   <- {origin}" if origin else "")]
        lines.append(f"  local     {dtype_name(value.dtype)}{list(value.shape)}")
    lines.append(f"  made by   {node.target} in {info_of(node).module or 'the loss'}")
    lines.append(f"  from      {', '.join(n.name for n in node.all_input_nodes)}")
    lines.append(f"  read by   {', '.join(n.name for n in node.users)}")
    return "\n".join(lines)


def pass_table(reports: Sequence[PassReport]) -> str:
    """A table with a row per pass that ran: calls in all graphs of the step, and bytes of the tensors they make."""
    lines = [f"{'pass':20} {'calls':>7} {'':>7} {'bytes made':>10} {'':>10}  what it does"]
    for each in reports:
        calls, made = each.num_calls[1] - each.num_calls[0], each.num_bytes[1] - each.num_bytes[0]
        more = f"{'+' if made > 0 else '-'}{human_bytes(abs(made))}" if made else ""
        size = human_bytes(each.num_bytes[1])
        lines.append(f"{each.name:20} {each.num_calls[1]:7} {f'{calls:+}' if calls else '':>7} {size:>10} {more:>10}"
                     f"  {each.about}")  # fmt: skip
    return "\n".join(lines)


def pass_diff(reports: Sequence[PassReport], name: str, known: Sequence[str]) -> str:
    """The graphs before and after one pass, as a diff. Raises PlanError for an unknown pass."""
    found = next((each for each in reports if each.name == name), None)
    if found is None and name not in known:
        near = difflib.get_close_matches(name, known, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the passes are {', '.join(known)}"
        raise PlanError(f"there is no pass {name!r}; {hint}")
    if found is None:
        return f"the pass {name} does not run under this plan"
    return found.diff or f"the pass {name} changes nothing"


_WIDTH = 100  # characters shown of a rank's actions


def describe_stages(program: RankProgram) -> list[str]:
    """Lines of text about a pipeline's stages: their modules, what is sent between them, and the schedule."""
    pipeline = program.pipeline
    if pipeline is None:
        return []
    costs, num = estimate_costs(program, program.of_cells(eager_graphs(program))), pipeline.cells.num_stages
    each = [costs.forward[i] + costs.backward[i] + costs.weight[i] for i in range(num)]
    lines = ["stages (their share of the cost as estimated; the parameters that lie there)"]
    for stage in range(num):
        names = [name for name, on in pipeline.stages.items() if stage in on]
        held = sum(math.prod(program.sharding.states[name].shape) * program.dtype_of(name).itemsize for name in names)
        ranks = ",".join(str(rank) for rank, _ in pipeline.schedule.holders(stage))
        first, last = stage_modules(program, stage)
        where = first if first == last else f"{first} .. {last}"
        share = each[stage] / (sum(each) or 1.0)
        on = f"{stage_axis()}={ranks:5}"
        lines.append(f"  {stage:<3} {on} {share:6.1%}  {len(names):4} parameters {human_bytes(held):>10}  {where}")
    lines += ["", "between stages (of each microbatch, from one rank)"]
    crossing: Counter[tuple[str, int, int]] = Counter()
    values: Counter[tuple[str, int, int]] = Counter()
    for value in pipeline.cells.values:
        kind, source = value.source
        for target in value.stages():
            way = ("forward" if kind == FORWARD else "backward", source, target)
            crossing[way] += value.num_bytes
            values[way] += 1
    ordered = sorted(crossing, key=lambda way: (way[0] != "forward", way[1], way[2]))
    for way in ordered:
        many = "1 value" if values[way] == 1 else f"{values[way]} values"
        lines.append(f"  {way[0]:9} {way[1]} -> {way[2]}  {human_bytes(crossing[way]):>10}  {many}")
    lines += [] if ordered else ["  nothing"]
    schedule = pipeline.schedule
    lines += ["", f"schedule {schedule.name}, micro={schedule.num_micro}"]
    for rank, actions in enumerate(schedule.ranks):
        text = " ".join(str(action) for action in actions if action.computes)
        lines.append(f"  {rank}: {text if len(text) <= _WIDTH else text[:_WIDTH].rpartition(' ')[0] + ' ...'}")
    return lines


def stage_modules(program: RankProgram, stage: int) -> tuple[str, str]:
    """The modules of the first and the last call of a stage's forward pass."""
    assert program.pipeline is not None
    graphs = program.pipeline.cells.graphs
    for kind in (FORWARD, BACKWARD):
        nodes = graphs[kind, stage].graph.nodes if (kind, stage) in graphs else ()
        own = [n for n in nodes if n.op == "call_function" and info_of(n).stage == stage]
        modules = [info_of(n).module or "the loss" for n in own if not is_view(n)]
        if modules:
            return modules[0], modules[-1]
    return "nothing", "nothing"
