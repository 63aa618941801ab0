"""Chooses the values to keep from forward to backward and those to recompute, by an integer program.

The choice spends the fewest seconds on recomputation within a budget of bytes. To recompute a value, its sources must
be kept or recomputed too (Jain et al. 2020, "Checkmate", here with each value recomputed at most once). scipy's HiGHS
solves the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_GAP = 1e-3  # relative distance from the optimum at which the solver may stop
_SECONDS = 20.0  # time limit of the solver
_ROW = 1e5  # bytes are scaled so that the constraint on memory sums to this
_INFEASIBLE = 2  # a status of scipy's milp


@dataclass(frozen=True)
class KeptValue:
    """A value of the forward pass.

    Attributes:
        bytes: its size.
        seconds: the time to recompute it from its sources.
        needed: whether the backward pass reads it.
        keepable: false for a view, which is recomputed from its base at no cost.
        droppable: false for a sum over ranks, which is not communicated again: it is kept if anything needs it.
        sources: indices of the values that it is recomputed from.
    """

    bytes: int
    seconds: float
    needed: bool
    keepable: bool = True
    droppable: bool = True
    sources: tuple[int, ...] = ()


def choose_kept(values: Sequence[KeptValue], budget_bytes: int | None) -> set[int] | None:
    """Indices of the values to keep, or None if no choice fits `budget_bytes`.

    With a budget of None, the choice keeps the fewest bytes.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    num = len(values)
    if num == 0:
        return set() if budget_bytes is None or budget_bytes >= 0 else None
    # RankParameters of the program: kept[0..num), recomputed[0..num).
    size = np.array([v.bytes if v.keepable else 0 for v in values], dtype=float)
    total = max(size.sum(), 1.0)
    seconds = np.array([v.seconds for v in values])
    cost = np.concatenate([size / total, np.zeros(num)])
    if budget_bytes is not None:
        cost = np.concatenate([1e-6 * size / total, seconds / max(seconds.sum(), 1e-12)])
    rows: list[int] = []
    columns: list[int] = []
    entries: list[float] = []
    low: list[float] = []

    def at_least(terms: Sequence[tuple[int, float]], bound: float) -> None:
        for column, entry in terms:
            rows.append(len(low))
            columns.append(column)
            entries.append(entry)
        low.append(bound)

    for i, value in enumerate(values):
        if value.needed:
            at_least([(i, 1.0), (num + i, 1.0)], 1.0)
        for source in value.sources:
            at_least([(source, 1.0), (num + source, 1.0), (num + i, -1.0)], 0.0)
    if budget_bytes is not None:
        if budget_bytes < 0:
            return None
        scale = _ROW / total  # the solver's tolerance is absolute
        at_least([(i, -size[i] * scale) for i in range(num) if size[i]], -budget_bytes * scale)
    upper = np.array([v.keepable for v in values] + [v.droppable for v in values], dtype=float)
    matrix = coo_array((entries, (rows, columns)), shape=(len(low), 2 * num)).tocsr()
    found = milp(
        cost,
        integrality=np.ones(2 * num),
        bounds=Bounds(np.zeros(2 * num), upper),
        constraints=LinearConstraint(matrix, np.array(low), np.inf),
        options={"mip_rel_gap": _GAP, "time_limit": _SECONDS},
    )
    if found.x is None and found.status == _INFEASIBLE:
        return None
    if found.x is None:  # the time limit came before any choice that fits
        least = choose_kept(values, None) if budget_bytes is not None else None
        return least if least is not None and sum(values[i].bytes for i in least) <= (budget_bytes or 0) else None
    return {i for i in range(num) if found.x[i] > 0.5}
