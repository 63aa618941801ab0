"""Starting the ranks of this machine, through the elastic launcher that torchrun is made of."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

FAILURE_FILE = "PLAIT_FAILURE_FILE"  # whichever rank creates this file is the one that shows its exception


def launch(arguments: Sequence[str], num_processes: int, environment: Mapping[str, str]) -> int:
    """Run `python ARGUMENTS` as that many ranks of this machine and wait for them; returns the exit status.

    A rank that fails stops the others. It shows its own exception; only one that was killed is reported here. Ctrl-C
    and SIGTERM are passed on to every rank, and the status is then 128 + the signal's number.
    """
    import tempfile  # here, because Ctrl-C is answered in one line only once this module is there
    import uuid

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Ranks share the cores; more threads than cores make every collective wait for a turn on the processor.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num_processes)))
    os.environ.update(environment)
    logging.disable(logging.CRITICAL)  # the launcher's own account of what the ranks already said
    with tempfile.TemporaryDirectory(prefix="plait-", ignore_cleanup_errors=True) as folder:
        os.environ[FAILURE_FILE] = str(Path(folder) / "failure")
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except SignalException as stopped:
            return 128 + stopped.sigval.value
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
            if killed and not Path(os.environ[FAILURE_FILE]).exists():
                name = signal.Signals(-failure.exitcode).name
                why = "; the machine may have run out of memory" if name == "SIGKILL" else ""
                print(f"plait: rank {rank} was ended by {name}{why}", file=sys.stderr)
            return failure.exitcode if failure.exitcode > 0 else 1
        return 0


def leave_interrupted() -> NoReturn:
    """End this process after Ctrl-C: at once, because others of its group may never come. One of all ranks says so."""
    if first_to_fail():
        print("plait: stopped by Ctrl-C", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + signal.SIGINT)


def first_to_fail() -> bool:
    """Whether this rank is the one to show its exception: the first of this machine, or one that nobody launched."""
    file = os.environ.get(FAILURE_FILE)
    if file is None:
        return True
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL))
    except OSError:
        return False
    return True
