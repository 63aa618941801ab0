"""Failures in docs/scale.md: goodput by the number of GPUs, what is left of the peak, how often to save."""

from __future__ import annotations

from collections.abc import Sequence

from bench.line_chart import Line, line_chart
from bench.scale_page import Page, percent
from bench.scale_points import (
    DENSE,
    MODELS,
    ZERO_BUBBLE,
    Curves,
    ScaledModel,
    ScalePoint,
    best_of,
    best_plan,
    cluster_of,
)
from plait.cost.goodput import (
    Goodput,
    daly_interval,
    goodput_of_replicas,
    goodput_of_restarts,
    mean_time_between_failures,
    young_interval,
)

NODE = 8  # GPUs
DAY, HOUR = 86400.0, 3600.0
LLAMA_NODES, LLAMA_DAYS, LLAMA_FAILURES = 2048, 54, 419  # Llama Team 2024, section 3.3.4: unexpected interruptions
LLAMA_PARAMETERS = 405e9
NODE_SECONDS = LLAMA_DAYS * DAY * LLAMA_NODES / LLAMA_FAILURES
STORAGE = 2e12  # bytes/s: Llama Team 2024, section 3.3.1, sustained
RECOVERY = 600.0  # seconds until steps run again, without loading; assumed
STALL = 30.0  # seconds until replicas go on without one; assumed
BARRIER = 1.0  # seconds for which a save stops training beside the copy to the host; assumed
HOST_COPIES = 0.8  # of the link between device and host, as the planner assumes
STATE_BYTES = 12  # of a parameter, in a checkpoint: float32, and two moments
STEP = 10.0  # seconds, where no plan is meant
_WAYS = {
    "stops": "training stops to save", "beside": "saved beside training", "replicas": "replicas go on without one",
}  # fmt: skip


def state_bytes(model: ScaledModel) -> float:
    """Bytes of a checkpoint."""
    return STATE_BYTES * model.shape.parameters


def restarts(model: ScaledModel, gpus: int, beside: bool, node_seconds: float = NODE_SECONDS) -> Goodput:
    """The goodput where all begin again from the last save, which is written beside training, or while it stops."""
    return _restarts(state_bytes(model), gpus, beside, node_seconds)


def _restarts(num_bytes: float, gpus: int, beside: bool, node_seconds: float) -> Goodput:
    host = cluster_of(gpus).host
    assert host is not None
    mean = mean_time_between_failures(node_seconds, gpus // NODE)
    write = num_bytes / STORAGE
    restart = RECOVERY + write  # what was written is read
    if not beside:
        return goodput_of_restarts(mean, write, restart)
    copy = num_bytes / gpus / (HOST_COPIES * host.device_bandwidth)
    return goodput_of_restarts(mean, copy + BARRIER, restart, delay=write)


def tolerant(model: ScaledModel, gpus: int, step: float, node_seconds: float = NODE_SECONDS) -> Goodput:
    """The goodput of replicas that go on without one, and give it their states when it is back."""
    cluster = cluster_of(gpus)
    fetched = state_bytes(model) / model.replica / cluster.share(len(cluster.links) - 1)
    return goodput_of_replicas(node_seconds, gpus // NODE, gpus // model.replica, step, STALL, RECOVERY + fetched)


def failures(page: Page, every: Sequence[Curves]) -> None:
    """Goodput by GPUs, and MFU times goodput."""
    llama = mean_time_between_failures(NODE_SECONDS, LLAMA_NODES)
    theirs = _restarts(STATE_BYTES * LLAMA_PARAMETERS, NODE * LLAMA_NODES, True, NODE_SECONDS)
    page.say(
        "## Failures",
        f"A node fails every {NODE_SECONDS / DAY:,.0f} days: {LLAMA_FAILURES} unexpected interruptions of"
        f" {LLAMA_NODES:,} nodes in {LLAMA_DAYS} days, one in {llama / HOUR:.1f} hours (Llama Team 2024). Saves have"
        f" {STATE_BYTES} bytes a parameter, and storage takes {STORAGE / 1e12:.0f} TB/s (the same report). Assumed"
        f" are {RECOVERY:.0f} s from a failure until steps run again, to which loading adds; {BARRIER:.0f} s for"
        f" which a save stops training beside the copy to the host; {STALL:.0f} s until replicas go on without one."
        f" With these numbers Llama 3's run has a goodput of {theirs.fraction:.1%}; the report says more than 90%."
        " The interval between saves is Daly's, the model that of `plait.cost.goodput`.",
    )
    lines: list[Line] = []
    rows: list[list[str]] = []
    left: list[tuple[ScaledModel, int, float, float, ScalePoint]] = []
    for curves in every:
        model = curves.model
        best = {point.gpus: point for point in best_of(curves.weak)}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in _WAYS}
        for gpus in model.sizes:
            if gpus < 2 * model.replica:
                continue
            apart = _plan_of_replicas(model, gpus)
            step = apart.step or best[gpus].step
            assert step is not None
            ways = {
                "stops": restarts(model, gpus, False),
                "beside": restarts(model, gpus, True),
                "replicas": tolerant(model, gpus, step.seconds),
            }
            for name, each in ways.items():
                found[name].append((gpus, each.fraction))
            rows.append(_row(model, gpus, ways))
            again, on = best[gpus].mfu * ways["beside"].fraction, apart.mfu * ways["replicas"].fraction
            left.append((model, gpus, again, on, apart))
        lines += [Line(f"{model.name}, {_WAYS[name]}", points) for name, points in found.items()]
    svg = line_chart("Goodput under failures", lines, "GPUs", "of the time")
    page.picture("failures", svg, "Goodput under failures")
    head = ["model", "GPUs", "between failures", "interval", *_WAYS.values(), "saved beside training, most is lost to"]
    page.table(head, rows)
    for row in rows:
        if row[1] == f"{MODELS[0].sizes[-1]:,}":
            page.say(
                f"**{row[0]} on {row[1]} GPUs, where a node fails every {row[2]}: training gets on for {row[5]} of the"
                f" time if all begin again from a save, and for {row[6]} if only the replica that failed does.**"
            )
    _sensitivity(page)
    _left_of_the_peak(page, left)


def _plan_of_replicas(model: ScaledModel, gpus: int) -> ScalePoint:
    """The best plan whose replicas hold all states."""
    limits = model.strategies[ZERO_BUBBLE if model is DENSE else "experts, ZeRO-3"]
    rows = gpus // model.gpus_a_row
    return best_plan(model, cluster_of(gpus), rows, f"{limits} replica={gpus // model.replica}")


def _row(model: ScaledModel, gpus: int, ways: dict[str, Goodput]) -> list[str]:
    mean, beside = mean_time_between_failures(NODE_SECONDS, gpus // NODE), ways["beside"]
    worst = max(beside.lost, key=lambda name: beside.lost[name])
    fractions = [percent(each.fraction) for each in ways.values()]
    return [
        model.name, f"{gpus:,}", f"{mean / 60:,.0f} min", f"{beside.interval:,.0f} s", *fractions,
        f"{worst} {beside.lost[worst]:.0%}",
    ]  # fmt: skip


def _sensitivity(page: Page) -> None:
    """Goodput on the most GPUs if nodes fail more or less often."""
    rows, head = [], ["a node fails every"]
    for model in MODELS:
        head += [f"{model.name}: {_WAYS[name]}" for name in ("beside", "replicas")]
    for factor in (1 / 3, 1.0, 3.0):
        seconds = NODE_SECONDS * factor
        row = [f"{seconds / DAY:,.0f} days"]
        for model in MODELS:
            gpus = model.sizes[-1]
            ways = restarts(model, gpus, True, seconds), tolerant(model, gpus, STEP, seconds)
            row += [percent(each.fraction) for each in ways]
        rows.append(row)
    page.say(f"On {MODELS[0].sizes[-1]:,} GPUs, with steps of {STEP:.0f} s, if nodes fail more or less often:")
    page.table(head, rows)


def _left_of_the_peak(page: Page, left: Sequence[tuple[ScaledModel, int, float, float, ScalePoint]]) -> None:
    lines, said = [], []
    for model in MODELS:
        own = [each for each in left if each[0] is model]
        lines.append(Line(f"{model.name}, all begin again", [(gpus, again) for _, gpus, again, _, _ in own]))
        lines.append(Line(f"{model.name}, replicas go on", [(gpus, on) for _, gpus, _, on, _ in own if on]))
        crossing = next((gpus for _, gpus, again, on, _ in own if on > again), None)
        _, gpus, again, on, apart = own[-1]
        other = f"no plan has replicas: {apart.why}"
        if apart.step is not None:
            other = f"{on:.1%} where replicas of {model.replica:,} GPUs go on (`{apart.step.plan}`)"
        ahead = f"from {crossing:,} GPUs on" if crossing else "nowhere"
        said.append(
            f"- {model.name} on {gpus:,} GPUs: {again:.1%} of the peak is left where all begin again, and {other}."
            f" Replicas are ahead {ahead}."
        )
    page.say(
        "A replica that goes on holds all states, so that ZeRO cuts them within a replica alone, and a plan has"
        " less room. MFU times goodput, where the batch grows:"
    )
    page.picture("useful", line_chart("MFU times goodput", lines, "GPUs", "of the peak"), "MFU times goodput")
    page.say(*said)


def intervals(page: Page) -> None:
    """Goodput by the time between two saves, with Young's and Daly's."""
    gpus = MODELS[0].sizes[-1]
    mean = mean_time_between_failures(NODE_SECONDS, gpus // NODE)
    lines, said = [], []
    for model in MODELS:
        save = state_bytes(model) / STORAGE
        restart = RECOVERY + save
        seconds = [mean * 2 ** (power / 4) for power in range(-28, 5)]
        curve = [(each, goodput_of_restarts(mean, save, restart, each).fraction) for each in seconds]
        lines.append(Line(f"{model.name}, a save of {state_bytes(model) / 1e12:.0f} TB takes {save:.0f} s", curve))
        young, daly = young_interval(save, mean), daly_interval(save, mean)
        first, higher, hour = (goodput_of_restarts(mean, save, restart, each).fraction for each in (young, daly, HOUR))
        said.append(
            f"- {model.name}: Young's interval is {young:.0f} s with a goodput of {first:.2%}, Daly's {daly:.0f} s with"
            f" {higher:.2%}; with a save every hour it is {hour:.1%}."
        )
    page.say(
        "## How often to save",
        f"On {gpus:,} GPUs, where a node fails every {mean / 60:.0f} minutes, with saves for which training stops:",
    )
    svg = line_chart(
        "Goodput by the time between two saves", lines, "seconds of training between two saves", "of the time"
    )
    page.picture("interval", svg, "Goodput by the time between two saves")
    page.say(*said)
