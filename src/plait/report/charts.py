"""Figures of a report: utilisation, memory, bytes per link, loss and tokens/s (swimlanes are in swimlane.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from plait.cost.memory_model import human_bytes
from plait.report.swimlane import plotly
from plait.spec.trace import ExpertLoad, Sample, Trace

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_FEW = 8  # up to this many ranks have a line each; more ranks are rows of a heat map
_NUM_BINS = 240
_MEASURED, _PREDICTED = "#0072B2", "#E69F00"
# Colours of lines in one figure (the palette of Okabe and Ito, as in the swimlanes).
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#B0A000")


def draw_utilisation(measured: Trace | None, predicted: Trace | None, bubble: bool = True) -> Figure:
    """Bars of each rank's utilisation, and with `bubble` of its bubble too, for plans with a pipeline."""
    go, make_subplots = plotly()
    titles = ("utilisation: computing, of the whole step", "bubble: idle between first and last computation")
    num = 2 if bubble else 1
    figure = make_subplots(rows=1, cols=num, subplot_titles=titles[:num], horizontal_spacing=0.08)
    for name, trace, colour in (("measured", measured, _MEASURED), ("predicted", predicted, _PREDICTED)):
        if trace is None:
            continue
        ranks = list(range(trace.num_ranks))
        both = ([trace.utilisation(r) for r in ranks], [trace.bubble(r) for r in ranks])
        for column, values in enumerate(both[:num], 1):
            figure.add_trace(
                go.Bar(
                    x=ranks, y=values, name=name, legendgroup=name, marker_color=colour, showlegend=column == 1,
                    hovertemplate=f"rank %{{x}}: {name} %{{y:.1%}}<extra></extra>",
                ),
                row=1, col=column,
            )  # fmt: skip
    figure.update_yaxes(tickformat=".0%", range=[0, 1], gridcolor="#EEEEEE")
    figure.update_xaxes(title_text="rank", tickformat="d", **_rank_ticks(measured or predicted))
    _titles_to_the_left(figure)
    return _tidy(figure, 300)


def draw_samples(samples: Sequence[Sample], num_ranks: int, end: float, title: str, as_bytes: bool) -> Figure:
    """A value of each rank over the time of a step. A value holds until the rank's next sample; `end` is in seconds."""
    go, _ = plotly()
    figure = go.Figure()
    by_rank: list[list[tuple[float, float]]] = [[] for _ in range(num_ranks)]
    for sample in samples:
        by_rank[sample.rank].append((sample.time, sample.value / (2**20 if as_bytes else 1)))
    if num_ranks <= _FEW:
        for rank, own in enumerate(by_rank):
            figure.add_trace(
                go.Scatter(
                    x=[*(time for time, _ in own), end], y=[*(value for _, value in own), own[-1][1] if own else None],
                    mode="lines", line={"shape": "hv", "color": LINES[rank]}, name=f"rank {rank}",
                )
            )  # fmt: skip
        figure.update_yaxes(rangemode="tozero", gridcolor="#EEEEEE", title_text="MiB" if as_bytes else None)
        if not as_bytes:
            figure.update_yaxes(dtick=max(max((s.value for s in samples), default=0) // 8, 1))
        height = 300
    else:
        values = np.array([_binned(own, end) for own in by_rank])
        figure.add_trace(
            go.Heatmap(
                x=(np.arange(_NUM_BINS) + 0.5) * end / _NUM_BINS, y=np.arange(num_ranks), z=values,
                colorscale="Viridis", colorbar={"title": "MiB" if as_bytes else "", "thickness": 12},
                hovertemplate="rank %{y}, %{x:.4g} s: %{z:,.4g}<extra></extra>",
            )
        )  # fmt: skip
        figure.update_yaxes(title_text="rank", autorange="reversed")
        height = 160 + 5 * num_ranks
    figure.update_xaxes(title_text="seconds", range=[0, end], gridcolor="#EEEEEE")
    figure.update_layout(title={"text": title, "font": {"size": 15}})
    return _tidy(figure, height)


def draw_links(sent: Mapping[tuple[int, int], int], num_ranks: int) -> Figure:
    """A matrix of the bytes that each rank sent to each other rank in a step."""
    go, _ = plotly()
    values = np.full((num_ranks, num_ranks), np.nan)
    for (source, target), count in sent.items():
        values[source, target] = count
    written = [["" if np.isnan(v) else human_bytes(int(v)) for v in row] for row in values]
    figure = go.Figure(
        go.Heatmap(
            z=values, x=np.arange(num_ranks), y=np.arange(num_ranks), colorscale="Blues", zmin=0, xgap=1, ygap=1,
            text=written, texttemplate="%{text}" if num_ranks <= _FEW else None, showscale=False,
            hovertemplate="rank %{y} to rank %{x}: %{text}<extra></extra>", hoverongaps=False,
        )
    )  # fmt: skip
    total = sum(sent.values())
    figure.update_layout(title={"text": f"bytes from rank to rank: {human_bytes(total)} in all", "font": {"size": 15}})
    figure.update_xaxes(title_text="to rank", tickformat="d", constrain="domain", showgrid=False)
    figure.update_yaxes(
        title_text="from rank", tickformat="d", autorange="reversed", scaleanchor="x", constrain="domain",
        showgrid=False,
    )  # fmt: skip
    if num_ranks <= _FEW:
        figure.update_xaxes(dtick=1)
        figure.update_yaxes(dtick=1)
    return _tidy(figure, 420)


def draw_experts(loads: Mapping[str, ExpertLoad]) -> Figure:
    """A row for each mixture, a column for each expert: its rows over those of the mean expert of the mixture."""
    go, _ = plotly()
    names, most = list(loads), max(len(load.rows) for load in loads.values())
    values = np.full((len(names), most), np.nan)
    for row, load in enumerate(loads.values()):
        values[row, : len(load.rows)] = load.relative
    counts = [[f"{n:,}" for n in load.rows] + [""] * (most - len(load.rows)) for load in loads.values()]
    figure = go.Figure(
        go.Heatmap(
            z=values, x=np.arange(most), y=names, colorscale="RdBu", reversescale=True, zmin=0, zmid=1, zmax=2,
            xgap=1, ygap=1, text=counts, colorbar={"title": "of the mean", "thickness": 12},
            hovertemplate="expert %{x} of %{y}: %{text} rows, %{z:.2f} of the mean<extra></extra>", hoverongaps=False,
        )
    )  # fmt: skip
    figure.update_layout(
        title={"text": "rows of each expert, relative to the mean of its mixture", "font": {"size": 15}}
    )
    figure.update_xaxes(title_text="expert", tickformat="d", showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False, automargin=True)
    return _tidy(figure, 160 + 22 * len(names))


def draw_metrics(lines: Sequence[Mapping[str, object]]) -> Figure:
    """Loss and tokens/s over the steps of a run. `lines` are those of its metrics file."""
    go, make_subplots = plotly()
    figure = make_subplots(rows=1, cols=2, subplot_titles=("loss", "tokens/s"), horizontal_spacing=0.08)
    steps = [line["step"] for line in lines]
    figure.add_trace(go.Scatter(x=steps, y=[line.get("loss") for line in lines], name="loss", mode="lines"), 1, 1)
    if held := [line for line in lines if "held_out_loss" in line]:
        y = [line["held_out_loss"] for line in held]
        figure.add_trace(
            go.Scatter(x=[line["step"] for line in held], y=y, name="held out", mode="lines+markers"), 1, 1
        )
    speed = [line.get("tokens_per_s") for line in lines]
    figure.add_trace(go.Scatter(x=steps, y=speed, name="tokens/s", mode="lines", showlegend=False), 1, 2)
    figure.update_layout(colorway=list(LINES))
    figure.update_yaxes(gridcolor="#EEEEEE")
    figure.update_yaxes(rangemode="tozero", row=1, col=2)
    figure.update_xaxes(title_text="step", gridcolor="#EEEEEE")
    _titles_to_the_left(figure)
    return _tidy(figure, 320)


def _binned(samples: Sequence[tuple[float, float]], end: float) -> list[float]:
    """The largest value in each of _NUM_BINS equal parts of the time."""
    found, value, at = [], 0.0, 0
    for index in range(_NUM_BINS):
        most = value
        while at < len(samples) and samples[at][0] <= (index + 1) * end / _NUM_BINS:
            value = samples[at][1]
            most = max(most, value)
            at += 1
        found.append(most)
    return found


def _titles_to_the_left(figure: Figure) -> None:
    """Align the titles of two figures side by side to the left, so that the legend has room on the right."""
    for title, start in zip(figure.layout.annotations, (0.0, 0.54), strict=False):
        title.update(x=start, xanchor="left")


def _rank_ticks(trace: Trace | None) -> dict[str, int]:
    return {"dtick": 1} if trace is not None and trace.num_ranks <= 2 * _FEW else {}


def _tidy(figure: Figure, height: int) -> Figure:
    return figure.update_layout(
        height=height, plot_bgcolor="white", margin={"l": 70, "r": 20, "t": 50, "b": 50}, bargap=0.25,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1.0, "xanchor": "right"},
    )  # fmt: skip
