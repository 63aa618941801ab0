"""The fuzzer's loop: cases drawn from a seed, checked in child processes, counted; each new fault made smaller."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from fuzz import grammar, plans
from fuzz.grammar import Spec
from fuzz.outcome import FAULTS, KINDS, Outcome
from fuzz.script import render
from fuzz.shrink import shrink
from fuzz.worker import Worker

SAY_SECONDS = 60.0
PLANS_EACH = 8  # of one model: they share its capture


def model_of(seed: int, case: int) -> Spec:
    """The model of a case: that of the cases beside it."""
    return grammar.draw(random.Random(f"model {seed} {case // PLANS_EACH}"))


def plan_of(seed: int, case: int, spec: Spec, compiler: str = "") -> str:
    """The plan of a case; with a compiler, one that compiles."""
    text = plans.draw(random.Random(f"plan {seed} {case}"), spec)
    return f"compile=inductor {text}" if compiler and "compile=" not in text else text


@dataclass
class Counted:
    """What a run has found so far."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: set[int] = field(default_factory=set)  # models with wrong numbers
    slow: list[int] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        return sum(self.counts[kind] for kind in FAULTS)

    def add(self, case: int, found: Outcome) -> bool:
        """Count an outcome; whether it is a fault of a kind not seen before, or wrong numbers of another model."""
        self.counts[found.kind] += 1
        if found.slow:
            self.slow.append(case)
        if found.kind == "refused":
            self.refusals[found.reason] += 1
        if found.kind not in FAULTS:
            return False
        self.faults[found.kind, found.reason] += 1
        model = case // PLANS_EACH
        new = self.faults[found.kind, found.reason] == 1 or (found.kind == "wrong" and model not in self.wrong)
        self.wrong |= {model} if found.kind == "wrong" else set()
        return new

    def show(self, seed: int, seconds: float) -> str:
        """The counts, the faults by kind and reason, and the refusals by reason."""
        counts = ", ".join(f"{self.counts[kind]} {kind}" for kind in KINDS)
        slow = f"{len(self.slow)} slow" + (f" {self.slow}" if self.slow else "")
        lines = [f"seed {seed}: {self.counts.total()} cases in {seconds:.0f} s: {counts}, {slow}"]
        lines += [f"  {number:5} {kind}: {reason}" for (kind, reason), number in self.faults.most_common()]
        lines += [f"  {number:5} refused: {reason}" for reason, number in self.refusals.most_common()]
        return "\n".join(lines)


class Fuzzer:
    """A run: `jobs` threads, each with a child process of its own, take models in turn."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.counted = Counted()
        self._lock = threading.Lock()
        self._next = options.first // PLANS_EACH * PLANS_EACH
        self._start = self._said = time.monotonic()

    def run(self) -> int:
        """The exit status: 0 if there is no fault. Asked to stop, it ends with the models that it has begun."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self.options, "seconds", 0.0))
        with ThreadPoolExecutor(self.options.jobs) as pool:
            for done in [pool.submit(self._work) for _ in range(self.options.jobs)]:
                done.result()
        print(self.counted.show(self.options.seed, time.monotonic() - self._start), flush=True)
        return 1 if self.counted.num_faults else 0

    def _take(self) -> range | None:
        """The cases of the next model; None when the run is over."""
        with self._lock:
            if time.monotonic() - self._start > self.options.seconds:
                return None
            if self.options.case is not None:
                taken, self.options.case = self.options.case, -1
                return range(taken, taken + 1) if taken >= 0 else None
            if self.options.cases is not None and self._next >= self.options.cases:
                return None
            self._skip()
            taken = range(self._next, self._next + PLANS_EACH)
            self._next += PLANS_EACH
            return taken

    def _skip(self) -> None:
        """Pass by models that are not wanted."""
        unwanted, wanted = set(self.options.without.split(",")), set(self.options.only.split(",")) - {""}
        for _ in range(1000):
            words = model_of(self.options.seed, self._next).words
            if not unwanted & words and (not wanted or wanted & words):
                return
            self._next += PLANS_EACH
        raise SystemExit(f"--without {self.options.without} --only {self.options.only} leave none of 1000 models")

    def _work(self) -> None:
        worker = Worker(self.options.limit, self.options.compiler)
        try:
            while (cases := self._take()) is not None:
                spec = model_of(self.options.seed, cases[0])
                texts = [plan_of(self.options.seed, case, spec, self.options.compiler) for case in cases]
                found = list(worker.check(spec, texts))
                for case, text, outcome in zip(cases, texts, found, strict=True):
                    self._note(worker, case, spec, text, outcome)
                self._say_so_far()
        finally:
            worker.close()

    def _say_so_far(self) -> None:
        """The counts, once a minute: a long run may be stopped."""
        with self._lock:
            now = time.monotonic()
            if now - self._said > SAY_SECONDS:
                self._said = now
                print(self.counted.show(self.options.seed, now - self._start).splitlines()[0], flush=True)

    def _note(self, worker: Worker, case: int, spec: Spec, text: str, found: Outcome) -> None:
        with self._lock:
            new = self.counted.add(case, found)
        if self.options.case is not None:
            print(f"{text}\n{spec}\n{found.kind}: {found.reason}\n{found.detail}", flush=True)
        origin = f"scripts/fuzz --seed {self.options.seed} --case {case}"
        if not new:
            if found.kind in FAULTS:
                print(f"again {found.kind}: {found.reason}   ({origin})", flush=True)
            return
        print(f"{found.kind}: {found.reason}\n    {text}   ({origin})", flush=True)
        if self.options.shrink:
            spec, text, found = shrink(
                spec, text, found, lambda s, p: next(iter(worker.check(s, [p]))), seconds=self.options.shrink
            )
            print(f"    smaller: {text}\n    {spec}", flush=True)
        if self.options.out:
            folder = Path(self.options.out)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{found.kind}_{self.options.seed}_{case}.py").write_text(render(spec, text, found, origin))


def main(arguments: list[str] | None = None) -> int:
    """The command line of scripts/fuzz."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="take no new model after that long")
    parser.add_argument("--seed", type=int, default=None, help="by default a random one, which is printed")
    parser.add_argument("--cases", type=int, default=None, help="stop after that many cases")
    parser.add_argument("--case", type=int, default=None, help="this case of the seed alone, in full")
    parser.add_argument("--first", type=int, default=0, help="the case to begin with")
    parser.add_argument("--without", default="-", help="no models with these layers, options, dtypes or tasks")
    parser.add_argument("--only", default="", help="models with one of these")
    parser.add_argument(
        "--compiler", choices=["inductor", "none"], default="",
        help="all plans have compile=inductor; with none the calls of a region run one by one, which is far faster",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="child processes side by side")
    parser.add_argument("--limit", type=float, default=120, help="seconds after which a case counts as hung")
    parser.add_argument("--shrink", type=float, default=60, help="seconds to make each new fault smaller; 0 not to")
    parser.add_argument("--out", default=None, help="the folder for scripts that show the faults")
    parser.add_argument(
        "--torch-ops", nargs="*", metavar="NAME", help="instead, the ops of PyTorch's own test database, all or these"
    )
    options = parser.parse_args(arguments)
    if options.torch_ops is not None:
        from fuzz import torch_ops  # takes seconds

        return torch_ops.run(options.torch_ops, options.jobs, options.limit)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**6)
    print(f"seed {options.seed}", flush=True)
    return Fuzzer(options).run()


if __name__ == "__main__":
    sys.exit(main())
