"""Scale on paper: docs/scale.md and its figures, from the simulator. Nothing is run on the hardware.

    python -m bench.scale [--out docs]

Every number of the page is computed here; it takes a few minutes of one core.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.line_chart import Line, line_chart
from bench.scale_failures import failures, intervals, restarts
from bench.scale_page import Page, bits, having, mfu_line
from bench.scale_points import (
    DENSE,
    GPU,
    MODELS,
    Curves,
    ScalePoint,
    best_of,
    best_plan,
    cluster_of,
    spent_more,
    where_it_breaks,
)
from plait.spec.cluster import Cluster, LinkSpec

NOISE = (1024, 8192, 65536)  # rows
WORTH_IT = 0.05  # of the time, which twice the GPUs must save at least
SITES, SITE_LATENCY, SITE_PORTS = 8, 0.02, 128
SITE_RATES = tuple(10.0**power for power in range(10, 17))  # bit/s of a site
HEAD = ("GPUs", "rows", "tokens a step", "step", "MFU", "most beside compute", "plan")


def introduce(page: Page) -> None:
    page.say("# Scale on paper")
    page.lines += ["    python -m bench.scale    # makes this page and its figures, in a few minutes of one core", ""]
    page.say(
        f"What `plait plan` and its simulator say of training on up to {max(DENSE.sizes):,} GPUs. Nothing of it was"
        f" run: each number is computed by the script, from the closed forms and the cluster `{GPU}` of"
        " [cluster.md](cluster.md) (8 H100s a node, a 400 Gbit/s card for each, a network without bottleneck). They"
        " meet Megatron-LM's runs on up to 2,520 A100s within 10%, and, with the numbers of its GPUs of 700 W, Llama"
        " 3's 8,192 tokens on 16,384 H100s within 1% ([bench/published.md](bench/published.md)); of a mixture of"
        " experts Grok-1 on 2,048 H100s is predicted a third too slow. No run of more GPUs was there to hold them to."
    )
    rows = []
    for model in MODELS:
        shape = model.shape
        active = shape.layers * shape.layer_weights + shape.vocab * shape.hidden
        experts = f"{shape.experts_per_token} of {shape.num_experts}" if shape.num_experts > 1 else "none"
        rows.append([
            model.name, f"{shape.parameters / 1e12:.2f}T", f"{active / 1e9:,.0f}B", str(shape.layers),
            f"{shape.hidden:,}", experts, f"{shape.sequence:,}", f"a row for {model.gpus_a_row} GPUs",
            f"{model.rows:,} rows",
        ])  # fmt: skip
    head = ("model", "parameters", "of a token", "layers", "width", "experts", "sequence", "weak scaling", "strong")
    page.table(head, rows)
    page.say(
        "Precision is bf16-params, states are on the device; experts have room for 1.25 times a balanced router's rows."
        " Each point is the best plan of its strategy that takes all GPUs and fits 92% of their memory, with"
        " recomputation, microbatches and stages chosen; MFU counts no recomputation. What the planner calls weights'"
        " sums are the collectives within a layer, those of experts too."
    )


def plan_rows(points: Sequence[ScalePoint], sequence: int) -> list[list[str]]:
    """A row for each point."""
    rows = []
    for point in points:
        if point.step is None:
            rows.append([f"{point.gpus:,}", f"{point.rows:,}", "", "", "", "", f"none: {point.why}"])
            continue
        step, shares = point.step, point.shares
        most = max((name for name in shares if name != "compute"), key=lambda name: shares[name])
        rows.append([
            f"{point.gpus:,}", f"{point.rows:,}", f"{point.rows * sequence / 1e6:,.0f}M", f"{step.seconds:.3g} s",
            f"{step.mfu:.1%}", f"{most} {shares[most]:.0%}", f"`{step.plan}`",
        ])  # fmt: skip
    return rows


def ends(points: Sequence[ScalePoint]) -> str:
    """The MFU of the fewest and of the most GPUs."""
    first, last = having(points)[0], having(points)[-1]
    return f"{first.mfu:.1%} of the peak on {first.gpus:,} GPUs and {last.mfu:.1%} on {last.gpus:,}"


def weak_scaling(page: Page, every: Sequence[Curves]) -> None:
    page.say("## A batch that grows with the GPUs")
    lines = [mfu_line(curves.model.name, best_of(curves.weak)) for curves in every]
    title = "MFU of the best plan, rows in proportion to GPUs"
    page.picture("weak", line_chart(title, lines, "GPUs", "MFU"), "MFU of the best plan, weak scaling")
    for curves in every:
        points = best_of(curves.weak)
        broken = where_it_breaks(points)
        after = f"It leaves 90% of its best behind {broken}." if broken else "It stays within 90% of its best."
        page.say(f"**{curves.model.name}: {ends(points)}.** {after}")
        page.table(HEAD, plan_rows(points, curves.model.shape.sequence))


def strong_scaling(page: Page, every: Sequence[Curves]) -> None:
    page.say("## A batch that stays as it is")
    lines = []
    for curves in every:
        speeds = [(each.gpus, each.step.tokens_per_second) for each in best_of(curves.strong) if each.step]
        lines.append(Line(curves.model.name, [(gpus, speed / speeds[0][1]) for gpus, speed in speeds]))
    first = min(point[0] for line in lines for point in line.points)
    last = max(point[0] for line in lines for point in line.points)
    ideal = Line("in proportion to GPUs, from the fewest", [(first, 1.0), (last, last / first)], dashed=True)
    title = "Tokens per second over those of the fewest GPUs, a batch that stays"
    svg = line_chart(title, [*lines, ideal], "GPUs", "times", show_y=lambda value: f"{value:,.0f}x", log_y=True)
    page.picture("strong", svg, "Tokens per second, strong scaling")
    for curves, line in zip(every, lines, strict=True):
        points = best_of(curves.strong)
        grown, times = line.points[-1][0] / line.points[0][0], line.points[-1][1]
        broken = where_it_breaks(points)
        page.say(
            f"**{curves.model.name}: {grown:.0f} times the GPUs have {times:.1f} times the tokens per second;"
            f" {ends(points)}.**" + (f" It leaves 90% of its best behind {broken}." if broken else "")
        )
        page.table(HEAD, plan_rows(points, curves.model.shape.sequence))


def strategies(page: Page, every: Sequence[Curves]) -> None:
    page.say(
        "## Where each strategy breaks",
        "A curve breaks where its MFU falls below 90% of the best that it has with fewer GPUs, by what the step there"
        " spends more on than at its best.",
    )
    for curves in every:
        for kind, found in (("weak", curves.weak), ("strong", curves.strong)):
            how = "rows in proportion to GPUs" if kind == "weak" else f"{curves.model.rows:,} rows"
            title = f"{curves.model.name}: MFU by strategy, {how}"
            svg = line_chart(title, [mfu_line(name, points) for name, points in found.items()], "GPUs", "MFU")
            page.picture(f"{curves.model.name.split()[0].lower()}-{kind}", svg, title)
            rows = [[name, *_from_to(points)] for name, points in found.items()]
            page.table((f"{curves.model.name}, {how}", "begins at", "best MFU", "breaks"), rows)


def _from_to(points: Sequence[ScalePoint]) -> list[str]:
    """Where a curve begins, what it has at best, and where it breaks."""
    if not having(points):
        return ["nowhere", "", points[-1].why]
    first, best = having(points)[0], max(points, key=lambda each: each.mfu)
    before = [point for point in points if point.gpus < first.gpus]
    begins = f"{first.gpus:,}" + (f" (before: {before[-1].why})" if before else "")
    return [begins, f"{best.mfu:.1%} at {best.gpus:,}", where_it_breaks(points) or "not up to here"]


def time_to_loss(page: Page, every: Sequence[Curves]) -> None:
    named = ", ".join(f"{noise:,}" for noise in NOISE[:-1])
    page.say(
        "## The time to a loss",
        "A larger batch takes fewer steps, but not as many fewer as it has rows: steps go as 1 + N / rows, with N the"
        " gradient noise scale ([plan.md](plan.md)). N of models of this size is not known; it is measured in a run"
        f" (`train.noise_every`). Here it is taken to be {named} or {NOISE[-1]:,} rows. For each number of GPUs the"
        " better of the two batches above is taken, with the goodput of saves beside training.",
    )
    for curves in every:
        model, lines, said = curves.model, [], []
        for noise in NOISE:
            points = _seconds_to_loss(curves, noise)
            first = points[0][1]
            lines.append(Line(f"noise scale {noise:,} rows", [(gpus, seconds / first) for gpus, seconds in points]))
            text = f"- {noise:,} rows: {points[-1][0] / points[0][0]:.0f} times the GPUs come to a loss"
            text += f" {first / points[-1][1]:.1f} times as fast"
            for (fewer, now), (more, then) in itertools.pairwise(points):
                if then > (1 - WORTH_IT) * now:
                    text += f"; from {fewer:,.0f} to {more:,.0f} "
                    text += f"it takes {then / now - 1:.0%} longer" if then > now else f"{1 - then / now:.0%} is saved"
                    break
            said.append(f"{text}.")
        ideal = [(gpus, lines[0].points[0][0] / gpus) for gpus, _ in lines[0].points]
        lines.append(Line("in proportion to GPUs", ideal, dashed=True))
        svg = line_chart(
            f"{model.name}: time to a loss, over that of the fewest GPUs", lines, "GPUs", "of the time",
            show_y=lambda value: "1" if value > 0.75 else f"1/{1 / value:.0f}", log_y=True,
        )  # fmt: skip
        page.picture(f"{model.name.split()[0].lower()}-loss", svg, f"{model.name}: time to a loss")
        page.say(f"**{model.name}:**", *said)


def _seconds_to_loss(curves: Curves, noise: float) -> list[tuple[float, float]]:
    """(GPUs, seconds to a loss, up to a factor), of the better batch."""
    found = []
    for points in zip(best_of(curves.weak), best_of(curves.strong), strict=True):
        times = [
            (1 + noise / each.rows) * each.step.seconds / restarts(curves.model, each.gpus, True).fraction
            for each in points
            if each.step is not None
        ]
        if times:
            found.append((float(points[0].gpus), min(times)))
    return found


def in_sites(gpus: int, rate: float) -> Cluster:
    """The cluster in several sites, each of which sends `rate` bit/s to the others."""
    base = cluster_of(gpus)
    node, pod = base.links
    site = LinkSpec("site", SITE_LATENCY, rate / 8 / SITE_PORTS, at_once=SITE_PORTS, efficiency=pod.efficiency)
    return replace(base, name=f"{SITES} sites", links=(node, replace(pod, size=gpus // SITES), site))


def sites(page: Page) -> None:
    model, gpus = DENSE, DENSE.sizes[-1]
    rows = gpus // model.gpus_a_row
    together = list(model.strategies.values())[1:]
    apart = model.strategies["ZeRO-3 with tensor"].replace("sync=1", f"sync=8..512 replica={SITES}")
    found: dict[str, list[tuple[float, ScalePoint]]] = {"every step": [], "later": []}
    for rate in SITE_RATES:
        where = in_sites(gpus, rate)
        tried = [best_plan(model, where, rows, limits) for limits in together]
        found["every step"].append((rate, max(tried, key=lambda each: each.mfu)))
        found["later"].append((rate, best_plan(model, where, rows, apart)))
    names = {"every step": "agree at every step", "later": "a replica in each site, agree later (DiLoCo)"}
    lines = [
        Line(names[kind], [(rate, each.mfu) for rate, each in points if each.step]) for kind, points in found.items()
    ]
    page.say(
        "## Several sites",
        f"{model.name} on {gpus:,} GPUs in {SITES} sites of {gpus // SITES:,}, {SITE_LATENCY * 1e3:.0f} ms apart, by"
        " what a site can send to the others. Replicas that agree later have no pipeline, since plait lays out"
        " replicas within a stage.",
    )
    title = f"{model.name} over {SITES} sites: MFU of the best plan"
    page.picture("sites", line_chart(title, lines, "of a site", "MFU", show_x=bits), title)
    page.say(*(_of_sites(kind, points) for kind, points in found.items()), *_ahead(found))


def _of_sites(kind: str, points: Sequence[tuple[float, ScalePoint]]) -> str:
    fast = max((point for _, point in points), key=lambda each: each.mfu)
    what = "Agreeing later" if kind == "later" else f"Agreeing at {kind}"
    if fast.step is None:
        return f"- {what}: no plan, as {fast.why}."
    enough = next(rate for rate, point in points if point.mfu >= 0.9 * fast.mfu)
    rate, slow = next((rate, point) for rate, point in points if point.step)
    text = f"- {what}: {fast.mfu:.1%} at best, and 90% of that from {bits(enough)} on"
    if slow.mfu < 0.9 * fast.mfu:
        text += f"; {slow.mfu:.1%} with {bits(rate)}, where {spent_more(fast, slow)}"
    return f"{text}. At best: `{fast.step.plan}`; with {bits(rate)}: `{slow.step.plan}`." if slow.step else f"{text}."


def _ahead(found: dict[str, list[tuple[float, ScalePoint]]]) -> list[str]:
    pairs = zip(found["every step"], found["later"], strict=True)
    rates = [rate for (rate, now), _ in itertools.takewhile(lambda pair: pair[1][1].mfu > pair[0][1].mfu, pairs)]
    if not rates:
        return ["- Agreeing later is ahead nowhere."]
    return [
        f"- Agreeing later is ahead up to {bits(max(rates))} a site, in MFU. What it costs a model to agree so"
        " seldom is not known before it is measured."
    ]


def assumptions(page: Page) -> None:
    page.say(
        "## What this leaves out",
        "- The network has full bisection and no contention beyond a node's cards; links do not fail or flap, and"
        " no GPU is slower than another.",
        "- Rows for experts travel once for each expert, not once for each node, and routers are balanced within"
        " the room that there is.",
        "- Failures are independent and alike at any time. Spare nodes are there at once. What a save takes of the"
        " network beside training is not counted.",
        "- plait itself begins again from a checkpoint where a rank fails (`--resume=auto`); synchronous replicas"
        " that go on without one are predicted here, and not built.",
        "- Attention over many ranks of `context` is predicted up to 29% too fast, and too slow"
        " ([bench/published.md](bench/published.md)).",
        "- Learning rates are taken to be right for each batch, and the noise scale to stay as it is.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    docs = Path(__file__).parent.parent / "docs"
    parser.add_argument("--out", type=Path, default=docs, help="the folder for scale.md and pictures/; default: docs")
    page = Page(parser.parse_args().out)
    every = [Curves.of(model) for model in MODELS]
    introduce(page)
    weak_scaling(page, every)
    strong_scaling(page, every)
    strategies(page, every)
    failures(page, every)
    intervals(page)
    time_to_loss(page, every)
    sites(page)
    assumptions(page)
    print(f"wrote {page.write()}")


if __name__ == "__main__":
    main()
