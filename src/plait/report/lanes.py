"""Swimlanes of many spans, as data for a page's script (lanes.js): arrays as base64, each name once."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

from plait.report.swimlane import COLOURS, LANES, empty_swimlanes
from plait.spec.trace import COMPUTE_KINDS, KINDS, Trace

SCRIPT = Path(__file__).with_name("lanes.js")


def pack_swimlanes(measured: Trace | None, predicted: Trace | None, bubble: bool = True) -> dict[str, Any]:
    """What lanes.js draws: the picture of `report.swimlane.draw_swimlanes`, for any number of spans."""
    shown = [(name, trace) for name, trace in (("predicted", predicted), ("measured", measured)) if trace]
    names: dict[str, int] = {}
    order = sorted(KINDS, key=lambda kind: (kind != "wait", KINDS.index(kind)))  # first what is drawn behind the rest
    order = [kind for kind in order if any(span.kind == kind for _, trace in shown for span in trace.spans)]
    code = {kind: number for number, kind in enumerate(order)}
    rows = []
    for title, trace in shown:
        begin = min((span.start for span in trace.spans), default=0.0)
        spans = trace.spans
        rows.append({
            "ranks": trace.num_ranks, "seconds": trace.seconds, "title": title,
            "start": _packed([span.start - begin for span in spans], np.float32),
            "end": _packed([span.end - begin for span in spans], np.float32),
            "rank": _packed([span.rank for span in spans], np.uint16),
            "kind": _packed([code[span.kind] for span in spans], np.uint8),
            "name": _packed([names.setdefault(span.name, len(names)) for span in spans], np.uint32),
        })  # fmt: skip
    kinds = []
    for kind in order:
        offset, height = LANES.get(kind, (0.0, 0.8))
        kinds.append({
            "name": kind, "colour": COLOURS[kind], "offset": offset, "height": height,
            "computes": kind in COMPUTE_KINDS, "beside": kind == "send",
        })  # fmt: skip
    layout = json.loads(empty_swimlanes(shown, bubble)[0].to_json())["layout"]
    return {"rows": rows, "names": list(names), "kinds": kinds, "layout": layout}


def _packed(values: list[Any], dtype: type) -> str:
    return base64.b64encode(np.array(values, dtype).tobytes()).decode()
