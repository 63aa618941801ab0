"""The engine: forward and backward of a step, and the update, on one rank of a plan.

    engine = Engine(compiler, plan, world, optimizer, scheduler, ...)
    engine.prepare(batch)                   # captures the step, places the parameters, makes the optimizer
    found = engine.forward_backward(batch)  # the loss; gradients are then in the parameters
    engine.optimizer_step()
    engine.state                            # what a checkpoint saves

A model that cannot be captured runs behind the same calls, through PyTorch's DDP.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plait.backends.backend import Backend, StepResult
from plait.backends.eager.offload.store import Offload
from plait.backends.recorder import TraceRecorder
from plait.comm.agree import attempt
from plait.comm.device import HostValue, is_host
from plait.comm.protocol import World
from plait.compile.capture.batch import batch_structure
from plait.compile.capture.loss_values import join_outputs, results
from plait.compile.capture.precision import Precision
from plait.compile.ops.draw import micro_key
from plait.compile.stages.split import updates_within
from plait.engine.batch_padding import BatchPadding, PaddedBatch
from plait.engine.compiler import CaptureReport, Compiler
from plait.engine.ddp_fallback import EagerExecutor, ddp_warning, refuse_unless_data_only
from plait.engine.device_memory import explained
from plait.engine.evaluation import evaluate
from plait.engine.executor import StepExecutor, check_finite, clip
from plait.engine.frozen_parameters import follow_frozen
from plait.engine.local_batch import LocalBatch, num_rows, replica_key, rows_of_replica, step_key
from plait.engine.local_sgd.replicas import Replicas
from plait.engine.model_weights import AsItWas, refuse_away
from plait.engine.optimizer_step import OptimizerStep
from plait.engine.optimizer_trials import note_absent
from plait.engine.rank_executor import RankExecutor
from plait.engine.rank_optimizers import OptimizerFactory, SchedulerFactory, build_both, build_optimizer
from plait.engine.same_batch import SameBatch
from plait.engine.setup_checks import agree_on_setup, check_captured, describe_optimizer
from plait.engine.step_results import refuse_padding, without_padding
from plait.engine.train_state import NO_BATCH_YET, LossScale, TrainState
from plait.errors import CaptureError, PlanError
from plait.plan.plan import Plan

_LOG = logging.getLogger("plait")
_MOST = 0.9  # an axis that is to split weights, and splits less of them, is worth a warning in the log


@dataclass(frozen=True)
class StepLoss:
    """The forward result for a global batch.

    loss     the mean loss, a 0-d tensor
    weight   for a plait.Weighted, its weight relative to other batches
    outputs  the auxiliary outputs of the loss, by name
    """

    loss: Tensor
    weight: Tensor | None
    outputs: dict[str, Tensor] | None


class Engine:
    """Runs the steps of a plan on one rank.

    compiler   captures and compiles the step of a model and a loss
    optimizer  as `Trainer` takes it; None to compute gradients only
    offload    keeps tensors that are not on the device; by default made for the plan, with its file on `scratch`
    adopt      whether parameters that stay whole are the model's own tensors, so that training changes the model
    backend    what executes the captured step; None: eager execution
    recorder   records spans, for a trace
    allow      as `Trainer` takes it

    Every rank makes one and makes the same calls.
    """

    def __init__(
        self,
        compiler: Compiler,
        plan: Plan,
        world: World,
        optimizer: OptimizerFactory | None,
        scheduler: SchedulerFactory | None = None,
        *,
        seed: int = 0,
        clip_norm: float | None = None,
        on_nan: Literal["raise", "warn"] = "raise",
        adopt: bool = False,
        scratch: str | Path | None = None,
        offload: Offload | None = None,
        recorder: TraceRecorder | None = None,
        backend: Backend | None = None,
        allow: Collection[str] = (),
    ) -> None:
        self.compiler, self.plan, self.world = compiler, plan, world
        self.clip_norm, self.recorder = clip_norm, recorder
        self.state = self._make_state(seed)
        if Precision(plan.precision, plan.exceptions).scaled:
            self.state.loss_scale = LossScale(world)
        self.offload = offload or Offload(plan.inner_plan, world, scratch)
        self.same = SameBatch(world, plan)
        self.padding = BatchPadding(compiler, world)
        self.updates_within = updates_within(plan)
        self.factories = (optimizer, scheduler)
        self._on_nan, self._adopt, self._allow = on_nan, adopt, allow
        self._backend = backend
        self._executor: StepExecutor | None = None
        self._structure: str | None = None  # of the first batch
        self._rows = 1  # of the last global batch
        self._num_waiting = 0  # batches whose gradients no update has taken yet
        self._without_gradient = frozenset[str]()  # parameters that all of these batches have left out
        self._unchecked: tuple[int, HostValue] | None = None  # the last step, whose loss is yet to be looked at
        self._skipped: HostValue | None = None  # whether the last step made no update, for the scheduler

    def _make_state(self, seed: int) -> TrainState:
        return TrainState(self.plan, self.world, seed)

    @property
    def is_prepared(self) -> bool:
        """Whether the step is captured and the parameters are placed."""
        return self._executor is not None

    @property
    def executor(self) -> StepExecutor:
        """The parameters and programs of this rank. Raises PlanError before the first batch."""
        if self._executor is None:
            raise PlanError(NO_BATCH_YET)
        return self._executor

    @property
    def captures(self) -> CaptureReport:
        """The captures of the step so far; none of a model that is not captured."""
        return CaptureReport(tuple(self._executor.captures) if isinstance(self._executor, RankExecutor) else ())

    def prepare(self, batch: Any) -> bool:
        """Capture the step, lay it out, place the parameters and make the optimizer, if this is the first batch.

        Returns whether it was the first batch. If preparing fails, the model is left as it was."""
        if self.is_prepared:
            return False
        before = AsItWas(self.compiler.model)
        self._structure = batch_structure(batch.tree if isinstance(batch, LocalBatch) else batch)
        state = self.state
        try:
            with self._explained("making ready to train", lambda: num_rows(batch)):
                self._prepare(batch)
        except BaseException:
            self._executor = state.executor = state.optimizer = state.scheduler = state.replicas = None
            before.restore()
            raise
        self.executor.release()
        return True

    def _prepare(self, batch: Any) -> None:
        state, world = self.state, self.world
        refuse_away(self.compiler.model)
        agree_on_setup(world, self.plan, self.compiler.model, state.seed, self.clip_norm, self._on_nan)
        self.hold(self.rows_here(self.padded(batch).batch))
        if (compiled := self.executor.compiled) is not None:
            captured = compiled.program.captured
            given = (self.compiler, self.plan, captured, self.clip_norm)
            attempt(world, lambda: check_captured(*given), "checking the plan")
            if world.rank == 0 and (share := compiled.share) is not None:
                _LOG.log(logging.INFO if share.parameters > _MOST else logging.WARNING, "%s", share)
        self.make_optimizer()
        if self.plan.relaxed_axis:
            assert state.optimizer is not None, "replicas that agree later each step an optimizer"
            state.replicas = Replicas(self.plan, world, self.executor, state.optimizer)
        if state.average is not None:
            state.average.begin(self.executor)

    def hold(self, batch: Any) -> None:
        """The first part of `prepare`: capture and lower the step of this replica's batch, and place the parameters."""
        compiler, world = self.compiler, self.world
        try:
            found: StepExecutor = RankExecutor(
                compiler, world, batch, self.state.seed, self._adopt, self.offload, self.recorder, self._backend
            )
        except CaptureError as error:
            refuse_unless_data_only(error, self.plan, world, compiler, batch)
            if world.rank == 0:
                how = ddp_warning(self.plan)
                warnings.warn(f"the model runs as it is{how}: {error}", stacklevel=6)
            found = EagerExecutor(compiler.model, compiler.loss_fn, self.plan.inner_plan, world, self._allow)
        self._executor = self.state.executor = found
        self._frozen = found.frozen
        self._trained = found.layouts.keys() - {*found.frozen}

    def make_optimizer(self) -> None:
        """The second part: the optimizer of what this rank holds, and its scheduler."""
        factory, scheduler = self.factories
        if factory is None:
            return
        state, world, executor = self.state, self.world, self.executor
        state.optimizer, state.scheduler = attempt(
            world,
            lambda: build_both(factory, scheduler, executor, world),
            "making the optimizer",
            lambda made: describe_optimizer(made[0]),
            "give every rank the same optimizer",
        )
        state.update = self._make_update()

    def _make_update(self) -> Any:
        """What steps the optimizer, and knows where its state is."""
        assert self.state.optimizer is not None
        executor = self.executor
        return OptimizerStep(self.state.optimizer, executor.parameters, executor.sharding, self.world, self.offload)

    def padded(self, batch: Any, train: bool = True) -> PaddedBatch:
        """The batch with its sequences padded, if the plan says so. All ranks must call it."""
        return self.padding.padded(batch, train)

    def rows_here(self, batch: Any) -> Any:
        """The rows of a global batch that this rank's replica trains on."""
        return rows_of_replica(batch, self.plan, self.world) if self.plan.relaxed_axis else batch

    def key(self) -> int:
        """The key of the next step's random draws."""
        key = step_key(self.state.seed, self.state.step_number)
        return key if self.state.replicas is None else replica_key(key, self.state.replicas.index)

    def forward_backward(self, batch: Any, updates: bool = False) -> StepLoss:
        """The loss of a global batch, and its gradients. `updates` says that `optimizer_step` follows at once.

        The gradients are added to those of earlier batches that wait for an update, in the parameters of this rank.
        Under an asynchronous schedule the parameters are updated already. Raises LossError for a loss that is not
        finite, with on_nan="raise"; on an accelerator in the step after it, so that the host runs ahead of the device.
        Raises WorldError if the ranks have different batches.
        """
        self.prepare(batch)
        state = self.state
        number = state.step_number + 1
        padded = self.padded(batch)
        batch = padded.batch
        self.same.begin(batch, f"step {number}")
        waiting = self._waiting()
        with self._explained(f"forward and backward of step {number}", lambda: num_rows(batch)):
            result = self.run(self.rows_here(batch), micro_key(self.key(), self._num_waiting * self.plan.micro))
        self._rows = num_rows(batch)
        self.same.check()
        result = self._without_left_out(result)
        if state.replicas is not None and state.replicas.local is None:
            with self.span("reduce", "gradients"):
                result = state.replicas.gradients(result)
        refuse_padding(batch, result)
        with self.same.awaited():
            self._check_finite(number, result)
        outputs = (
            None if result.aux is None else results(padded.cropped(without_padding(batch, join_outputs(result.aux))))
        )
        self._follow_frozen()
        if not self.updates_within:
            self._keep_gradients(result, waiting)
            self._num_waiting += 1
        return StepLoss(result.loss, None if result.parts is None else result.parts[1], outputs)

    def _keep_gradients(self, result: StepResult, waiting: Mapping[str, Tensor]) -> None:
        """Add the gradients of a batch to those that wait for an update."""
        executor = self.executor
        executor.set_gradients(result.gradients)
        for name, gradient in waiting.items():
            own = executor.parameters[name]
            own.grad = gradient if own.grad is None else own.grad.add_(gradient)

    def _without_left_out(self, result: StepResult) -> StepResult:
        """The result, without gradients of parameters of parts of the model that the step has left out."""
        executor, replicas, left_out = self.executor, self.state.replicas, frozenset[str]()
        # Replicas that update alone give zeros, so that all have the same moments to average.
        alone = replicas is not None and replicas.local is not None
        if result.counts and isinstance(executor, RankExecutor) and not alone:
            ran = executor.left_out.ran(result.counts)
            if replicas is not None:  # gradients are means over replicas
                ran = [num > 0 for num in replicas.sum_of(torch.tensor(ran, dtype=torch.float64)).tolist()]
            left_out = executor.left_out.without_gradient(ran)
        self._without_gradient = left_out & self._without_gradient if self._num_waiting else left_out
        if left_out and isinstance(executor, RankExecutor):
            executor.without_gradient(left_out, self._without_gradient)
        return replace(result, gradients={n: g for n, g in result.gradients.items() if n not in left_out})

    def _check_finite(self, number: int, result: StepResult) -> None:
        """Check the loss of this step. On an accelerator, for which the host does not wait, that of the step before."""
        if is_host(result.loss.device):
            check_finite(self.executor, number, float(result.loss), result.gradients, self._on_nan)
            return
        self.check_last()
        self._unchecked = (number, HostValue(result.loss))

    def check_last(self) -> None:
        """Check the loss of the last step, if that is still to be done. Raises LossError as `forward_backward`."""
        self.settle()
        if self._unchecked is not None:
            (number, loss), self._unchecked = self._unchecked, None
            check_finite(self.executor, number, loss.get(), {}, self._on_nan)

    def settle(self) -> None:
        """Step the scheduler for the last step, if the host is still to learn whether that made an update."""
        if self._skipped is not None:
            skipped, self._skipped = self._skipped.get(), None
            if not skipped:
                self.state.scheduler.step()

    def run(self, batch: Any, key: int) -> StepResult:
        """Forward and backward of this replica's batch, and no more: `forward_backward` without its checks."""
        scale = None if self.state.loss_scale is None else self.state.loss_scale.tensor()
        update = self._update_within if self.updates_within else None
        with nullcontext() if self.executor.compiled is not None else self.span("backward", "step"):
            return self.executor.run(batch, key, scale=scale, update=update)

    def update(self) -> None:
        """A step of the optimizer with the gradients that are in the parameters, and no more: `optimizer_step` without
        clipping and what follows a step."""
        self.state.update.step(step_key(self.state.seed, self.state.step_number))
        self.zero_grad()
        self.executor.updated()

    def _waiting(self) -> dict[str, Tensor]:
        """The gradients of earlier batches that wait for an update, by name."""
        if not self._num_waiting:
            return {}
        if self.offload.norms:
            raise PlanError(
                f"the plan {self.plan.title!r} keeps gradients away from the device, where those of several batches are"
                " not added up; call optimizer_step() after each forward_backward, or use micro=N"
            )
        found = {name: p.grad for name, p in self.executor.parameters.items() if p.grad is not None}
        return {name: gradient.clone() for name, gradient in found.items()}

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that wait for an update, before clipping, as whole tensors by name. All ranks must call it."""
        return self.executor.whole_gradients()

    def zero_grad(self) -> None:
        """Drop the gradients that wait for an update."""
        if self.state.optimizer is not None:
            self.state.optimizer.zero_grad(set_to_none=True)
        elif self._executor is not None:
            self._executor.set_gradients({})
        self._num_waiting = 0

    def optimizer_step(self) -> Tensor | None:
        """Update the parameters with the gradients that wait.

        Returns the gradients' 2-norm before clipping; None without `clip_norm`. In fp16, gradients that are not finite
        are dropped, and the loss scale is lowered; on an accelerator a fused optimizer does so without a wait of the
        host, and the scheduler steps when the next update begins. Raises PlanError if no gradients wait.
        """
        state, executor = self.state, self.executor
        updated, norm, skipped = True, None, None
        self.settle()
        if not self.updates_within:
            if not self._num_waiting:
                raise PlanError("optimizer_step(): no gradients wait for it; call forward_backward(batch) first")
            updated, norm, skipped = self._update_with_gradients()
            self.zero_grad()
            if updated:
                self._read_updated(executor)
        if state.scheduler is not None and skipped is not None:
            self._skipped = HostValue(skipped)
        elif state.scheduler is not None and updated:
            state.scheduler.step()
        state.step_number += 1
        if updated and state.average is not None:
            state.average.update(skipped)
        if state.replicas is not None:
            with self.span("reduce", "agree"):
                state.replicas.stepped(state.step_number)
        return norm

    def _update_with_gradients(self) -> tuple[bool, Tensor | None, Tensor | None]:
        """Update with the gradients that wait, unless those of fp16 are not finite.

        Returns whether, their norm, and where the host does not know whether yet a 0-d tensor that is 1 if not.
        """
        state, executor = self.state, self.executor
        updated, norm, skipped = True, None, None
        gradients = [p.grad for p in executor.parameters.values() if p.grad is not None]
        gradients += self.offload.norms.values()
        if state.loss_scale is not None:
            skipped = state.loss_scale.update(gradients)
            if is_host(skipped.device) or not state.update.can_skip:
                updated, skipped = not bool(skipped), None
        del gradients  # an update needs the memory
        if updated:
            what = f"the update of step {state.step_number + 1}"
            with self.span("optimizer", "STEP"), self._explained(what, lambda: self._rows):
                norm = clip(executor, self.clip_norm) if self.clip_norm is not None else None
                state.update.step(step_key(state.seed, state.step_number), skipped)
        return updated, norm, skipped

    def _read_updated(self, executor: StepExecutor) -> None:
        """Make steps read what the optimizer has made of the parameters."""
        executor.updated()

    def evaluate(self, data: Any) -> Any:
        """The mean loss over a batch or several batches; see Trainer.evaluate."""
        self.check_last()
        with self._explained("an evaluation", lambda: self._rows):
            return evaluate(self, data, self._structure)

    def _update_within(self, gradients: dict[str, Tensor]) -> None:
        """Make one of the updates of an asynchronous schedule."""
        self.executor.set_gradients(gradients)
        self.update()

    def _follow_frozen(self) -> None:
        """Make the optimizer take over parameters that train from this step on."""
        executor, state = self.executor, self.state
        factory = self.factories[0]
        if factory is None or executor.frozen == self._frozen:
            return
        absent: Mapping[str, nn.Parameter] = executor.absent

        def make() -> torch.optim.Optimizer:
            return build_optimizer(factory, executor.parameters, executor.layouts, self.world, absent)

        assert state.optimizer is not None
        given = (state.optimizer, make, executor.parameters, absent, executor.frozen, self._trained, self.plan)
        if follow_frozen(*given):
            state.update = self._make_update()
            note_absent(state.optimizer, absent)
            self._trained |= executor.layouts.keys() - {*executor.frozen}
        self._frozen = executor.frozen

    def _explained(self, what: str, num_rows: Callable[[], int]) -> AbstractContextManager[None]:
        """Context in which memory that runs out is a DeviceMemoryError, which says what takes how much."""
        return explained(self.state, what, num_rows)

    def span(self, kind: str, name: str) -> AbstractContextManager[Any]:
        """Context that is recorded as a span, if there is a trace."""
        return nullcontext() if self.recorder is None else self.recorder.span(kind, name)

    def close(self) -> None:
        """Free what is kept on disk."""
        self.offload.close()
