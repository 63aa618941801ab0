"""The bucket policy, which decides the gradients that are reduced together."""

from __future__ import annotations

from collections.abc import Sequence


def split_buckets(sizes: Sequence[int], bucket_bytes: int, first_bytes: int) -> list[list[int]]:
    """Split consecutive items into buckets, as lists of indices.

    A bucket is closed as soon as its items have `bucket_bytes` or more, the first one as soon as they have
    `first_bytes`. `sizes` are the bytes of the items.
    """
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
    """The bytes at which a bucket is closed: a sixteenth of `total_bytes`, but from 1 MiB to `bucket_bytes`.

    Small buckets let most of the all-reduce overlap with the backward, and have few bytes in flight at a time.
    """
    return min(bucket_bytes, max(1 << 20, total_bytes // 16))
