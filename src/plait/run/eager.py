"""The eager fallback: a model that cannot be captured still trains data-parallel, through PyTorch's own DDP.

Each rank runs the model on its own part of the batch. The loss is exact also where it is normalised by a count: DDP
averages over N ranks, so each rank's loss is its sum x N / the weight of all ranks. Batch statistics and dropout are
those of each rank alone, as in DDP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from plait.comm.process import device_mesh
from plait.comm.protocol import World
from plait.errors import CaptureError, LossError, PlanError
from plait.graph.dtypes import torch_name
from plait.run.boundary import has_process_group
from plait.run.compiler import LossFn
from plait.run.local_batch import LocalBatch, batch_part
from plait.run.program import StepResult
from plait.run.references import as_pair
from plait.spec.layout import Layout
from plait.spec.plan import Plan

# Keys of a plan that DDP on the model as it is can do, or that only say how fast.
_WITHOUT_GRAPH = (
    "data", "home_optimizer", "batchnorm", "allreduce", "bucket_bytes", "sync", "outer", "outer_lr", "outer_momentum",
    "moments", "streaming", "overlap", "compress", "uncompressed",
)  # fmt: skip


def refuse_unless_data_only(error: CaptureError, plan: Plan, world: World) -> None:
    """Raise PlanError with the model's own file and line if the plan needs the graph that could not be had."""
    rows = {row.name: row.default for row in dataclasses.fields(plan) if row.name not in _WITHOUT_GRAPH}
    needs = {name: getattr(plan, name) for name, default in rows.items() if getattr(plan, name) != default}
    if needs:
        raise PlanError(
            f"the plan {plan.title!r} needs the graph of the step for {Plan(**needs)}, and it could not be captured:"
            f" {error}\nThe nearest plan that works is data={plan.num_processes}, which runs the model as it is."
        ) from error
    if plan.within.data > 1 and not has_process_group(world):
        raise PlanError(f"a model that cannot be captured runs under DDP, which needs processes, not threads: {error}")


class EagerReplica:
    """One rank of data=N on a model as it is; the counterpart of `run.replica.Replica`."""

    with_gradient: tuple[str, ...] = ()
    absent: Mapping[str, nn.Parameter] = MappingProxyType({})

    def __init__(self, model: nn.Module, loss_fn: LossFn, plan: Plan, world: World) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.plan = plan
        self.world = world
        self.dtypes = {name: p.dtype for name, p in model.named_parameters()}
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.layouts = {n: Layout(torch_name(p.dtype), tuple(p.shape)) for n, p in self.parameters.items()}
        self._forward: nn.Module = _Loss(model, loss_fn)
        if plan.data > 1 and has_process_group(world):
            group = device_mesh(world).get_group("data")
            self._forward = DistributedDataParallel(self._forward, process_group=group, find_unused_parameters=True)

    def run(self, batch: Any, key: int, train: bool = True, scale: Tensor | None = None) -> StepResult:
        rows = self._rows(batch)
        self.model.train(train)
        torch.manual_seed((key * self.plan.data + self.world.rank) & ((1 << 62) - 1))
        with torch.set_grad_enabled(train):
            loss, total, weight = self._forward(rows) if train else _Loss(self.model, self.loss_fn)(rows)
            sums = torch.stack([total.detach().double(), weight.detach().double()])
            if self.plan.data > 1:
                sums = self.world.comm("data").all_reduce(sums).wait()
            if train:
                for parameter in self.parameters.values():
                    parameter.grad = None
                (loss * (self.plan.data / sums[1].to(loss.dtype))).backward()
        self.with_gradient = tuple(name for name, p in self.parameters.items() if p.grad is not None)
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        return StepResult((sums[0] / sums[1]).to(total.dtype), (sums[0], sums[1]), gradients, {})

    def whole_gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Most are in place already."""
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient

    def updated(self) -> None:
        """Every rank has updated all parameters."""

    def local(self, name: str) -> Tensor:
        return self.parameters[name].detach()

    def set_local(self, name: str, part: Tensor) -> None:
        self.parameters[name].detach().copy_(part)

    def scale_gradients(self, factor: float) -> None:
        torch._foreach_mul_([p.grad for p in self.parameters.values() if p.grad is not None], factor)

    def gradient_norm(self) -> float:
        norms = [p.grad.norm() for p in self.parameters.values() if p.grad is not None]
        return float(torch.stack(norms).norm()) if norms else 0.0

    def whole(self, name: str, local: Tensor | None) -> Tensor:
        assert local is not None
        return local

    def _rows(self, batch: Any) -> Any:
        if isinstance(batch, LocalBatch):
            return batch.tree
        return batch_part(batch, self.world.mesh.coordinates(self.world.rank)["data"], self.plan.data)


class _Loss(nn.Module):
    """Model and loss as one module, so that DDP sees the backward of both."""

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, rows: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(loss to differentiate, its sum, its weight): a mean counts as one part among the ranks'."""
        total, weight = as_pair(self.loss_fn(self.model, rows))
        if not torch.is_tensor(total) or total.numel() != 1:
            raise LossError(f"the loss must be a scalar or (sum, weight), not {type(total).__name__}")
        return total.reshape(()), total.reshape(()), torch.as_tensor(weight, dtype=torch.float64).detach().reshape(())
