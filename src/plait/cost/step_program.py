"""StepProgram: what a rank of a plan issues in a step, as plain values without graphs or tensors.

    RankProgram and the graphs of a backend -> compile/step_calls.py -> StepProgram
                                            -> cost/step_simulation.py, on a Cluster -> times and a Trace

A call has a `signature`: the op with the shapes and dtypes of its arguments. A cluster whose calls were measured has
their seconds by signature; of other calls the time is estimated from arithmetic and bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.cost.collective_time import CollectiveKind
from plait.schedule.readiness import Cell, Edges, RankAction
from plait.spec.mesh import Mesh
from plait.spec.schedule import Schedule


@dataclass(frozen=True, slots=True)
class OpCall:
    """A call that a rank computes alone.

    Attributes:
        signature: the op, and the shapes and dtypes of its arguments.
        phase: forward, backward or update.
        flops: floating-point operations of a matrix product, convolution or attention; 0 for other ops.
        num_bytes: bytes that it reads and writes; 0 for a view.
        dtype: in which it computes.
        module: path of the module that it belongs to.
        attention: whether it is an attention that stores no scores.
        parameters: of an update, how many it changes one after the other.
    """

    signature: str
    phase: str
    flops: float = 0.0
    num_bytes: float = 0.0
    dtype: str = "float32"
    module: str = ""
    attention: bool = False
    parameters: int = 0


@dataclass(frozen=True, slots=True)
class AxisCollective:
    """One collective that a call begins: its kind, the axis, and the bytes that a rank puts in."""

    kind: CollectiveKind
    axis: str
    held: int


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A call that begins collectives, waits for them, or does both.

    Attributes:
        signature: as in OpCall.
        phase: forward, backward or update.
        transfers: the collectives, one after the other; those that a wait ends too.
        part: "whole", "start" or "wait".
        begun: of a wait, the position of the start among the graph's calls.
        stream: the communicator; collectives of one stream run one after the other.
        what: what is sent, in words.
        copied: bytes that the rank reads and writes to lay out what it sends, before the collective, and what it has
            received, after it.
    """

    signature: str
    phase: str
    transfers: tuple[AxisCollective, ...]
    part: str = "whole"
    begun: int = -1
    stream: str = ""
    what: str = ""
    copied: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class CopyCall:
    """A call that begins a copy between the device and the host or the disk, or waits for one.

    Attributes:
        signature: as in OpCall.
        phase: forward or backward.
        num_bytes: of the copy.
        part: "start" or "wait".
        begun: of a wait, the position of the start among the graph's calls.
        home: host or disk.
    """

    signature: str
    phase: str
    num_bytes: int
    part: str
    begun: int = -1
    home: str = "host"


ProgramCall = OpCall | CollectiveCall | CopyCall


def moved_by(calls: Sequence[ProgramCall], by: int) -> tuple[ProgramCall, ...]:
    """The calls of a list that stands `by` places later in another: waits name the places of their starts."""
    return tuple(
        call if isinstance(call, OpCall) or call.begun < 0 else replace(call, begun=call.begun + by) for call in calls
    )


@dataclass(frozen=True)
class PipelineCalls:
    """How the ranks along the pipeline axis run the graphs of cells.

    Attributes:
        axis: the pipeline axis.
        schedule: with its transfers.
        edges: which cells need which.
        micro_graphs: for each rank along the axis and cell, the names of the graphs of its microbatches, in order.
        messages: for a SEND of a rank, the bytes that it moves.
        exchanged: by rank, the bytes of gradients that it sends to other ranks that have the same parameters, after all
            cells.
        after: what all ranks of the axis do after the step: sums of losses, and buffers that are broadcast.
    """

    axis: str
    schedule: Schedule
    edges: Edges
    micro_graphs: Mapping[tuple[int, Cell], tuple[str, ...]]
    messages: Mapping[RankAction, int]
    exchanged: tuple[int, ...] = ()
    after: tuple[CollectiveCall, ...] = ()


@dataclass(frozen=True)
class StepProgram:
    """All that one rank of each place of the pipeline issues in a step.

    Attributes:
        mesh: the plan's mesh.
        graphs: the calls of each graph, by name.
        micro_graphs: the graphs of the microbatches of a step, in order, without a pipeline.
        updates: by place along the pipeline, the calls of the optimizer's update, and of what follows it.
        pipeline: the schedule's part, if the step is split.
        rows: rows of the global batch.
        tokens: tokens of the global batch, or its rows if it has none.
        model_flops: floating-point operations of the model's products on the whole batch, without recomputation.
        dtype: that of most of these.
        batch_bytes: bytes of the batch that a rank reads.
    """

    mesh: Mesh
    graphs: Mapping[str, tuple[ProgramCall, ...]]
    micro_graphs: tuple[str, ...]
    updates: tuple[tuple[ProgramCall, ...], ...]
    pipeline: PipelineCalls | None = None
    rows: int = 1
    tokens: int = 1
    model_flops: float = 0.0
    dtype: str = "float32"
    batch_bytes: int = 0

    @property
    def num_places(self) -> int:
        """Places along the pipeline; 1 without one."""
        return len(self.updates)

    def rank_of(self, place: int) -> int:
        """A rank at this place: the one whose other coordinates are 0."""
        here = dict.fromkeys(self.mesh.names, 0)
        return self.mesh.rank(here | ({self.pipeline.axis: place} if self.pipeline is not None else {}))

    def calls_of(self, place: int) -> list[tuple[str, int]]:
        """The graphs that the rank at this place runs in a step, each with how often."""
        if self.pipeline is None:
            return [(name, self.micro_graphs.count(name)) for name in dict.fromkeys(self.micro_graphs)]
        names = [
            name
            for (rank, _), micro_graphs in self.pipeline.micro_graphs.items()
            if rank == place
            for name in micro_graphs
        ]
        return [(name, names.count(name)) for name in dict.fromkeys(names)]
