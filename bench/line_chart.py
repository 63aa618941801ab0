"""A line chart as SVG, for pictures in docs: curves by name over a logarithmic axis. Nothing needs to be installed."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.report.charts import LINES

_WIDTH, _HEIGHT = 760, 410
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 36, 48, 62
_ROW = 20  # of the legend


@dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
        name: in the legend.
        points: (x, y), x ascending and more than 0.
        dashed: whether it is an ideal or a mark, and not a prediction.
    """

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def line_chart(
    title: str,
    lines: Sequence[Line],
    x_title: str,
    y_title: str,
    show_x: Callable[[float], str] = lambda value: f"{value:,.0f}",
    show_y: Callable[[float], str] = lambda value: f"{value:.0%}",
    log_y: bool = False,
) -> str:
    """The SVG. x is logarithmic, with a tick at each power of two or, over more than 10 of them, of ten; y begins at 0
    unless `log_y`. Lines without a point are in the legend alone."""
    points = [point for line in lines for point in line.points]
    low, high = math.log(min(x for x, _ in points)), math.log(max(x for x, _ in points))
    top = max(y for _, y in points)
    bottom = min(y for _, y in points) if log_y else 0.0
    height = _HEIGHT + _ROW * (-(-len(lines) // 2))
    right, under = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def across(x: float) -> float:
        return _LEFT + (math.log(x) - low) / max(high - low, 1e-9) * (right - _LEFT)

    def up(y: float) -> float:
        part = math.log(y / bottom) / math.log(top / bottom) if log_y else y / (top * 1.05)
        return under - part * (under - _TOP)

    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        ' font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{html.escape(title)}</text>',
    ]
    for x in _ticks(math.exp(low), math.exp(high)):
        place = f"{across(x):.1f}"
        found.append(f'<line x1="{place}" x2="{place}" y1="{_TOP}" y2="{under}" stroke="#eee"/>')
        found.append(f'<text x="{place}" y="{under + 17}" text-anchor="middle">{html.escape(show_x(x))}</text>')
    for y in _ticks(bottom, top) if log_y else _even(top):
        place = f"{up(y):.1f}"
        found.append(f'<line x1="{_LEFT}" x2="{right}" y1="{place}" y2="{place}" stroke="#ddd"/>')
        found.append(f'<text x="{_LEFT - 8}" y="{up(y) + 4:.1f}" text-anchor="end">{html.escape(show_y(y))}</text>')
    found.append(f'<text x="{(_LEFT + right) / 2}" y="{under + 38}" text-anchor="middle">{html.escape(x_title)}</text>')
    found.append(f'<text x="{_LEFT}" y="{_TOP - 8}" fill="#555">{html.escape(y_title)}</text>')
    for number, line in enumerate(lines):
        colour = LINES[number % len(LINES)]
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line.points)
        style = f'fill="none" stroke="{colour}" stroke-width="2"{dash}'
        found.append(f'<polyline points="{path}" {style}/>')
        for x, y in () if line.dashed else line.points:
            shown = f"{line.name}: {show_y(y)} at {show_x(x)}"
            found.append(
                f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.5" fill="{colour}"><title>{html.escape(shown)}'
                "</title></circle>"
            )
        column, row = number % 2, number // 2
        at, place = _LEFT + column * (right - _LEFT) / 2, _HEIGHT + _ROW * row
        found.append(f'<line x1="{at:.0f}" x2="{at + 24:.0f}" y1="{place - 4}" y2="{place - 4}" {style}/>')
        none = "" if line.points else " (no plan)"
        found.append(f'<text x="{at + 30:.0f}" y="{place}">{html.escape(line.name + none)}</text>')
    return "\n".join([*found, "</svg>"]) + "\n"


def _ticks(low: float, high: float) -> list[float]:
    """Powers of two between two numbers, or of ten if there are more than 10 of those."""
    base = 2.0 if math.log2(high / low) <= 10 else 10.0
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    return [base**power for power in range(first, last + 1)]


def _even(top: float) -> list[float]:
    """About five round numbers from 0 up to the top."""
    unit = 10 ** math.floor(math.log10(top / 5))
    step = next(unit * factor for factor in (1, 2, 5, 10) if top / (unit * factor) <= 6)
    return [step * number for number in range(int(top * 1.05 / step) + 1)]
