"""What the launcher told this process: its rank, how many there are, and what the command line chose."""

from __future__ import annotations

import os
from pathlib import Path

from plait.plan.plan import Plan


def resolve_plan(plan: Plan | str | None) -> Plan:
    """The plan of the command line (PLAIT_PLAN), or else the one given, or else data parallel over all processes."""
    text = os.environ.get("PLAIT_PLAN")
    if text is not None:
        return Plan.parse(text)
    if plan is None:
        return Plan.for_processes(num_processes())
    return Plan.parse(plan) if isinstance(plan, str) else plan


def resolve_trace(trace: str | Path | None) -> Path | None:
    """The folder for a trace: the one given, or that of the command line (PLAIT_TRACE)."""
    chosen = trace if trace is not None else os.environ.get("PLAIT_TRACE")
    return None if chosen is None else Path(chosen)


def under_launcher() -> bool:
    """Whether torchrun, or anything that speaks as it does, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def num_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
