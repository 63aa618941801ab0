"""Cuts a chain of work into pipeline stages: the exact optimum, by dynamic programming.

Items are in the order in which they run, and a stage is a run of consecutive items. The cost of a stage is the time of
its work, and of its sends and receives. The chosen cut has the lowest cost of its most expensive stage, and among such
cuts the lowest time of all transfers. A value that skips stages counts where it is sent and where it is received, not
in between.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Item:
    """Work that is not cut.

    Attributes:
        seconds: its time, forward and backward.
        state_bytes: its parameters, gradients and optimizer state.
        activation_bytes: what one microbatch keeps of it from forward to backward.
    """

    seconds: float
    state_bytes: int = 0
    activation_bytes: int = 0


@dataclass(frozen=True)
class Flow:
    """A value that item `source` passes to the later items `users`; a transfer between stages takes `seconds`."""

    source: int
    users: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Memory:
    """The bytes that each stage may hold, and for each stage how many microbatches it has in flight."""

    limit: int
    in_flight: tuple[int, ...]


def stage_costs(items: Sequence[Item], flows: Sequence[Flow]) -> tuple[Matrix, Matrix]:
    """For every possible stage [i, j) of items its cost in seconds, and the seconds of its sends and receives.

    Both matrices are [n + 1, n + 1]; entries with j <= i have no meaning.
    """
    n = len(items)
    work = np.concatenate([[0.0], np.cumsum([item.seconds for item in items])])
    moved = np.zeros((n + 2, n + 2))  # as differences along both dims

    def add(first_i: int, last_i: int, first_j: int, last_j: int, seconds: float) -> None:
        if first_i <= last_i and first_j <= last_j:
            moved[first_i, first_j] += seconds
            moved[last_i + 1, first_j] -= seconds
            moved[first_i, last_j + 1] -= seconds
            moved[last_i + 1, last_j + 1] += seconds

    for flow in flows:
        users = sorted({user for user in flow.users if user > flow.source})
        if not users:
            continue
        add(0, flow.source, flow.source + 1, users[-1], flow.seconds)  # sent: made in the stage and read after it
        before = flow.source
        for user in users:  # received: `user` is the first in its stage to read it
            add(before + 1, user, user + 1, n, flow.seconds)
            before = user
    moved = moved.cumsum(0).cumsum(1)[: n + 1, : n + 1]
    return work[None, :] - work[:, None] + moved, moved


def choose_cut(
    items: Sequence[Item],
    flows: Sequence[Flow],
    num_stages: int,
    allowed: Sequence[Collection[int] | None] | None = None,
    memory: Memory | None = None,
    copies: Sequence[int] = (),
) -> tuple[int, ...] | None:
    """The first item of each stage but the first, or None if there is no such cut.

    `allowed` gives, for each of these stages, the items at which it may begin, or None for any. `memory` limits what a
    stage holds. A stage with `copies[k]` replicas works on that many microbatches at a time.
    """
    n = len(items)
    costs, moved = stage_costs(items, flows)
    costs[np.tril_indices(n + 1)] = np.inf  # no stage is empty
    ends = [_mask(n, allowed[k] if allowed else None) for k in range(num_stages - 1)] + [_mask(n, {n}, last=True)]
    too_large = [_too_large(items, memory, k) if memory else None for k in range(num_stages)]
    each = [costs / number for number in copies or [1] * num_stages]
    dearest = _best(each, ends, too_large, np.maximum)
    if dearest is None:
        return None
    bottleneck = dearest[0]
    cheap = [np.where(cost <= bottleneck * (1 + 1e-9), moved, np.inf) for cost in each]
    found = _best(cheap, ends, too_large, np.add)
    assert found is not None
    return found[1]


def _mask(n: int, allowed: Collection[int] | None, last: bool = False) -> NDArray[np.bool_]:
    mask = np.zeros(n + 1, dtype=bool)
    if last:
        mask[n] = True
    elif allowed is None:
        mask[1:n] = True
    else:
        mask[[i for i in allowed if 0 < i < n]] = True
    return mask


def _too_large(items: Sequence[Item], memory: Memory, stage: int) -> NDArray[np.bool_]:
    held = np.array([i.state_bytes + i.activation_bytes * memory.in_flight[stage] for i in items], dtype=np.float64)
    total = np.concatenate([[0.0], np.cumsum(held)])
    large: NDArray[np.bool_] = total[None, :] - total[:, None] > memory.limit
    return large


def _best(
    costs: Sequence[Matrix],
    ends: Sequence[NDArray[np.bool_]],
    too_large: Sequence[NDArray[np.bool_] | None],
    join: np.ufunc,
) -> tuple[float, tuple[int, ...]] | None:
    """The least cost of all stages under `join`, and the first item of each stage but the first; None if no cut is
    allowed."""
    size = costs[0].shape[0]
    reached = np.full(size, np.inf)
    reached[0] = 0.0
    came_from = []
    for stage, mask, large in zip(costs, ends, too_large, strict=True):
        stage = stage if large is None else np.where(large, np.inf, stage)
        joined = join(reached[:, None], stage)
        joined[~np.isfinite(reached)] = np.inf
        came_from.append(joined.argmin(0))
        reached = np.where(mask, joined.min(0), np.inf)
    if not np.isfinite(reached[-1]):
        return None
    places = [size - 1]
    for came in reversed(came_from):
        places.append(int(came[places[-1]]))
    return float(reached[-1]), tuple(reversed(places[1:-1]))
