"""A pipelined step on one rank: it runs the schedule, then the ranks share gradients, buffers and losses.

A cell is the forward or backward of one stage. Its graph reads parameters, buffers, one microbatch, the values that
earlier cells saved, and the sums of gradients so far.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from plait.backends.backend import StepResult, Update
from plait.backends.eager.offload.pipeline_activations import PipelineActivations
from plait.backends.eager.offload.store import Offload
from plait.backends.eager.program import Program, outputs_of
from plait.backends.eager.rewrites.dead_values import SavedValues
from plait.backends.eager.schedule_executor import ScheduleExecutor
from plait.backends.recorder import TraceRecorder
from plait.comm.protocol import World
from plait.compile.capture.loss_values import Outputs
from plait.compile.ir.calls import output_node
from plait.compile.ops.draw import micro_key
from plait.compile.rank_program import RankProgram
from plait.plan.axes import stage_axis
from plait.plan.sharding_plan import DEVICE
from plait.schedule.readiness import Cell
from plait.spec.schedule import BACKWARD, Schedule


class CellRunner:
    """The Runner of a schedule that updates parameters after the step.

    When all cells have run, `gradients` has the sums over all microbatches, by parameter; `losses` has the scalars of
    the loss, by (kind, microbatch).
    """

    def __init__(
        self,
        program: Program,
        micro_graphs: Mapping[Cell, Sequence[str]],
        exchange: Callable[[dict[str, Tensor]], None],
        key: int,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        batches: Sequence[Mapping[str, Tensor]],
        scale: Tensor | None,
    ) -> None:
        assert program.program.pipeline is not None
        self._program = program
        self._pipeline = program.program.pipeline
        self._micro_graphs = micro_graphs
        self._exchange = exchange
        self._key = key
        self._parameters = parameters
        self._buffers = buffers
        self._batches = batches
        self._scale = scale
        self._counts: Counter[Cell] = Counter()
        self._sums: dict[Cell, dict[str, Tensor]] = defaultdict(dict)
        self.losses: dict[tuple[str, int], Tensor] = {}
        self.aux: dict[tuple[str, str, int], Tensor] = {}  # by kind, name and microbatch
        self.gradients: dict[str, Tensor] = {}

    def run_cell(self, cell: Cell, micro: int, saved: SavedValues) -> Mapping[str, Tensor]:
        """Run the cell on a microbatch and add its gradients to the sums."""
        found = self._call(cell, micro, saved, self._micro_graphs[cell][self._counts[cell]], self._parameters)
        self._counts[cell] += 1
        self._sums[cell] = found["gradient"]
        if self._counts[cell] == len(self._micro_graphs[cell]):
            for name, gradient in self._sums.pop(cell).items():
                before = self.gradients.get(name)
                self.gradients[name] = gradient if before is None else before.add_(gradient)
        return found["value"]

    def reduce(self) -> None:
        """Sum the gradients that other ranks of the pipeline have too."""
        self._exchange(self.gradients)

    def update(self, micro: int) -> None:
        """Nothing: parameters are updated after the step."""

    def _call(
        self, cell: Cell, micro: int, saved: SavedValues, graph: str, parameters: Mapping[str, Tensor]
    ) -> dict[str, dict[str, Tensor]]:
        found = self._program.call(
            graph,
            self._pipeline.cells.graphs[cell].outputs,
            parameter=parameters,
            buffer=self._buffers,
            batch=self._batches[micro],
            sum=self._sums[cell],
            key=micro_key(self._key, micro),
            scale=self._scale,
            saved=saved,
        )
        for name, value in found["buffer"].items():
            self._buffers[name].copy_(value)
        for kind in ("loss", "sum", "weight"):
            for value in found[kind].values():
                self.losses[kind, micro] = value
        for kind in ("aux", "aux_weight"):
            for name, value in found[kind].items():
                self.aux[kind, name, micro] = value
        return found


class StaleRunner(CellRunner):
    """The Runner of an asynchronous pipeline, which updates weights while microbatches are in flight.

    The backward of a microbatch uses the very weights that its forward on this rank used (weight stashing). A rank
    copies its weights before an update only if a microbatch still needs them. So it holds no more versions than the
    definition asks for: num_ranks - rank under PipeDream, two under 2BW (Narayanan et al. 2019, "PipeDream: Generalized
    Pipeline Parallelism for DNN Training"; 2021, "Memory-Efficient Pipeline-Parallel DNN Training").

    `schedule` says which version each microbatch uses and which microbatches are updated together. `update` is called
    with the mean gradients of each such group.
    """

    def __init__(self, *rest: Any, schedule: Schedule, rank: int, update: Update) -> None:
        super().__init__(*rest)
        self._update = update
        self._groups = schedule.groups()
        self._version = {micro: schedule.version(rank, micro) for micro in range(schedule.num_micro)}
        self._users = Counter(
            self._version[a.micro] for a in schedule.ranks[rank] if a.kind == BACKWARD and a.micro is not None
        )  # backwards still to run, by the version that they use
        self._newest = 0
        self._older: dict[int, dict[str, Tensor]] = {}
        self._of_group: dict[int, dict[Cell, dict[str, Tensor]]] = {}  # sums of gradients, by the first microbatch
        self._done: Counter[tuple[int, Cell]] = Counter()
        self.most_versions = 1

    def run_cell(self, cell: Cell, micro: int, saved: SavedValues) -> Mapping[str, Tensor]:
        """Run the cell with the version of the weights that the schedule gives the microbatch."""
        version, (first, num) = self._version[micro], self._groups[micro]
        weights = self._parameters if version == self._newest else self._older[version]
        backward = cell[0] == BACKWARD
        micro_graphs = self._program.program.micro_graphs_of_cell(cell, num if backward else 1)
        if backward:
            self._sums = defaultdict(dict, self._of_group.get(first, {}))
        found = self._call(cell, micro, saved, micro_graphs[self._done[first, cell] if backward else 0], weights)
        if backward:
            self._done[first, cell] += 1
            self._of_group.setdefault(first, {})[cell] = found["gradient"]
            self._users[version] -= 1
            if not self._users[version]:
                self._older.pop(version, None)
        return found["value"]

    def update(self, micro: int) -> None:
        """Update the weights by the mean gradients of the group of this microbatch."""
        first, num = self._groups[micro]
        gradients: dict[str, Tensor] = {}
        for sums in self._of_group.pop(first, {}).values():
            gradients |= sums
        if num > 1 and gradients:
            torch._foreach_div_(list(gradients.values()), float(num))
        if self._users[self._newest]:
            self._older[self._newest] = {name: tensor.clone() for name, tensor in self._parameters.items()}
        self._newest += 1
        self.most_versions = max(self.most_versions, 1 + len(self._older))
        self._update(gradients)


class PipelineProgram:
    """The Executable of a step with a pipeline."""

    def __init__(
        self,
        program: RankProgram,
        graphs: Mapping[str, Graph],
        world: World,
        offload: Offload,
        recorder: TraceRecorder | None = None,
    ) -> None:
        assert program.pipeline is not None
        self.program = program
        self.world = world
        self.pipeline = program.pipeline
        self._cells = Program(program, graphs, world, offload, recorder)
        self.comm = world.comm(stage_axis())
        self._offload = offload
        # Gradients that are offloaded once they are summed.
        self._offloaded = program.sharding.gradients_away & self.pipeline.added_up
        cells, schedule = self.pipeline.cells, self.pipeline.schedule
        self._here = world.mesh.coordinates(world.rank)
        activations = None
        if program.sharding.activation_memory != DEVICE:
            activations = PipelineActivations(offload, schedule, self.comm.rank, cells.values)
        self._executor = ScheduleExecutor(
            schedule, cells.values, list(cells.graphs), self.comm, self._here, recorder, world.device, activations
        )
        chunks = schedule.stages[self.comm.rank]
        self._micro_graphs = {
            cell: program.micro_graphs_of_cell(cell, schedule.num_micro_of(self.comm.rank, chunks.index(cell[1])))
            for cell in cells.graphs
            if cell[1] in chunks
        }
        self._makers: dict[tuple[str, str], list[int]] = defaultdict(list)  # ranks, by kind and name
        for cell, each in cells.graphs.items():
            for output in each.outputs:
                self._makers[output.kind, output.name] += [
                    rank for rank, chunk in schedule.holders(cell[1]) if schedule.num_micro_of(rank, chunk)
                ]
        self._loss_dtypes = {
            output.kind: result.meta["val"].dtype
            for each in cells.graphs.values()
            for output, result in zip(each.outputs, output_node(each.graph).args[0], strict=True)  # type: ignore[arg-type]
            if output.kind in ("loss", "sum", "weight")
        }
        self._aux = {
            (output.kind, output.name): (cell[1], result.meta["val"])
            for cell, each in cells.graphs.items()
            for output, result in zip(each.outputs, output_node(each.graph).args[0], strict=True)  # type: ignore[arg-type]
            if output.kind in ("aux", "aux_weight")
        }
        self.most_versions = 1  # of the weights that this rank has held at a time
        parameters = program.sharding.parameters
        self._shared = [name for name, each in parameters.items() if stage_axis() in each.reduce_axes]

    @property
    def collective_order(self) -> str:
        """The order of this rank's collectives, as Executable defines it."""
        return self._cells.collective_order

    def run(
        self,
        key: int,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        batches: Iterable[Mapping[str, Tensor]],
        scale: Tensor | None = None,
        update: Update | None = None,
    ) -> list[StepResult]:
        """Run one step as Executable.run says."""
        rest = (self._cells, self._micro_graphs, self.exchange, key, parameters, buffers, list(batches), scale)
        step: CellRunner
        if self.pipeline.schedule.asynchronous:
            assert update is not None, "only a trainer steps under an asynchronous schedule"
            step = StaleRunner(*rest, schedule=self.pipeline.schedule, rank=self.comm.rank, update=update)
        else:
            step = CellRunner(*rest)
        self._executor.run(step)
        if isinstance(step, StaleRunner):
            self.most_versions = step.most_versions
        for name in self._offloaded & step.gradients.keys():
            self._offload.leave(f"gradient/{name}", step.gradients.pop(name))
        self._spread_buffers(buffers)
        return self._results(step)

    def exchange(self, sums: dict[str, Tensor]) -> None:
        """Sum the gradients of parameters that several ranks of the pipeline have; all ranks add in the same order.
        Changes `sums`, this rank's gradients by name."""
        mine = self.comm.rank
        works, sent = [], []
        for number, name in enumerate(self._shared):
            ranks = self.pipeline.ranks_of(name)
            if mine in ranks and self.program.sharding.states[name].lies_at(self._here):
                makers = [rank for rank in ranks if rank in self._makers["gradient", name]]
                if mine in makers:
                    for peer in ranks:
                        if peer != mine:
                            sent.append(self.comm.send(sums[name].contiguous(), peer, tag=number))
                works.append((name, makers, number))
        for name, makers, number in works:
            terms = {}
            for rank in makers:
                terms[rank] = sums[name] if rank == mine else self._receive(name, rank, number)
            if makers:
                total = sums[name] = terms[makers[0]].clone()
                for rank in makers[1:]:
                    total.add_(terms[rank])
        for work in sent:  # until then the tensors that are sent must stay as they are
            work.wait()

    def _receive(self, name: str, rank: int, tag: int) -> Tensor:
        shape = self.program.sharding.states[name].local_shape(self.world.mesh, self._here)
        like = torch.empty(shape, dtype=self.program.dtype_of(name), device=self.world.device)
        return self.comm.recv(like, rank, tag).wait()

    def _spread_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        for name in [name for kind, name in self._makers if kind == "buffer"]:
            root = self._makers["buffer", name][0]
            buffers[name].copy_(self.comm.broadcast(buffers[name].contiguous(), root).wait())

    def _results(self, step: CellRunner) -> list[StepResult]:
        """The results of all microbatches, with the losses on every rank."""
        num = self.pipeline.schedule.num_micro
        mine = torch.zeros(len(self._loss_dtypes), num, dtype=torch.float64, device=self.world.device)
        for row, kind in enumerate(self._loss_dtypes):
            for micro in range(num):
                if (kind, micro) in step.losses:  # on the one rank that has the last stage of this microbatch
                    mine[row, micro] = step.losses[kind, micro]
        rows = self.comm.all_reduce(mine).wait()
        found = {kind: row.to(dtype) for row, (kind, dtype) in zip(rows, self._loss_dtypes.items(), strict=True)}
        aux = self._outputs(step)
        results = []
        for micro in range(num):
            parts = (found["sum"][micro], found["weight"][micro]) if "sum" in found else None
            gradients = step.gradients if micro == num - 1 else {}
            results.append(StepResult(found["loss"][micro], parts, gradients, {}, aux=aux[micro]))
        return results

    def _outputs(self, step: CellRunner) -> list[tuple[Outputs] | None]:
        """The outputs beside the loss of each microbatch, on every rank: each is broadcast by the rank that made it."""
        schedule, mine = self.pipeline.schedule, self.comm.rank
        works = {}
        for (kind, name), (stage, like) in self._aux.items():
            roots = [schedule.where(stage, micro)[0] for micro in range(schedule.num_micro)]
            for root in dict.fromkeys(roots):  # one broadcast from each rank
                micros = [micro for micro, rank in enumerate(roots) if rank == root]
                if root == mine:
                    sent = torch.stack([step.aux[kind, name, micro] for micro in micros])
                else:
                    sent = torch.empty((len(micros), *like.shape), dtype=like.dtype, device=self.world.device)
                works[kind, name, root] = micros, self.comm.broadcast(sent, root)
        found: list[dict[str, dict[str, Tensor]]] = [{"aux": {}, "aux_weight": {}} for _ in range(schedule.num_micro)]
        for (kind, name, _), (micros, work) in works.items():
            for micro, value in zip(micros, work.wait().unbind(), strict=True):
                found[micro][kind][name] = value
        parts = [outputs_of(self.program.captured, each["aux"], each["aux_weight"]) for each in found]
        return [None if part is None else (part,) for part in parts]
