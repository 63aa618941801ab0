"""Which activations are dropped after forward and worked out again in backward, as a value of the plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recompute:
    """`none`, `layer` (all of each layer), `budget` (as much as fits `budget_bytes`), `pattern` (modules by name)."""

    kind: str = "none"
    budget_bytes: int = 0
    pattern: str = ""


NO_RECOMPUTE = Recompute()
