"""Runs a user's own script as one rank."""

from __future__ import annotations

import io
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from plait.comm.launch import first_to_fail, ranks_folder
from plait.engine.environment import num_processes, rank
from plait.errors import PlaitError, RankFailed


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Run the script as `python SCRIPT ARGUMENTS` would. Of several ranks only the first to fail prints its error."""
    if num_processes() > 1:
        _print_whole_lines()
    if (folder := ranks_folder()) is not None:
        from plait.comm.rendezvous import lead_scripts

        lead_scripts(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script sees Ctrl-C as under plain Python
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.absolute().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except KeyboardInterrupt as error:
        tell_other_ranks(error)
        if num_processes() > 1 and first_to_fail():
            print(f"plait: rank {rank()} was interrupted (KeyboardInterrupt)", file=sys.stderr, flush=True)
        _leave(130)
    except SystemExit as error:
        if num_processes() > 1 and error.code not in (None, 0):
            tell_other_ranks(error)
            if first_to_fail():
                print(f"plait: rank {rank()} left with sys.exit({error.code!r})", file=sys.stderr, flush=True)
        raise
    except PlaitError as error:
        if num_processes() == 1:
            raise
        tell_other_ranks(error)
        if first_to_fail():
            own = "" if isinstance(error, RankFailed) else f"rank {rank()} failed: {type(error).__name__}: "
            print(f"plait: {own}{error}", file=sys.stderr, flush=True)
        _leave(2)
    except Exception as error:
        tell_other_ranks(error)
        if first_to_fail():
            print(_own_traceback(error, script), end="", file=sys.stderr)
            if num_processes() > 1:
                print(f"plait: rank {rank()} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        _leave(1)


def tell_other_ranks(error: BaseException) -> None:
    """Tell other ranks, if there are any, that this one has failed."""
    if "plait.comm.failure" in sys.modules and os.environ.get("WORLD_SIZE", "1") != "1":
        from plait.comm.failure import let_failed_rank_report, tell_failure

        tell_failure(error)
        if isinstance(error, RankFailed):  # a world was made, by a rank whose number can be
            let_failed_rank_report(rank(), error)


def _print_whole_lines() -> None:
    """Make this process write whole lines, because ranks share one terminal, where parts of lines would mix."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _own_traceback(error: Exception, script: Path) -> str:
    """The traceback from the script's first frame on, without the frames of plait that ran it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    shown = error.with_traceback(frames) if frames is not None else error
    return "".join(traceback.format_exception(shown))


def _leave(status: int) -> None:
    """Exit at once: a process whose group is broken would wait for the other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
