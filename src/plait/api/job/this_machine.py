"""This machine as a cluster, measured once and kept in a file; and the plan of `plait train --plan auto` on it."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from plait.comm.launch import launch
from plait.engine.environment import under_launcher
from plait.errors import ConfigError, PlanError
from plait.plan.plan import Plan
from plait.spec.cluster import Cluster
from plait.spec.cluster_file import read_cluster

AUTO = "auto"
# What --plan auto does not choose unless it is told to, because the numbers would not be those of one device.
_NUMBERS = {"sync": "1", "precision": "fp32", "compress": "none"}


def measured_file(num_devices: int) -> Path:
    """Where the measurement of this machine with so many ranks is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "plait" / "clusters" / f"{socket.gethostname()}-{num_devices}.toml"


def this_machine(num_devices: int | None = None) -> Cluster:
    """The cluster that this machine is, as `plait cluster measure` finds it; measured when there is no file of it, or
    one of other hardware.

    Raises ConfigError if it cannot be measured: by a rank that has been started already, and if measuring fails.
    """
    from plait.api.cluster_measurement import default_processes

    num = num_devices or default_processes()
    path = measured_file(num)
    if why := _cannot_keep(path):
        _say(f"this machine is measured, in less than two minutes, each time: {why}; set XDG_CACHE_HOME")
        with tempfile.TemporaryDirectory() as folder:
            once = Path(folder) / path.name
            _measure(num, once)
            return read_cluster(once)
    if path.exists():
        try:
            found = read_cluster(path)
            changed = stale(found, num)
        except ConfigError as error:
            changed = str(error)
        if not changed:
            return found
        _say(f"the measurement {path} is stale: {changed}; this machine is measured anew")
    else:
        _say(f"this machine is measured once, in less than two minutes, and kept in {path}")
    _measure(num, path)
    return read_cluster(path)


def stale(found: Cluster, num_devices: int) -> str:
    """What differs between a measurement and this machine; "" if nothing does."""
    from plait.api.cluster_measurement import describe_here

    name, cores = describe_here()
    host = found.measured.rpartition(" on ")[2]
    if host != socket.gethostname():
        return f"it is of the host {host or 'unknown'}, and this is {socket.gethostname()}"
    if found.device.name != name:
        return f"it is of {found.device.name}, and this machine has {name}"
    if found.num_devices != num_devices:
        return f"it is of {found.num_devices} devices, and there are {num_devices}"
    if found.host is not None and found.host.cores != cores:
        return f"it is of {found.host.cores} cores, and there are {cores}"
    if lacking := [key for key in ("step_seconds", "update_seconds") if not getattr(found.device, key)]:
        return f"it does not have {' and '.join(lacking)}, which a former version did not measure"
    return ""


def _cannot_keep(path: Path) -> str:
    """Why a measurement that is not there yet cannot be kept at `path`; "" if it can, or is there."""
    try:
        if path.exists():
            return ""
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"the folder {str(path.parent)!r} cannot be made: {error.strerror}"
    return "" if os.access(path.parent, os.W_OK) else f"the folder {str(path.parent)!r} cannot be written"


def _measure(num: int, path: Path) -> None:
    if under_launcher():
        raise ConfigError(
            f"this machine is not measured, and a rank cannot do it; run `plait cluster measure --out {path}` first"
        )
    status = launch(["-m", "plait", "cluster", "measure", "--processes", str(num), "--out", str(path)], num, {})
    if status or not path.exists():
        raise ConfigError("this machine could not be measured; what went wrong is above, or give --cluster")


def is_auto(text: str | None) -> bool:
    """Whether a plan is to be searched for: `auto`, which limits may follow, as in "auto tensor=1..2"."""
    return text is not None and text.split()[:1] == [AUTO]


def auto_plan(path: Path, text: str, processes: int | None, changes: Sequence[str]) -> Plan:
    """The best plan for a job on this machine, with the numbers of one device unless `text` has other limits.

    Raises PlanError under a launcher, and if no plan that fits is accepted by the job; ConfigError as `this_machine`.
    """
    from plait.api.job.config import load_config
    from plait.api.job.from_config import check_job
    from plait.api.job.prediction_commands import plan_config

    if under_launcher():
        raise PlanError("--plan auto plans before ranks are started; give the plan that `plait plan` prints")
    limits = text.split()[1:]
    given = {word.partition("=")[0] for word in limits}
    limits += [f"{key}={value}" for key, value in _NUMBERS.items() if key not in given]
    found = plan_config(path, lambda: this_machine(processes), limits=" ".join(limits), changes=changes)
    job = load_config(path, changes)
    refused = ""
    for each in found.fitting():
        try:
            check_job(job, each.plan, writes=False)
        except PlanError as error:
            refused = str(error)
            continue
        _say(
            f"plan {each.plan.title}: {each.step.seconds:.3g} s a step predicted, {each.step.tokens_per_second:,.0f}"
            f" tokens/s; the fastest of {found.num_rough:,} plans, of which {found.num_simulated} were simulated"
        )
        return each.plan
    raise PlanError(f"the job refuses every plan that was found, the last as: {refused}")


def _say(text: str) -> None:
    print(f"plait: {text}", file=sys.stderr)
