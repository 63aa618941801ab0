"""A pipelined step on one rank: it runs the schedule, then the ranks share gradients, buffers and losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.fx import Graph

from plait.backends.backend import StepResult, Update
from plait.backends.eager.cell_runner import CellRunner, StaleRunner
from plait.backends.eager.offload.pipeline_activations import PipelineActivations
from plait.backends.eager.offload.store import Offload
from plait.backends.eager.program import Program, outputs_of
from plait.backends.eager.schedule_executor import ScheduleExecutor
from plait.backends.recorder import TraceRecorder
from plait.comm.protocol import World
from plait.compile.capture.loss_values import Outputs
from plait.compile.ir.calls import output_node
from plait.compile.rank_program import RankProgram
from plait.plan.axes import stage_axis
from plait.plan.sharding_plan import DEVICE


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
