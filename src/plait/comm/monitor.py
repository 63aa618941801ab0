"""Detects dead ranks and deadlocks, by a thread per process that signals its rank's life and checks its rank's waits.

A rank that lives may be late, up to PLAIT_TIMEOUT seconds (default 30 minutes); after PLAIT_NOTICE seconds (default 30)
the user is told which rank is waited for. A wait ends early, with an error, if

    a rank that it is for has ended      its process is gone, or, on another host, it gave no sign for two minutes
    a rank has failed                    its report is in the key-value store
    ranks wait for each other            what they say of their waits is a cycle that does not change between two looks
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from plait.comm.key_value_store import KeyValueStore
from plait.comm.sharing import alive, host_name
from plait.errors import RankFailed, WorldError

TIMEOUT, NOTICE = "PLAIT_TIMEOUT", "PLAIT_NOTICE"  # environment variables
_TIMEOUT_SECONDS, _NOTICE_SECONDS = 1800.0, 30.0

FAILURE = "failure"  # the key of the first failed rank's report
FINISHED = "finished"  # the key FINISHED/RANK is set once that rank is done

_BEAT_SECONDS = 0.5
_SHORT_SECONDS = 1.0  # waits shorter than this are not checked
_LOST_SECONDS = 120.0  # without a sign of a rank on another host, which may hold Python's lock for long
_LEAVE_SECONDS = 5.0  # in which a rank must leave a failed wait; a wait inside C++ code cannot be interrupted

LateRanks = Callable[[], Sequence[int]]


class Wait:
    """A wait of one of this rank's threads. `late()` returns the ranks that must still act before it can end."""

    def __init__(self, what: str, late: LateRanks, number: int) -> None:
        self.what, self.late, self.number = what, late, number
        self.since = time.monotonic()
        self.error: WorldError | None = None
        self.num_notices = 0
        self.error_since = 0.0

    def check(self) -> None:
        """Raise the error that ends this wait, if there is one."""
        if self.error is not None:
            raise self.error


class Monitor:
    """The monitor of one rank. It calls `leave` with the error of a wait that should have failed but goes on."""

    def __init__(self, store: KeyValueStore, rank: int, size: int, leave: Callable[[WorldError], None]) -> None:
        self.rank = rank
        self.started: Counter[str] = Counter()  # collectives by group, where the transport does not count
        self.num_steps = 0  # steps that this rank has begun
        self._store, self._size, self._leave = store.clone(), size, leave
        self._doing, self._doing_since = "what comes before its first step", time.time()
        self._host, self._pid = host_name(), os.getpid()
        self._waits: dict[int, Wait] = {}  # by thread
        self._owner = threading.get_ident()
        self._num_waits = self._beat = 0
        self._signs: dict[int, tuple[int, float]] = {}  # by rank: its latest beat, and when it was first seen
        self._beats: dict[int, tuple[int, float]] = {}  # the same, as `progress` saw it
        self._ended: set[int] = set()  # ranks that seemed gone at the last look
        self._suspect: tuple[tuple[tuple[int, int], ...], dict[int, int]] | None = None
        self._interval = max(_BEAT_SECONDS, size / 50)  # many ranks share one store
        self._over = threading.Event()
        self._say(())
        self._thread = threading.Thread(target=self._run, name="plait monitor", daemon=True)
        self._thread.start()

    def does(self, what: str) -> None:
        """Set what this rank is doing, for messages about waits for it."""
        self._doing, self._doing_since = what, time.time()

    @contextmanager
    def waiting(self, what: str, late: LateRanks) -> Iterator[Wait]:
        """A context manager around a wait; `what` names what is waited for, `late` the ranks."""
        wait = self.begin(what, late)
        try:
            yield wait
        finally:
            self.end(wait)

    def begin(self, what: str, late: LateRanks) -> Wait:
        self._num_waits += 1
        wait = self._waits[threading.get_ident()] = Wait(what, late, self._num_waits)
        return wait

    def end(self, wait: Wait) -> None:
        thread = threading.get_ident()
        if self._waits.get(thread) is wait:
            del self._waits[thread]

    def behind(self, group: str, number: int, ranks: Sequence[int]) -> list[int]:
        """The ranks, among `ranks`, that have started fewer than `number` collectives of a group."""
        return [rank for rank in ranks if rank != self.rank and self._status(rank)["started"].get(group, 0) < number]

    def behind_step(self, step: int) -> list[int]:
        """The ranks that have begun fewer than `step` steps."""
        return [rank for rank in range(self._size) if rank != self.rank and self._status(rank)["steps"] < step]

    def progress(self) -> dict[int, tuple[int, bool, str]]:
        """For each rank the steps that it has begun, whether it lives and waits for others, and what it does."""
        found = {}
        for rank in range(self._size):
            status = self._status(rank)
            beat, since = self._beats.get(rank, (-1, 0.0))
            if status["beat"] != beat:
                beat, since = self._beats[rank] = (status["beat"], time.monotonic())
            quiet = time.monotonic() - since > 4 * self._interval  # such as one that was stopped
            found[rank] = (status["steps"], status["wait"] is not None and not quiet, self._doing_of(rank))
        return found

    def find_gone(self) -> int | None:
        """A rank that has ended, looked for after a collective failed; None if there is none.

        On this host it is a rank without a process, on others a rank that says so. The search lasts half a second,
        because a connection closes a little before its process ends.
        """
        others = [rank for rank in range(self._size) if rank != self.rank]
        for _ in range(10):
            for rank in others:
                status = self._status(rank)
                here = self._host and status["host"] == self._host and not alive(status["pid"])
                if here or self._get(f"{FINISHED}/{rank}") is not None:
                    return rank
            time.sleep(0.05)
        return None

    def why_gone(self, rank: int, what: str) -> WorldError:
        """The error for a wait for a rank that has ended."""
        if self._get(f"{FINISHED}/{rank}") is not None:
            return WorldError(
                f"rank {rank} has finished while rank {self.rank} still waits for it{_in(what)}; give every rank the"
                " same number of batches, and let each of them call the same methods"
            )
        return self._failed() or RankFailed(rank, "its process ended without a word (killed, or out of memory?)")

    def close(self, report: str = "") -> None:
        """Stop the thread, and say that this rank is done or leave the report of its failure."""
        if self._over.is_set() or os.getpid() != self._pid:  # a child of this process is no rank
            return
        self._over.set()
        try:
            if report:
                self._store.first(FAILURE, report)
            else:
                self._store.set(f"{FINISHED}/{self.rank}", "")
        except RuntimeError:  # the store's host is gone
            pass
        if self._thread is not threading.current_thread():
            self._thread.join(_LEAVE_SECONDS)  # Python's exit would crash the process if it were inside C++ code

    # The thread's side.

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            try:
                self._look()
            except (RuntimeError, KeyError, TypeError):
                # The store's host is gone: a wait at the store finds that by itself, others go on as far as they can.
                if self._get(f"heart/{self.rank}") is None:
                    return

    def _look(self) -> None:
        waits = [(thread, wait) for thread, wait in self._waits.copy().items()]
        now = time.monotonic()
        late_of = {wait.number: tuple(wait.late()) for _, wait in waits if now - wait.since >= _SHORT_SECONDS}
        own = self._waits.get(self._owner)
        self._say(late_of.get(own.number, ()) if own is not None else ())
        for thread, wait in waits:
            if wait.number in late_of and self._waits.get(thread) is wait:
                if wait.error is None:
                    wait.error = self._found(wait, late_of[wait.number], thread == self._owner)
                    wait.error_since = now
                elif thread == self._owner and now - wait.error_since > _LEAVE_SECONDS:
                    self._leave(wait.error)

    def _found(self, wait: Wait, late: tuple[int, ...], by_owner: bool) -> WorldError | None:
        if (failure := self._failed()) is not None:
            return failure
        for rank in late:
            if self._is_gone(rank, by_owner):
                return self.why_gone(rank, wait.what)
        if by_owner and (cycle := self._stands_still(wait, late)):
            return WorldError(f"ranks wait for each other, and none can go on: {cycle}")
        waited = time.monotonic() - wait.since
        if late and waited > timeout():
            return WorldError(
                f"rank {self.rank} waited {waited:.0f} s for {ranks_text(late)}{_in(wait.what)}, of which rank"
                f" {late[0]} lives and {self._doing_of(late[0])}; a larger PLAIT_TIMEOUT, in seconds, lets it be later"
            )
        if late and waited > notice_after() * 2**wait.num_notices and (by_owner or self._owner not in self._waits):
            self._notice(wait, late, waited)
        return None

    def _notice(self, wait: Wait, late: tuple[int, ...], waited: float) -> None:
        """Print which rank is waited for. Of all ranks that wait for it only the first prints."""
        status = self._status(late[0])
        key = f"notice/{late[0]}/{status['since']}/{wait.num_notices}"
        wait.num_notices += 1
        if self._store.first(key, str(self.rank)) != str(self.rank):
            return
        which = "it" if len(late) == 1 else f"rank {late[0]}, the first of them,"
        print(
            f"plait: rank {self.rank} has waited {waited:.0f} s for {ranks_text(late)}{_in(wait.what)}; {which} is"
            f" process {status['pid']} on {status['host'].partition(' ')[0]}, lives, and {self._doing_of(late[0])};"
            f" the wait ends after {timeout():.0f} s (PLAIT_TIMEOUT)",
            file=sys.stderr,
            flush=True,
        )

    def _say(self, late: Sequence[int]) -> None:
        """Put this rank's status in the store, as a sign of life."""
        self._beat += 1
        wait = self._waits.get(self._owner)
        status = {
            "beat": self._beat,
            "host": self._host,
            "pid": self._pid,
            "doing": self._doing,
            "since": round(self._doing_since, 1),
            "steps": self.num_steps,
            "started": dict(self.started),
            "wait": None if wait is None else [wait.number, wait.what, list(late)],
        }
        self._store.set(f"heart/{self.rank}", json.dumps(status))

    def _status(self, rank: int) -> dict[str, Any]:
        found = self._get(f"heart/{rank}")
        if found is None:  # it has not joined yet
            begun = {"beat": 0, "steps": 0, "started": {}, "wait": None}
            return begun | {"host": "", "pid": 0, "doing": "joining the run", "since": 0.0}
        status: dict[str, Any] = json.loads(found)
        return status

    def _doing_of(self, rank: int) -> str:
        status = self._status(rank)
        seconds = max(time.time() - status["since"], 0.0)
        return f"has been at this for {seconds:.0f} s: {status['doing']}"

    def _is_gone(self, rank: int, by_owner: bool) -> bool:
        """Whether a rank was done, or its process gone, at two looks in a row."""
        status = self._status(rank)
        if status["pid"] and status["host"] and status["host"] == self._host:
            gone = not alive(status["pid"])
        else:
            beat, since = self._signs.get(rank, (-1, 0.0))
            if status["beat"] != beat:
                beat, since = self._signs[rank] = (status["beat"], time.monotonic())
            gone = beat > 0 and time.monotonic() - since > _LOST_SECONDS
        gone = gone or (by_owner and self._get(f"{FINISHED}/{rank}") is not None)
        before = rank in self._ended
        (self._ended.add if gone else self._ended.discard)(rank)
        return gone and before

    def _failed(self) -> RankFailed | None:
        report = self._get(FAILURE)
        if not report:
            return None
        found = json.loads(report)
        if found["by"] == self.rank:
            return None
        message: str = found["message"]
        return RankFailed(found["rank"], message.removeprefix(f"rank {found['rank']} failed: "))

    def _stands_still(self, wait: Wait, late: tuple[int, ...]) -> str:
        """The cycle of ranks that wait for each other, as text, if it has been the same since the last look; else "".

        Each rank says at every beat what it waits for. If all ranks of the cycle have done so since the last look and
        nothing has changed, all of them were waiting at the same time.
        """
        texts = {self.rank: (wait.number, wait.what)}
        beats = {self.rank: self._beat}
        came_from: dict[int, int] = {}
        edges = {self.rank: late}
        stack = [self.rank]
        while stack and self.rank not in came_from:
            rank = stack.pop()
            for other in edges[rank]:
                if other in came_from:
                    continue
                came_from[other] = rank
                if other == self.rank:
                    break
                status = self._status(other)
                if status["wait"] is not None:
                    number, what, for_ranks = status["wait"]
                    texts[other], beats[other], edges[other] = (number, what), status["beat"], tuple(for_ranks)
                    stack.append(other)
        if self.rank not in came_from:
            self._suspect = None
            return ""
        circle = [self.rank]
        while (before := came_from[circle[-1]]) != self.rank:
            circle.append(before)
        circle.reverse()  # each rank waits for the next
        found = tuple((rank, texts[rank][0]) for rank in circle)
        if self._suspect is None or self._suspect[0] != found:
            self._suspect = (found, {rank: beats[rank] for rank in circle})
            return ""
        if any(beats[rank] < self._suspect[1][rank] + 2 for rank in circle):
            return ""
        start = circle.index(min(circle))
        circle = circle[start:] + circle[:start]
        pairs = zip(circle, circle[1:] + circle[:1], strict=True)
        lines = [f"rank {r} waits for rank {n}{_in(texts[r][1])}" for r, n in pairs]
        return "; ".join(lines)

    def _get(self, key: str) -> str | None:
        try:
            return self._store.get(key)
        except RuntimeError:  # the store's host is gone
            return None


def ranks_text(ranks: Sequence[int]) -> str:
    """The ranks as text.

    >>> ranks_text([0, 2])
    'ranks 0, 2'
    """
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _in(what: str) -> str:
    return f" in {what}" if what else ""


def timeout() -> float:
    """Seconds by which a living rank may be late, from PLAIT_TIMEOUT. Raises WorldError for a bad value."""
    return _seconds(TIMEOUT, _TIMEOUT_SECONDS)


def notice_after() -> float:
    """Seconds of waiting after which the user is told, from PLAIT_NOTICE; later notices come after twice, four times as
    many, and so on."""
    return _seconds(NOTICE, _NOTICE_SECONDS)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name)
    if not text:
        return default
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise WorldError(f"{name}={text!r}; it should be a number of seconds above 0, such as {name}={default:.0f}")
    return found
