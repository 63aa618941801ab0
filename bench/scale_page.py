"""The page docs/scale.md: paragraphs, tables and pictures in their order."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from bench.line_chart import Line
from bench.scale_points import ScalePoint

_WIDTH = 120


class Page:
    """The text of the page, and its pictures, which are written into `out` at once."""

    def __init__(self, out: Path) -> None:
        self.out, self.lines = out, list[str]()

    def say(self, *paragraphs: str) -> None:
        """Add paragraphs, and items of a list, which begin with a dash."""
        for text, after in zip(paragraphs, [*paragraphs[1:], ""], strict=True):
            is_item = text.startswith("- ")
            indent = "  " if is_item else ""
            filled = textwrap.fill(
                text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
            self.lines += [filled] if is_item and after.startswith("- ") else [filled, ""]

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table."""
        self.lines += ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)] + [""]

    def picture(self, name: str, svg: str, text: str) -> None:
        """Write a picture, and add it with what stands for it where it is not seen."""
        path = self.out / "pictures" / f"scale-{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(svg)
        self.lines += [f"![{text}](pictures/{path.name})", ""]

    def write(self) -> Path:
        """Write the page. Returns its path."""
        path = self.out / "scale.md"
        path.write_text("\n".join(self.lines).rstrip() + "\n")
        return path


def having(points: Sequence[ScalePoint]) -> list[ScalePoint]:
    """The points that have a plan."""
    return [point for point in points if point.step is not None]


def mfu_line(name: str, points: Sequence[ScalePoint]) -> Line:
    """A curve of MFU over GPUs."""
    return Line(name, [(point.gpus, point.mfu) for point in having(points)])


def percent(value: float) -> str:
    return f"{value:.1%}"


def bits(rate: float) -> str:
    """A rate in bit/s, in words."""
    unit, size = next(((unit, size) for unit, size in (("P", 1e15), ("T", 1e12)) if rate >= size), ("G", 1e9))
    return f"{rate / size:,.0f} {unit}bit/s"
