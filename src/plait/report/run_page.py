"""The report of a run as one self-contained HTML page: facts, and figures of a step that the reader chooses."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plait.report.charts import draw_experts, draw_links, draw_metrics, draw_samples, draw_utilisation
from plait.report.swimlane import MANY, SCRIPT, draw_swimlanes, pack_swimlanes
from plait.spec.trace import ExpertLoad, Trace

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MOST_SPANS = 200_000  # in one page; a page with more opens slowly
_MEMORY = {
    "held": "activations that cells hold for later ones, by the sizes of the values",
    "allocated": "bytes allocated on the device",
    "resident": "resident memory of the process",
}


@dataclass(frozen=True)
class StepView:
    """A step that a page shows.

    Attributes:
        step: the number of the step.
        measured: its measured trace, if there is one.
        predicted: its simulated trace, if the plan has a schedule.
        sent: bytes sent, by sending and receiving rank.
        memory_of: what the memory samples count: "held", "allocated" or "resident".
        experts: the rows of each mixture of experts, by module.
    """

    step: int
    measured: Trace | None
    predicted: Trace | None
    sent: Mapping[tuple[int, int], int] = field(default_factory=dict)
    memory_of: str = "held"
    experts: Mapping[str, ExpertLoad] = field(default_factory=dict)

    @property
    def num_spans(self) -> int:
        return sum(len(trace.spans) for trace in (self.measured, self.predicted) if trace is not None)


def steps_that_fit(steps: Sequence[StepView]) -> list[StepView]:
    """The last steps for which a page has room, at least one."""
    found: list[StepView] = []
    room = MOST_SPANS
    for step in reversed(steps):
        room -= step.num_spans
        if found and room < 0:
            break
        found.insert(0, step)
    return found


def median_step(steps: Sequence[StepView]) -> int:
    """The index of the step of median length; evaluations and saves make some steps longer."""
    lengths = [step.measured.seconds if step.measured else 0.0 for step in steps]
    return sorted(range(len(steps)), key=lengths.__getitem__)[len(steps) // 2]


def build_page(
    title: str,
    facts: Sequence[tuple[str, str]],
    steps: Sequence[StepView],
    metrics: Sequence[Mapping[str, object]],
) -> str:
    """The HTML of the page. `facts` are rows of its table, `metrics` the lines of the metrics file.

    Raises PlanError if plotly is not installed.
    """
    from plotly.offline import get_plotlyjs

    figures = {f"step-{i}": _of_step(step) for i, step in enumerate(steps)}
    if metrics:
        figures["run"] = {"metrics": _rows(draw_metrics(metrics))}
    shown = median_step(steps) if steps else 0
    data = "".join(
        f'<script type="application/json" id="{name}">{_embedded(json.dumps(found, separators=(",", ":")))}</script>\n'
        for name, found in figures.items()
    )
    options = "".join(
        f'<option value="{i}"{" selected" if i == shown else ""}>{html.escape(_name(step))}</option>'
        for i, step in enumerate(steps)
    )
    rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in facts)
    measured = any(step.measured for step in steps)
    chooser = f'<p><label>Step <select id="choose">{options}</select></label> {_HELP}</p>' if measured else ""
    body = f"<h1>{html.escape(title)}</h1><table>{rows}</table>"
    if steps:
        body += f"<h2>Time</h2>{chooser}" + "".join(f'<div id="{name}"></div>' for name in _PLACES)
    if metrics:
        body += '<h2>Training</h2><div id="metrics"></div>'
    script = SCRIPT.read_text(encoding="utf-8")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{body}\n{data}"
        f"<script>{get_plotlyjs()}</script><script>{script}{_SCRIPT}</script></body></html>\n"
    )


_PLACES = ("swimlanes", "utilisation", "memory", "in-flight", "experts", "links")
_HELP = "Drag over a time to zoom into it, double-click to see all of it; point at a bar to read what it is."
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 1.5em auto; max-width: 1500px; padding: 0 1.5em; color: #222 }
h1 { font-size: 1.4em } h2 { font-size: 1.15em; margin: 1.6em 0 0.4em; border-bottom: 1px solid #ddd }
th { text-align: left; font-weight: 600; padding: 0 1.5em 0 0; vertical-align: top; white-space: nowrap }
.imagelayer image { image-rendering: pixelated }
p { color: #555 } select { font: inherit; margin-right: 1em }
"""
_SCRIPT = """
const config = {displaylogo: false, responsive: true};
const places = ["swimlanes", "utilisation", "memory", "in-flight", "experts", "links", "metrics"];
let turn = 0;
function draw(figures) {
  const mine = ++turn;
  const names = places.filter(name => name in figures);
  const next = () => {
    const name = names.shift();
    if (!name || mine !== turn) return;
    const {data, layout} = figures[name];
    const drawn = data ? Plotly.react(name, data, layout, config) : lanes(name, figures[name], config);
    drawn.then(() => setTimeout(next, 0));
  };
  next();
}
const read = id => JSON.parse(document.getElementById(id)?.textContent ?? "{}");
const choose = document.getElementById("choose");
const whole = read("run");
const show = number => {
  const figures = read("step-" + number);
  for (const name of places) {
    const place = document.getElementById(name);
    if (place && name !== "metrics") place.style.display = name in figures ? "" : "none";
  }
  draw({...figures, ...whole});
};
choose?.addEventListener("change", () => show(choose.value));
show(choose ? choose.value : 0);
"""


def _of_step(step: StepView) -> dict[str, object]:
    """The figures of a step, as data for the page's script."""
    bubble = step.predicted is not None  # the plan has a schedule
    figures = {"utilisation": draw_utilisation(step.measured, step.predicted, bubble)}
    trace = step.measured or step.predicted
    assert trace is not None
    kind = step.memory_of if step.measured else "held"
    for name, samples, title, as_bytes in (
        ("memory", trace.memory, f"memory: {_MEMORY[kind]}", True),
        ("in-flight", trace.in_flight, "microbatches in flight: begun, and not yet through backward", False),
    ):
        if any(sample.value for sample in samples):
            figures[name] = draw_samples(samples, trace.num_ranks, trace.seconds, title, as_bytes)
    if step.experts:
        figures["experts"] = draw_experts(step.experts)
    if step.sent:
        figures["links"] = draw_links(step.sent, trace.num_ranks)
    found = {name: _rows(figure) for name, figure in figures.items()}
    if step.num_spans <= MANY:
        return found | {"swimlanes": _rows(draw_swimlanes(step.measured, step.predicted, bubble=bubble))}
    return found | {"swimlanes": pack_swimlanes(step.measured, step.predicted, bubble)}


def _rows(figure: Figure) -> object:
    return json.loads(figure.to_json())


def _name(step: StepView) -> str:
    return f"{step.step}: {step.measured.seconds * 1e3:.4g} ms" if step.measured else "predicted"


def _embedded(text: str) -> str:
    """JSON escaped for use inside an HTML element."""
    return text.replace("<", "\\u003c")
