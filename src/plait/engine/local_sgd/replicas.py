"""The replicas of a plan whose ranks synchronise less often than every step, or through a compressor.

Along one axis of the mesh, every rank has a replica or a part of one. A replica trains under `plan.inner_plan`, on its
rows of the batch, with random draws of its own. This file computes what replicas have in common.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from plait.backends.backend import StepResult
from plait.comm.protocol import World
from plait.compile.capture.loss_values import ROWS, LossPart, Outputs, join_outputs
from plait.cost.wire_bytes import bytes_exchanged
from plait.engine.executor import StepExecutor, scale_all
from plait.engine.local_sgd.diloco import LocalTraining
from plait.engine.local_sgd.exchange import MeanExchange
from plait.engine.step_results import gather_outputs
from plait.plan.axes import parts_around
from plait.plan.compression import NO_COMPRESSION
from plait.plan.plan import Plan
from plait.plan.sharding_plan import ShardingPlan


class Replicas:
    """One rank's view of the replicas.

    local      synchronisation every n steps; None if gradients are exchanged at every step
    exchange   the exchange of gradients, or of weights with `local`
    agreed_at  the last step after which all replicas had the same weights
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        replica: StepExecutor,
        optimizer: torch.optim.Optimizer,
        step: int = 0,
    ) -> None:
        axis = plan.relaxed_axis
        self.plan = plan
        self.axis = axis
        self.num = plan.mesh.axis_size(axis)
        self.index = world.mesh.coordinates(world.rank)[axis]
        self._executor = replica
        self._comm = world.comm(axis)
        self._device = world.device
        self._means = MeanExchange(self._comm, NO_COMPRESSION)
        self.trained = {name: p for name, p in replica.parameters.items() if p.requires_grad}
        self.local: LocalTraining | None = None
        self.exchange = MeanExchange(self._comm, plan.compress, plan.exempt)
        if plan.sync != 1:
            sizes = {name: math.prod(replica.layouts[name].shape) for name in replica.layouts}
            self.local = LocalTraining(plan, self._comm, self.trained, sizes, optimizer)
            self.exchange = self.local.exchange
        self._seconds = 0.0
        self.agreed_at = step

    def gradients(self, result: StepResult) -> StepResult:
        """The result of a step with synchronous training: the loss of the global batch, and the mean gradients."""
        start = time.perf_counter()
        total, weight = result.parts or (result.loss, torch.ones_like(result.loss))
        mine = torch.stack([total.detach().double(), weight.detach().double()])
        sums = self._comm.all_reduce(mine).wait()
        gradients = result.gradients
        if result.parts is not None:
            scale_all(list(gradients.values()), mine[1] * self.num / sums[1])
        gradients = {name: mean.to(gradients[name].dtype) for name, mean in self.exchange.mean(gradients).items()}
        self._seconds += time.perf_counter() - start
        loss = (sums[0] / sums[1]).to(result.loss.dtype)
        parts = None if result.parts is None else (sums[0], sums[1])
        aux = None if result.aux is None else self.outputs(result.aux)
        return dataclasses.replace(result, loss=loss, parts=parts, gradients=gradients, aux=aux)

    def outputs(self, aux: Sequence[Outputs]) -> tuple[Outputs, ...]:
        """The auxiliary outputs of each microbatch from all replicas, with rows in the order of the global batch."""
        before, _ = parts_around(self.plan.mesh, self.axis)
        found = []
        for outputs in aux:
            rows = next((float(part.weight) for part in outputs.values() if part.kind == "mean"), 1.0)
            rows = next((float(len(part.value)) for part in outputs.values() if part.kind == ROWS), rows)
            joined = join_outputs(gather_outputs(self._comm, outputs, [rows] * self.num, self._device))
            for name, part in joined.items():
                if part.kind == ROWS and before > 1:
                    rows = part.value.unflatten(0, (self.num, before, -1)).transpose(0, 1).flatten(0, 2)
                    joined[name] = LossPart(ROWS, rows)
            found.append(joined)
        return tuple(found)

    def take_seconds(self) -> float:
        """Seconds spent on exchanges since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def stepped(self, step: int) -> None:
        """Synchronise after `step` steps, if it is due."""
        start = time.perf_counter()
        self._agree_if_due(step)
        self._seconds += time.perf_counter() - start

    def _agree_if_due(self, step: int) -> None:
        if self.local is None:
            self.agreed_at = step
            return
        if self.local.after(step):
            self._executor.updated()
        if self.local.agreed(step):
            self.agreed_at = step
            self._agree_on_buffers()

    def agree(self, step: int) -> None:
        """Synchronise now, whether or not it is due."""
        if self.local is not None and self.agreed_at != step:
            self.local.agree()
            self._executor.updated()
        self.agreed_at = step
        self._agree_on_buffers()

    @contextmanager
    def aggregated(self, step: int) -> Iterator[None]:
        """Context in which weights and buffers are the means over replicas. Training goes on with the replica's own."""
        if self.agreed_at == step and self.local is not None:
            yield
            return
        means = self.means(step)
        here = {**{n: p.detach() for n, p in self.trained.items()}, **self.float_buffers()}
        own = {name: here[name].clone() for name in means}
        self._put(here, means)
        try:
            yield
        finally:
            self._put(here, own)

    def means(self, step: int) -> dict[str, Tensor]:
        """The means over replicas of this rank's parts of trained parameters, and of buffers, by name."""
        tensors = dict(self.float_buffers())
        if self.agreed_at != step:
            tensors |= {name: p.detach() for name, p in self.trained.items()}
        return self._means.mean(tensors) if tensors else {}

    def mean_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The means over replicas of float32 tensors, by name."""
        return self._means.mean(tensors) if tensors else {}

    def sum_of(self, numbers: Tensor) -> Tensor:
        """The sums over replicas of a tensor of numbers."""
        return self._comm.all_reduce(numbers.to(self._device)).wait()

    def _agree_on_buffers(self) -> None:
        buffers = self.float_buffers()
        self._put(buffers, self._means.mean(buffers) if buffers else {})

    def _put(self, here: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            here[name].copy_(value)
        self._executor.updated()

    def begin(self, step: int) -> None:
        """Continue from weights that have been loaded, equal on all replicas, after `step` steps."""
        self.agreed_at = step
        self.exchange.errors.clear()
        self.exchange.factors.clear()
        if self.local is not None and self.local.outer:
            self.local.begin()

    def float_buffers(self) -> dict[str, Tensor]:
        """Floating-point buffers, such as running statistics, by name. Replicas have their own until they
        synchronise."""
        return {name: buffer for name, buffer in self._executor.buffers.items() if buffer.is_floating_point()}


def bytes_kept(plan: Plan) -> int:
    """Bytes that a rank keeps per trained number: the synchronised weights, the outer optimizer's momentum, and the
    error of a compressor."""
    return 8 * plan.keeps_agreed + 4 * (plan.compress != NO_COMPRESSION)


def bytes_sent(plan: Plan, sharding: ShardingPlan, here: Mapping[str, int]) -> float:
    """Bytes that the rank at these coordinates of a replica sends for all replicas to agree once on what it trains.

    `sharding` is that of the plan of one replica."""
    mesh, num, sent = plan.inner_plan.mesh, plan.mesh.axis_size(plan.relaxed_axis), 0.0
    for name, each in sharding.parameters.items():
        if not each.frozen and each.state.lies_at(here):
            plain = any(fnmatch.fnmatchcase(name, pattern) for pattern in plan.exempt)
            shape = each.state.local_shape(mesh, here)
            sent += bytes_exchanged(shape, NO_COMPRESSION if plain else plan.compress, num)
    return sent
