"""The serial program that defines what parameter servers compute, on one device. `verify` compares a plan with it.

The order of the pushes is given. A version of the values is a dict, a gradient is PyTorch's own, and an update is a
step of the user's optimizer on the full model. There are no servers, no pieces and no waiting.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.engine.local_batch import batch_part, num_rows, step_key
from plait.engine.local_sgd.tensor_compression import compress
from plait.engine.rank_optimizers import make_optimizer
from plait.integrations.ray_servers.server_job import Job
from plait.reference.local_sgd import norm_parts
from plait.reference.one_device import one_device_step
from plait.schedule.work_queue import WorkQueue

ServedTensors = dict[str, Tensor]


class SerialServers:
    """The workers of a job, one push after the other. All of them take their pieces from one batch."""

    def __init__(self, job: Job, batch: Any) -> None:
        self.job, self.plan, self.batch = job, job.plan, batch
        num = job.plan.workers
        self.model, self.loss_fn = job.make_model()
        self.twins = [copy.deepcopy(self.model) for _ in range(num if job.is_local else 1)]
        self.optimizers = [make_optimizer(job.optimizer, _named(twin)) for twin in self.twins if job.is_local]
        self.now = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.server = make_optimizer(job.server_optimizer, list(self.now.items()))
        self.handout = WorkQueue(0, job.num_parts, job.steps_each)
        # Of each worker, the version, values and part of the data of its tasks.
        self.tasks: dict[int, list[tuple[int, ServedTensors, int]]] = {w: [] for w in range(num)}
        self.clocks = dict.fromkeys(range(num), 0)
        self.errors: dict[tuple[int, str], Tensor] = {}
        self.factors: list[dict[str, Tensor]] = [{} for _ in range(num)]
        self.version = 0

    def run(self, order: Sequence[int]) -> tuple[list[float], ServedTensors]:
        """Run the pushes, with worker `order[k]` making push k. Returns the loss of each push, and the final values by
        name."""
        losses, arrived = [], {}
        waits = self.plan.staleness == 0
        self._release()
        for worker in order:
            base, values, piece = self.tasks[worker].pop(0)
            self.handout.used(worker, piece)
            loss, push, weight = (self._local if self.job.is_local else self._gradient)(worker, values, piece)
            losses.append(loss)
            push = self._compressed(worker, push)
            self.clocks[worker] += 1
            if not waits:
                self._update([push], [1.0])
                self._release()
            elif base < self.version:  # too late: the gradient is dropped
                self._go([worker])
            else:
                arrived[worker] = (push, weight)
                if len(arrived) == self.job.num_parts:
                    members = sorted(arrived)
                    self._update([arrived[w][0] for w in members], [arrived[w][1] for w in members])
                    arrived = {}
                    self._go(members)
        return losses, {name: p.detach() for name, p in self.model.named_parameters()}  # with the frozen parameters

    def _release(self) -> None:
        """Give one more task to each worker that has fewer tasks than it may and stays within the staleness bound; at
        first, to all."""
        bound = math.inf if self.plan.staleness is None else self.plan.staleness
        for _ in range(1 + self.plan.overlap):
            slowest = min(self.clocks.values())
            self._go([
                w for w, tasks in self.tasks.items()
                if len(tasks) <= self.plan.overlap and self.clocks[w] + len(tasks) - slowest <= bound
            ])  # fmt: skip

    def _go(self, workers: Sequence[int]) -> None:
        """Give each of the workers its next task, with a copy of the current values."""
        values = {name: p.detach().clone() for name, p in self.now.items()}
        for worker, piece, _ in self.handout.give(workers):
            self.tasks[worker].append((self.version, values, piece))

    def _update(self, pushes: Sequence[ServedTensors], weights: Sequence[float]) -> None:
        """Step the servers' optimizer on the weighted mean of the pushes."""
        for name, parameter in self.now.items():
            terms = [push[name] * (w / sum(weights)) for push, w in zip(pushes, weights, strict=True) if name in push]
            parameter.grad = functools.reduce(torch.add, terms) if terms else None
        if self.plan.staleness == 0 and not self.job.is_local:
            self._clip(list(self.now.values()))
        self.server.step()
        self.version += 1

    def _gradient(self, worker: int, values: ServedTensors, piece: int) -> tuple[float, ServedTensors, float]:
        """(loss, gradients by name, weight) of a piece at the given values."""
        twin = self.twins[0]
        loss, weight = self._backward(twin, values, piece, step_key(self.job.seed, piece))
        if self.plan.staleness != 0:
            self._clip(_trained(twin))
        return loss, {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}, weight

    def _local(self, worker: int, values: ServedTensors, piece: int) -> tuple[float, ServedTensors, float]:
        """(mean loss, change of the values by name, 1.0) of the steps that a worker takes by itself."""
        twin, optimizer, losses = self.twins[worker], self.optimizers[worker], []
        for index in range(self.job.steps_each):
            step = self.version * self.job.steps_each + index
            at = piece + index * self.job.num_parts
            losses.append(self._backward(twin, values if index == 0 else {}, at, step_key(self.job.seed, step))[0])
            self._clip(_trained(twin))
            optimizer.step()
        if self.plan.moments == "reset":
            for kept in optimizer.state.values():
                for value in kept.values():
                    if torch.is_tensor(value):
                        value.zero_()
        after = dict(twin.named_parameters())
        return sum(losses) / len(losses), {n: value - after[n].detach() for n, value in values.items()}, 1.0

    def _backward(self, twin: nn.Module, values: ServedTensors, piece: int, key: int) -> tuple[float, float]:
        """(loss, weight) of a piece. Sets the gradients of the twin, at `values`, or at its own values where they have
        none."""
        named = dict(twin.named_parameters())
        for name, value in values.items():
            named[name].data.copy_(value)
        twin.zero_grad(set_to_none=True)
        rows = batch_part(self.batch, piece % self.job.num_parts, self.job.num_parts)
        found = one_device_step(twin, self.loss_fn, rows, self.plan.inner_plan, key, norm_parts(self.plan))
        return float(found.loss), float(num_rows(rows)) if found.weight is None else found.weight

    def _compressed(self, worker: int, push: ServedTensors) -> ServedTensors:
        """A push as a server decompresses it: piece by piece, with the error feedback of the worker's earlier
        pushes."""
        coding = self.job.coding
        found = {name: value.clone() for name, value in push.items()}
        for piece in (piece for pieces in self.job.shards for piece in pieces):
            if coding.compression.kind != "none" and piece.name in found and coding.is_coded(piece):
                part = found[piece.name][piece.start : piece.stop] if piece.shape else found[piece.name]
                label = f"{piece.name}:{piece.start}"
                given = part.float() + self.errors.get((worker, label), 0.0)
                _, kept = compress(given, coding.compression, self.factors[worker], label)
                self.errors[worker, label] = given - kept
                part.copy_(kept)
        return found

    def _clip(self, parameters: list[nn.Parameter]) -> None:
        if self.job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], self.job.clip_norm)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for _, p in _named(model)]


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]
