"""The comparison of runs: a table of what they reach and spend, and an HTML page of their curves."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from plait.cost.efficiency import Comparison, Curve
from plait.cost.memory_model import human_bytes
from plait.report.charts import LINES
from plait.report.swimlane import page, plotly

_HEAD = ("run", "plan", "statistical efficiency", "tokens/s", "goodput", "waiting", "seconds", "sent")


def comparison_table(found: Sequence[Comparison], plans: Sequence[str], target: float, which: str) -> str:
    """The comparison as a table of text.

    Args:
        found: the comparison of each run with the first.
        plans: the plan of each run.
        target: the loss up to which seconds and bytes are counted.
        which: the name of that loss, such as "held-out loss".
    """
    rows = [_HEAD, *_cells(found, plans)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append(
        f"to a {which} of {target:.4g}, the lowest that every run has reached; sent: by rank 0,"
        " or what all workers of parameter servers pulled and pushed"
    )
    return "\n".join(lines)


def comparison_page(
    curves: Sequence[Curve],
    found: Sequence[Comparison],
    plans: Sequence[str],
    target: float,
    which: str,
    staleness: Sequence[Mapping[int, int]],
) -> str:
    """The comparison as an HTML page: loss against tokens, seconds and bytes, the table, and the age of updates.

    `staleness` has for each run the number of updates by their age in versions. Other arguments are those of
    `comparison_table`.
    """
    go, make_subplots = plotly()
    names = names_in_figures(curves, plans)
    figure = make_subplots(rows=1, cols=3, shared_yaxes=True, horizontal_spacing=0.03)
    for number, (curve, name) in enumerate(zip(curves, names, strict=True)):
        colour = LINES[number % len(LINES)]
        for column, spent in enumerate((curve.tokens, curve.seconds, curve.num_bytes), start=1):
            figure.add_trace(
                go.Scatter(
                    x=spent, y=curve.loss, mode="lines", line={"color": colour}, name=name,
                    legendgroup=str(number), showlegend=column == 1,
                ),
                row=1, col=column,
            )  # fmt: skip
    for column, title in enumerate(("tokens", "seconds", "bytes sent"), start=1):
        figure.update_xaxes(title_text=title, gridcolor="#EEEEEE", row=1, col=column)
    figure.update_xaxes(type="log", exponentformat="SI", dtick=1, row=1, col=3)  # bytes differ by factors of 100
    figure.add_hline(y=target, line={"dash": "dot", "color": "#888888"})
    figure.update_yaxes(gridcolor="#EEEEEE")
    figure.update_yaxes(title_text=which, row=1, col=1)
    figure.update_layout(
        height=460, plot_bgcolor="white", margin={"t": 20}, legend={"orientation": "h", "y": -0.2, "yanchor": "top"}
    )
    cells = [[html.escape(cell) for cell in row] for row in _cells(found, plans)]
    table = go.Figure(
        go.Table(
            header={"values": list(_HEAD), "align": "left"},
            cells={"values": list(zip(*cells, strict=True)), "align": "left"},
            columnwidth=[3, 5, *[2] * (len(_HEAD) - 2)],
        )
    )
    table.update_layout(height=120 + 60 * len(cells), margin={"t": 20, "b": 10})
    figures = [figure, table]
    if any(staleness):
        ages = go.Figure()
        for number, (name, counts) in enumerate(zip(names, staleness, strict=True)):
            if counts:
                ages.add_trace(
                    go.Bar(
                        x=sorted(counts), y=[counts[age] for age in sorted(counts)], name=name,
                        marker={"color": LINES[number % len(LINES)]},
                    )
                )  # fmt: skip
        ages.update_layout(height=320, plot_bgcolor="white", title="updates, by how many versions old they were")
        figures.append(ages)
    others = curves[1].name if len(curves) == 2 else f"{len(curves) - 1} others"
    return page(figures, f"plait: {curves[0].name} against {others}")


def names_in_figures(curves: Sequence[Curve], plans: Sequence[str]) -> list[str]:
    """The name of each run in the figures: its plan, with its folder if another run has the same plan."""
    return [
        f"{plan or 'one device'} ({curve.name})" if list(plans).count(plan) > 1 else plan or curve.name
        for curve, plan in zip(curves, plans, strict=True)
    ]


def _cells(found: Sequence[Comparison], plans: Sequence[str]) -> list[tuple[str, ...]]:
    base = found[0].goodput
    return [
        (
            each.name, plan or "one device", f"{each.efficiency:.2f}", f"{each.throughput:,.0f}",
            f"{each.goodput / base:.2f}", f"{each.waited:.1%}", f"{each.seconds:.1f}", human_bytes(int(each.num_bytes)),
        )
        for each, plan in zip(found, plans, strict=True)
    ]  # fmt: skip
