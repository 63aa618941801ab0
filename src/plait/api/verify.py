"""verify: run a plan with ranks as threads, and compare it with the unmodified model on one device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.api.trainer import Trainer
from plait.backends.choose import graphs_of
from plait.backends.recorder import Counts, TraceRecorder, read_counts
from plait.comm.protocol import World
from plait.comm.thread_world import alone, run_ranks
from plait.compile.capture.batch import batch_tensors, map_batch
from plait.compile.capture.capture import LossFn
from plait.compile.capture.loss_values import loss_and_aux, results
from plait.compile.capture.precision import Precision, narrowest
from plait.compile.compiled import Compiled
from plait.compile.ops.dims import HALF
from plait.compile.ops.split_sums import LargestParts, SplitSums
from plait.compile.rank_program import RankProgram
from plait.compile.stages.split import Pipeline
from plait.engine.arguments import check_arguments
from plait.engine.compiler import Captures, Compiler
from plait.engine.local_batch import check_values, step_key, without_inference
from plait.engine.model_copy import Twin, preserved
from plait.engine.optimizer_step import equal_draws
from plait.engine.rank_optimizers import OptimizerFactory, make_optimizer
from plait.engine.setup_checks import check_given, check_plan, check_step, place_of_threads
from plait.engine.trace_folder import loads_of_ranks
from plait.engine.train_state import FIRST_SCALE
from plait.errors import CaptureError, LossError, PlaitError, PlanError
from plait.integrations.ray_servers.served_check import ServedCheck
from plait.optim.combined import CombinedOptimizer
from plait.plan.annotation import Annotations
from plait.plan.plan import Plan
from plait.reference.differences import (
    LAST_BITS,
    Reference,
    Report,
    RoundedGradients,
    RunResult,
    in_half,
    last_bits,
    refusal_of_failed_run,
)
from plait.reference.local_sgd import SerialReplicas
from plait.reference.one_device import one_device_step, stale_step
from plait.spec.trace import ExpertLoad

_HEADROOM = 2.0**4  # of the loss scale in fp16: one rank's term of a sum may be larger than the sum


class Verifier:
    """Verifies plans of one model and batch. All plans share the capture and the run on one device.

    The arguments are those of the function `verify`.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batch: Any,
        *,
        optimizer: OptimizerFactory = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        steps: int = 2,
        seed: int = 0,
        clip_norm: float | None = None,
    ) -> None:
        check_given(model, loss_fn, optimizer, clip_norm)
        check_arguments(steps=steps, seed=seed)
        if steps < 1:
            raise PlanError(f"steps={steps}: verify takes 1 step or more")
        check_values(batch)
        self.captures = Captures(model, loss_fn, warns=False)  # plans differ in their microbatches
        self.batch = without_inference(batch)
        self.optimizer = optimizer
        self.steps = steps
        self.seed = seed
        self.clip_norm = clip_norm
        self._references: dict[Hashable, Reference] = {}

    @torch.inference_mode(False)
    def verify(self, plan: Plan | str, *, layouts: Annotations | None = None, tolerance: float = 1e-4) -> Report:
        """Compare `steps` steps under `plan` with one device; see the function `verify`."""
        plan = Plan.of(plan)
        check_arguments(layouts=layouts, tolerance=tolerance)
        check_plan(plan, self.captures.model, self.clip_norm, place_of_threads())
        compiler = Compiler(self.captures, plan.inner_plan, layouts)
        if plan.workers:
            return self._verify_served(plan, compiler, layouts, tolerance)
        compiled = self._compiled(compiler, self.batch, plan, self.optimizer)
        program = compiled.program
        graphs_of(program)  # what does not compile is found before there are ranks
        reference = self._reference(plan, program, compiler)
        mine, load = self._run_plan(plan, compiler, reference.scale / _HEADROOM)
        report = reference.compare(mine, plan, tolerance, _value_bits(program), sorted(compiled.without_rule))
        return replace(report, rows=sum(load.rows), dropped=load.dropped)

    def _verify_served(self, plan: Plan, compiler: Compiler, layouts: Annotations | None, tolerance: float) -> Report:
        check = ServedCheck(
            plan, compiler, self.batch, self.steps, optimizer=self.optimizer, layouts=layouts, seed=self.seed,
            clip_norm=self.clip_norm,
        )  # fmt: skip
        # With sync= a worker steps the optimizer on its own parts; else servers step it, which make_job has tried.
        optimizer = self.optimizer if plan.sync != 1 else None
        program = self._compiled(compiler, check.first_batch, plan, optimizer).program
        batch = self._batch_of_reference(compiler, program)

        def serial(
            plan: Plan,
            rounding: float = 0.0,
            draw: int = 0,
            wide: bool = False,
            coarse: RoundedGradients | None = None,
        ) -> RunResult:
            twin = self._twin(rounding, draw, coarse)
            if wide:
                twin.widen()
            return check.serial(twin, plan, _widened(batch) if wide else batch)

        bits = _value_bits(program)
        reference = self._with_repetitions(serial, plan, bits)
        with self._preserved():
            mine = check.in_one_process()
        return replace(reference.compare(mine, plan, tolerance, bits), steps=self.steps)

    def _compiled(
        self, compiler: Compiler, batch: Any, plan: Plan, optimizer: OptimizerFactory | None = None
    ) -> Compiled:
        """The step compiled under a plan, before there are ranks on which that could fail."""
        try:
            return check_step(compiler, batch, plan, self.clip_norm, optimizer)
        except CaptureError as error:
            if not error.data_dependent:
                raise
            error.args = (
                f"{error}\nverify compares what the graph computes, so it cannot check this model; with data=N alone"
                " the model trains as it is, under PyTorch's DDP, if its loss is a mean over rows or a plait.Weighted",
            )
            raise

    def _run_plan(self, plan: Plan, compiler: Compiler, scale: float) -> tuple[RunResult, ExpertLoad]:
        """The run, and the rows of experts if they have a capacity."""
        counts: dict[int, Counts] = {}

        def rank(world: World) -> RunResult:
            trainer = Trainer(
                compiler.model, compiler.loss_fn, self.optimizer, plan,
                seed=self.seed, clip_norm=self.clip_norm, world=world, compiler=compiler, on_nan="warn",
            )  # fmt: skip
            if plan.expert_capacity is not None:
                trainer.engine.recorder = TraceRecorder(world)
            if trainer.state.loss_scale is not None:
                trainer.state.loss_scale.value = scale
            gradients: dict[str, Tensor] = {}
            losses, outputs = [], list[dict[str, Tensor]]()
            for step in range(self.steps):
                result, found = _step(trainer, self.batch, wants_gradients=step == 0)
                loss, aux = loss_and_aux(result)
                losses.append(float(loss))
                outputs.append(aux)
                gradients = found or gradients
                if trainer.engine.recorder is not None:
                    counts[world.rank] = [*counts.get(world.rank, []), *trainer.engine.recorder.steps[-1].counts]
            if trainer.engine.recorder is not None:
                trainer.engine.recorder.close()
            replica = trainer.executor
            parameters = {n: replica.whole(n, replica.local(n)).clone() for n in replica.layouts}
            buffers = {n: value.clone() for n, value in replica.buffers.items()}
            trainer.agree()  # as after the last step; an exchange may be in flight
            return RunResult(losses, gradients, parameters, buffers, outputs=outputs[0])

        with self._preserved():
            if plan.backend != "torch":
                return rank(alone(plan.process_mesh)), ExpertLoad(())
            device = next((p.device for p in compiler.model.parameters() if not p.is_meta), "cpu")
            mine = run_ranks(plan.mesh, rank, device=device, algorithm=plan.allreduce, strict=True)[0]
        loads = loads_of_ranks(((rank, read_counts(each)) for rank, each in sorted(counts.items())), plan.mesh).values()
        rows, dropped = sum(sum(each.rows) for each in loads), sum(each.dropped for each in loads)
        return mine, ExpertLoad((rows,), dropped)

    def _batch_of_reference(self, compiler: Compiler, program: RankProgram) -> Any:
        """The batch of the run on one device: as it was given, also if the plan pads it, except that random numbers,
        which are drawn by position, are those of the padded batch."""
        draws = any(each.kind == "key" for each in program.captured.inputs)
        return compiler.padded(self.batch) if draws else self.batch

    def _reference(self, plan: Plan, program: RankProgram, compiler: Compiler) -> Reference:
        """The run on one device and its repetitions with other rounding.

        Plans share it unless they differ in local batch norm, microbatches, precision or random numbers.
        """
        batch = self._batch_of_reference(compiler, program)
        num_parts = plan.inner_plan.num_batch_parts if plan.batchnorm == "local" else 1
        pipeline = program.pipeline
        stale = pipeline if pipeline is not None and pipeline.schedule.asynchronous else None
        own = stale is not None or bool(plan.relaxed_axis)  # the plan has a definition of its own
        bits = _value_bits(program)
        levels = sorted({*bits.values()})
        lengths = () if batch is self.batch else tuple(leaf.shape for leaf in batch_tensors(batch))
        key = (
            num_parts, plan.micro, plan.precision, plan.exceptions, plan.reduce, str(plan) if own else "", lengths,
            *levels,
        )  # fmt: skip
        if key not in self._references:
            if plan.relaxed_axis:
                serial: Callable[..., RunResult] = functools.partial(self._run_replicas, program, batch)
            else:
                serial = functools.partial(self._run_one_device, batch, num_parts=num_parts, stale=stale)
            self._references[key] = self._with_repetitions(serial, plan, bits)
        return self._references[key]

    def _with_repetitions(self, program: Callable[..., RunResult], plan: Plan, bits: Mapping[str, float]) -> Reference:
        """The run of a plan's serial program, and how to repeat it with other rounding.

        `bits` is the relative rounding of its values, by name. `program` takes a plan, `rounding` (the relative change
        of the weights), `draw` (which random change), `wide` (whether to compute half precision in float32) and
        `coarse` (the rounding of gradients).
        """
        run = self._as_it_was(program)
        try:
            reference = run(plan)
        except PlaitError:
            raise
        except Exception as error:
            if (refusal := refusal_of_failed_run(plan, error)) is None:
                raise
            self._as_it_was(self._run_one_device)(self.batch, Plan(), 1)  # raises the model's own error if it has one
            raise refusal from error
        return Reference(_comparable(reference), functools.partial(self._repetitions, run, plan, bits))

    def _repetitions(self, run: Callable[..., RunResult], plan: Plan, bits: Mapping[str, float]) -> list[RunResult]:
        """The run of `_with_repetitions`, repeated."""
        levels = sorted({*bits.values()})
        again = [replace(run(plan, rounding=level), rounding=level) for level in levels]
        if levels[-1] > LAST_BITS["fp32"] and not in_half(plan):
            # The model computes in half precision by itself. One run may, by chance, show nothing of a value that is
            # rounded coarsely. What can be computed in float32 shows how far off one device is: a loss near 0 is the
            # difference of large numbers, which longer and shorter sums round differently.
            runs = [run(plan, rounding=levels[-1], draw=draw) for draw in (1, 2)]
            with suppress(Exception):  # the user's own casts may fail
                runs.append(run(plan, wide=True))
            again += [replace(one, rounding=levels[-1]) for one in runs]
        if levels[-1] > LAST_BITS["fp32"] or in_half(plan):  # each rank rounds its part of a sum
            for num_parts in (2, 4):
                with SplitSums(num_parts):
                    again.append(replace(run(plan), rounding=levels[-1]))
        if plan.compress.kind != "none":  # how a coarse code amplifies rounding, one run shows only by chance
            again += [run(plan, rounding=last_bits(plan), draw=draw) for draw in (1, 2, 3)]
        if in_half(plan):
            again.append(run(replace(plan, precision="fp32", exceptions=())))
        named = [name for name, _ in self.captures.model.named_parameters() if name in bits]
        if coarse := {name: bits[name] for name in named if bits[name] > bits["loss"]}:
            # Gradients are rounded where the loss is not, as with reduce=bf16: updates bring that to later losses. A
            # loss is one number, which a single run may leave as it is by chance.
            for draw in range(4):
                with LargestParts(2 + 2 * (draw % 2)) as parts:
                    one = run(plan, draw=draw, coarse=RoundedGradients(coarse, parts))
                again.append(replace(one, rounding=levels[-1], of_gradients=True))
        return again

    def _run_one_device(
        self,
        batch: Any,
        plan: Plan,
        num_parts: int,
        rounding: float = 0.0,
        scale: float | None = None,
        stale: Pipeline | None = None,
        draw: int = 0,
        wide: bool = False,
        coarse: RoundedGradients | None = None,
    ) -> RunResult:
        scaled = Precision(plan.precision, plan.exceptions).scaled
        if scale is None:
            scale = FIRST_SCALE if scaled else 1.0
        twin = self._twin(rounding, draw, coarse)
        if wide:
            twin.widen()
            batch = _widened(batch)
        named = dict(twin.named_parameters())
        changing = self.captures.changing  # parameters that the step itself changes: they compare as buffers do
        optimizer = make_optimizer(self.optimizer, _trained(twin))
        losses: list[float] = []
        outputs: list[dict[str, Tensor]] = []
        gradients: dict[str, Tensor] = {}
        for step in range(self.steps):
            optimizer.zero_grad(set_to_none=True)
            key = step_key(self.seed, step)
            given = (twin, self.captures.loss_fn, batch, plan, key)
            if stale is not None:  # stale_step updates too
                found = stale_step(*given, stale, optimizer, num_parts)
            else:
                found = one_device_step(*given, num_parts, scale)
            losses.append(float(found.loss))
            outputs.append(results(found.outputs or {}))
            if stale is not None:
                continue
            _finite(losses, {})
            overflown = scaled and any(p.grad is not None and not p.grad.isfinite().all() for p in named.values())
            if overflown and scale > 1:  # the trainer too lowers its scale, but this run does so before the first step
                return self._run_one_device(
                    batch, plan, num_parts, rounding, scale / 2, draw=draw, wide=wide, coarse=coarse
                )
            if step == 0:
                gradients = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
            if self.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([p for p in named.values() if p.grad is not None], self.clip_norm)
            if rounding:
                _round_as_within(optimizer, self.seed + step)
            with equal_draws(optimizer, key):
                optimizer.step()
        parameters = {n: p.detach() for n, p in named.items() if n not in changing}
        buffers = self._buffers_of(twin) | {n: named[n].detach() for n in changing}
        return RunResult(losses, gradients, parameters, buffers, scale, outputs[0])

    def _buffers_of(self, twin: Twin) -> dict[str, Tensor]:
        """A twin's buffers, without those that a step makes."""
        own = dict(self.captures.model.named_buffers())
        return {name: buffer for name, buffer in twin.named_buffers() if name in own}

    def _run_replicas(
        self,
        program: RankProgram,
        batch: Any,
        plan: Plan,
        rounding: float = 0.0,
        draw: int = 0,
        wide: bool = False,
        scale: float | None = None,
        coarse: RoundedGradients | None = None,
    ) -> RunResult:
        """The run of replicas that synchronize later, as the first of them ends it; arguments as _run_one_device."""
        if scale is None:
            scale = FIRST_SCALE if Precision(plan.precision, plan.exceptions).scaled else 1.0
        pipeline = program.pipeline
        stale = pipeline if pipeline is not None and pipeline.schedule.asynchronous else None
        twins = [self._twin(rounding, draw, coarse) for _ in range(plan.mesh.axis_size(plan.relaxed_axis))]
        for twin in twins if wide else ():
            twin.widen()
        batch = _widened(batch) if wide else batch
        optimizers = [make_optimizer(self.optimizer, _trained(twin)) for twin in twins]
        held = program.sharding.states
        states = {n: held[n] for n, _ in self.captures.model.named_parameters() if n in held}
        left_out = program.captured.left_out.names
        serial = SerialReplicas(plan, twins, optimizers, states, self.captures.changing, stale, scale, left_out)
        losses, gradients, outputs = list[float](), dict[str, Tensor](), list[dict[str, Tensor]]()
        for step in range(self.steps):
            try:
                loss, found, aux = serial.step(
                    self.captures.loss_fn, batch, step_key(self.seed, step), step + 1, self.clip_norm
                )
            except OverflowError:  # the trainer too lowers its scale, but this run does so before the first step
                return self._run_replicas(program, batch, plan, rounding, draw, wide, scale / 2, coarse)
            losses.append(loss)
            outputs.append(aux)
            gradients = gradients or found
        parameters = {
            n: p.detach() for n, p in twins[0].named_parameters() if n in states and n not in self.captures.changing
        }
        buffers = self._buffers_of(twins[0])
        buffers |= {n: p.detach() for n, p in twins[0].named_parameters() if n in self.captures.changing}
        return RunResult(losses, gradients, parameters, buffers, scale, outputs[0])

    def _preserved(self) -> AbstractContextManager[None]:
        return preserved(self.captures.model, self.captures.loss_fn)

    def _as_it_was(self, run: Callable[..., RunResult]) -> Callable[..., RunResult]:
        """The run, wrapped so that it leaves the Python state of model and loss as it was."""

        def found(*args: Any, **kwargs: Any) -> RunResult:
            with self._preserved():
                return run(*args, **kwargs)

        return found

    def _twin(self, rounding: float, draw: int = 0, coarse: RoundedGradients | None = None) -> Twin:
        """A copy of the model, with its values changed by the relative `rounding`, and gradients as by `coarse`."""
        twin = Twin(self.captures.model)
        generator = torch.Generator().manual_seed(self.seed + draw)
        if coarse is not None:
            coarse.attach(twin, generator)
        if rounding:
            for parameter in (p for p in twin.parameters() if p.is_floating_point()):
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                last_bits = max(rounding, torch.finfo(parameter.dtype).eps / 4)
                parameter.data.mul_(1 + last_bits * noise)
        return twin


def _round_as_within(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Change gradients by what an optimizer that computes in bfloat16 may make of their rounding.

    In the run whose weights differ by rounding few numbers change to the next one of bfloat16, and by chance none.
    """
    generator = torch.Generator().manual_seed(seed)
    members = optimizer.members.values() if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    for member in (each for each in members if isinstance(each, torch.optim.Muon)):
        for p in (p for group in member.param_groups for p in group["params"] if p.grad is not None):
            p.grad.mul_(1 + LAST_BITS["bf16"] / 4 * torch.randn(p.shape, generator=generator).to(p.grad))


def _widened(batch: Any) -> Any:
    """The batch with half precision converted to float32."""
    return map_batch(lambda _, x: x.float() if torch.is_tensor(x) and x.dtype in HALF else x, batch)


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _comparable(reference: RunResult) -> RunResult:
    """The run on one device. Raises LossError if its numbers are not finite, so that nothing can be compared."""
    _finite(reference.losses, reference.gradients)
    return reference


def _finite(losses: Sequence[float], gradients: Mapping[str, Tensor]) -> None:
    for number, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            raise LossError(f"the loss of step {number} is {loss} on one device: there is nothing to compare")
    for name, gradient in gradients.items():
        if not gradient.isfinite().all():
            raise LossError(f"the gradient of {name} is not finite on one device: there is nothing to compare")


def _value_bits(program: RankProgram) -> dict[str, float]:
    """The relative rounding of the loss, of each gradient (by its parameter) and of each buffer."""
    outputs, rounded = program.captured.outputs, narrowest(program.captured.graph)
    found = {o.name: max(eps / 4, LAST_BITS["fp32"]) for o, eps in zip(outputs, rounded, strict=True)}
    sent = LAST_BITS[program.plan.reduce]
    return found | {o.name: max(found[o.name], sent) for o in outputs if o.kind == "gradient"}


def _step(trainer: Trainer, batch: Any, wants_gradients: bool) -> tuple[Any, dict[str, Tensor]]:
    """Take a step. Returns its result, and its gradients if they are wanted and exist after the step."""
    if not wants_gradients or trainer.engine.updates_within:
        return trainer.step(batch), {}
    result = trainer.forward_backward(batch)
    found = trainer.gradients()
    trainer.optimizer_step()
    return result, found


def verify(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    plan: Plan | str,
    *,
    layouts: Annotations | None = None,
    optimizer: OptimizerFactory = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    steps: int = 2,
    seed: int = 0,
    clip_norm: float | None = None,
    tolerance: float = 1e-4,
) -> Report:
    """Compare `steps` steps under `plan`, with ranks as threads of this process, with one device.

    Args:
        model: the model, which is left as it was. Ranks compute on its device.
        loss_fn: as the Trainer takes it.
        batch: the global batch of every step.
        plan: a Plan or its text.
        layouts: annotations of parameters by name pattern.
        optimizer: as the Trainer takes it.
        steps: the number of steps to compare.
        seed: the seed of random draws.
        clip_norm: as the Trainer takes it.
        tolerance: the largest difference, relative to each tensor's largest value, that counts as equal; 0 for equal
            bits.

    Returns a Report: print it, or ask `.ok`.

    The reference is the model itself under ordinary autograd and `optimizer`, on the whole batch; only its random draws
    are those of the plan. Gradients and outputs of the loss function are compared after the first step, parameters and
    buffers after the last.

    A plan with servers runs in this process too: servers, and the ranks of every worker as threads, with pushes in a
    random order. The reference is the serial program that defines the plan, in the same order. Losses are those of
    pushes, and gradients are not compared. With sync=H it takes as many steps as whole rounds have.

    With batchnorm=local the reference runs on the whole batch, but batch norm takes statistics of each rank's rows
    alone, and its running statistics are those of the first rank.

    Raises PlanError, LayoutError or CaptureError as the Trainer would, and LossError if the reference is not finite.
    """
    verifier = Verifier(model, loss_fn, batch, optimizer=optimizer, steps=steps, seed=seed, clip_norm=clip_norm)
    return verifier.verify(plan, layouts=layouts, tolerance=tolerance)
