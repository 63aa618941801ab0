"""The text and the HTML page of `plait schedule`: a schedule as a grid, with the time and memory that it takes."""

from __future__ import annotations

from pathlib import Path

from plait.cost.costs import Costs, read_costs
from plait.cost.memory_model import human_bytes
from plait.cost.simulate import simulate
from plait.errors import PlanError, ScheduleError
from plait.schedule.check import check_schedule
from plait.schedule.families import FAMILIES, find_family, make_schedule
from plait.schedule.readiness import chain
from plait.schedule.schedule_grid import draw_grid
from plait.schedule.zero_bubble_rules import StageSeconds, search_zero_bubble
from plait.spec.schedule import Schedule
from plait.spec.text_files import TABLES, read_bounded
from plait.spec.trace import Trace

SEARCHED = "zb-search"
_MOST_CELLS = 4_000_000


def find_schedule(name: str, num_ranks: int | None, num_micro: int | None, chunks: int | None) -> Schedule:
    """The schedule called `name` for these sizes, or the one in the file `name`.

    Raises PlanError if there is neither, if a size is missing, or if a file is for another size. Raises ScheduleError
    if the file's schedule is invalid.
    """
    if name not in FAMILIES and Path(name).exists():
        return _read(Path(name), {"--stages": num_ranks, "--micro": num_micro, "--chunks": chunks})
    try:
        find_family(name)
    except PlanError as error:
        raise PlanError(f"{error}; nor is there a file {name!r} here") from None
    if num_ranks is None or num_micro is None:
        lacking = " and ".join(key for key, value in (("--stages", num_ranks), ("--micro", num_micro)) if value is None)
        raise PlanError(f"the schedule {name} is of any size: give {lacking}, like --stages 4 --micro 8")
    if (cells := num_ranks * (num_ranks + num_micro)) > _MOST_CELLS:
        raise PlanError(
            f"--stages {num_ranks} --micro {num_micro}: the picture has a row for each rank and a column for each time,"
            f" {cells:,} cells or more; take fewer, with {_MOST_CELLS:,} cells at most"
        )
    return make_schedule(name, num_ranks, num_micro, chunks)


def search_schedule(num_ranks: int | None, num_micro: int | None, costs: Path | None, memory: float) -> Schedule:
    """The schedule with split backwards that a search finds for the costs in a file.

    `memory` is the most that a rank holds, in times of what 1f1b does. Raises PlanError if a number or the costs are
    missing.
    """
    if num_ranks is None or num_micro is None or costs is None:
        raise PlanError(f"{SEARCHED} is searched for given times: give --stages, --micro and --costs FILE")
    given = read_costs(costs, num_ranks)
    stages = [StageSeconds(*each) for each in zip(given.forward, given.backward, given.weight, strict=True)]
    transfer = max((given.transfer(stage, stage + 1) for stage in range(num_ranks - 1)), default=0.0)
    whole = [given.of("activation_bytes", stage) for stage in range(num_ranks)]
    kept = max((given.kept_for_weight(stage) / each for stage, each in enumerate(whole) if each), default=1.0)
    return search_zero_bubble(stages, transfer, num_micro, memory * num_ranks, kept)


def _read(path: Path, asked: dict[str, int | None]) -> Schedule:
    try:
        schedule = Schedule.parse(read_bounded(path, TABLES))
        check_schedule(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read the schedule {str(path)!r}: {error}") from None
    has = {"--stages": schedule.num_ranks, "--micro": schedule.num_micro, "--chunks": len(schedule.stages[0])}
    for option, value in asked.items():
        if value is not None and value != has[option]:
            raise PlanError(f"{option} {value}, but the file {str(path)!r} is for {has[option]}; leave {option} out")
    return schedule


def save_schedule(path: Path, schedule: Schedule) -> None:
    """Write a schedule as a file that a plan can name. Raises PlanError if it cannot be written."""
    try:
        path.write_text(f"{schedule}\n", encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write the schedule {str(path)!r}: {error.strerror}") from None


def predict(schedule: Schedule, costs: Path | None) -> Trace:
    """The simulated step, with costs from a file or with equal stages."""
    return simulate(schedule, read_costs(costs, schedule.num_stages) if costs else Costs.equal(schedule.num_stages))


def describe_schedule(schedule: Schedule, trace: Trace, costs: Path | None, width: int | None = None) -> str:
    """The grid, folded to `width` characters, and a table of what each rank does in `trace`."""
    lines = [*_fold(draw_grid(schedule, chain(schedule.num_stages)).splitlines(), width), ""]
    stages = "" if schedule.num_stages == schedule.num_ranks else f", {schedule.num_stages} stages"
    with_costs = f"costs from {costs}" if costs else "forward, and each part of backward, takes 1"
    lines.append(
        f"{schedule.name}: {schedule.num_ranks} ranks{stages}, {schedule.num_micro} microbatches; {with_costs}"
    )
    lines.append(
        f"time {trace.seconds:.6g}{' s' if costs else ''}, utilisation {trace.utilisation():.1%}, bubble"
        f" {trace.bubble():.1%} (of the {trace.cost:.6g} that a step costs where the next one follows at once)"
    )
    has_bytes = any(sample.value for sample in trace.memory)
    lines += ["", _row("rank", "stages", "computes", "utilisation", "bubble", "in flight", *["memory"] * has_bytes)]
    for rank, chunks in enumerate(schedule.stages):
        memory = [human_bytes(trace.peak_bytes(rank))] if has_bytes else []
        figures = [f"{trace.busy(rank):.6g}", f"{trace.utilisation(rank):.1%}", f"{trace.bubble(rank):.1%}"]
        figures += [str(trace.peak_in_flight(rank)), *memory]
        lines.append(_row(str(rank), ",".join(map(str, chunks)), *figures))
    lines.append("")
    lines.append("in flight: the most microbatches, of any chunk, whose activations a rank holds at a time")
    return "\n".join(lines)


def write_schedule_page(path: Path, schedule: Schedule, trace: Trace, costs: Path | None = None) -> None:
    """Write a self-contained HTML page with the swimlanes of the trace. Time is in seconds only with `costs`.

    Raises PlanError if plotly is not installed or the file cannot be written.
    """
    from plait.report.swimlane import draw_swimlanes, page, write_page

    title = f"{schedule.name}, {schedule.num_ranks} ranks, {schedule.num_micro} microbatches"
    unit = "seconds" if costs else "units (a forward, or a part of a backward, takes 1)"
    write_page(path, page(draw_swimlanes(predicted=trace, unit=unit), title))


def _fold(lines: list[str], width: int | None) -> list[str]:
    """The grid in blocks of at most `width` characters, each with a line per rank."""
    start = lines[0].index("|") + 1
    cell = len(lines[0][start:]) - len(lines[0][start:].lstrip()) + len(lines[0][start:].split()[0])
    length = max(map(len, lines))
    if width is None or length <= width:
        return lines
    step = max((width - start) // cell, 1) * cell
    found: list[str] = []
    for at in range(start, length, step):
        found += ["", *(line[:start] + line[at : at + step] for line in lines)]
    return found[1:]


def _row(*cells: str) -> str:
    return "  ".join(cell.rjust(11) if i > 1 else cell.ljust((4, 8)[i]) for i, cell in enumerate(cells)).rstrip()
