"""What a backend is: it turns the program of a plan's ranks into what runs on one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from plait.backends.recorder import TraceRecorder
from plait.comm.protocol import World
from plait.compile.capture.loss_values import Outputs
from plait.compile.rank_program import RankProgram

Update = Callable[[dict[str, Tensor]], None]


@dataclass(frozen=True)
class StepResult:
    """What a microbatch gave: local tensors by name. A gradient that lies on another rank is absent, and one that has
    left the device, which is still to be multiplied by `factor`."""

    loss: Tensor
    parts: tuple[Tensor, Tensor] | None  # (sum, weight) where the loss was given so
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    factor: float = 1.0
    aux: tuple[Outputs, ...] | None = None  # of each microbatch, where the loss came with outputs beside it


class Executable(Protocol):
    """The program of a step, ready to run on one rank."""

    @property
    def program(self) -> RankProgram: ...

    @property
    def collective_order(self) -> str:
        """A short text, equal on ranks that make the same collectives in the same order."""

    def run(
        self,
        key: int,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        batches: Iterable[Mapping[str, Tensor]],
        scale: Tensor | None = None,
        update: Update | None = None,
    ) -> list[StepResult]:
        """Run the microbatches of a step on local tensors; the last result has the sums of this rank's gradients.

        key         seeds the random draws, and is the same on every rank
        parameters  as the graphs read them (RankProgram.layouts), by name
        buffers     by name; they take their new values
        batches     the leaves of each microbatch, by name
        scale       multiplies the loss that is differentiated
        update      called by a schedule that updates within the step, with the gradients of each group of microbatches;
                    it changes `parameters` in place
        """


class Backend(Protocol):
    """One way to execute programs on a rank."""

    def build(self, program: RankProgram, world: World, recorder: TraceRecorder | None = None) -> Executable:
        """What runs the program on the rank of this world, recorded if there is a recorder. Every rank makes one."""
