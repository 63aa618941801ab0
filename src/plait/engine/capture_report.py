"""The captures of a run: how many there were, how long each took, and what caused it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from plait.compile.capture.batch import batch_leaves
from plait.compile.ir.dtypes import torch_name

Leaves = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class StepCapture:
    """One capture of a step, with its layout and lowering.

    Attributes:
        cause: what differed from the capture before, in words; of a batch the tensor, the dim and both sizes.
        seconds: the time that it took on this rank.
        train: whether it is the step of training, or that of an evaluation.
    """

    cause: str
    seconds: float
    train: bool = True


@dataclass(frozen=True)
class CaptureReport:
    """The captures of a run, in order. Print it for a table."""

    captures: tuple[StepCapture, ...] = ()

    def __len__(self) -> int:
        return len(self.captures)

    def __iter__(self) -> Iterator[StepCapture]:
        return iter(self.captures)

    @property
    def seconds(self) -> float:
        """The time of all captures."""
        return sum(each.seconds for each in self.captures)

    @property
    def again(self) -> int:
        """The number of captures after the first one of training and the first one of evaluation."""
        return len(self) - len({each.train for each in self})

    def __str__(self) -> str:
        if not self.captures:
            return "no step was captured"
        lines = [f"captured {len(self)} time{'s' * (len(self) != 1)}, in {self.seconds:.1f} s"]
        for number, each in enumerate(self.captures, start=1):
            kind = "" if each.train else "evaluation: "
            lines.append(f"  {number:3}  {each.seconds:7.2f} s  {kind}{each.cause}")
        return "\n".join(lines)


def leaves_of(batch: Any) -> Leaves:
    """The dtype and shape of each tensor of a batch, by name."""
    return {name: (torch_name(leaf.dtype), tuple(leaf.shape)) for name, leaf in batch_leaves(batch).items()}


def difference_of_leaves(before: Leaves, now: Leaves) -> str:
    """What differs between the tensors of two batches, in words; empty if the tensors are alike."""
    if gone := [name for name in before if name not in now]:
        return f"the batch has no {gone[0]}, which the one before had"
    if new := [name for name in now if name not in before]:
        return f"the batch has {new[0]}, which the one before had not"
    found: dict[str, list[str]] = {}
    for name, (dtype, shape) in now.items():
        was, sizes = before[name]
        if was != dtype:
            return f"{name} is {dtype} after {was}"
        if len(sizes) != len(shape):
            return f"{name} has shape {list(shape)} after {list(sizes)}"
        for dim, (old, size) in enumerate(zip(sizes, shape, strict=True)):
            if old != size:
                found.setdefault(f"dim {dim} from {old} to {size}", []).append(name)
    return "; ".join(f"{', '.join(names)}: {what}" for what, names in found.items())
