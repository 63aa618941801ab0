"""Draws a schedule as text: a line per rank, a column per unit of time.

    rank 0 | F0 F1  .  . B0 == B1 ==
    rank 1 |  . F0 F1 ...

A backward that is not split takes two columns (`B0 ==`). A dot is a bubble, and brackets mark an action: [F1].
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.schedule.readiness import Edges, RankAction, unit_steps
from plait.spec.schedule import Schedule

_WIDTH, _RANKS = 112, 16  # characters and ranks shown around a mark


def draw_grid(schedule: Schedule, edges: Edges, marks: Mapping[RankAction, int] | None = None) -> str:
    """The schedule as a grid.

    marks  actions to show in brackets, each with a column. An action that cannot run is drawn in that column, or for -1
           right after the last action of its rank. With marks, a large grid is cut to the surroundings of the first.
    """
    rows: list[dict[int, str]] = [{} for _ in range(schedule.num_ranks)]
    for (rank, action), (start, end) in unit_steps(schedule, edges).items():
        if action.computes:
            rows[rank][start] = f"[{action}]" if (rank, action) in (marks or {}) else str(action)
            rows[rank].update((step, "==") for step in range(start + 1, end))
    focus: RankAction | None = None
    step = 0
    for (rank, action), wanted in (marks or {}).items():
        if f"[{action}]" in rows[rank].values():
            column = next(step for step, text in rows[rank].items() if text == f"[{action}]")
        else:
            column = max(wanted, max(rows[rank], default=-1) + 1)
            rows[rank][column] = f"[{action}]"
        if focus is None:
            focus, step = (rank, action), column
    return _print(rows, None if focus is None else (focus[0], step))


def _print(rows: list[dict[int, str]], focus: tuple[int, int] | None) -> str:
    length = max((max(row) + 1 for row in rows if row), default=1)
    cell = max((len(text) for row in rows for text in row.values()), default=1) + 1
    first, last, low, high = 0, length, 0, len(rows)
    if focus is not None:
        shown = max(_WIDTH // cell, 3)
        first = max(min(focus[1] - shown // 2, length - shown), 0)
        last = min(first + shown, length)
        low = max(min(focus[0] - _RANKS // 2, len(rows) - _RANKS), 0)
        high = min(low + _RANKS, len(rows))
    name = len(f"rank {len(rows) - 1}")
    lines = []
    for rank in range(low, high):
        cells = (rows[rank].get(step, ".").rjust(cell) for step in range(first, last))
        lines.append(
            f"{f'rank {rank}':<{name}} |{'...' if first else ''}{''.join(cells)}{' ...' if last < length else ''}"
        )
    if high - low < len(rows):
        lines.append(f"(ranks {low} to {high - 1} of {len(rows)}, steps {first} to {last - 1} of {length})")
    elif last - first < length:
        lines.append(f"(steps {first} to {last - 1} of {length})")
    return "\n".join(lines)
