"""docs/scale.md and what makes it: points of curves, where they break, pictures; the page is what is computed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.line_chart import Line, line_chart
from bench.scale import plan_rows
from bench.scale_failures import _row, _sensitivity, intervals, restarts, tolerant
from bench.scale_page import Page, bits
from bench.scale_points import (
    DENSE,
    MOE,
    ScaledModel,
    ScalePoint,
    _ClosedForms,
    best_of,
    best_plan,
    cluster_of,
    spent_more,
    where_it_breaks,
)
from plait.cost.shape_evaluator import ShapeEvaluator
from plait.cost.transformer import TransformerShape
from plait.plan.plan import Plan

DOCS = Path(__file__).parent.parent / "docs"
SHAPE = TransformerShape(16, 2048, 16, 50257, 1024, dropout=False, stores_scores=False)
SMALL = ScaledModel("small", SHAPE, (8, 16), 1, 16, 8, {})


def points() -> list[ScalePoint]:
    """Points of one plan on more and more GPUs, as if its messages took longer and longer, and then none."""
    plan = Plan.parse("pipeline=2 data=4 micro=4 precision=bf16-params")
    step = ShapeEvaluator(SHAPE, cluster_of(8)).simulate(plan, 16)
    made = []
    for gpus, bubble in ((8, 0.0), (16, 0.01 * step.seconds), (32, 2 * step.seconds)):
        made.append(ScalePoint(gpus, 16, replace(step, estimate=replace(step.estimate, bubble=bubble))))
    return [*made, ScalePoint(64, 16, None, "it is too large")]


def test_where_a_curve_breaks_and_why() -> None:
    found = points()
    text = where_it_breaks(found)
    assert re.match(
        r"at 32: bubble and messages take \d\d% of the step, not \d+%; no plan from 64 on: it is too large$", text
    )
    assert where_it_breaks(found[:2]) == ""
    assert where_it_breaks([found[0], found[3]]) == "at 64: it is too large"
    assert where_it_breaks(found[3:]) == "nowhere a plan: it is too large"
    assert spent_more(found[0], found[2]).startswith("bubble and messages take")
    assert "compute reaches less of the peak" in spent_more(found[2], found[0])
    better = replace(found[2], strategy="other", step=found[0].step)
    assert best_of({"a": found, "b": [found[2], found[2], better, found[3]]})[2] is better


def test_a_point_is_a_plan_of_all_gpus_or_says_why_not() -> None:
    point = best_plan(SMALL, cluster_of(16), 16, "sync=1 tensor=1..2 context=1", "some")
    assert point.step is not None and point.step.plan.num_processes == 16
    assert point.strategy == "some"
    assert sum(point.shares.values()) == pytest.approx(1.0)
    assert best_plan(SMALL, cluster_of(16), 16, "tensor=3").why.startswith("16 rows, the weights")
    dense = best_plan(DENSE, cluster_of(64), 64, "sync=1 tensor=8 pipeline=1 context=1 zero=3")
    assert dense.step is None and re.match(r"the nearest plan misses by [\d.]+ GiB a GPU", dense.why)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved chunks=2", "zb-v", "zb-h1", "dualpipe-v"])
def test_closed_forms_choose_as_a_simulation_would(schedule: str) -> None:
    plan = Plan.parse(f"pipeline=4 data=2 micro=16 schedule={schedule} precision=bf16-params")
    closed, simulated = (
        make(SHAPE, cluster_of(8)).simulate(plan, 64) for make in (_ClosedForms, ShapeEvaluator)
    )  # fmt: skip
    assert closed.seconds == pytest.approx(simulated.seconds, rel=0.1)


def test_failures_of_more_gpus_cost_more() -> None:
    fractions = [restarts(DENSE, gpus, True).fraction for gpus in DENSE.sizes]
    assert fractions == sorted(fractions, reverse=True)
    assert restarts(DENSE, 131072, False).fraction < fractions[-1] < tolerant(DENSE, 131072, 10.0).fraction


def test_a_chart_has_its_curves() -> None:
    lines = [Line("a < b", [(8, 0.5), (16, 0.25)]), Line("ideal", [(8, 0.5), (16, 0.5)], dashed=True), Line("none", [])]
    root = ElementTree.fromstring(line_chart("title & more", lines, "GPUs", "MFU"))
    space = {"svg": "http://www.w3.org/2000/svg"}
    first, second, third = (each.attrib["points"].split() for each in root.findall("svg:polyline", space))
    (left, top), (right, bottom) = (tuple(map(float, each.split(","))) for each in first)
    assert left < right and top < bottom and len(second) == 2 and not third
    assert len(root.findall("svg:circle", space)) == 2
    texts = [each.text for each in root.findall("svg:text", space)]
    assert {"title & more", "a < b", "none (no plan)", "8", "16", "0%"} <= set(texts)
    times = line_chart("t", [Line("x", [(1, 1.0), (1024, 0.01)])], "s", "y", log_y=True)
    assert ElementTree.fromstring(times) is not None
    assert [bits(1e10), bits(1e12), bits(1e16)] == ["10 Gbit/s", "1 Tbit/s", "10 Pbit/s"]


def test_the_page_is_what_is_computed(tmp_path: Path) -> None:
    """What takes no time is computed again: tables of failures, intervals, and within 10% a point of a curve, since the
    forms that it comes from get better."""
    text = (DOCS / "scale.md").read_text()
    page = Page(tmp_path)
    intervals(page)
    _sensitivity(page)
    point = best_plan(MOE, cluster_of(131072), 131072 // MOE.gpus_a_row, MOE.strategies["experts, zero bubble, ZeRO-3"])
    missing = [line for line in page.lines if line not in text]
    assert missing == [], "run python -m bench.scale"
    of_page = re.search(r"\| experts, zero bubble, ZeRO-3 \| [^|]+ \| ([\d.]+)% at", text)
    assert of_page is not None
    assert point.mfu == pytest.approx(float(of_page[1]) / 100, rel=0.1), "run python -m bench.scale"
    (row,) = plan_rows([point], MOE.shape.sequence)
    assert row[:2] == ["131,072", "32,768"] and row[4] == f"{point.mfu:.1%}"
    same = (tmp_path / "pictures" / "scale-interval.svg").read_text()
    assert same == (DOCS / "pictures" / "scale-interval.svg").read_text()
    ways = {"stops": restarts(MOE, 131072, False), "beside": restarts(MOE, 131072, True)}
    assert " | ".join(_row(MOE, 131072, ways)[:6]) in text


def test_every_picture_is_there() -> None:
    named = re.findall(r"\]\((pictures/[^)]+)\)", (DOCS / "scale.md").read_text())
    assert len(named) == 12
    assert all((DOCS / each).exists() for each in named)
    assert {f"pictures/{each.name}" for each in (DOCS / "pictures").glob("scale-*.svg")} == set(named)
