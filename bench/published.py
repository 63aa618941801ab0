"""Published tables against plait's closed forms and simulator: every row, with the error of what is predicted.

    python -m bench.published [--write]

Nothing is run on the hardware of the tables. Numbers are fitted on half of the measured runs (bench/published_rows.py);
summaries are of the other half.
"""

from __future__ import annotations

from bench.harness import arguments, publish
from bench.published_rows import BEGIN, FITTED, PublishedRow, errors, fit, predicted, published_rows

SHOWN = ("params_b", "model", "scheme", "psi", "stage", "gpus", "dp", "tp", "pp", "cp", "seq", "ac", "tech",
         "recompute", "schedule", "microbatches")  # fmt: skip


def summary(rows: list[PublishedRow]) -> list[str]:
    lines = [
        "| paper | rows | held out | median error | worst error | within 10% and 20% |",
        "|---|---|---|---|---|---|",
    ]
    for family in dict.fromkeys(row.family for row in rows):
        of = [row for row in rows if row.family == family]
        held = [row for row in of if not row.is_fitted]
        middle, worst = errors(held)
        reached = "yes" if middle <= 0.1 and worst <= 0.2 else "**no**"
        lines.append(f"| {family} | {len(of)} | {len(held)} | {middle:.1%} | {worst:.1%} | {reached} |")
    return lines


def fitted(rows: list[PublishedRow]) -> list[str]:
    lines = ["| hardware | number | used | fitted now |", "|---|---|---|---|"]
    for kind in BEGIN:
        now = fit(kind, rows)
        lines += [f"| {kind} | {name} | {FITTED[kind][name]:.3g} | {now[name]:.3g} |" for name in now]
    return lines


def every(rows: list[PublishedRow]) -> list[str]:
    lines = ["| paper, table | run | number | published | predicted | error | half |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        run = " ".join(f"{key}={row.setup[key]}" for key in SHOWN if key in row.setup)
        value = predicted(row)
        half = "" if not row.hardware else "fitted" if row.is_fitted else "held out"
        table = row.table.partition(" (")[0]
        lines.append(
            f"| {row.family}, {table} | {run} | {row.metric} [{row.unit}] | {row.value:g} | {value:.4g} |"
            f" {value / row.value - 1:+.1%} | {half} |"
        )
    return lines


NOTES = """What is not reached, and why:

- torchtitan, sequences of 131,072 and 262,144 over 4 and 8 ranks: ring attention is slower there than over 1 and 2, by
  about a third, for a reason that the forms do not have.
- GPipe: the paper does not say which batches the rows have, nor how uneven AmoebaNet's stages are. Predicted are equal
  batches. A speed-up of 3.2 of 4 ranks with 4 microbatches is above what their bubble allows.
- Korthikanti, throughput increase: the ratio of two iteration times, each within 6%, less one; 38% for 29%. These two
  rows are in the fitted half, because their run has no kind of recomputation.
"""


def main() -> None:
    given = arguments(__doc__)
    rows = published_rows()
    parts = ["## Held-out rows, by paper", "", *summary(rows), "", NOTES, "## Fitted numbers", "", *fitted(rows), ""]
    publish("Published tables", "\n".join([*parts, "## All rows", "", *every(rows)]), "published", given.write)


if __name__ == "__main__":
    main()
