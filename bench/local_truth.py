"""Predicted step times against measured ones: several models on local processes, each under at least 12 plans.

python -m bench.local_truth [gpt vit ...] [--ranks 2 4] [--rounds 7] [--keep FOLDER] [--write]
"""

from __future__ import annotations

import argparse
import dataclasses
import pickle
import statistics
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import truth_ranks
from bench.harness import publish
from bench.truth_models import MODELS
from bench.truth_ranks import CORES, Lowered, Measured, Ranks
from plait.cost.step_program import StepProgram
from plait.cost.step_simulation import StepSimulator
from plait.spec.cluster import CallTime, Cluster, CollectiveTime, DeviceSpec, HostSpec, LinkSpec

PLANS = {
    2: (
        "data=2", "data=2 zero=1", "data=2 zero=3", "data=2 micro=2", "data=2 micro=4", "data=2 recompute=layer",
        "tensor=2", "tensor=2 micro=2", "pipeline=2 micro=2", "pipeline=2 micro=4",
        "pipeline=2 micro=4 schedule=gpipe", "pipeline=2 micro=4 schedule=zb-h1", "data=2 zero=2 micro=2",
    ),
    4: (
        "data=4", "data=4 zero=1", "data=4 zero=3", "data=4 micro=2", "data=4 recompute=layer", "data=2 tensor=2",
        "tensor=4", "data=2 tensor=2 zero=1", "pipeline=2 data=2 micro=2", "pipeline=2 data=2 micro=4",
        "pipeline=2 tensor=2 micro=2", "pipeline=4 micro=4", "data=4 zero=2 micro=2",
    ),
}  # fmt: skip
STEPS = 3  # a turn
TEXT = """Each model's step under each plan, on local processes that share two cores and memory, against what the
simulator of `plait.simulate` says from calls, collectives, messages and the host's part, which are measured one by one
in the same run. Plans take turns of 3 steps; a row has the median, least and most of the rounds. How fast a machine is
changes from moment to moment, because others use it: all times are divided by those of some work that is always the
same, measured before and after, and multiplied by its median. While a process measures it goes before all others.

How far the machine lets plans be told apart at all is the rank correlation of every other round with the rest, which
no prediction can be far above.

One number is fitted, for all models and both numbers of ranks: calls take {in_step:.3f} times as long in a step as one
by one. It is the median of the plans marked with *, which are left out of the errors. To reach: 10% (median), a rank
correlation of 0.9, and a pick within 5% of the fastest."""


@dataclass
class Run:
    """One model on so many ranks: what was measured, and what ranks issue under each plan."""

    model: str
    ranks: int
    programs: dict[str, StepProgram]
    machine: list[list[Measured]]  # of each rank, before the rounds and after them
    seconds: dict[str, list[float]]  # round by round, in units of the reference
    raw: dict[str, list[float]]  # the same as the clock said
    reference: float  # the median of its seconds
    refused: dict[str, str]

    def times(self, plan: str) -> list[float]:
        """Seconds of a step, round by round, on a processor that is always as fast."""
        return [each * self.reference for each in self.seconds[plan]]


def measure(model: str, ranks: int, rounds: int) -> Run:
    """Measure one model under all plans, in turns."""
    began = time.perf_counter()
    lowered = Lowered(model, PLANS[ranks])
    print(f"{model} on {ranks} ranks: lowered in {time.perf_counter() - began:.0f} s", lowered.refused, flush=True)
    group = Ranks(lowered, ranks)
    try:
        group.call(truth_ranks.ready)
        print(f"ready after {time.perf_counter() - began:.0f} s", flush=True)
        machine = [group.call(truth_ranks.machine)]
        print(f"calls are measured after {time.perf_counter() - began:.0f} s", flush=True)
        seconds: dict[str, list[float]] = {plan: [] for plan in lowered.programs}
        raw: dict[str, list[float]] = {plan: [] for plan in lowered.programs}
        units = []
        for _ in range(rounds):
            for plan in lowered.programs:
                turns = group.call(truth_ranks.turn, plan, STEPS)
                unit = statistics.fmean(unit for _, unit in turns)
                raw[plan].append(statistics.fmean(step for step, _ in turns))
                seconds[plan].append(raw[plan][-1] / unit)
                units.append(unit)
        machine.append(group.call(truth_ranks.machine))
        print(f"done after {time.perf_counter() - began:.0f} s", flush=True)
    finally:
        group.close()
    return Run(model, ranks, lowered.programs, machine, seconds, raw, statistics.median(units), lowered.refused)


def is_fitted(plan: str) -> bool:
    """Whether `in_step` is fitted to a plan's time: half of them, always the same."""
    return zlib.crc32(plan.encode()) % 2 == 0


def fit(runs: Sequence[Run]) -> float:
    """What calls take in a step over what they take one by one: one number for the machine, with which half of the
    plans of all runs are right in the median."""
    ratios = []
    for run in runs:
        said = predict(run, 1.0)
        ratios += [statistics.median(run.times(plan)) / said[plan] for plan in said if is_fitted(plan)]
    return statistics.median(ratios)


def cluster_of(run: Run, in_step: float) -> Cluster:
    """The cluster that was measured in the run."""
    unit, first = run.reference, run.machine[0][0]
    active = [one for ranks in run.machine for one in ranks[: min(CORES, run.ranks)]]
    by_signature: dict[str, list[CallTime]] = {}
    for call in (call for one in active for call in one.calls):
        by_signature.setdefault(call.signature, []).append(call)
    calls = tuple(
        dataclasses.replace(each[0], seconds=unit * statistics.fmean(call.seconds for call in each))
        for each in by_signature.values()
    )
    by_kind: dict[tuple[str, int, int, float], list[float]] = {}
    for each in (each for ranks in run.machine for one in ranks for each in one.collectives):
        by_kind.setdefault((each.kind, each.size, each.stride, each.num_bytes), []).append(unit * each.seconds)
    size, seconds = first.messages[-1]
    flops = max((call.flops / call.seconds for call in calls if call.flops), default=1e11)
    device = DeviceSpec(
        "core", (("float32", flops),), 1e10, 1e10, overlaps=False, op_seconds=4e-6,
        view_seconds=unit * first.view_seconds, step_seconds=unit * first.step_seconds,
        in_step=in_step, together=_together(first.together, run.ranks),
    )  # fmt: skip
    link = LinkSpec("node", unit * first.messages[0][1], min(size / seconds / unit, 1e10), overlaps=False)
    host = HostSpec("cpu", CORES, 1e10, 1e10, 1e12, 1e9, 1e10, 0, 0.0)
    collectives = tuple(CollectiveTime(*key, statistics.fmean(each)) for key, each in by_kind.items())
    return Cluster("here", run.ranks, device, (link,), host=host, calls=calls, collectives=collectives)


def _together(measured: Sequence[tuple[int, float]], ranks: int) -> tuple[tuple[int, float], ...]:
    """As measured while each rank has a core; more ranks take turns on them."""
    own = [(num, max(speed, 1.0)) for num, speed in measured if num <= CORES]
    return (*own, *((num, CORES / num) for num in range(len(own) + 1, ranks + 1)))


def predict(run: Run, in_step: float) -> dict[str, float]:
    """Predicted seconds of a step, by plan."""
    simulator = StepSimulator(cluster_of(run, in_step))
    return {plan: simulator.simulate(program).seconds for plan, program in run.programs.items()}


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks of values."""
    from scipy.stats import spearmanr

    return float(spearmanr(first, second).statistic)


def halves_correlation(run: Run) -> float:
    """The rank correlation of what was measured with itself: medians of every other round with those of the rest."""
    halves = [[statistics.median(run.times(plan)[start::2]) for plan in run.seconds] for start in (0, 1)]
    return rank_correlation(*halves)


def table(run: Run, in_step: float) -> str:
    """A row for each plan, the fastest first."""
    said = predict(run, in_step)
    rows = ["| plan | measured, ms | predicted, ms | predicted / measured |", "| --- | --- | --- | --- |"]
    for plan in sorted(run.seconds, key=lambda each: statistics.median(run.times(each))):
        times = [1e3 * each for each in run.times(plan)]
        middle = statistics.median(times)
        rows.append(
            f"| {plan}{' *' * is_fitted(plan)} | {middle:.1f} ({min(times):.1f}-{max(times):.1f}) |"
            f" {1e3 * said[plan]:.1f} | {1e3 * said[plan] / middle:.3f} |"
        )
    return "\n".join(rows)


def summary(run: Run, in_step: float) -> list[str]:
    """The cells of the run's row: plans, errors of those that nothing was fitted to, correlation, the pick's cost."""
    said = predict(run, in_step)
    taken = {plan: statistics.median(run.times(plan)) for plan in run.seconds}
    errors = [abs(said[plan] / taken[plan] - 1) for plan in taken if not is_fitted(plan)]
    pick, best = min(said, key=lambda plan: said[plan]), min(taken, key=lambda plan: taken[plan])
    spread, raw = (
        statistics.median(max(times) / min(times) for times in each.values()) for each in (run.seconds, run.raw)
    )
    return [
        f"{run.model}, {run.ranks} ranks", str(len(taken)), f"{statistics.median(errors):.1%}", f"{max(errors):.1%}",
        f"{rank_correlation(list(said.values()), [taken[plan] for plan in said]):.3f}",
        f"{halves_correlation(run):.3f}", pick, best, f"{taken[pick] / taken[best] - 1:.1%}",
        f"{spread:.2f} ({raw:.2f})",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], choices=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--keep", type=Path, help="keep what is measured in this folder, and take what it has")
    parser.add_argument("--write", action="store_true", help="keep the table in docs/bench/")
    given = parser.parse_args()
    heads = ["model", "plans", "median error", "worst", "rank correlation", "of measured halves", "picked", "fastest",
             "pick over fastest", "slowest over fastest round (as clocked)"]  # fmt: skip
    runs = []
    for model in given.models or MODELS:
        for ranks in given.ranks:
            path = None if given.keep is None else given.keep / f"{model}-{ranks}.pickle"
            if path is not None and path.exists():
                runs.append(pickle.loads(path.read_bytes()))
                continue
            runs.append(measure(model, ranks, given.rounds))
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(pickle.dumps(runs[-1]))
    in_step = fit(runs)
    rows = ["| " + " | ".join(heads) + " |", "| " + " | ".join(["---"] * len(heads)) + " |"]
    rows += ["| " + " | ".join(summary(run, in_step)) + " |" for run in runs]
    parts = [f"## {run.model}, {run.ranks} ranks\n\n{table(run, in_step)}" for run in runs]
    text = TEXT.format(in_step=in_step)
    publish("Predicted and measured steps", "\n\n".join([text, "\n".join(rows), *parts]), "local-truth", given.write)


if __name__ == "__main__":
    main()
