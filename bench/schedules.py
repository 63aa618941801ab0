"""The executor against the simulator: stages that sleep for a known time, so that 16 ranks fit on any machine.

python -m bench.schedules [--write]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bench.harness import arguments, publish
from plait.backends.eager.rewrites.dead_values import SavedValues
from plait.backends.eager.schedule_executor import ScheduleExecutor
from plait.comm.protocol import World
from plait.comm.thread_world import run_ranks
from plait.compile.stages.stage_graphs import Value
from plait.cost.costs import Costs
from plait.cost.simulate import simulate
from plait.schedule.families import FAMILIES, make_replicated, make_schedule
from plait.schedule.readiness import Cell, chain
from plait.schedule.transfers import add_transfers, add_updates
from plait.spec.mesh import Mesh
from plait.spec.schedule import Schedule

SECONDS = {"F": 0.08, "B": 0.08, "W": 0.08}  # of a stage; several chunks of a rank share them
ROUNDS = 3
NAMES = [name for name in FAMILIES if name != "forward-only" and not make_schedule(name, 2, 2).asynchronous]
TEXT = """Stages sleep 80 ms forward and 160 ms backward (80 ms for each part of it), split among the chunks of a rank.
Measured: seconds from the first action of any rank to the last, median of {rounds} steps, over what the simulator says
for the same schedule with free transfers; to reach: within 3%.

{table}

## 8 stages, 32 microbatches

The rate is that of one device doing all the work, over steps that follow one another at once. To reach: 6.5 under
gpipe, 7.6 under zb-h2.

{rates}

## A slow stage in the middle

Three stages of which the middle one takes 4 times as long, 16 microbatches: what a second rank for it gains. To reach:
within 5% of what the simulator says.

{slow}

## PipeDream

4 stages, 64 microbatches, each followed by an update: utilisation between start-up and drain {stale}. To reach: 97%."""
SLOW = (1.0, 4.0, 1.0)


class Sleeper:
    """Cells that take as long as they should and hand on a number."""

    def __init__(self, schedule: Schedule, values: list[Value], work: Sequence[float]) -> None:
        self._work = work
        self._chunks = max(map(len, schedule.stages))
        self._made: dict[Cell, list[Value]] = {}
        self._reads: dict[Cell, list[Value]] = {}
        for value in values:
            self._made.setdefault(value.source, []).append(value)
            for cell in value.users:
                self._reads.setdefault(cell, []).append(value)
        self._number = torch.zeros(1)

    def run_cell(self, cell: Cell, micro: int, saved: SavedValues) -> Mapping[str, Tensor]:
        end = time.perf_counter() + SECONDS[cell[0]] * self._work[cell[1]] / self._chunks
        for value in self._reads.get(cell, ()):
            saved.pop(value.name)
        found = {value.name: self._number for value in self._made.get(cell, ())}
        if (left := end - time.perf_counter()) > 0:
            time.sleep(left)
        return found

    def reduce(self) -> None:
        pass

    def update(self, micro: int) -> None:
        pass


def measure(
    schedule: Schedule, num_steps: int, work: Sequence[float] | None = None, apart: bool = True
) -> tuple[list[float], float]:
    """Seconds of each step after a first one, and of all divided by their number; they follow one another at once
    unless they are `apart`. `work` is that of each stage, of 1."""
    edges = chain(schedule.num_stages)
    schedule = add_updates(add_transfers(schedule, edges), edges)
    values = [Value(f"{a[0]}{a[1]}>{b[1]}", a, (b,), torch.zeros(1)) for a, b in sorted(edges)]
    cells = [(kind, stage) for kind in SECONDS for stage in range(schedule.num_stages)]

    def rank(world: World) -> list[tuple[float, float]]:
        comm = world.comm("pipeline")
        executor = ScheduleExecutor(schedule, values, cells, comm, world.mesh.coordinates(world.rank))
        runner = Sleeper(schedule, values, work or [1.0] * schedule.num_stages)
        times = []
        for step in range(1 + num_steps):
            if step <= 1 or apart:
                comm.barrier()
            start = time.perf_counter()
            executor.run(runner)
            times.append((start, time.perf_counter()))
        return times[1:]

    found = run_ranks(Mesh((("pipeline", schedule.num_ranks),)), rank)
    steps = [max(t[i][1] for t in found) - min(t[i][0] for t in found) for i in range(num_steps)]
    whole = max(t[-1][1] for t in found) - min(t[0][0] for t in found)
    return steps, whole / num_steps


def simulated(schedule: Schedule, work: Sequence[float] | None = None) -> float:
    chunks = max(map(len, schedule.stages))
    work = work or [1.0] * schedule.num_stages
    costs = Costs(*(tuple(SECONDS[kind] * each / chunks for each in work) for kind in ("F", "B", "W")))
    return simulate(schedule, costs).seconds


def main() -> None:
    given = arguments(__doc__)
    rows = ["| schedule | 4 stages, 8 micro | 8 stages, 16 micro | 16 stages, 32 micro |", "| --- | --- | --- | --- |"]
    for name in NAMES:
        cells = []
        for num_ranks in (4, 8, 16):
            num_micro = 1 if name == "naive" else 2 * num_ranks
            schedule = make_schedule(name, num_ranks, num_micro)
            steps, _ = measure(schedule, ROUNDS)
            ratios = [seconds / simulated(schedule) for seconds in steps]
            cells.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})")
        rows.append(f"| {name} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    rates = ["| schedule | rate of one device | of the simulator, steps apart |", "| --- | --- | --- |"]
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v"):
        schedule = make_schedule(name, 8, 32)
        _, seconds = measure(schedule, 4, apart=False)
        alone = 8 * 32 * sum(SECONDS.values())
        rates.append(f"| {name} | {alone / seconds:.2f} | {alone / simulated(schedule):.2f} |")
        print(rates[-1], flush=True)
    stale = make_schedule("pipedream", 4, 64)
    steps, _ = measure(stale, 1)
    used = 64 * sum(SECONDS.values()) / (steps[0] - 3 * sum(SECONDS.values()))  # less start-up and drain of a stage
    print(f"pipedream, 4 stages: {used:.3f}", flush=True)
    slow = ["| schedule | [1,1,1] / [1,2,1], measured | simulated |", "| --- | --- | --- |"]
    for name in ("gpipe", "1f1b", "zb-h1"):
        one, two = make_schedule(name, 3, 16), make_replicated(name, [1, 2, 1], 16)
        ratios = [a / b for a, b in zip(measure(one, ROUNDS, SLOW)[0], measure(two, ROUNDS, SLOW)[0], strict=True)]
        said = simulated(one, SLOW) / simulated(two, SLOW)
        slow.append(f"| {name} | {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) | {said:.3f} |")
        print(slow[-1], flush=True)
    body = TEXT.format(
        rounds=ROUNDS, table="\n".join(rows), rates="\n".join(rates), slow="\n".join(slow), stale=f"{used:.1%}"
    )
    publish("Executor against simulator", body, "schedules", given.write)


if __name__ == "__main__":
    main()
