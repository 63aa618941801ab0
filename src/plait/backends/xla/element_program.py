"""What an optimizer's step does to each element of a parameter, as a program of ATen ops of no shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

PARAMETER, GRADIENT = "parameter", "gradient"


@dataclass(frozen=True)
class ProgramValue:
    """A tensor of a program, by its number: first its inputs, then the results of its calls."""

    index: int


@dataclass(frozen=True)
class StepNumber:
    """A number that comes with each step, by its place among those of the program."""

    index: int


@dataclass(frozen=True)
class UpdateCall:
    """A call of a functional ATen op. Its result is the program's next value, of this dtype."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ElementProgram:
    """The update of one kind of parameter.

    inputs   what the first values are: PARAMETER, GRADIENT, or a key of the optimizer's state
    calls    in order
    outputs  the value that each of PARAMETER and the keys of the state has after the step
    """

    inputs: tuple[str, ...]
    calls: tuple[UpdateCall, ...]
    outputs: tuple[tuple[str, int], ...]
