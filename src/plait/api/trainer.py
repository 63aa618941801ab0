"""The Trainer: a thin layer over the engine, whose results are global values."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plait.backends.recorder import TraceRecorder
from plait.comm.device import is_host
from plait.comm.process_world import process_world
from plait.comm.protocol import World
from plait.compile.capture.capture import LossFn
from plait.compile.sharding.sharded_fraction import ShardedFraction
from plait.cost.noise_scale import NoiseSample
from plait.engine.arguments import check_arguments
from plait.engine.checkpoint import load, saved_state, snapshot
from plait.engine.checkpoint.write import Saver
from plait.engine.compiler import CaptureReport, Captures, Compiler
from plait.engine.cpu_settings import give_freed_memory_back, keep_freed_memory, warn_of_slow_precision
from plait.engine.ddp_fallback import check_allowed
from plait.engine.engine import StepLoss
from plait.engine.engines import engine_for
from plait.engine.environment import resolve_plan, resolve_trace
from plait.engine.executor import StepExecutor
from plait.engine.gathered import gathered, not_started
from plait.engine.gradient_noise import NoiseMeter, check_noise_every
from plait.engine.local_batch import check_values
from plait.engine.rank_optimizers import OptimizerFactory, SchedulerFactory
from plait.engine.setup_checks import check_given, check_plan, place_here
from plait.engine.trace_folder import write_plan, write_trace
from plait.engine.train_state import MovingAverage, TrainState
from plait.errors import CheckpointError, PlanError
from plait.plan.annotation import Annotations
from plait.plan.plan import Plan
from plait.spec.layout import Layout

_TRAINS = torch.inference_mode(False)  # for what makes or changes tensors that later steps write


class StepEnd:
    """The argument of a callback after each step. Values are global, or with sync=N those of this rank's replica.

    Attributes:
        step: the number of steps taken.
        loss: the loss of the step. Whoever reads it waits for the device.
        gradient_norm: the 2-norm of the gradients before clipping; None without `clip_norm`. As `loss`.
        aux: what the loss function returned beside the loss.
        noise: what the step shows of the noise of gradients, if it was one that `noise_every` measures: `noise.signal`,
            and `noise.noise`, which alone say little.
        noise_scale: the gradient noise scale, in rows, from running means over the steps measured so far; None while
            they do not show it.
    """

    def __init__(
        self,
        step: int,
        loss: Tensor,
        gradient_norm: Tensor | None,
        aux: Mapping[str, Tensor],
        noise: NoiseSample | None = None,
        noise_scale: float | None = None,
    ) -> None:
        self.step, self.aux, self.noise, self.noise_scale = step, aux, noise, noise_scale
        self._loss, self._gradient_norm = loss, gradient_norm

    @cached_property
    def loss(self) -> float:
        return float(self._loss)

    @cached_property
    def gradient_norm(self) -> float | None:
        return None if self._gradient_norm is None else float(self._gradient_norm)


class Trainer:
    """Trains `model` under `plan`. The same script runs on one process, on many, and on many machines.

    Args:
        model: any nn.Module, on any device or on the meta device. Its code is not touched.
        loss_fn: a function of (model, batch) that returns the mean loss over the batch, or Weighted(sum, weight) for a
            loss normalized by a count; or a pair (loss, aux), where aux is a dict of further outputs by name.
        optimizer: a function from parameters to a torch.optim.Optimizer, such as
            functools.partial(torch.optim.AdamW, lr=3e-4). If its first argument is called `named_parameters` it gets
            (name, parameter) pairs. It may return several optimizers, as a list or as an object that holds and steps
            them. Several optimizers may also be given as a list of (name pattern, such a function) pairs, in which the
            first pattern that matches a parameter decides.
        plan: a Plan or its text; by default that of the environment's PLAIT_PLAN, or data parallelism over all
            processes.
        layouts: annotations of parameters by name pattern (plan/annotation.py). Other parameters get their layouts from
            the rules of auto sharding.
        clip_norm: the 2-norm of all gradients to which they are clipped.
        scheduler: a function from an optimizer to a torch.optim.lr_scheduler.LRScheduler, stepped after each step.
        callbacks: functions called with a StepEnd after each step, on every rank.
        on_nan: "raise" LossError if the loss is not finite, without an update, or "warn" and go on. On an accelerator,
            for which the host does not wait, the error comes with the next step, after an update.
        scratch: the folder for what the plan offloads to disk; by default TMPDIR or /var/tmp. Nothing stays in it.
        allow: "local_loss" lets a model that cannot be captured, and so runs under PyTorch's DDP, train on the mean of
            the ranks' losses where that is not the loss of the batch, as for a loss that couples rows. Without it such
            a loss is refused.
        trace: a folder for a recording of the last 20 steps on every rank, written by `close`, for `plait report`; by
            default that of `plait run --trace`, for a trainer of the ranks that it started.
        noise_every: the number of steps from one measurement of the gradient noise scale to the next (McCandlish et al.
            2018), which callbacks get; 0 for none. A step that measures runs forward and backward twice, the first time
            on an eighth of the rows, repeated; the numbers of the training stay as they are.

    Steps run in training mode. A model given in evaluation mode is switched as by `model.train()`; a model in training
    mode keeps the mode of each submodule.

    Tensors that the model or the loss function reads, and that belong neither to the model nor to the batch, are read
    at each step, and changed if the step changes them. Checkpoints do not contain them. If a Python value that they
    read changes, or a `requires_grad`, the step is captured again, which takes seconds. A number that changes at each
    step should therefore be in the batch, or be a 0-d tensor. The clock and files are read once, during capture.

    `step` and `evaluate` return what `loss_fn` returns beside the loss too, for the whole global batch. A tensor with a
    row for each row of the batch has its rows in the batch's order. A scalar is averaged over microbatches, and over
    the batches of an evaluation, weighted by rows. Sum(x), Mean(x), Max(x), Min(x) and Weighted(sum, weight) choose
    another reduction, and may have any shape. These outputs have no gradient.

    The trainer owns what a plan shards, such as tensor-parallel weights, and frees the model's own copy with the first
    batch: `gathered` lends the weights to the model. They are gone after `close`, so save or export them before. If the
    start fails, the model stays as it was.

    Raises PlanError for a plan that cannot train this model, before any step.
    """

    @_TRAINS
    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        optimizer: OptimizerFactory,
        plan: Plan | str | None = None,
        *,
        layouts: Annotations | None = None,
        seed: int = 0,
        clip_norm: float | None = None,
        scheduler: SchedulerFactory | None = None,
        callbacks: Sequence[Callable[[StepEnd], None]] = (),
        on_nan: Literal["raise", "warn"] = "raise",
        scratch: str | Path | None = None,
        trace: str | Path | None = None,
        allow: Collection[str] = (),
        noise_every: int = 0,
        world: World | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        check_given(model, loss_fn, optimizer, clip_norm)
        check_arguments(
            layouts=layouts, seed=seed, scheduler=scheduler, callbacks=callbacks, on_nan=on_nan, scratch=scratch,
            trace=trace, allow=allow, noise_every=noise_every, world=world,
        )  # fmt: skip
        self.plan = resolve_plan(plan)
        if self.plan.workers:
            raise PlanError(
                f"the plan {self.plan.title!r} has parameter servers, whose workers have no Trainer; run it with `plait"
                " train`, or use data=N"
            )
        check_plan(self.plan, model, clip_norm, place_here(world))
        if noise_every:
            check_noise_every(noise_every, self.plan)
        self._adopt = world is None
        if world is not None and world.mesh.spread != self.plan.process_mesh.spread:
            raise PlanError(
                f"the world has ranks along {world.mesh.spread or 'no axis'}, and the plan {self.plan.title!r} along"
                f" {self.plan.process_mesh.spread or 'none'}; make the world of the plan's own mesh (plan.process_mesh)"
            )
        device = None if self.plan.backend == "torch" else "cpu"  # XLA has the devices, and tensors come from the host
        if world is None:
            world = process_world(self.plan.process_mesh, device=device, algorithm=self.plan.allreduce)
        self.world = world
        self._trace = resolve_trace(trace) if self._adopt or trace is not None else None
        if self._adopt and is_host(self.world.device):
            give_freed_memory_back() if self.plan.uses_disk else keep_freed_memory()
            if self.world.rank == 0:
                warn_of_slow_precision(self.plan.precision, self.world.device)
        compiler = compiler or Compiler(Captures(model, loss_fn, self.world.device), self.plan.inner_plan, layouts)
        self.engine = engine_for(self.plan)(
            compiler, self.plan, self.world, optimizer, scheduler,
            seed=seed, clip_norm=clip_norm, on_nan=on_nan, adopt=self._adopt, scratch=scratch,
            recorder=None if self._trace is None else TraceRecorder(self.world), allow=check_allowed(allow),
        )  # fmt: skip
        self._callbacks = tuple(callbacks)
        self._noise = NoiseMeter(self.engine, noise_every) if noise_every else None
        self._last: StepLoss | None = None  # result of the last forward_backward
        self._pending: list[Callable[[], object]] = []  # loads that wait for the first batch
        self._saver = Saver()
        if self._trace is not None:
            atexit.register(_end_trace, weakref.ref(self))  # for scripts that do not call close()

    @property
    def state(self) -> TrainState:
        """The live objects that a checkpoint saves."""
        return self.engine.state

    @property
    def step_number(self) -> int:
        """The number of steps that have been taken."""
        return self.state.step_number

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer on this rank's parts of the parameters; None before the first batch."""
        return self.state.optimizer

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler, if there is one; None before the first batch."""
        return self.state.scheduler

    @property
    def executor(self) -> StepExecutor:
        """The rank's parameters and executables. Raises PlanError before the first batch."""
        return self.engine.executor

    @property
    def captures(self) -> CaptureReport:
        """The captures of the step so far: their number, their times, and what caused each."""
        return self.engine.captures

    @_TRAINS
    def prepare(self, batch: Any) -> None:
        """Capture the step, lower it under the plan and place the parameters, as the first `step` would."""
        if not self.engine.prepare(batch):
            return
        if self._trace is not None and self.world.rank == 0:
            self.write_plan(self._trace)
        pending, self._pending = self._pending, []
        for take_over in pending:
            take_over()

    @_TRAINS
    def step(self, batch: Any) -> Any:
        """Take one training step on a global batch, or on this rank's LocalBatch.

        Returns the global loss, a 0-d tensor, or (loss, aux) if `loss_fn` returns a pair. With sync=N the loss is that
        of this rank's replica on its part of the batch, without waiting for the others. Under an asynchronous schedule
        each microbatch contributes the loss of the weights that it used.
        """
        found = self._forward_backward(batch, updates=True)
        self.optimizer_step()
        return found

    @_TRAINS
    def forward_backward(self, batch: Any) -> Any:
        """Run the first half of `step`: the same result, and no parameter is changed.

        `gradients` then returns the gradients, and `optimizer_step` updates with them. Gradients of several batches
        accumulate, as in PyTorch, until `optimizer_step` or `zero_grad`. Random draws differ from batch to batch.
        Raises PlanError under an asynchronous schedule, which updates within a step.
        """
        if self.engine.updates_within:
            raise PlanError(
                f"schedule={self.plan.schedule} updates weights within a step, which has no halves; call step(batch),"
                " or take schedule=1f1b"
            )
        return self._forward_backward(batch)

    def _forward_backward(self, batch: Any, updates: bool = False) -> Any:
        check_values(batch)
        self.prepare(batch)
        self._saver.check(self.step_number)
        if self._noise is not None:
            self._noise.before(batch)
        if self.engine.recorder is not None:
            self.engine.recorder.begin()
        self._last = found = self.engine.forward_backward(batch, updates)
        return found.loss if found.outputs is None else (found.loss, found.outputs)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients for the next `optimizer_step`, before clipping: whole tensors by name, for parameters that have
        one. Every rank calls it. They are copies: what is written to them changes no gradient."""
        return self.engine.gradients()

    def zero_grad(self) -> None:
        """Drop the gradients for the next `optimizer_step`."""
        self.engine.zero_grad()
        if self._noise is not None:
            self._noise.drop()

    @_TRAINS
    def optimizer_step(self) -> Tensor | None:
        """Run the second half of `step`: clip the gradients, update, step the scheduler and call the callbacks.

        Returns the 2-norm of the gradients before clipping, a 0-d tensor, or None without `clip_norm`. Raises PlanError
        if there are no gradients.
        """
        if self._noise is not None:
            self._noise.after()
        norm = self.engine.optimizer_step()
        number, recorder = self.step_number, self.engine.recorder
        if recorder is not None:
            recorder.end(number)
        if self.world.monitor is not None:
            self.world.monitor.does(f"what comes after step {number}, such as its data, a callback or a save")
        assert self._last is not None
        last, self._last = self._last, None
        for callback in self._callbacks:
            callback(self._end_of(number, last, norm))
        return norm

    def _end_of(self, number: int, last: StepLoss, norm: Tensor | None) -> StepEnd:
        measured = (None, None) if (noise := self._noise) is None else (noise.last, noise.running.scale)
        return StepEnd(number, last.loss, norm, last.outputs or {}, *measured)

    @_TRAINS
    def evaluate(self, data: Any) -> Any:
        """The loss without gradients, in evaluation mode, as a float: of one batch, or over a loader or list of
        batches.

        If `loss_fn` returns (loss, aux) so does `evaluate`, with the outputs of all batches combined. A batch whose
        rows the ranks cannot share, such as a short last one, is computed whole by each of them. For replicas that
        synchronize later it is the loss of their mean weights.
        """
        return self.engine.evaluate(data)

    @_TRAINS
    def agree(self) -> None:
        """Synchronize replicas that do so every n steps now, as after the last step. Does nothing under other plans."""
        if self.state.replicas is not None:
            self.state.replicas.agree(self.step_number)

    @property
    def sharded_fraction(self) -> ShardedFraction | None:
        """The share of the model that an axis such as tensor splits; None without an axis that splits weights."""
        compiled = self.executor.compiled
        return None if compiled is None else compiled.share

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of every parameter, by name."""
        return dict(self.executor.layouts)

    def state_dict(self) -> dict[str, Any]:
        """State of the model, optimizer, scheduler and step. Tensors are DTensors among processes. Every rank calls it.

        As in PyTorch the tensors are those that train on: copy them, or `save`, to return to this step later.
        """
        return snapshot.take(self.state)

    @_TRAINS
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load a state that was made under any plan. Before the first batch it is kept until then.

        Raises CheckpointError for a dict that is no trainer's state.
        """
        check_arguments(state=state)
        if not {"model", "step"} <= set(state):
            raise CheckpointError(f"a trainer's state has model, optimizer and step; this one has {sorted(state)}")
        if not self.engine.is_prepared:
            self._pending.append(lambda: snapshot.restore(self.state, state))
            return
        snapshot.restore(self.state, state)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model as plain CPU tensors by name, as in `model.state_dict()`. Every rank calls it."""
        if not self.engine.is_prepared and not self._pending:
            with not_started(self.world, self.engine.compiler.model, None, False) as model:
                return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
        replicas = self.state.replicas
        with nullcontext() if replicas is None else replicas.aggregated(self.step_number):
            return snapshot.full_model(self.executor)

    @contextmanager
    @_TRAINS
    def gathered(
        self, rank: int | None = None, *, write: bool = True, at_once: bool = True, ema: bool = False
    ) -> Iterator[nn.Module]:
        """Give the model that the trainer was given its whole weights within the context: to generate, evaluate, clamp
        or export.

        Args:
            rank: the only rank to have the weights; by default all have them. Every rank enters and leaves.
            write: keep changes to weights and buffers, which all ranks make alike, or which `rank` makes. The
                optimizer's state stays as it is. Otherwise, and after an exception, changes are dropped.
            at_once: if false, weights are gathered op by op as each is read, and freed afterwards, for a model that
                fits on no device. All ranks then use the model alike, without gradients, and changes are dropped.
            ema: use the moving average that `ema` keeps in place of the weights; changes are dropped.

        For replicas that synchronize later the weights are the mean; changed weights become equal on all replicas.
        Before the first batch all ranks have the model as given, and training begins with the changed weights.

        Raises PlanError for ema=True without an average.
        """
        average = self.state.average
        if ema and average is None:
            raise PlanError("gathered(ema=True): the trainer keeps no average; call trainer.ema(decay) first")
        with ExitStack() as stack:
            if ema and average is not None:
                stack.enter_context(average.applied())
            if not self.engine.is_prepared and not self._pending:
                yield stack.enter_context(not_started(self.world, self.engine.compiler.model, rank, write and not ema))
            else:
                yield stack.enter_context(gathered(self.state, rank, write and not ema, at_once))

    @_TRAINS
    def ema(self, decay: float) -> MovingAverage:
        """Keep an exponential moving average of the weights from now on, sharded like them and updated by each step.

        `with trainer.ema(0.999).applied(): trainer.evaluate(...)` evaluates it, and `gathered(ema=True)` gives it to
        the model. Checkpoints contain it. Raises PlanError for replicas that synchronize later.
        """
        check_arguments(decay=decay)
        if self.plan.relaxed_axis:
            raise PlanError(
                f"the plan {self.plan.title!r} has replicas that agree later, each of which would have an average of"
                " its own; use a plan without sync= and compress=, or average the weights after agree() yourself"
            )
        average = self.state.average = MovingAverage(decay)
        if self.engine.is_prepared:
            average.begin(self.executor)
        return average

    @_TRAINS
    def save(
        self, path: str | Path, extra: Mapping[str, object] | None = None, *, keep: int = 2, wait: bool = True
    ) -> None:
        """Write a checkpoint, which loads under any plan, into a folder or a URL such as s3://bucket/run.

        Args:
            path: the folder or URL.
            extra: JSON-like values that `load` returns, such as {"data": loader.state_dict()}.
            keep: the number of checkpoints to keep there, this one included.
            wait: whether to return only once it is on disk. If not, training goes on while a copy in host memory is
                written; a failed save is raised by the next step, save, load or close, on all ranks.

        Raises CheckpointError, which names the file that could not be written. Earlier checkpoints stay as they were.
        """
        check_arguments(path=path, extra=extra, keep=keep)
        self.engine.check_last()
        saved_state.save(self.state, path, extra or {}, keep, self._saver, wait)

    @_TRAINS
    def load(self, path: str | Path) -> dict[str, Any]:
        """Load a checkpoint, or the newest one in a folder or URL, and return its `extra`.

        Model, optimizer, scheduler, random numbers and step continue as they were, under any plan. Before the first
        batch the model is compared, and the rest is loaded with that batch. Raises CheckpointError, with nothing
        changed, which names a damaged file or what differs in the model or the optimizer.
        """
        check_arguments(path=path)
        self._saver.wait()
        if self.engine.is_prepared:
            return load.load(self.state, path)
        folder, extra = load.look_up(self.world, self.engine.compiler.model, path)
        self._pending.append(lambda: load.load(self.state, folder))
        return extra

    @_TRAINS
    def load_weights(self, path: str | Path) -> None:
        """Load weights alone: from a checkpoint, a .safetensors file, or a folder in the form of Hugging Face.

        Dtypes are converted. Before the first batch names and shapes are compared, and the weights are loaded with that
        batch. Raises CheckpointError, which says which names or shapes differ from the model's.
        """
        check_arguments(path=path)
        self._saver.wait()
        if self.engine.is_prepared:
            load.load_weights(self.state, path)
            return
        load.look_up_weights(self.world, self.engine.compiler.model, path)
        self._pending.append(lambda: load.load_weights(self.state, path))

    def close(self) -> None:
        """Wait for a save in progress, leave the world if the trainer made it, and remove what is on disk."""
        try:
            self._saver.wait()
            self.engine.check_last()
        finally:
            self._end_trace()
            self.engine.close()
            if self._adopt:
                self.world.close()

    def _end_trace(self) -> None:
        recorder, self.engine.recorder = self.engine.recorder, None
        if recorder is not None and self._trace is not None:
            if recorder.steps:
                write_trace(self._trace, recorder)
            recorder.close()

    def span(self, kind: str, name: str) -> AbstractContextManager[object]:
        """Record what happens within, if there is a trace: `with trainer.span("data", "next"): batch = next(it)`."""
        return self.engine.span(kind, name)

    def write_plan(self, folder: Path) -> None:
        """Write what `plait report` must know of the plan into the folder of a run. One rank calls it."""
        write_plan(folder, self.executor.compiled, self.world, str(self.plan))


def _end_trace(reference: weakref.ref[Trainer]) -> None:
    if (trainer := reference()) is not None:
        trainer._end_trace()
