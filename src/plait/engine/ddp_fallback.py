"""The eager fallback: a model that cannot be captured trains data-parallel, through PyTorch's
DistributedDataParallel (DDP).

Each rank runs the model on its part of the batch, and the loss of the batch is put together from the parts' losses: the
sum of sums over the sum of weights for a plait.Weighted, else the mean weighted by rows. DDP averages over N ranks, so
each rank differentiates its sum x N / the weight of all ranks.

The result equals that of one device if the loss of a batch is such a combination. It is not if the loss couples rows,
as a contrastive loss does, or is a mean over rows selected by a mask that is not given as a plait.Weighted; nor if a
step keeps something of its rows in the model, as a queue of negatives or a moving average does; nor with batch norm,
whose statistics are each rank's own. These are refused (`_refuse_other_numbers`, `_refuse_batch_norm`).
Dropout masks are each rank's own: as random as those of one device, but not the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from plait.backends.backend import StepResult, Update
from plait.comm.device import random_devices
from plait.comm.hidden_group import without_process_group
from plait.comm.process_world import device_mesh, has_process_group
from plait.comm.protocol import World
from plait.compile.capture.batch import map_batch, take_rows
from plait.compile.capture.capture import LossFn
from plait.compile.capture.capture_errors import users_line
from plait.compile.capture.loss_values import Outputs, copied, join_outputs, read_loss
from plait.compile.compiled import Compiled
from plait.compile.ir.dtypes import torch_name
from plait.engine.compiler import Compiler
from plait.engine.executor import scale_all
from plait.engine.local_batch import LocalBatch, batch_part, num_rows, without_inference
from plait.engine.model_copy import Twin, preserved
from plait.engine.step_results import gather_outputs
from plait.errors import CaptureError, LossError, PlanError, Refusal
from plait.plan.axes import ddp_axis
from plait.plan.legality import refusals
from plait.plan.plan import Plan
from plait.plan.sharding_plan import ParameterSharding, ShardingPlan
from plait.plan.step_facts import StepFacts
from plait.spec.layout import Layout

LOCAL_LOSS = "local_loss"  # given to Trainer's allow= to train on the mean of the ranks' losses
_ROUNDING = (2e-2, 1e-3)  # relative difference of two ways to add up a loss, in half and in full precision


def refuse_unless_data_only(error: CaptureError, plan: Plan, world: World, compiler: Compiler, batch: Any) -> None:
    """Raise PlanError, with the file and line of the model's code, if the plan needs the graph that could not be
    captured.

    The message names a plan that works, as far as that is known for the model and this batch.
    """
    if any(refusals(plan, StepFacts(uncaptured=str(error)))):
        nearest = _nearest(plan, world, compiler.model, compiler.loss_fn, batch)
        raise PlanError(refusals(plan, StepFacts(uncaptured=str(error), nearest=nearest))[0]) from error
    if _num_ranks(plan.inner_plan) > 1 and not has_process_group(world):
        raise PlanError(f"a model that cannot be captured runs under DDP, which needs processes, not threads: {error}")


def _nearest(plan: Plan, world: World, model: nn.Module, loss_fn: LossFn, batch: Any) -> str:
    """The nearest plan for a model that is not captured, in words."""
    several = f"{ddp_axis()}={plan.num_processes}"
    if plan.num_processes == 1 or (world.mesh.size > 1 and not has_process_group(world)):  # threads share it
        return f"{several}, which runs the model as it is"
    if (name := _batch_norm(model)) is not None and plan.batchnorm != "local":
        return (
            f"data=1, which runs the model as it is; with {several} batchnorm=local the batch statistics of"
            f" {name or 'the model'} would be those of each rank's rows"
        )
    rows, num = (batch.tree, batch.local_size) if isinstance(batch, LocalBatch) else (batch, num_rows(batch))
    apart = 0.0
    with suppress(LossError, PlanError):  # the loss is invalid, which is reported when it runs
        compared = EagerExecutor(model, loss_fn, Plan(), world).compare_halves(rows, num)
        apart = compared.apart
        if compared.changed:
            return (
                f"data=1, which runs the model as it is; with {several} PyTorch's DDP would keep in {compared.changed}"
                " what each rank's own rows leave there, and not what the whole batch does"
            )
    if apart:
        return (
            f"data=1, which runs the model as it is; with {several} PyTorch's DDP would compute the loss of each rank's"
            " own rows, and together they are not this loss of the whole batch"
        )
    return f"{several}, which runs the model as it is"


def check_allowed(allow: Collection[str]) -> frozenset[str]:
    """The names that a trainer was told to allow. Raises PlanError for an unknown name."""
    given = (allow,) if isinstance(allow, str) else tuple(allow)
    if unknown := [name for name in given if name != LOCAL_LOSS]:
        raise PlanError(f"allow={unknown[0]!r} is unknown; there is {LOCAL_LOSS!r}")
    return frozenset(given)


def ddp_warning(plan: Plan) -> str:
    """The warning about results when a model starts to run under DDP; empty on one rank."""
    if _num_ranks(plan.inner_plan) == 1:
        return ""
    return (
        ", under PyTorch's DDP; the loss and gradients are those of the whole batch where it is a mean over rows or a"
        " plait.Weighted, but dropout masks are each rank's own, and so is what else the model does across rows"
    )


class EagerExecutor:
    """One rank of data=N for a model that is not captured; the counterpart of engine.rank_executor.RankExecutor."""

    with_gradient: tuple[str, ...] = ()
    absent: Mapping[str, nn.Parameter] = MappingProxyType({})
    changing: frozenset[str] = frozenset()
    compiled: Compiled | None = None
    frozen: tuple[str, ...] = ()

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, plan: Plan, world: World, allow: Collection[str] = ()
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.plan = plan
        self.world = world
        model.to(world.device)
        self.dtypes = {name: p.dtype for name, p in model.named_parameters()}
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.layouts = {n: Layout(torch_name(p.dtype), tuple(p.shape)) for n, p in self.parameters.items()}
        self._num_runs = 0  # training steps
        self._axis, self._num = ddp_axis(), _num_ranks(plan)
        whole = {name: ParameterSharding(layout, layout) for name, layout in self.layouts.items()}
        self.sharding = ShardingPlan(plan.mesh, "", whole)
        self._checks = self._num > 1 and LOCAL_LOSS not in allow
        if self._checks:
            _refuse_batch_norm(model, plan)
        self._loss = _Loss(model, loss_fn, alone=LOCAL_LOSS not in allow)
        self._forward: nn.Module = self._loss
        if self._num > 1 and has_process_group(world):
            group = device_mesh(world).get_group(self._axis)
            self._forward = DistributedDataParallel(self._forward, process_group=group, find_unused_parameters=True)

    def release(self) -> None:
        """Nothing to do: the model keeps all its parameters."""

    def run(
        self, batch: Any, key: int, train: bool = True, scale: Tensor | None = None, update: Update | None = None
    ) -> StepResult:
        assert update is None, "no plan of a model that runs as it is updates within a step"
        rows, num = self._rows(batch)
        if train and self._checks and not self._num_runs & (self._num_runs - 1):  # at batches 0, 1, 2, 4, 8...
            self._refuse_other_numbers(rows, num)
        self._num_runs += train
        self._loss.num_rows = num
        self.model.train(train)
        torch.manual_seed((key * self._num + self.world.rank) & ((1 << 62) - 1))
        with torch.set_grad_enabled(train):
            total = (self._forward if train else self._loss)(rows)
            weight, outputs = self._loss.weight, self._loss.outputs
            here = weight.detach().to(total.device, non_blocking=True)
            sums = torch.stack([total.detach().double(), here.double()])
            if self._num > 1:
                sums = self.world.comm(self._axis).all_reduce(sums).wait()
            if train:
                for parameter in self.parameters.values():
                    parameter.grad = None
                (total * (self._num / sums[1].to(total.dtype))).backward()
        self.with_gradient = tuple(name for name, p in self.parameters.items() if p.grad is not None)
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        aux = None if outputs is None else (self._outputs(outputs, batch),)
        return StepResult((sums[0] / sums[1]).to(total.dtype), (sums[0], sums[1]), gradients, {}, aux=aux)

    def _refuse_other_numbers(self, rows: Any, num: int) -> None:
        """Raise LossError, on all ranks, if the loss of any rank's rows is not the combined loss of their two halves,
        or if a step leaves something of its rows in the model."""
        found = self.compare_halves(rows, num)
        mine = [found.apart, math.isnan(found.whole), bool(found.changed)]
        sent = torch.tensor(mine, dtype=torch.float64, device=self.world.device)
        every = self.world.comm(self._axis).all_gather(sent).wait()
        most, rank = (float(value) for value in every[:, 0].max(0))
        if most == 0 and 0 < float(every[:, 1].sum()) < len(every):  # nan on some ranks only: a mean over no rows
            most, rank = math.inf, float(every[:, 1].argmax())
        if most == 0 and float(every[:, 2].max()) > 0:
            rank = float(every[:, 2].argmax())
            raise LossError(
                f"under PyTorch's DDP each rank computes with its own rows, and a step leaves something of its rows in"
                f" {found.changed or 'a buffer'} (rank {rank:.0f} has found so): a queue, a moving average or a count."
                " On the ranks that would not be what the whole batch leaves. Change the line that cannot be captured,"
                f" as the warning says; else train on one process, or give Trainer allow=({LOCAL_LOSS!r},) to train"
                " with the buffers of rank 0, as DDP does"
            )
        if most == 0:
            return
        shown = f"here {found.whole:.6g} of {num} rows, and {found.halves:.6g} of two halves of them put together"
        raise LossError(
            f"under PyTorch's DDP each rank computes the loss of its own rows, and together they are not this loss of"
            f" the whole batch (rank {rank:.0f} has found so; {shown}): it couples rows, or it is a mean over some of"
            " them. Return plait.Weighted(sum, weight) if it is a mean over a number of rows or tokens that may differ;"
            f" else train on one process, or give Trainer allow=({LOCAL_LOSS!r},) to train on the mean of the ranks'"
            " losses, as DDP does"
        )

    def compare_halves(self, rows: Any, num: int) -> _Halves:
        """Compare these rows with their two halves. Model and loss are as before afterwards."""
        if num > 1:
            with torch.no_grad():
                try:
                    return self._compare_halves(rows, num)
                except (LossError, PlanError):
                    raise
                except Exception:  # the model cannot run on half of its rows, or in evaluation mode
                    pass
        return _Halves()

    def _compare_halves(self, rows: Any, num: int) -> _Halves:
        half = num // 2
        train = _batch_norm(self.model) is None

        def taken(part: Any, size: int, train: bool, seed: int = 0) -> tuple[float, float, dict[str, Tensor]]:
            """A loss, its weight, and the values that a forward has left in the model, from the state of now."""
            with _restored(self.model, self.loss_fn):
                self.model.train(train)
                torch.manual_seed(seed)
                self._loss.num_rows = size
                total = float(self._loss(part))
                left = dict[str, Tensor](self.model.named_parameters()) | dict(self.model.named_buffers())
                return total, float(self._loss.weight), left

        whole = taken(rows, num, train)
        kept = taken(take_rows(rows, num, 0, half), half, train)[2]
        changed = next((name for name, value in whole[2].items() if not _same(value, kept.get(name))), "")
        if whole[:2] != taken(rows, num, train, seed=1)[:2]:  # without dropout
            train, whole = False, taken(rows, num, False)
            if whole[:2] != taken(rows, num, False, seed=1)[:2]:
                return _Halves(_ratio(*whole[:2]), changed=changed)
        first, one, _ = taken(take_rows(rows, num, 0, half), half, train)
        second, two, _ = taken(take_rows(rows, num, half, num - half), num - half, train)
        loss, halves = _ratio(*whole[:2]), _ratio(first + second, one + two)
        if loss == halves or math.isnan(loss):
            return _Halves(loss, halves, changed=changed)
        apart = abs(loss - halves) / max(abs(loss), abs(halves))
        return _Halves(loss, halves, 0.0 if apart <= _ROUNDING[self._loss.dtype.itemsize > 2] else 1.0, changed)

    def _outputs(self, outputs: Outputs, batch: Any) -> Outputs:
        """The auxiliary outputs of all ranks."""
        if self._num == 1:
            return copied(outputs)
        comm = self.world.comm(self._axis)
        return join_outputs(gather_outputs(comm, outputs, self._sizes(batch), self.world.device))

    def whole_gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)

    def updated(self) -> None:
        """Nothing to do: every rank updates all parameters."""

    def local(self, name: str) -> Tensor:
        return self.parameters[name].detach()

    def set_local(self, name: str, part: Tensor) -> None:
        self.parameters[name].detach().copy_(part)

    def set_whole(self, name: str, whole: Tensor) -> None:
        self.parameters[name].data = whole

    def scale_gradients(self, factor: Tensor) -> None:
        scale_all([p.grad for p in self.parameters.values() if p.grad is not None], factor)

    def gradient_norm(self) -> Tensor:
        norms = [p.grad.norm() for p in self.parameters.values() if p.grad is not None]
        return torch.stack(norms).norm() if norms else torch.zeros((), device=self.world.device)

    def whole(self, name: str, local: Tensor | None) -> Tensor:
        assert local is not None
        return local

    def _rows(self, batch: Any) -> tuple[Any, int]:
        """This rank's rows, and their number."""
        if isinstance(batch, LocalBatch):
            return self._moved(batch.tree), batch.local_size
        index = self.world.mesh.coordinates(self.world.rank)[self._axis]
        return self._moved(batch_part(batch, index, self._num)), self._sizes(batch)[index]

    def _sizes(self, batch: Any) -> list[int]:
        """The number of rows of each rank. All ranks must call it; for a LocalBatch the host waits."""
        if isinstance(batch, LocalBatch):
            mine = torch.tensor([batch.local_size], device=self.world.device)
            return [int(n) for n in self.world.comm(self._axis).all_gather(mine).wait().flatten().tolist()]
        rows = num_rows(batch)
        each = -(-rows // self._num)
        return [max(0, min(each, rows - index * each)) for index in range(self._num)]

    def _moved(self, rows: Any) -> Any:
        """The rows, on this rank's device."""
        device = self.world.device
        rows = without_inference(rows)
        return map_batch(lambda _, leaf: leaf.to(device, non_blocking=True) if torch.is_tensor(leaf) else leaf, rows)


def _num_ranks(plan: Plan) -> int:
    """The number of ranks over which DDP trains."""
    return plan.mesh.axis_size(ddp_axis())


def _ratio(total: float, weight: float) -> float:
    return total / weight if weight else math.nan


@dataclass(frozen=True)
class _Halves:
    """What the rows of a rank show when they are taken as a whole and in two halves.

    Attributes:
        whole: the loss of the rows.
        halves: the combined loss of the two halves.
        apart: the difference; 0 within rounding, and if the loss is random, as no two evaluations agree then.
        changed: the name of a buffer or parameter that the rows left other than one half would have; empty if there is
            none.
    """

    whole: float = 0.0
    halves: float = 0.0
    apart: float = 0.0
    changed: str = ""


def _same(value: Tensor, other: Tensor | None) -> bool:
    if other is None or value.shape != other.shape:
        return False
    return torch.equal(value, other) or bool(torch.isclose(value, other, equal_nan=True).all())


@contextmanager
def _restored(model: nn.Module, loss_fn: LossFn) -> Iterator[None]:
    """Context in which the model has copies of its values. Random state, and the Python state of model and loss, are as
    before afterwards."""
    with (
        torch.random.fork_rng(devices=random_devices(*(buffer.device for buffer in model.buffers()))),
        preserved(model, loss_fn),
        Twin(model).installed(),
    ):
        yield


def _batch_norm(model: nn.Module) -> str | None:
    """The name of a module whose output depends on batch statistics; None if there is none."""
    return next((n for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)), None)


def _refuse_batch_norm(model: nn.Module, plan: Plan) -> None:
    found = _batch_norm(model)
    if found is not None and plan.batchnorm != "local":
        what = (
            f"the model runs under PyTorch's DDP, where the batch statistics of {found or 'the model'} are those of"
            " each rank's rows, not of the batch"
        )
        raise PlanError(Refusal(what, "", "add batchnorm=local to the plan if that is what you want"))


class _Loss(nn.Module):
    """Model and loss as one module, so that DDP sees the backward pass of both. A mean is weighted by its rows.

    With `alone` they find no process group in torch.distributed, as in a step that is captured.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, alone: bool) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.alone = alone
        self.num_rows = 1  # rows of the next call
        self.weight = torch.ones(())  # weight of the last loss
        self.dtype = torch.float32  # dtype of the last loss
        self.outputs: Outputs | None = None

    def forward(self, rows: Any) -> Tensor:
        """The sum of the loss over these rows."""
        named = functools.partial(users_line, self.model, self.loss_fn)
        with without_process_group(named) if self.alone else nullcontext():
            found = read_loss(self.loss_fn(self.model, rows), self.num_rows)
        self.outputs, self.dtype = found.outputs, found.total.dtype
        if found.weight is not None:
            self.weight = found.weight.detach()
            return found.total
        self.weight = torch.full((), float(self.num_rows), dtype=torch.float64)
        return found.total * self.num_rows
