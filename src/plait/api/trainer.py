"""The Trainer: what a user trains with. A thin layer over the engine, with all that is seen global."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plait.backends.recorder import TraceRecorder
from plait.comm.device import is_host
from plait.comm.process import process_world
from plait.comm.protocol import World
from plait.compile.sharding.split_share import SplitShare
from plait.engine.average import MovingAverage
from plait.engine.checkpoint import collect, load, snapshot
from plait.engine.checkpoint.saver import Saver
from plait.engine.checks import check_given, check_plan, place_here
from plait.engine.compiler import Captures, Compiler, LossFn
from plait.engine.eager import check_allowed
from plait.engine.engine import Engine, StepLoss
from plait.engine.environment import resolve_plan, resolve_trace
from plait.engine.executor import StepExecutor
from plait.engine.gathered import gathered, not_started
from plait.engine.optimizers import OptimizerFactory
from plait.engine.trace_folder import write_plan, write_trace
from plait.engine.train_state import TrainState
from plait.engine.tuning import give_freed_memory_back, keep_freed_memory, warn_of_slow_precision
from plait.errors import CheckpointError, PlanError
from plait.plan.annotation import Annotations
from plait.plan.plan import Plan
from plait.spec.layout import Layout


@dataclass(frozen=True)
class StepEnd:
    """What a callback gets after each step. All values are global, or with sync=N those of this rank's replica."""

    step: int
    loss: float
    gradient_norm: float | None  # before clipping; None where no clip_norm was given
    aux: Mapping[str, Tensor] = field(default_factory=dict)  # what the loss came with


class Trainer:
    """Trains `model` under `plan`; the same script runs on one process, on many, and on many machines.

    model      any nn.Module, on any device or on the meta device; its code is not touched
    loss_fn    (model, batch) -> the mean loss over the batch, or Weighted(sum, weight) for a loss normalised by a
               count; or (loss, aux), where aux is a dict of further outputs by name
    optimizer  parameters -> torch.optim.Optimizer, such as functools.partial(torch.optim.AdamW, lr=3e-4); if its first
               argument is called `named_parameters` it gets (name, parameter) pairs. Several optimizers are a list of
               (name pattern, such a function) pairs, of which the first that fits a parameter trains it, or whatever
               the function returns: a list of optimizers, or an object that holds some and steps them
    plan       a Plan or its text; by default the environment's PLAIT_PLAN, or data parallel over all processes
    layouts    annotations of parameters by name pattern (spec.annotation); the recipes decide on the others
    clip_norm  clip the 2-norm of all gradients to this
    scheduler  optimizer -> torch.optim.lr_scheduler.LRScheduler, stepped after each step
    callbacks  called with a StepEnd after each step, on every rank
    on_nan     "raise" LossError when the loss is not finite (nothing is updated), or "warn" and go on
    scratch    the folder for what the plan keeps on disk; by default TMPDIR or /var/tmp. Nothing is left in it
    allow      "local_loss" for a model that cannot be captured and runs under PyTorch's DDP: train on the mean of the
               ranks' losses where that is not the loss of the batch, as of a loss that couples rows. It is refused else
    trace      a folder for what every rank did in the last 20 steps, written by `close`; `plait report` shows it

    A step trains in training mode: a model given in evaluation mode is switched as a whole, as `model.train()` would;
    one in training mode keeps the mode of each of its submodules. Tensors that model
    or loss read and that are neither the model's nor the batch's are read anew at each step, and changed if the step
    changes them; checkpoints do not have them. Where a Python value that they read differs, or `requires_grad`, the
    step is captured anew, which takes seconds: a number that changes at each step is better one of the batch, which is
    an input of the step but where Python needs to know it, or a 0-d tensor. The clock and files are read once, when
    the step is captured.

    What `loss_fn` returns beside the loss, `step` and `evaluate` return too, as it is for the whole global batch: a
    tensor with a row for each row of the batch has them in the batch's order; a scalar is, over microbatches and over
    the batches of an evaluation, the mean weighted by rows; Sum(x), Mean(x), Max(x), Min(x) and Weighted(sum, weight)
    say otherwise, and may have any shape. These outputs have no gradient.

    What a plan splits, such as tensor-parallel weights, lives in the trainer, and the model's own copy is let go with
    the first batch: `gathered` lends it to the model. After `close` it is gone; save it, or export it, before. If the
    start fails the model is as it was.
    """

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
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        callbacks: Sequence[Callable[[StepEnd], None]] = (),
        on_nan: Literal["raise", "warn"] = "raise",
        scratch: str | Path | None = None,
        trace: str | Path | None = None,
        allow: Collection[str] = (),
        world: World | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        check_given(model, loss_fn, optimizer, clip_norm)
        self.plan = resolve_plan(plan)
        if self.plan.workers:
            raise PlanError(
                f"the plan {self.plan.title!r} has parameter servers, which a Trainer is no part of; give it to plait"
                " train, or use data=N"
            )
        check_plan(self.plan, model, clip_norm, place_here(world))
        self._adopt = world is None
        if world is not None and world.mesh.spread != self.plan.mesh.spread:
            raise PlanError(
                f"the world has ranks along {world.mesh.spread or 'no axis'}, and the plan {self.plan.title!r} along"
                f" {self.plan.mesh.spread or 'none'}; make the world of the plan's own mesh (plan.mesh)"
            )
        self.world = world if world is not None else process_world(self.plan.mesh, algorithm=self.plan.allreduce)
        self._trace = resolve_trace(trace)
        if self._adopt and is_host(self.world.device):
            give_freed_memory_back() if self.plan.uses_disk else keep_freed_memory()
            if self.world.rank == 0:
                warn_of_slow_precision(self.plan.precision, self.world.device)
        compiler = compiler or Compiler(Captures(model, loss_fn, self.world.device), self.plan.inner_plan, layouts)
        self.engine = Engine(
            compiler, self.plan, self.world, optimizer, scheduler,
            seed=seed, clip_norm=clip_norm, on_nan=on_nan, adopt=self._adopt, scratch=scratch,
            recorder=None if self._trace is None else TraceRecorder(self.world), allow=check_allowed(allow),
        )  # fmt: skip
        self._callbacks = tuple(callbacks)
        self._last: StepLoss | None = None  # of the last forward_backward
        self._pending: list[Callable[[], object]] = []  # what is loaded, before the first batch
        self._saver = Saver()
        if self._trace is not None:
            atexit.register(_end_trace, weakref.ref(self))  # of a script that does not close

    @property
    def state(self) -> TrainState:
        """What a checkpoint saves: live objects."""
        return self.engine.state

    @property
    def step_number(self) -> int:
        """How many steps were taken."""
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
        """What this rank holds and runs. PlanError before the first batch."""
        return self.engine.executor

    def prepare(self, batch: Any) -> None:
        """Capture the step, lay it out and place the parameters, as the first `step` would."""
        if not self.engine.prepare(batch):
            return
        if self._trace is not None and self.world.rank == 0:
            self.write_plan(self._trace)
        pending, self._pending = self._pending, []
        for take_over in pending:
            take_over()

    def step(self, batch: Any) -> Any:
        """One training step on a global batch (or this rank's LocalBatch); returns the global loss, a 0-d tensor, or
        (loss, aux) where `loss_fn` does.

        With sync=N it is that of this rank's replica, on its part of the batch: the others are not waited for. Of an
        asynchronous schedule it is what each microbatch gave with the weights that it used.
        """
        found = self._forward_backward(batch)
        self.optimizer_step()
        return found

    def forward_backward(self, batch: Any) -> Any:
        """The first half of `step`: returns what `step` does, and changes no parameter.

        `gradients` gives the gradients then, and `optimizer_step` updates with them. Those of several batches add up,
        as in PyTorch, until `optimizer_step` or `zero_grad`. Random draws differ from batch to batch. PlanError under
        an asynchronous schedule, which updates within a step.
        """
        if self.engine.updates_within:
            raise PlanError(
                f"schedule={self.plan.schedule} updates weights within a step, which has no halves; call step(batch),"
                " or take schedule=1f1b"
            )
        return self._forward_backward(batch)

    def _forward_backward(self, batch: Any) -> Any:
        self.prepare(batch)
        self._saver.check(self.step_number)
        if self.engine.recorder is not None:
            self.engine.recorder.begin()
        self._last = found = self.engine.forward_backward(batch)
        return found.loss if found.outputs is None else (found.loss, found.outputs)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that wait for `optimizer_step`, before clipping: whole tensors by name, of the parameters that
        have one. Every rank calls it."""
        return self.engine.gradients()

    def zero_grad(self) -> None:
        """Drop the gradients that wait for `optimizer_step`."""
        self.engine.zero_grad()

    def optimizer_step(self) -> float | None:
        """The second half of `step`: clip and update with the gradients that wait, step the scheduler, call the
        callbacks. Returns the 2-norm of the gradients before clipping, None without `clip_norm`. PlanError where no
        gradients wait."""
        norm = self.engine.optimizer_step()
        number, recorder = self.step_number, self.engine.recorder
        if recorder is not None:
            recorder.end(number)
        if self.world.monitor is not None:
            self.world.monitor.does(f"what comes after step {number}, such as its data, a callback or a save")
        assert self._last is not None
        last, self._last = self._last, None
        for callback in self._callbacks:
            callback(StepEnd(number, float(last.loss), norm, last.outputs or {}))
        return norm

    def evaluate(self, data: Any) -> Any:
        """The loss without gradients, in evaluation mode, a float: of one batch, or over a loader or list of them.
        Where `loss_fn` returns (loss, aux) so does this, with the outputs of all batches put together. A batch that
        the plan's ranks do not divide, such as a short last one, is worked out whole by each of them.

        Of replicas that agree later it is that of the mean of their weights.
        """
        return self.engine.evaluate(data)

    def agree(self) -> None:
        """Let replicas that agree every n steps agree now, as after the last step; nothing where all agree at each."""
        if self.state.replicas is not None:
            self.state.replicas.agree(self.step_number)

    @property
    def split_share(self) -> SplitShare | None:
        """How much of the model an axis that splits weights does split; None without such an axis."""
        compiled = self.executor.compiled
        return None if compiled is None else compiled.share

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of every parameter, by name."""
        return dict(self.executor.layouts)

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer, scheduler and step; tensors are DTensors in the process world. Every rank calls it.

        As in PyTorch the tensors are those that train on: copy them, or `save`, to come back to this step later.
        """
        return snapshot.take(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state made under any plan. Before the first batch it is kept until then."""
        if not {"model", "step"} <= set(state):
            raise CheckpointError(f"a trainer's state has model, optimizer and step; this one has {sorted(state)}")
        if not self.engine.is_prepared:
            self._pending.append(lambda: snapshot.restore(self.state, state))
            return
        snapshot.restore(self.state, state)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model as plain CPU tensors by name, as `model.state_dict()` has it. Every rank calls it."""
        if not self.engine.is_prepared and not self._pending:
            with not_started(self.world, self.engine.compiler.model, None, False) as model:
                return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
        replicas = self.state.replicas
        with nullcontext() if replicas is None else replicas.aggregated(self.step_number):
            return snapshot.full_model(self.executor)

    @contextmanager
    def gathered(
        self, rank: int | None = None, *, write: bool = True, at_once: bool = True, ema: bool = False
    ) -> Iterator[nn.Module]:
        """Inside, the model that the trainer was given has its weights, whole: to generate, evaluate, clamp, export.

        rank     have them on that rank alone; by default on all. Every rank enters and leaves, whichever has them
        write    take over at the end what was changed of weights and buffers: on all ranks alike, or that of `rank`.
                 The optimizer's state stays as it is. Otherwise changes are dropped, as they are after an exception
        at_once  False puts weights together op by op, as each is read, and lets go of them after: for a model that
                 fits on no device. All ranks then use the model alike, without gradients, and write nothing
        ema      the moving average that `ema` keeps, in place of the weights; nothing is written

        Of replicas that agree later the weights are the mean; those that are changed become the same on all replicas.
        Before the first batch all ranks have the model as it was given, and training begins with what it is changed to.
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

    def ema(self, decay: float) -> MovingAverage:
        """Keep an exponential moving average of the weights from now on, in parts like these, updated by each step.

        `with trainer.ema(0.999).applied(): trainer.evaluate(...)`; `gathered(ema=True)` gives the model itself with it.
        It is saved and resumed with checkpoints.
        """
        if self.plan.relaxed_axis:
            raise PlanError(
                f"the plan {self.plan.title!r} has replicas that agree later, each of which would have an average of"
                " its own; use a plan without sync= and compress=, or average what agree() leaves yourself"
            )
        average = self.state.average = MovingAverage(decay)
        if self.engine.is_prepared:
            average.begin(self.executor)
        return average

    def save(
        self, path: str | Path, extra: Mapping[str, Any] | None = None, *, keep: int = 2, wait: bool = True
    ) -> None:
        """Write a checkpoint that loads under any plan into a folder, or a URL such as s3://bucket/run.

        extra  JSON-like values to get back from `load`, such as {"data": loader.state_dict()}
        keep   how many checkpoints are left there, this one included
        wait   whether to return only once it is on disk. If not, training goes on while it is written from a copy in
               host memory; a save that failed is raised at the next step, save, load or close, on all ranks

        CheckpointError names the file that could not be written; earlier checkpoints stay as they were.
        """
        collect.save(self.state, path, extra or {}, keep, self._saver, wait)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Take over the newest checkpoint in a folder or URL, or the one that it is; returns its `extra`.

        Model, optimizer, scheduler, random numbers and step go on as they were, whatever the plan. Before the first
        batch the model is compared and the rest is taken over with that batch. CheckpointError, with nothing changed,
        names a damaged file, or what differs in the model or the optimizer.
        """
        self._saver.wait()
        if self.engine.is_prepared:
            return load.load(self.state, path)
        folder, extra = load.look_up(self.world, self.engine.compiler.model, path)
        self._pending.append(lambda: load.load(self.state, folder))
        return extra

    def load_weights(self, path: str | Path) -> None:
        """Take over the weights alone: of a checkpoint, a .safetensors file, or a folder as Hugging Face saves it.

        Names and shapes must be those of the model, or CheckpointError says which differ; types are converted. Before
        the first batch they are compared, and the weights are taken over with that batch.
        """
        self._saver.wait()
        if self.engine.is_prepared:
            load.load_weights(self.state, path)
            return
        load.look_up_weights(self.world, self.engine.compiler.model, path)
        self._pending.append(lambda: load.load_weights(self.state, path))

    def close(self) -> None:
        """Wait for a save under way; leave the world that the trainer joined, and give up what is kept on disk."""
        try:
            self._saver.wait()
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

    def span(self, kind: str, name: str) -> AbstractContextManager[Any]:
        """Record what goes on within, if there is a trace: `with trainer.span("data", "next"): batch = next(it)`."""
        return self.engine.span(kind, name)

    def write_plan(self, folder: Path) -> None:
        """Write what `plait report` needs to know of the plan into the folder of a run; one rank calls it."""
        write_plan(folder, self.executor.compiled, self.world, str(self.plan))


def _end_trace(reference: weakref.ref[Trainer]) -> None:
    if (trainer := reference()) is not None:
        trainer._end_trace()


__all__ = ["StepEnd", "Trainer"]
