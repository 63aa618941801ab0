"""The rank, the number of processes and the plan that launcher and command line set for this process. Needs no
torch."""

from __future__ import annotations

import os
from pathlib import Path

from plait.comm.launch import rank_and_size
from plait.plan.plan import Plan


def resolve_plan(plan: Plan | str | None) -> Plan:
    """The plan of the command line (PLAIT_PLAN), else the given one, else data parallel over all processes."""
    text = os.environ.get("PLAIT_PLAN")
    if text is not None:
        return Plan.parse(text)
    if plan is None:
        return Plan.for_processes(num_processes())
    return Plan.of(plan)


def resolve_trace(trace: str | Path | None) -> Path | None:
    """The folder for a trace: the given one, else that of the command line (PLAIT_TRACE); None for no trace."""
    chosen = trace if trace is not None else os.environ.get("PLAIT_TRACE")
    return None if chosen is None else Path(chosen)


def under_launcher() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    """This process's rank; 0 without a launcher. Raises WorldError for one that is none of `num_processes`."""
    return rank_and_size()[0]


def num_processes() -> int:
    """The number of processes; 1 without a launcher. Raises WorldError for a text that is no number above 0."""
    return rank_and_size()[1]
