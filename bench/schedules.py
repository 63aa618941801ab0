"""The executor against the simulator: stages that sleep for a known time, so that 16 ranks fit on any machine.

python -m bench.schedules [--write]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from bench.harness import arguments, publish
from plait.comm.protocol import World
from plait.comm.threads import run_ranks
from plait.decide.costs import Costs
from plait.decide.readiness import Cell, chain
from plait.decide.schedules import FAMILIES, make_schedule
from plait.decide.simulate import simulate
from plait.decide.transfers import add_transfers, add_updates
from plait.graph.cells import Value
from plait.run.execute import Box, Executor
from plait.spec.mesh import Mesh
from plait.spec.schedule import Schedule

SECONDS = {"F": 0.02, "B": 0.02, "W": 0.02}  # of a stage; several chunks of a rank share them
ROUNDS = 5
NAMES = [name for name in FAMILIES if name not in ("forward-only", "pipedream", "pipedream-2bw")]
TEXT = """Stages sleep 20 ms forward and 40 ms backward (20 ms for each part of it), split among the chunks of a rank.
Measured: seconds from the first action of any rank to the last, median of {rounds} steps, over what the simulator says
for the same schedule with free transfers; to reach: within 3%.

{table}

## 8 stages, 32 microbatches

The rate is that of one device doing all the work, over steps that follow one another at once. To reach: 6.5 under
gpipe, 7.6 under zb-h2.

{rates}"""


class Sleeper:
    """Cells that take as long as they should and hand on a number."""

    def __init__(self, schedule: Schedule, values: list[Value]) -> None:
        self._chunks = max(map(len, schedule.stages))
        self._made: dict[Cell, list[Value]] = {}
        self._reads: dict[Cell, list[Value]] = {}
        for value in values:
            self._made.setdefault(value.source, []).append(value)
            for cell in value.users:
                self._reads.setdefault(cell, []).append(value)
        self._number = torch.zeros(1)

    def run_cell(self, cell: Cell, micro: int, box: Box) -> Mapping[str, Tensor]:
        end = time.perf_counter() + SECONDS[cell[0]] / self._chunks
        for value in self._reads.get(cell, ()):
            box.pop(value.name)
        found = {value.name: self._number for value in self._made.get(cell, ())}
        if (left := end - time.perf_counter()) > 0:
            time.sleep(left)
        return found

    def reduce(self) -> None:
        pass


def measure(
    name: str, num_ranks: int, num_micro: int, num_steps: int, warm: int = 1
) -> tuple[list[float], float, Schedule]:
    """Seconds of each step, of `num_steps` in a row divided by their number, and the schedule."""
    schedule = make_schedule(name, num_ranks, num_micro)
    edges = chain(schedule.num_stages)
    schedule = add_updates(add_transfers(schedule, edges), edges)
    values = [Value(f"{a[0]}{a[1]}>{b[1]}", a, (b,), torch.zeros(1)) for a, b in sorted(edges)]
    cells = [(kind, stage) for kind in SECONDS for stage in range(schedule.num_stages)]

    def rank(world: World) -> list[tuple[float, float]]:
        comm = world.comm("pipeline")
        executor = Executor(schedule, values, cells, comm, world.mesh.coordinates(world.rank))
        runner = Sleeper(schedule, values)
        times = []
        for step in range(warm + num_steps):
            if step <= warm:
                comm.barrier()
            start = time.perf_counter()
            executor.run(runner)
            times.append((start, time.perf_counter()))
        return times[warm:]

    found = run_ranks(Mesh((("pipeline", num_ranks),)), rank)
    steps = [max(t[i][1] for t in found) - min(t[i][0] for t in found) for i in range(num_steps)]
    whole = max(t[-1][1] for t in found) - min(t[0][0] for t in found)
    return steps, whole / num_steps, schedule


def simulated(schedule: Schedule) -> float:
    num, chunks = schedule.num_stages, max(map(len, schedule.stages))
    costs = Costs(*(tuple([SECONDS[kind] / chunks] * num) for kind in ("F", "B", "W")))
    return simulate(schedule, costs).seconds


def main() -> None:
    given = arguments(__doc__)
    rows = ["| schedule | 4 stages, 8 micro | 8 stages, 16 micro | 16 stages, 32 micro |", "| --- | --- | --- | --- |"]
    for name in NAMES:
        cells = []
        for num_ranks in (4, 8, 16):
            num_micro = 1 if name == "naive" else 2 * num_ranks
            ratios = []
            for _ in range(ROUNDS):
                steps, _, schedule = measure(name, num_ranks, num_micro, 1)
                ratios.append(steps[0] / simulated(schedule))
            cells.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})")
        rows.append(f"| {name} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    rates = ["| schedule | rate of one device | of the simulator, steps apart |", "| --- | --- | --- |"]
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v"):
        _, seconds, schedule = measure(name, 8, 32, 6)
        alone = 8 * 32 * sum(SECONDS.values())
        rates.append(f"| {name} | {alone / seconds:.2f} | {alone / simulated(schedule):.2f} |")
        print(rates[-1], flush=True)
    body = TEXT.format(rounds=ROUNDS, table="\n".join(rows), rates="\n".join(rates))
    publish("Executor against simulator", body, "schedules", given.write)


if __name__ == "__main__":
    main()
