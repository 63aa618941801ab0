"""Turn a rank's nested spans, such as a collective inside a backward, into spans that follow one another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from plait.spec.trace import Span, Trace


def flattened(trace: Trace) -> Trace:
    """The same trace with no two spans of a rank at one time: each moment belongs to the innermost span only."""
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
