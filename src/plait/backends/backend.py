"""The protocols of a backend, which turns a RankProgram into an Executable for one rank."""

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
    """The results of one microbatch: a scalar loss, and local tensors by the names of their parameters and buffers.

    `gradients` lacks parameters that lie on other ranks and gradients that are offloaded. An offloaded gradient must
    still be multiplied by `factor`.
    """

    loss: Tensor
    parts: tuple[Tensor, Tensor] | None  # (sum, weight) if the loss function returned these
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    factor: float | Tensor = 1.0
    aux: tuple[Outputs, ...] | None = None  # outputs beside the loss, one entry per microbatch
    counts: tuple[Tensor, ...] = ()  # of each microbatch, which say what has no gradient (Captured.left_out)


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
        """Run the microbatches of one step. Returns one result per microbatch; the last one has this rank's gradients,
        summed over all microbatches.

        key         seed of the random draws, the same on every rank
        parameters  local tensors by name, laid out as RankProgram.layouts says
        buffers     local tensors by name; the step writes their new values into them
        batches     for each microbatch its leaves, by name
        scale       scalar by which the loss is multiplied before it is differentiated
        update      called with the gradients of each group of microbatches by a schedule that updates parameters within
                    the step; changes `parameters` in place
        """


class Backend(Protocol):
    """A way to execute programs on a rank."""

    def build(self, program: RankProgram, world: World, recorder: TraceRecorder | None = None) -> Executable:
        """Make the executable of this world's rank; every rank makes one. A recorder, if given, records its spans."""
