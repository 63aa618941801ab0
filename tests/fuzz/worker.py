"""A child process that checks cases: one that crashes or hangs takes only itself down."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fuzz.grammar import Spec
from fuzz.outcome import Outcome

MODELS_EACH = 60  # after which a child is replaced: captures take memory
START_SECONDS = 120.0  # to import torch and to take a model, on a busy machine


class Worker:
    """The parent's end of a child process, which is started when it is needed, and again when it is gone."""

    def __init__(self, limit: float, compiler: str = "", context: Any = None) -> None:
        self.limit = limit
        self._context = context or multiprocessing.get_context("spawn")
        self._compiler = compiler
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self._process: Any = None
        self._num_models = 0

    def check(self, spec: Spec, plans: list[str]) -> Iterator[Outcome]:
        """The outcome of each plan in turn, each within the limit of seconds."""
        rest = list(plans)
        while rest:
            if self._process is None or not self._process.is_alive() or self._num_models >= MODELS_EACH:
                self._start()
            self._num_models += 1
            self._line.send((spec, rest))
            limit = self.limit + START_SECONDS  # of the first
            while rest:
                found = self._receive(limit)
                yield found
                rest.pop(0)
                limit = self.limit
                if self._process is None:
                    break

    def _receive(self, limit: float) -> Outcome:
        try:
            if self._line.poll(limit):
                found = self._line.recv()
                assert isinstance(found, Outcome)
                return found
        except (EOFError, ConnectionError):
            self._process.join(10)
            found = Outcome("crashed", f"the process ended with {self._process.exitcode}", self._stacks())
            self._end()
            return found
        self._process.kill()  # its stacks were written shortly before
        found = Outcome("hung", "", self._stacks())
        self._end()
        return found

    def _stacks(self) -> str:
        path = Path(self._folder.name) / "stacks"
        return path.read_text()[-8000:] if path.exists() else ""

    def _start(self) -> None:
        self._end()
        self._line, theirs = self._context.Pipe()
        self._process = self._context.Process(
            target=serve, args=(theirs, self._folder.name, self.limit, self._compiler), daemon=True
        )
        self._process.start()
        theirs.close()
        self._num_models = 0

    def close(self) -> None:
        """End the child, and remove its folder."""
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join(10)
            self._line.close()
        self._process = None


def serve(line: Connection, folder: str, limit: float, compiler: str = "") -> None:
    """The child: outcomes for what comes. The compiler `none` leaves the regions of compiled plans as they are."""
    os.environ["TMPDIR"] = folder
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    stacks = Path(folder, "stacks").open("w")  # noqa: SIM115 - for as long as the process lives
    faulthandler.enable(stacks, all_threads=True)
    warnings.simplefilter("ignore")
    import torch

    from fuzz.outcome import Checker, classify

    torch.set_num_threads(1)
    if compiler == "none":
        from plait.backends.inductor import inductor_backend
        from plait.backends.inductor.region_compiler import CompileReport

        inductor_backend.compile_regions = lambda functions, plan: CompileReport(0, 0, 0, 0.0)
    while True:
        try:
            spec, plans = line.recv()
        except EOFError:
            sys.exit()
        checker = None
        for plan in plans:
            faulthandler.dump_traceback_later(limit * 0.95, file=stacks)
            try:
                checker = checker or Checker(spec)
                found = checker.check(plan)
            except Exception as error:
                found = classify(error)
            faulthandler.cancel_dump_traceback_later()
            line.send(found)
