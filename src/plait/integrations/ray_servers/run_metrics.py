"""The files of a run with servers: a line of metrics for every step, an event for everything unusual, and the journal
with which a coordinator restarts."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plait.integrations.ray_servers.messages import Note
from plait.schedule.consistency import Commit
from plait.spec.text_files import open_in_run

EVENTS = "events.jsonl"


class RunMetrics:
    """Counts since the last line, and totals since this process began. Metrics go to `log`, events to
    `out`/events.jsonl."""

    def __init__(self, out: str, log: Any) -> None:
        self._log = log
        self._events = open_in_run(Path(out) / EVENTS, "a")  # closed by `close`
        self.messages: list[str] = []  # to be shown to the user; emptied when read
        self.tokens = 0
        self.loss = float("nan")
        self.totals: Counter[str] = Counter()
        self._begin()
        self._since = time.monotonic()

    def commit(self, commit: Commit, notes: list[Note]) -> None:
        """Count an update that was ordered."""
        self._updates += 1
        for stale in commit.staleness:
            self._stale[stale] += 1
        for note in notes:
            self.took(note)
            self._losses.append((note.loss, note.weight))

    def took(self, note: Note) -> None:
        """Count a push, whether it is used or not."""
        self._pushes += 1
        self._waited += note.waited
        self._data += note.data
        self._moved += note.moved
        self._tokens += note.tokens
        self.tokens += note.tokens

    def count(self, what: str, number: int = 1) -> None:
        """Count `updates_lost`, `late` or `refused`."""
        self._counts[what] += number
        self.totals[what] += number

    def event(self, kind: str, message: str, show: bool = True, **values: Any) -> None:
        """Write an event to events.jsonl and, with `show`, to the messages."""
        if not self._events.closed:
            self._events.write(
                json.dumps({"time": round(time.time(), 3), "event": kind, "message": message} | values) + "\n"
            )
        if show:
            self.messages.append(message)

    def line(self, step: int, rate: float, num_workers: int) -> None:
        """Write the metrics of a step that is done. `loss` is the mean over the step's gradients, by weight."""
        seconds = time.monotonic() - self._since
        self._since += seconds
        total = sum(weight for _, weight in self._losses)
        if total:
            self.loss = sum(loss * weight for loss, weight in self._losses) / total
        pushes = max(self._pushes, 1)
        stale = sum(age * number for age, number in self._stale.items())
        self._log.write({
            "step": step,
            "loss": self.loss,
            "lr": rate,
            "tokens_per_s": self._tokens / seconds,
            "seconds": seconds,
            "data_seconds": self._data / pushes,
            "waited_seconds": self._waited / pushes,
            "bytes_moved": self._moved,
            "updates": self._updates,
            "workers": num_workers,
            "staleness_mean": stale / max(sum(self._stale.values()), 1),
            "staleness": {str(age): self._stale[age] for age in sorted(self._stale)},
            **{what: self._counts[what] for what in ("updates_lost", "late", "refused")},
        })  # fmt: skip
        self._begin()

    def evaluated(self, step: int, loss: float) -> None:
        """Write the held-out loss of a step."""
        if not self._events.closed:
            self._log.write({"step": step, "held_out_loss": loss})
        self.messages.append(f"step {step}  held-out loss {loss:.3f}")

    def close(self) -> None:
        """Close both files."""
        self._log.close()
        self._events.close()

    def _begin(self) -> None:
        self._stale: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()
        self._losses: list[tuple[float, float]] = []
        self._updates = self._pushes = self._tokens = self._moved = 0
        self._waited = self._data = 0.0


class Journal:
    """A file with the coordinator's state that servers do not have. Writes replace the file atomically."""

    def __init__(self, path: Path, job: str) -> None:
        self._path, self._job, self._written = path, job, ""

    def write(self, members: Sequence[int], unused: Sequence[int]) -> None:
        """Write the numbers of the member workers and, for each server, the lost updates and refused gradients
        reported so far."""
        if (text := json.dumps({"job": self._job, "members": members, "unused": unused})) != self._written:
            new = self._path.with_suffix(".new")
            with open_in_run(new) as file:
                file.write(text)
            new.replace(self._path)
            self._written = text

    def read(self) -> tuple[list[int], list[int]] | None:
        """The (members, unused) last written; None if the file has nothing of this run."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return (found["members"], found["unused"]) if found["job"] == self._job else None
