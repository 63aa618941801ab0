"""Ray's workers as forks of a process that has imported torch and plait, which each of them would take seconds for.

`forked_workers()` runs such a process. Ray starts each worker by the command that it yields: this file, which hands
arguments, environment, folder and output of the worker on to the process, and ends with the worker.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SERVERS = "plait.integrations.ray_servers"
_PRELOAD = ("torch._dynamo", f"{_SERVERS}.worker", f"{_SERVERS}.evaluator", "tests.served")
_LARGEST = 1 << 20  # bytes of arguments and environment
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


@contextmanager
def forked_workers(folder: Path) -> Iterator[str]:
    """Within the context Ray's workers can be started by the command that it yields."""
    path = folder / "workers"
    process = subprocess.Popen(
        [sys.executable, __file__, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield f"{sys.executable} -I -S {__file__} {path}"
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def _ask(path: str, arguments: list[str]) -> None:
    """As Ray's command: have a worker forked, and wait until it has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
        line.connect(path)
        asked = json.dumps([arguments, os.getcwd(), {**os.environ}]).encode()
        socket.send_fds(line, [asked], [0, 1, 2])
        line.recv(1)


def _serve(path: str) -> None:
    """Fork workers until standard input is closed; they end with this process."""
    import gc
    import importlib
    import select
    import signal

    gc.disable()  # most of what is imported stays
    sys.path.append(str(Path(__file__).parents[1]))  # where Ray's driver finds tests.served
    for name in _PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else a collection in each worker would copy all pages of what was imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for the status of a worker
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listens:
        listens.bind(path)
        listens.listen()
        print("ready", flush=True)
        while listens in select.select([0, listens], [], [])[0]:
            line, _ = listens.accept()
            asked, outputs, _, _ = socket.recv_fds(line, _LARGEST, 3)
            if os.fork() == 0:
                listens.close()
                _become_worker(json.loads(asked), outputs)
            for descriptor in outputs:
                os.close(descriptor)
            line.close()  # the worker still has it


def _become_worker(asked: tuple[list[str], str, dict[str, str]], outputs: list[int]) -> None:
    import ctypes
    import gc
    import runpy
    import signal
    import traceback

    try:
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)  # Ray kills the group of a worker that has ended
        for number, descriptor in enumerate(outputs):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.argv, folder, variables = asked
        os.chdir(folder)
        os.environ.clear()
        os.environ |= variables
        sys.path[0] = str(Path(sys.argv[0]).parent)
        gc.enable()
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[2:]:
        _ask(sys.argv[1], sys.argv[2:])
    else:
        _serve(sys.argv[1])
