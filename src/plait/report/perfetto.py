"""Traces as JSON for ui.perfetto.dev and chrome://tracing: a process per rank, with nested spans."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from plait.spec.trace import Trace

_MEASURED, _PREDICTED, _SENDS = 0, 1, 2  # threads of a rank's process
_THREADS = {_MEASURED: "measured", _PREDICTED: "predicted", _SENDS: "predicted transfers"}


def chrome_trace(measured: Iterable[tuple[int, float, Trace]], predicted: Trace | None = None) -> str:
    """The JSON of measured steps, given as (number, begin in seconds, trace), each beside the predicted step."""
    steps = list(measured) or [(0, 0.0, Trace((), 0))]
    origin = min(begin for _, begin, _ in steps)
    events: list[dict[str, Any]] = []
    for step, begin, trace in steps:
        at = begin - origin
        events += _spans(trace, step, at, _MEASURED)
        if predicted is not None:
            events += _spans(predicted, step, at, _PREDICTED)
        for name, samples in (("memory", trace.memory), ("microbatches in flight", trace.in_flight)):
            events += [
                {"ph": "C", "pid": s.rank, "name": name, "ts": _micro(at + s.time), "args": {name: s.value}}
                for s in samples
            ]
    threads = sorted({(event["pid"], event["tid"]) for event in events if "tid" in event})
    for rank in sorted({rank for rank, _ in threads}):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}})
    for rank, thread in threads:
        events.append(
            {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": _THREADS[thread]}}
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _spans(trace: Trace, step: int, at: float, thread: int) -> list[dict[str, object]]:
    events = []
    for span in trace.spans:
        arguments = {"step": step}
        if span.num_bytes:
            arguments["bytes"] = span.num_bytes
        # Simulated transfers overlap with what a rank does, so their spans do not nest in others.
        tid = _SENDS if thread == _PREDICTED and span.kind == "send" else thread
        events.append({
            "ph": "X", "pid": span.rank, "tid": tid, "name": span.name, "cat": span.kind,
            "ts": _micro(at + span.start), "dur": _micro(span.seconds), "args": arguments,
        })  # fmt: skip
    return events


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
