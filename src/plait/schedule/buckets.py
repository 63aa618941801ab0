"""Which gradients travel together."""

from __future__ import annotations

from collections.abc import Sequence


def split_buckets(sizes: Sequence[int], bucket_bytes: int, first_bytes: int) -> list[list[int]]:
    """Indices of consecutive items, closed as soon as a bucket holds `bucket_bytes` (the first: `first_bytes`)."""
    buckets: list[list[int]] = []
    members: list[int] = []
    held = 0
    for index, size in enumerate(sizes):
        members.append(index)
        held += size
        if held >= (bucket_bytes if buckets else min(first_bytes, bucket_bytes)):
            buckets.append(members)
            members, held = [], 0
    if members:
        buckets.append(members)
    return buckets


def bucket_limit(total_bytes: int, bucket_bytes: int) -> int:
    """Size at which a bucket is closed: a sixteenth of all, so that most of the sum overlaps with backward and little
    memory is under way at a time, but between 1 MiB and `bucket_bytes`."""
    return min(bucket_bytes, max(1 << 20, total_bytes // 16))
