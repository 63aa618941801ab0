"""What a coordinator that comes back has to know, and servers do not: who is a member, and what has been said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


class Journal:
    """A file of one run, which is there whole or as it was before."""

    def __init__(self, path: Path, job: str) -> None:
        self._path, self._job, self._written = path, job, ""

    def write(self, members: Sequence[int], unused: Sequence[int]) -> None:
        """Workers that are members, and of every server the updates and gradients that it was said to be without."""
        if (text := json.dumps({"job": self._job, "members": members, "unused": unused})) != self._written:
            new = self._path.with_suffix(".new")
            new.write_text(text)
            new.replace(self._path)
            self._written = text

    def read(self) -> tuple[list[int], list[int]] | None:
        """The members and what is unused; None where there is nothing of this run."""
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return None
        return (found["members"], found["unused"]) if found["job"] == self._job else None
