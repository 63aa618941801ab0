"""The text of `plait plan`: the best plans, the front of time and memory, why well-known choices lost, what to run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from plait.cost.found_plans import RELAXED_WORTH, USABLE, Candidate, FoundPlans, best_between
from plait.cost.memory_model import human_bytes


def describe_plans(found: FoundPlans, command: str, measure: str = "") -> str:
    """What a search found. `command` is the line that runs the best plan, and `measure` says how the gradient noise
    scale is measured, for plans that are ranked by the time to a loss."""
    cluster, device = found.cluster, found.cluster.device
    given = found.memory != USABLE * device.memory
    why = "as given" if given else f"{USABLE:.0%} of the device's, the rest for the driver and for communicators"
    lines = [f"{cluster.name}: {cluster.num_devices} x {device.name}, {human_bytes(found.memory)} each ({why})"]
    lines.append(f"{found.num_rough:,} plans by closed forms, {found.num_simulated} simulated")
    if len(found.rows) > 1:
        lines.append(f"of batches of {', '.join(map(str, found.rows[:-1]))} and {found.rows[-1]} rows")
    lines += [f"  {count} refused: {reason}" for reason, count in found.refused]
    lines += _goal(found, measure) if found.goal.to_loss else []
    if not found.best:
        return "\n".join([*lines, "", *_nothing_fits(found)])
    to_loss = found.goal.to_loss and (found.goal.noise is not None or len(found.of_batches) == 1)
    lines += ["", "the best plans, one for each spread of ranks", *_table(found.best, True, to_loss)]
    lines += ["", "none is both faster and smaller than one of these", *_table(found.front, False, to_loss)]
    if found.lost:
        lines += ["", "well-known choices that lost"]
        for lost in found.lost:
            lines += [f"  {lost.name}: {lost.why}", f"      {lost.plan.title}"]
    best = found.best[0]
    lines += ["", *_batches(found), *_remarks(best), command]
    return "\n".join(lines)


def _goal(found: FoundPlans, measure: str) -> Iterable[str]:
    """What plans are ranked by, and what of it is not known."""
    goal = found.goal
    yield ""
    if goal.noise is not None:
        yield f"ranked by the time to a loss, with a gradient noise scale of {goal.noise}:"
        yield "  steps are taken to go as 1 + noise scale / batch, with a learning rate that is right for each batch"
        yield "  unknown: how the noise scale changes, which grows as the loss falls; it was taken as it is"
        if goal.noise.high is not None and goal.noise.high == math.inf:
            yield "  unknown: how large it may be, since the gradient was not told from its noise; measure for longer"
    else:
        yield "ranked by the time to a loss, of which the gradient noise scale is not known:"
        yield "  plans of one batch are compared by their steps, as all take as many to the loss"
        if len(found.of_batches) > 1:
            yield "  unknown: which batch is best; they are listed as if none were too large for its noise"
        yield f"  to measure it: {measure}"
    yield (
        f"  unknown: what replicas that agree later lose; they count {RELAXED_WORTH:.0%} of their tokens, which is"
        " assumed: `plait compare` shows it of two runs"
    )


def _batches(found: FoundPlans) -> Iterable[str]:
    """Of several batches, between which noise scales each is the fastest."""
    if len(found.of_batches) < 2:
        return
    yield "the fastest batch to a loss depends on the gradient noise scale:"
    noise = found.goal.noise
    for each in found.of_batches:
        low, high = best_between(each, found.of_batches)
        if low >= high:
            yield f"  batch {each.rows}: never"
            continue
        words = "any" if (low, high) == (0.0, math.inf) else f"between {low:,.0f} and {high:,.0f} rows"
        if high == math.inf and low > 0:
            words = f"above {low:,.0f} rows"
        elif low == 0.0 and high < math.inf:
            words = f"below {high:,.0f} rows"
        here = ""
        if noise is not None and low <= noise.rows <= high:
            sure = noise.low is not None and noise.high is not None and low <= noise.low and noise.high <= high
            here = ", as it is" if sure or noise.low is None else ", as it may be: its interval goes beyond"
        yield f"  batch {each.rows}: {words}{here}"
    yield ""


def _nothing_fits(found: FoundPlans) -> Iterable[str]:
    yield "no plan fits"
    if found.nearest is not None:
        missing = found.nearest.step.misses_by(found.memory)
        yield f"the nearest misses by {human_bytes(missing)} a rank: {found.nearest.plan.title}"
        sizes = found.nearest.step.estimate.memory.items()
        largest = sorted(((kind, size) for kind, size in sizes if size), key=lambda each: -each[1])
        yield "  " + ", ".join(f"{kind} {human_bytes(size)}" for kind, size in largest)
    if found.enough:
        yield f"the smallest cluster of these devices that would do has {found.enough} of them"
    else:
        yield "no larger cluster of these devices would do, as far as was looked; take a smaller batch or sequence"
        if found.nearest is not None:
            yield f"a device of which a rank may take {human_bytes(found.memory + missing)} would do"


def _remarks(best: Candidate) -> Iterable[str]:
    if best.plan.relaxed_axis:
        yield (
            f"its replicas agree every {best.plan.sync} steps: it trains on other numbers than one device, and counts"
            f" {RELAXED_WORTH:.0%} of its tokens, which is assumed; --limit-keys sync=1 leaves such plans out"
        )
    layers = getattr(best.step, "layers", ())
    if len(layers) > 1 and len(set(layers)) > 1:
        yield f"its stages have {', '.join(map(str, layers))} layers"


def _table(found: Sequence[Candidate], why: bool, to_loss: bool) -> list[str]:
    prices = [each.step.dollars_per_million_tokens for each in found]
    several = len({each.rows for each in found}) > 1
    head = ["", *["to a loss"] * to_loss, "step", "tokens/s", "MFU", "memory", *["batch"] * several]
    head += ["$/M tokens"] * (None not in prices)
    rows = [[*head, "plan"]]
    for number, (each, price) in enumerate(zip(found, prices, strict=True), start=1):
        row = [str(number), *[_to_loss(each, found[0])] * to_loss, _seconds(each.step.seconds)]
        row += [f"{each.step.tokens_per_second:,.0f}", f"{each.step.mfu:.1%}"]
        row += [human_bytes(each.memory), *[str(each.rows)] * several]
        row += [] if None in prices else [f"{price:.3g}"]
        rows.append([*row, each.plan.title])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for number, row in enumerate(rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]))
        if why and number and found[number - 1].why:
            lines.append(" " * (sum(widths) + 2 * len(widths)) + f"ahead of the next, which {found[number - 1].why}")
    return lines


def _to_loss(each: Candidate, best: Candidate) -> str:
    """The time to the goal's loss, or where the steps are not known how much longer it is than the best plan's."""
    seconds = each.seconds_to_loss
    if seconds is None:
        return f"{best.score / each.score:.2f}x"
    return _seconds(seconds) if seconds < 600 else f"{seconds / 3600:,.3g} h"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
