"""The metrics of a job, as a test reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
