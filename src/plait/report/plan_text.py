"""The text of `plait plan`: the best plans, the front of time and memory, why well-known choices lost, what to run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plait.cost.found_plans import RELAXED_WORTH, USABLE, Candidate, FoundPlans
from plait.cost.memory_model import human_bytes


def describe_plans(found: FoundPlans, command: str) -> str:
    """What a search found. `command` is the line that runs the best plan."""
    cluster, device = found.cluster, found.cluster.device
    given = found.memory != USABLE * device.memory
    why = "as given" if given else f"{USABLE:.0%} of the device's, the rest for the driver and for communicators"
    lines = [f"{cluster.name}: {cluster.num_devices} x {device.name}, {human_bytes(found.memory)} each ({why})"]
    lines.append(f"{found.num_rough:,} plans by closed forms, {found.num_simulated} simulated")
    lines += [f"  {count} refused: {reason}" for reason, count in found.refused]
    if not found.best:
        return "\n".join([*lines, "", *_nothing_fits(found)])
    lines += ["", "the best plans, one for each spread of ranks", *_table(found.best, why=True)]
    lines += ["", "none is both faster and smaller than one of these", *_table(found.front, why=False)]
    if found.lost:
        lines += ["", "well-known choices that lost"]
        for lost in found.lost:
            lines += [f"  {lost.name}: {lost.why}", f"      {lost.plan.title}"]
    best = found.best[0]
    lines += ["", *_remarks(best), command]
    return "\n".join(lines)


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


def _remarks(best: Candidate) -> Iterable[str]:
    if best.plan.relaxed_axis:
        yield (
            f"its replicas agree every {best.plan.sync} steps: it trains on other numbers than one device, and counts"
            f" {RELAXED_WORTH:.0%} of its tokens, which is assumed; --limit-keys sync=1 leaves such plans out"
        )
    layers = getattr(best.step, "layers", ())
    if len(layers) > 1 and len(set(layers)) > 1:
        yield f"its stages have {', '.join(map(str, layers))} layers"


def _table(found: Sequence[Candidate], why: bool) -> list[str]:
    prices = [each.step.dollars_per_million_tokens for each in found]
    several = len({each.rows for each in found}) > 1
    head = ["", "step", "tokens/s", "MFU", "memory", *["batch"] * several, *["$/M tokens"] * (None not in prices)]
    rows = [[*head, "plan"]]
    for number, (each, price) in enumerate(zip(found, prices, strict=True), start=1):
        row = [str(number), _seconds(each.step.seconds), f"{each.step.tokens_per_second:,.0f}", f"{each.step.mfu:.1%}"]
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


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
