"""What the commands of the command line share: options, the choice of a plan, processes, how errors are shown."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from plait.api.output import lasting_output
from plait.api.script import tell_other_ranks
from plait.comm.launch import FAILURE_FILE, first_to_fail, launch
from plait.engine.environment import num_processes, resolve_plan, under_launcher
from plait.errors import PlaitError, PlanError, RankFailed
from plait.plan.plan import Plan

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The job's TOML file.")]
PlanOption = Annotated[str | None, typer.Option("--plan", help='How the step is spread, such as "data=2 tensor=2".')]
ProcessesOption = Annotated[
    int | None,
    typer.Option("--processes", min=1, help="Processes on this machine; by default as many as the plan has."),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Change a value: --set train.steps=10.")]


def choose_plan(text: str | None, processes: int | None) -> Plan:
    """The plan to train under, checked against the number of processes."""
    if under_launcher():
        chosen = plan_of(text) if text is not None else resolve_plan(None)
        chosen.check_processes(num_processes())
        os.environ["PLAIT_PLAN"] = str(chosen)
        return chosen
    if text is None and "PLAIT_PLAN" not in os.environ:
        return Plan.for_processes(processes or 1)
    chosen = plan_of(text)
    if processes is not None and chosen.workers:
        raise PlanError(
            f"--processes {processes} says how many ranks this command starts, but Ray starts those of"
            f" workers={chosen.workers}; leave --processes out"
        )
    if processes is not None:
        chosen.check_processes(processes)
    return chosen


def plan_of(text: str | None) -> Plan:
    return Plan.parse(text) if text is not None else resolve_plan(None)


def launched_here() -> bool:
    """Whether this rank was started by `launch_command`, whose process has checked the job."""
    return under_launcher() and FAILURE_FILE in os.environ


def launch_command(arguments: list[str], size: int, plan: Plan | None) -> None:
    raise typer.Exit(launch(["-m", "plait", *arguments], size, {} if plan is None else {"PLAIT_PLAN": str(plan)}))


@contextmanager
def errors_shown_once(status: int = 2, script: bool = False) -> Iterator[None]:
    """Print a PlaitError as one message and exit with `status`. Of several ranks only the first to fail prints.

    What plait prints itself does not fail; a user's `script` has standard output as it is."""
    try:
        with nullcontext() if script else lasting_output():
            yield
    except PlaitError as error:
        tell_other_ranks(error)
        if first_to_fail():
            from rich.console import Console

            who = "" if isinstance(error, RankFailed) or not under_launcher() else _failed(error)
            console = Console(stderr=True, highlight=False, emoji=False)
            console.print(f"plait: {who}{error}", markup=False, style="red", soft_wrap=True)
        raise typer.Exit(status) from None
    except Exception as error:
        if not under_launcher() or isinstance(error, typer.Exit):
            raise
        tell_other_ranks(error)
        if first_to_fail():
            traceback.print_exc()
            print(f"plait: {_failed(error)}{error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _failed(error: Exception) -> str:
    return f"rank {os.environ['RANK']} failed: {type(error).__name__}: "
