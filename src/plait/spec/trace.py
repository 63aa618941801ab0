"""Trace: what each rank did and when. A run measures traces, and the simulator predicts them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

# The kinds of spans. The first three are compute; `wait` is for data of another rank, `data` for the next batch.
COMPUTE_KINDS = ("forward", "backward", "weight")
NEXT_BATCH = "data"
KINDS = (*COMPUTE_KINDS, "send", "wait", "gather", "reduce", "optimizer", NEXT_BATCH)


@dataclass(frozen=True)
class Span:
    """An interval of time in which a rank did one thing.

    Attributes:
        rank: the rank.
        kind: one of KINDS.
        name: text for a reader, such as the action.
        start: seconds since the trace began.
        end: seconds since the trace began.
        num_bytes: bytes that went over a link.
        micro: the microbatch, if the span belongs to one.
        chunk: the chunk, if the span belongs to one.
    """

    rank: int
    kind: str
    name: str
    start: float
    end: float
    num_bytes: int = 0
    micro: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind of span {self.kind!r}; it is one of {', '.join(KINDS)}")
        if self.end < self.start:
            raise ValueError(f"the span {self.name} of rank {self.rank} ends at {self.end}, before {self.start}")

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Sample:
    """A value that holds on a rank from `time` (in seconds) until its next sample."""

    rank: int
    time: float
    value: int


@dataclass(frozen=True)
class ExpertLoad:
    """The rows that the experts of a mixture get in one step, of all ranks and microbatches.

    Attributes:
        rows: for each expert, the rows that its router gives it.
        dropped: those of them that found no room.
    """

    rows: tuple[int, ...]
    dropped: int = 0

    @property
    def relative(self) -> tuple[float, ...]:
        """The rows of each expert over those of the mean expert."""
        mean = sum(self.rows) / len(self.rows)
        return tuple(each / mean if mean else 0.0 for each in self.rows)

    def __add__(self, other: ExpertLoad) -> ExpertLoad:
        return ExpertLoad(
            tuple(a + b for a, b in zip(self.rows, other.rows, strict=True)), self.dropped + other.dropped
        )


@dataclass(frozen=True)
class Trace:
    """The spans of all ranks, with samples of the bytes that each holds and of its microbatches in flight, if known.

    A microbatch is in flight on a rank from the start of its forward there to the end of its backward, weight part
    included. A rank with several chunks counts it once per chunk.
    """

    spans: tuple[Span, ...]
    num_ranks: int
    memory: tuple[Sample, ...] = ()
    in_flight: tuple[Sample, ...] = ()

    def __post_init__(self) -> None:
        ranks = {s.rank for s in self.spans} | {s.rank for s in (*self.memory, *self.in_flight)}
        if strange := sorted(rank for rank in ranks if not 0 <= rank < self.num_ranks):
            raise ValueError(f"rank {strange[0]} in a trace of {self.num_ranks} ranks")

    @cached_property
    def _by_rank(self) -> dict[int, list[Span]]:
        found = defaultdict(list)
        for span in self.spans:
            found[span.rank].append(span)
        return found

    def of_rank(self, rank: int) -> list[Span]:
        """The spans of one rank, in the order given."""
        return self._by_rank.get(rank, [])

    @cached_property
    def seconds(self) -> float:
        """Seconds from the first start to the last end over all ranks."""
        return max((s.end for s in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    @cached_property
    def _busy(self) -> tuple[float, ...]:
        spans = (self.of_rank(rank) for rank in range(self.num_ranks))
        return tuple(sum(s.seconds for s in each if s.kind in COMPUTE_KINDS) for each in spans)

    @cached_property
    def cost(self) -> float:
        """Seconds that a step takes if steps follow each other: the longest time from the first to the last compute
        span of a rank."""
        costs = [0.0]
        for rank in range(self.num_ranks):
            if compute := [s for s in self.of_rank(rank) if s.kind in COMPUTE_KINDS]:
                costs.append(max(s.end for s in compute) - min(s.start for s in compute))
        return max(costs)

    def busy(self, rank: int) -> float:
        """Seconds in which a rank computes."""
        return self._busy[rank]

    def utilisation(self, rank: int | None = None) -> float:
        """The fraction of `seconds` in which a rank, or the mean rank, computes."""
        return self._mean(rank) / self.seconds if self.seconds else 0.0

    def bubble(self, rank: int | None = None) -> float:
        """The fraction of `cost` in which a rank, or the mean rank, does not compute (Qi et al. 2024, section 5.3)."""
        return 1 - self._mean(rank) / self.cost if self.cost else 0.0

    def _mean(self, rank: int | None) -> float:
        return sum(self._busy) / self.num_ranks if rank is None else self._busy[rank]

    def peak_bytes(self, rank: int) -> int:
        """The most bytes that a rank holds, by the samples in `memory`."""
        return max((s.value for s in self.memory if s.rank == rank), default=0)

    def peak_in_flight(self, rank: int) -> int:
        """The most microbatches that a rank has in flight."""
        return max((s.value for s in self.in_flight if s.rank == rank), default=0)

    def shifted(self, seconds: float) -> Trace:
        """This trace, `seconds` later."""
        return replace(
            self,
            spans=tuple(replace(s, start=s.start + seconds, end=s.end + seconds) for s in self.spans),
            memory=tuple(replace(s, time=s.time + seconds) for s in self.memory),
            in_flight=tuple(replace(s, time=s.time + seconds) for s in self.in_flight),
        )

    def between(self, start: float, end: float) -> Trace:
        """The spans and samples that start at or after `start` and before `end`, such as those of one step."""
        return replace(
            self,
            spans=tuple(s for s in self.spans if start <= s.start < end),
            memory=tuple(s for s in self.memory if start <= s.time < end),
            in_flight=tuple(s for s in self.in_flight if start <= s.time < end),
        )

    def to_json(self) -> str:
        """The trace as one line of JSON, with a list per span and sample; `from_json` reads it."""
        rows: dict[str, object] = {"num_ranks": self.num_ranks}
        rows["spans"] = [[s.rank, s.kind, s.name, s.start, s.end, s.num_bytes, s.micro, s.chunk] for s in self.spans]
        rows["memory"] = [[s.rank, s.time, s.value] for s in self.memory]
        rows["in_flight"] = [[s.rank, s.time, s.value] for s in self.in_flight]
        return json.dumps(rows, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        try:
            rows = json.loads(text)
            spans = tuple(Span(*row) for row in rows["spans"])
            samples = [tuple(Sample(*row) for row in rows[key]) for key in ("memory", "in_flight")]
            return cls(spans, rows["num_ranks"], *samples)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"this is no trace: {type(error).__name__}: {error}") from None


def flattened(trace: Trace) -> Trace:
    """The trace with nested spans, such as a collective inside a backward, turned into spans that follow one another.

    Each moment then belongs to the innermost span only.
    """
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in trace.spans:
        by_rank[span.rank].append(span)
    spans = tuple(piece for rank in sorted(by_rank) for piece in _pieces(by_rank[rank]))
    return replace(trace, spans=spans)


def _pieces(spans: Sequence[Span]) -> list[Span]:
    found: list[Span] = []
    open_: list[Span] = []  # from the outermost to the innermost
    now = 0.0

    def until(end: float) -> None:
        nonlocal now
        while open_ and open_[-1].end <= end:
            inner = open_.pop()
            if inner.end > now:
                found.append(replace(inner, start=now, end=inner.end))
                now = inner.end
        if open_ and end > now:
            found.append(replace(open_[-1], start=now, end=end))
        now = max(now, end)

    for span in sorted(spans, key=lambda each: (each.start, -each.end)):
        until(span.start)
        while open_ and span.end > open_[-1].end:  # spans nest, but clocks of devices have a limited precision
            open_.pop()
        if span.end > span.start:
            open_.append(span)
        else:
            found.append(span)
    until(max((span.end for span in spans), default=0.0))
    return found
