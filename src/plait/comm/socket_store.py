"""The board of ranks that `plait` itself has started: the launcher holds it, behind a socket that is a file.

The file lies in a folder that only this user may enter, so nobody else reaches it, which a port would not forbid. What
is said is one line of JSON, and one line of JSON in reply:

    ["set", KEY, TEXT] -> null      ["get", KEY] -> TEXT or null      ["first", KEY, TEXT] -> TEXT
    ["missing", [KEY, ...]] -> [KEY, ...]
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plait.comm.key_value_store import LocalStore

_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.02  # seconds between looks for keys that somebody else will set


@contextmanager
def serve_board(path: Path) -> Iterator[None]:
    """Hold a board at the path, from another thread."""
    board = LocalStore()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                self.wfile.write(json.dumps(_answer(board, json.loads(line))).encode() + b"\n")

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 1024

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A rank that has ended in the middle of a line is no news: the launcher sees that it has ended."""

    with Server(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="plait board", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()


def _answer(board: LocalStore, request: list[Any]) -> Any:
    match request:
        case ["set", str(key), str(text)]:
            board.set(key, text)
            return None
        case ["get", str(key)]:
            return board.get(key)
        case ["first", str(key), str(text)]:
            return board.first(key, text)
        case ["missing", [*keys]]:
            return board.missing(keys, 0)
    raise ValueError(f"unknown request {request}")


class SocketStore:
    """A rank's line to the board. `name` keeps the worlds of one run apart. RuntimeError once the launcher is gone."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._turn = threading.Lock()
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._line.connect(str(path))
        except OSError as error:
            self._line.close()
            raise RuntimeError(f"the launcher's board {path} is out of reach: {error}") from None
        self._replies = self._line.makefile("rb")

    def __del__(self) -> None:
        if hasattr(self, "_replies"):
            self._replies.close()
        self._line.close()

    def set(self, key: str, text: str) -> None:
        self._ask("set", self._key(key), text)

    def get(self, key: str) -> str | None:
        found: str | None = self._ask("get", self._key(key))
        return found

    def first(self, key: str, text: str) -> str:
        found: str = self._ask("first", self._key(key), text)
        return found

    def missing(self, keys: Sequence[str], seconds: float) -> list[str]:
        end, pause = time.monotonic() + seconds, _FIRST_PAUSE
        absent = [self._key(key) for key in keys]
        while (absent := self._ask("missing", absent)) and (left := end - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LAST_PAUSE)
        return [key for key in keys if self._key(key) in absent]

    def clone(self) -> SocketStore:
        return SocketStore(self._path, self._name)

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"

    def _ask(self, *request: Any) -> Any:
        with self._turn:
            try:
                self._line.sendall(json.dumps(request).encode() + b"\n")
                reply = self._replies.readline()
            except OSError:
                reply = b""
        if not reply.endswith(b"\n"):
            raise RuntimeError(f"the launcher, which holds the board {self._path}, is gone")
        return json.loads(reply)
