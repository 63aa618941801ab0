"""Swimlanes: a lane per rank, time from left to right, the predicted step above the measured one."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from plait.errors import PlanError
from plait.spec.trace import COMPUTE_KINDS, KINDS, Span, Trace

if TYPE_CHECKING:
    from plotly.basedatatypes import BaseTraceType
    from plotly.graph_objects import Figure

# Colours that are distinct for the colour-blind too (Wong 2011, "Points of view: Color blindness").
COLOURS = {
    "forward": "#0072B2", "backward": "#D55E00", "weight": "#E69F00", "send": "#56B4E9", "wait": "#DDDDDD",
    "gather": "#CC79A7", "reduce": "#009E73", "optimizer": "#444444", "data": "#F0E442",
}  # fmt: skip
MANY = 3000  # a kind of more spans is one line of many pieces, drawn by WebGL, without text on its spans
LANES = {"wait": (0.0, 0.62), "send": (0.3, 0.12)}  # (offset, height) of kinds drawn behind or beside compute


def draw_swimlanes(
    measured: Trace | None = None, predicted: Trace | None = None, *, bubble: bool = True, unit: str = "seconds"
) -> Figure:
    """A plotly figure of one trace or both. Dragging zooms into a time, a double click shows all of it.

    Each trace is shown from its first span on. `bubble` says whether to print the bubble, which pipelines have; `unit`
    is the unit of time. Raises PlanError if plotly is not installed.
    """
    go, _ = plotly()
    shown = [(name, trace) for name, trace in (("predicted", predicted), ("measured", measured)) if trace]
    figure, lane = empty_swimlanes(shown, bubble, unit)
    for row, (_, trace) in enumerate(shown, start=1):
        begin = min((span.start for span in trace.spans), default=0.0)
        draw = _bars if len(trace.spans) <= MANY else _lines
        # Kinds that are drawn behind others come first.
        for kind in sorted({span.kind for span in trace.spans}, key=lambda kind: (kind != "wait", KINDS.index(kind))):
            spans = [span for span in trace.spans if span.kind == kind]
            figure.add_trace(draw(go, kind, spans, begin, lane), row=row, col=1)
    _name_once(figure)
    return figure


def empty_swimlanes(
    shown: Sequence[tuple[str, Trace]], bubble: bool = True, unit: str = "seconds"
) -> tuple[Figure, int]:
    """The figure of traces without their spans, and the height of a lane in pixels. `shown` has each trace with its
    name."""
    _, make_subplots = plotly()
    assert shown, "a figure needs a trace"
    titles = [
        f"{name}: {trace.seconds:.4g} {'s' if unit == 'seconds' else 'units'}, utilisation {trace.utilisation():.1%}"
        + (f", bubble {trace.bubble():.1%}" if bubble else "")
        for name, trace in shown
    ]
    lane = max(min(40, 900 // max(trace.num_ranks for _, trace in shown)), 12)  # pixels
    height = 130 + sum(lane * trace.num_ranks + 70 for _, trace in shown)
    figure = make_subplots(
        rows=len(shown), cols=1, shared_xaxes=True, subplot_titles=titles,
        row_heights=[trace.num_ranks for _, trace in shown], vertical_spacing=70 / height if len(shown) > 1 else 0,
    )  # fmt: skip
    for row, (_, trace) in enumerate(shown, start=1):
        named = range(0, trace.num_ranks, 1 if trace.num_ranks <= 32 else 4)  # with fewer names a page opens sooner
        names = [f"rank {rank}  {trace.utilisation(rank):.0%}" for rank in named]
        figure.update_yaxes(
            tickvals=list(named), ticktext=names, range=[trace.num_ranks - 0.5, -0.5], fixedrange=True,
            showgrid=False, zeroline=False, row=row, col=1,
        )  # fmt: skip
    figure.update_annotations(x=0, xanchor="left")  # the titles; the legend is on the right
    figure.update_xaxes(title_text=unit, row=len(shown), col=1)
    figure.update_xaxes(showgrid=True, gridcolor="#EEEEEE", zeroline=False)
    figure.update_layout(
        height=height, uniformtext={"mode": "hide", "minsize": 8}, barmode="overlay", bargap=0.0,
        plot_bgcolor="white", dragmode="zoom", hovermode="closest", margin={"l": 110, "r": 20, "t": 60, "b": 50},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 1.0, "xanchor": "right"},
    )  # fmt: skip
    return figure, lane


def page(figures: Figure | Sequence[Figure], title: str) -> str:
    """A self-contained HTML page of one figure or several."""
    import html

    several = figures if isinstance(figures, list | tuple) else [figures]
    parts = [
        each.to_html(full_html=False, include_plotlyjs=i == 0, config={"displaylogo": False, "responsive": True})
        for i, each in enumerate(several)
    ]
    name = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title></head>'
        f'<body style="font-family: sans-serif"><h1 style="font-size: 1.2em">{name}</h1>{"".join(parts)}'
        "</body></html>\n"
    )


def write_page(path: Path, text: str) -> None:
    """Write a page, or another text file. Raises PlanError if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write {str(path)!r}: {error.strerror}") from None


def plotly() -> tuple[ModuleType, Callable[..., Figure]]:
    """plotly's graph objects and its make_subplots. Raises PlanError if plotly is not installed."""
    try:
        import plotly.graph_objects as graph_objects
        from plotly.subplots import make_subplots
    except ImportError:
        raise PlanError("pages are drawn with plotly, which is not installed: pip install 'plait[report]'") from None
    return graph_objects, make_subplots


def _bars(go: ModuleType, kind: str, spans: list[Span], begin: float, lane: int) -> BaseTraceType:
    """Each span a rectangle with its name in it."""
    offset, height = LANES.get(kind, (0.0, 0.8))
    return go.Bar(
        orientation="h", name=kind, legendgroup=kind,
        base=[span.start - begin for span in spans], x=[span.seconds for span in spans],
        y=[span.rank + offset for span in spans], width=height,
        marker={"color": COLOURS[kind], "line": {"width": 0.5 if kind in COMPUTE_KINDS else 0, "color": "white"}},
        text=[span.name if kind in COMPUTE_KINDS else "" for span in spans], textposition="inside",
        insidetextanchor="middle", textangle=0, constraintext="inside", textfont={"color": "white", "size": 10},
        hovertext=[_tell(span) for span in spans], hoverinfo="text",
    )  # fmt: skip


def _lines(go: ModuleType, kind: str, spans: list[Span], begin: float, lane: int) -> BaseTraceType:
    """All spans as one broken line, as thick as a lane: many thousands of them are drawn at once."""
    offset, height = LANES.get(kind, (0.0, 0.8))
    # Each span is its start, its end and a gap; arrays travel as bytes, so that a page of many stays small.
    x = np.full((len(spans), 3), np.nan)
    x[:, 0] = [span.start - begin for span in spans]
    x[:, 1] = [span.end - begin for span in spans]
    y = np.repeat(np.array([span.rank + offset for span in spans], np.float32), 3)
    return go.Scattergl(
        mode="lines", name=kind, legendgroup=kind, connectgaps=False, x=x.reshape(-1), y=y,
        text=[text for span in spans for text in (span.name, span.name, None)] if kind in COMPUTE_KINDS else None,
        line={"color": COLOURS[kind], "width": max(height * lane, 1)},
        hovertemplate="%{text} at %{x:.6g} s" if kind in COMPUTE_KINDS else f"{kind} at %{{x:.6g}} s",
    )  # fmt: skip


def _tell(span: Span) -> str:
    sent = f", {span.num_bytes:,} bytes" if span.num_bytes else ""
    return f"rank {span.rank}: {span.name} ({span.kind})<br>{span.start:.6g} to {span.end:.6g} s{sent}"


def _name_once(figure: Figure) -> None:
    """Show each kind in the legend only once."""
    seen: set[str] = set()
    for trace in figure.data:
        trace.showlegend = trace.name not in seen
        seen.add(trace.name)


SCRIPT = Path(__file__).with_name("swimlane.js")


def pack_swimlanes(measured: Trace | None, predicted: Trace | None, bubble: bool = True) -> dict[str, object]:
    """The data from which swimlane.js draws what `draw_swimlanes` draws, for any number of spans.

    Arrays are base64, and each name is there once.
    """
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


def _packed(values: Sequence[float], dtype: type) -> str:
    return base64.b64encode(np.array(values, dtype).tobytes()).decode()
