"""The files that a run writes for its report.

RUN/plan.json          the plan and its axes; with a pipeline also the schedule and the edges between stage graphs
RUN/costs.json         with a pipeline: the estimated costs of its stages, which `plait schedule --costs` also reads
RUN/trace/rank-N.json  with a trace: the last steps of rank N, as nested spans in nanoseconds, samples of memory, and
                       bytes sent, and the rows of experts
"""

from __future__ import annotations

import functools
import json
import operator
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from plait.backends.eager.passes import eager_graphs
from plait.backends.recorder import TraceRecorder, read_counts
from plait.comm.protocol import World
from plait.compile.compiled import Compiled
from plait.compile.stage_costs import estimate_costs
from plait.cost.costs import Costs, read_costs
from plait.errors import DataError, PlaitError, PlanError
from plait.plan.axes import axis_kind, stage_axis
from plait.schedule.readiness import Edges
from plait.spec.mesh import Mesh
from plait.spec.schedule import Schedule
from plait.spec.text_files import open_in_run
from plait.spec.trace import ExpertLoad, Sample, Span, Trace

PLAN, COSTS, TRACE = "plan.json", "costs.json", "trace"


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run, for its report.

    axes      (name, size) of the mesh, outermost first
    schedule  the schedule, with a pipeline
    edges     which stage graph needs the result of which, with a pipeline
    costs     the estimated costs of the stages, with a pipeline
    """

    plan: str
    axes: tuple[tuple[str, int], ...]
    schedule: Schedule | None = None
    edges: Edges = frozenset()
    costs: Costs | None = None

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of the run's axes."""
        return Mesh(self.axes)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the run."""
        return self.mesh.size

    def places(self) -> tuple[int, ...]:
        """For every rank, its coordinate along the axis `pipeline`."""
        return tuple(self.mesh.coordinates(rank).get(stage_axis(), 0) for rank in range(self.num_ranks))

    def pipeline_of(self, rank: int) -> tuple[int, ...]:
        """The ranks of the pipeline that a rank belongs to, by coordinate."""
        return self.mesh.group(rank, stage_axis())


@dataclass(frozen=True)
class Recorded:
    """The trace of one step.

    begin      when the step began, in seconds of the clock of rank 0's host
    trace      nested spans, in seconds since the step began
    sent       bytes sent, by (sender, receiver)
    memory_of  what the memory samples measure: memory allocated on the device, or resident on the host
    experts    the rows of each mixture of experts that plait has found, by module
    """

    step: int
    begin: float
    trace: Trace
    sent: dict[tuple[int, int], int]
    memory_of: str
    experts: dict[str, ExpertLoad]


def write_plan(folder: Path, compiled: Compiled | None, world: World, plan: str) -> None:
    """Write plan and costs of a run into its folder, on rank 0, and remove the trace of an earlier run."""
    _make(folder)
    for path in (folder / TRACE).glob("rank-*.json"):
        path.unlink()
    found: dict[str, Any] = {"plan": plan, "axes": [[name, size] for name, size in world.mesh.axes]}
    program = None if compiled is None else compiled.program
    if program is not None and (pipeline := program.pipeline) is not None:
        found["schedule"] = str(pipeline.schedule)
        found["edges"] = [[list(a), list(b)] for a, b in sorted(pipeline.cells.edges())]
        costs = estimate_costs(program, program.of_cells(eager_graphs(program)))
        _write(folder / COSTS, json.dumps(_as_rows(costs)))
    else:
        (folder / COSTS).unlink(missing_ok=True)
    _write(folder / PLAN, json.dumps(found))


def write_trace(folder: Path, recorder: TraceRecorder) -> None:
    """Write the trace of this rank's last steps."""
    steps = []
    for each in recorder.read():
        rows = [
            [kind, name, start, end, num_bytes, action and action.micro, None if action is None else action.chunk]
            for kind, name, start, end, num_bytes, action in each.rows
        ]
        experts = {name: [counts, dropped] for name, (counts, dropped) in read_counts(each.counts).items()}
        steps.append({
            "step": each.step, "spans": rows, "memory": each.memory, "sent": each.sent, "experts": experts,
        })  # fmt: skip
    _make(folder / TRACE)
    text = json.dumps({"memory_of": recorder.memory_of, "steps": steps}, separators=(",", ":"))
    _write(folder / TRACE / f"rank-{recorder.rank}.json", text)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"cannot make the folder {str(folder)!r} of a run: {error.strerror}; give another") from None


def read_plan(folder: Path) -> RunPlan | None:
    """Read the plan of a run; None if there is none. Raises DataError for a file that cannot be read."""
    path = folder / PLAN
    if not path.exists():
        return None
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        axes = tuple((str(name), int(size)) for name, size in rows["axes"])
        if "schedule" not in rows:
            return RunPlan(rows["plan"], axes)
        schedule = Schedule.parse(rows["schedule"])
        edges = frozenset(((a[0], a[1]), (b[0], b[1])) for a, b in rows["edges"])
        return RunPlan(rows["plan"], axes, schedule, edges, read_costs(folder / COSTS, schedule.num_stages))
    except (KeyError, TypeError, ValueError, PlaitError) as error:
        raise DataError(f"{path} cannot be read: {error}; it was written by `plait train`") from None


def read_trace(folder: Path, mesh: Mesh) -> list[Recorded]:
    """Read the steps that all ranks of a mesh have recorded, in order; empty if there is no trace. Raises DataError for
    a bad file."""
    num_ranks = mesh.size
    files = [folder / TRACE / f"rank-{rank}.json" for rank in range(num_ranks)]
    present = [path for path in files if path.exists()]
    if not present:
        return []
    if absent := [path.name for path in files if path not in present]:
        raise DataError(
            f"{folder / TRACE} lacks {absent[0]} of {num_ranks} ranks; copy the files of all hosts there, or run again"
        )
    by_step: dict[int, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    memory_of = ""
    for rank, path in enumerate(files):
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
            memory_of = rows["memory_of"]
            for step in rows["steps"]:
                by_step[step["step"]].append((rank, step))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is no trace of plait: {type(error).__name__}: {error}") from None
    return [
        _step(number, ranks, mesh, memory_of) for number, ranks in sorted(by_step.items()) if len(ranks) == num_ranks
    ]


def _step(number: int, ranks: list[tuple[int, dict[str, Any]]], mesh: Mesh, memory_of: str) -> Recorded:
    begin = min((row[2] for _, step in ranks for row in step["spans"]), default=0)
    spans = tuple(
        Span(rank, kind, name, (start - begin) / 1e9, (end - begin) / 1e9, num_bytes, micro, chunk)
        for rank, step in ranks
        for kind, name, start, end, num_bytes, micro, chunk in step["spans"]
    )
    memory = tuple(Sample(rank, (at - begin) / 1e9, value) for rank, step in ranks for at, value in step["memory"])
    sent = {(rank, int(to)): count for rank, step in ranks for to, count in step["sent"].items()}
    experts = loads_of_ranks([(rank, step.get("experts", {})) for rank, step in ranks], mesh)
    return Recorded(number, begin / 1e9, Trace(spans, mesh.size, memory), sent, memory_of, experts)


def loads_of_ranks(ranks: Iterable[tuple[int, Mapping[str, Any]]], mesh: Mesh) -> dict[str, ExpertLoad]:
    """The rows of each mixture over all ranks, from each rank's rows and dropped rows by mixture.

    Ranks that share a part of the batch have the same rows, which count once, unless their counts differ: then each has
    rows of its own.
    """
    found: dict[str, dict[tuple[tuple[int, ...], ExpertLoad], None]] = defaultdict(dict)
    for rank, counts in ranks:
        place = mesh.coordinates(rank)
        part = tuple(
            index for axis, index in place.items() if axis_kind(axis).cuts_rows or axis_kind(axis).cuts_sequence
        )
        for module, (rows, dropped) in counts.items():
            found[module][part, ExpertLoad(tuple(rows), dropped)] = None
    return {module: functools.reduce(operator.add, (load for _, load in parts)) for module, parts in found.items()}


def _as_rows(costs: Costs) -> dict[str, object]:
    """The costs in the format of `plait schedule --costs`."""
    rows: dict[str, object] = {
        name: list(getattr(costs, name))
        for name in ("forward", "backward", "weight", "activation_bytes", "weight_activation_bytes")
    }
    assert not isinstance(costs.crossing, int)
    rows["bytes_per_second"] = costs.bytes_per_second
    rows["bytes"] = {f"{a}>{b}": count for (a, b), count in costs.crossing.items()}
    return rows


def _write(path: Path, text: str) -> None:
    """Replace the file atomically: a report may read it while the run goes on."""
    part = path.with_suffix(".part")
    with open_in_run(part) as file:
        file.write(text)
    os.replace(part, path)
