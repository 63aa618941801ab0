"""Replicas that train by themselves and synchronise every n steps: local SGD, DiLoCo and Streaming DiLoCo.

outer=none          weights become the mean of the replicas' weights (local SGD; Stich 2019; Lin et al. 2020, "Don't Use
                    Large Mini-Batches, Use Local SGD")
outer=nesterov      the mean change of a round is the gradient of an outer optimizer, and all replicas take its weights
                    (Douillard et al. 2023, "DiLoCo"); with sgd and a momentum it is SlowMo (Wang et al. 2020)
streaming, overlap  parts of the model synchronise in turn, and the exchange overlaps with the next steps; the weights
                    then become half the replica's own and half the outer ones (Douillard et al. 2025, "Streaming
                    DiLoCo")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from plait.comm.protocol import Comm
from plait.engine.local_sgd.exchange import MeanExchange, Pending, dtype_of_mean
from plait.plan.compression import NO_COMPRESSION
from plait.plan.plan import Plan
from plait.schedule.sync_rounds import SyncRounds, split_in_parts

MIXING = 0.5  # share of the replica's own weights, after an exchange that overlapped with steps


class LocalTraining:
    """One rank's side of training by replicas.

    parameters  this rank's parts of the trained parameters, by name
    sizes       elements of the whole parameters, from which all ranks form the same parts of the model
    outer       the weights as last synchronised, by name, of `dtype_of_mean`; empty if replicas only take the mean
    momentum    the momentum of the outer optimizer, by name, of `dtype_of_mean`
    pending     exchanges in flight, by part of the model
    """

    def __init__(
        self,
        plan: Plan,
        comm: Comm,
        parameters: Mapping[str, nn.Parameter],
        sizes: Mapping[str, int],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.rounds = SyncRounds.of(plan)
        self._plan = plan
        self._parameters = parameters
        self._optimizer = optimizer
        self.exchange = MeanExchange(comm, plan.compress, plan.exempt)
        self._plain = MeanExchange(comm, NO_COMPRESSION)
        numbers = split_in_parts(list(sizes.values()), plan.streaming)
        part_of = dict(zip(sizes, numbers, strict=True))
        self._parts = [[n for n in parameters if part_of[n] == part] for part in range(plan.streaming)]
        self.outer: dict[str, Tensor] = {}
        self.momentum: dict[str, Tensor] = {}
        self.pending: dict[int, Pending] = {}
        if plan.keeps_agreed:
            self.begin()

    def begin(self) -> None:
        """Take the current weights, which are equal on all replicas, as the synchronised ones."""
        self.outer = {name: p.detach().to(dtype_of_mean(p.dtype), copy=True) for name, p in self._parameters.items()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.outer.items()}
        self.pending.clear()

    def after(self, step: int) -> bool:
        """Do what is due after `step` steps of this replica. Returns whether any weights have changed."""
        for pending in self.pending.values():
            pending.advance()
        for part in self.rounds.begun(step):
            self._start(part)
        ended = [part for part in self.rounds.ended(step) if part in self.pending]  # a checkpoint may have ended it
        for part in ended:
            self._apply(part, MIXING if self._plan.overlap else 0.0)
        return bool(ended)

    def agree(self) -> None:
        """Synchronise the whole model now."""
        for part in sorted(self.pending):
            self._apply(part, MIXING if self._plan.overlap else 0.0)
        for part in range(len(self._parts)):
            self._start(part)
            self._apply(part, 0.0)

    def agreed(self, step: int) -> bool:
        """Whether all replicas have the same weights after `step` steps."""
        return step == 0 or (self._plan.overlap == 0 and len(self.rounds.begun(step)) == len(self._parts))

    def expect(self, part: int) -> None:
        """Prepare an exchange that had begun before a checkpoint. Its means are zeros, to be filled in."""
        parameters = {name: self._parameters[name].detach() for name in self._parts[part]}
        self.pending[part] = Pending.completed(
            {n: torch.zeros_like(p, dtype=dtype_of_mean(p.dtype)) for n, p in parameters.items()}
        )

    def _start(self, part: int) -> None:
        """Begin to exchange a part of the model: the change since the last synchronisation, or the weights."""
        names = self._parts[part]
        if self.outer:
            sent = {name: self.outer[name] - self._parameters[name].detach() for name in names}
        else:
            sent = {name: self._parameters[name].detach() for name in names}
        self.pending[part] = self.exchange.start(sent)

    def _apply(self, part: int, mixing: float) -> None:
        """Wait for an exchange and apply its result; `mixing` is the share of the replica's own weights that is
        kept."""
        means = self.pending.pop(part).wait()
        for name, mean in means.items():
            parameter = self._parameters[name].detach()
            if not self.outer:
                parameter.copy_(mean)
                continue
            agreed = self._outer_step(name, mean)
            if mixing:
                parameter.lerp_(agreed.to(parameter.dtype), 1 - mixing)
            else:
                parameter.copy_(agreed)
        self._settle_moments(self._parts[part])

    def _outer_step(self, name: str, change: Tensor) -> Tensor:
        """The outer weights after a step of torch.optim.SGD on the mean change."""
        lr, momentum = self._plan.outer_rates
        if momentum:
            velocity = self.momentum[name].mul_(momentum).add_(change)
            change = change.add(velocity, alpha=momentum) if self._plan.outer == "nesterov" else velocity
        return self.outer[name].sub_(change, alpha=lr)

    def _settle_moments(self, names: Iterable[str]) -> None:
        """Keep, reset or average the inner optimizer's state of these parameters, as the plan says."""
        if self._plan.moments == "kept":
            return
        moments = {
            f"{name}/{key}": value
            for name in names
            for key, value in self._optimizer.state.get(self._parameters[name], {}).items()
            if torch.is_tensor(value)
        }
        if self._plan.moments == "reset":
            for value in moments.values():
                value.zero_()
            return
        moments = {key: value for key, value in moments.items() if value.is_floating_point()}
        if moments:
            for key, mean in self._plain.mean(moments).items():
                moments[key].copy_(mean)
