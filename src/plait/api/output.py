"""Standard output that cannot end a run: what nobody reads, or a full disk does not take, is dropped."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Raw(io.FileIO):
    """A file whose writes do not fail; `failed` is the error of the last that would have."""

    failed: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failed = error
            return len(memoryview(data).cast("B"))


@contextmanager
def lasting_output() -> Iterator[None]:
    """Print within it without OSError or UnicodeEncodeError: a character that the encoding lacks is escaped.

    If the reader of a pipe has gone, the rest is dropped in silence, as it is for `head`. What else did not take the
    output is told at the end, with status 1 unless the body raises.
    """
    before = sys.stdout
    try:
        before.flush()
        raw = _Raw(before.fileno(), "w", closefd=False)
    except (OSError, ValueError, AttributeError):  # closed, or no file, as in tests
        yield
        return
    assert isinstance(before, io.TextIOWrapper)
    here = io.TextIOWrapper(
        raw if before.write_through else io.BufferedWriter(raw),
        encoding=before.encoding,
        errors="backslashreplace",
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )
    sys.stdout = here
    try:
        yield
    finally:
        here.flush()
        if sys.stdout is here:
            sys.stdout = before
        failed = None if isinstance(raw.failed, BrokenPipeError) else raw.failed
        if failed is not None:
            print(f"plait: the output could not be written: {failed.strerror}", file=sys.stderr)
    if failed is not None:
        raise SystemExit(1)
