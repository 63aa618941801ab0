"""Pages: what disks and memory are handed out in."""

from __future__ import annotations

PAGE = 4096  # bytes; direct input and output wants addresses, offsets and lengths in multiples of it


def padded(num_bytes: int) -> int:
    """Bytes of the whole pages that hold so many."""
    return -(-num_bytes // PAGE) * PAGE
