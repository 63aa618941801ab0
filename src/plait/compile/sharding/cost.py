"""Bytes that a rank sends to bring a value from one placement to another, and which changes are possible at all."""

from __future__ import annotations

import math

from plait.spec.layout import Only, Partial, Placement, Replicate, Shard

IMPOSSIBLE = math.inf


def conversion_bytes(have: Placement, want: Placement, num_bytes: int, size: int) -> float:
    """Bytes per rank over an axis of `size` ranks for a tensor of `num_bytes` in all, by ring algorithms."""
    if have == want:
        return 0.0
    share = num_bytes * (size - 1) / size
    match have, want:
        case Replicate(), Shard() | Only():
            return 0.0
        case Only(), Partial(op="sum"):
            return 0.0
        case _, Partial():
            return IMPOSSIBLE
        case Partial(), Shard():
            return share
        case Partial(), _:
            return 2 * share
        case Shard(dim=a), Shard(dim=b):
            return share / size if a != b else share
        case Only(), _:
            return float(num_bytes)
        case _:
            return share
