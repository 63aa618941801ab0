"""Key-value stores: short texts that ranks leave for each other outside of collectives.

They work while ranks are stuck in a collective, as failures, stops and checks between ranks require. Ranks that are
threads share a LocalStore. Ranks that `plait` has started reach the launcher's LocalStore through a Unix socket, which
lies in a folder that only this user may enter; a port would be open to others. A request is one line of JSON, and so is
its reply:

    ["set", KEY, TEXT] -> null      ["get", KEY] -> TEXT or null      ["first", KEY, TEXT] -> TEXT
    ["missing", [KEY, ...]] -> [KEY, ...]

Ranks of other launchers use the store of torch.distributed (comm/rendezvous.py).
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
from threading import Condition
from typing import Any, Protocol

from plait.errors import WorldError


class KeyValueStore(Protocol):
    """Texts by key, the same for all ranks."""

    def set(self, key: str, text: str) -> None: ...

    def get(self, key: str) -> str | None:
        """The text of the key, or None while it is not set."""

    def first(self, key: str, text: str) -> str:
        """Set the key unless it is set, and return its text then. Of several callers exactly one gets its own text."""

    def missing(self, keys: Sequence[str], seconds: float) -> list[str]:
        """Wait until all keys are set, at most `seconds`. Returns the keys that are not set."""

    def clone(self) -> KeyValueStore:
        """The same store for another thread of this process."""


class LocalStore:
    """The store of ranks that share a process."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._changed = Condition()
        self._stopped: WorldError | None = None

    def set(self, key: str, text: str) -> None:
        with self._changed:
            self._texts[key] = text
            self._changed.notify_all()

    def get(self, key: str) -> str | None:
        return self._texts.get(key)

    def first(self, key: str, text: str) -> str:
        with self._changed:
            found = self._texts.setdefault(key, text)
            self._changed.notify_all()
        return found

    def missing(self, keys: Sequence[str], seconds: float) -> list[str]:
        end = time.monotonic() + seconds
        with self._changed:
            while (absent := [key for key in keys if key not in self._texts]) and self._stopped is None:
                if (left := end - time.monotonic()) <= 0:
                    break
                self._changed.wait(left)
            if absent and self._stopped is not None:
                raise self._stopped
        return absent

    def clone(self) -> LocalStore:
        return self

    def stop(self, error: WorldError) -> None:
        """Raise the error in every present and future wait."""
        with self._changed:
            self._stopped = error
            self._changed.notify_all()


_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.02  # seconds between looks for keys that others will set


@contextmanager
def serve_store(path: Path) -> Iterator[None]:
    """Serve a LocalStore at the path of a Unix socket, in another thread."""
    store = LocalStore()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                self.wfile.write(json.dumps(_answer(store, json.loads(line))).encode() + b"\n")

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 1024

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignored: a rank has ended in the middle of a line, which the launcher notices by itself."""

    with Server(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="plait store", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()


def _answer(store: LocalStore, request: list[Any]) -> str | list[str] | None:
    match request:
        case ["set", str(key), str(text)]:
            store.set(key, text)
            return None
        case ["get", str(key)]:
            return store.get(key)
        case ["first", str(key), str(text)]:
            return store.first(key, text)
        case ["missing", [*keys]]:
            return store.missing(keys, 0)
    raise ValueError(f"unknown request {request}")


class SocketStore:
    """A rank's connection to the launcher's store. `name` separates the worlds of one run.

    Raises RuntimeError once the launcher is gone.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise RuntimeError(f"the launcher's store {path} is out of reach: {error}") from None
        self._replies = self._socket.makefile("rb")

    def __del__(self) -> None:
        if hasattr(self, "_replies"):
            self._replies.close()
        self._socket.close()

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

    def _ask(self, *request: object) -> Any:
        with self._lock:
            try:
                self._socket.sendall(json.dumps(request).encode() + b"\n")
                reply = self._replies.readline()
            except OSError:
                reply = b""
        if not reply.endswith(b"\n"):
            raise RuntimeError(f"the launcher, which holds the store {self._path}, is gone")
        return json.loads(reply)
