"""verify: run a plan with ranks as threads and compare it with the unmodified model on one device."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.protocol import World
from plait.comm.threads import run_ranks
from plait.errors import CaptureError, LossError, PlanError
from plait.graph.lower import Lowered
from plait.graph.pipeline import Pipeline
from plait.graph.precision import Precision
from plait.run.checks import check_given
from plait.run.compiler import Captures, Compiler, LossFn
from plait.run.microbatch import microbatches
from plait.run.references import one_device_step, stale_step
from plait.run.scaling import FIRST_SCALE
from plait.spec.annotation import Annotations
from plait.spec.plan import Plan
from plait.trainer import OptimizerFactory, Trainer, step_key

# Rounding alone moves some tensors by much of their value: the gradient of a bias in front of a normalisation is zero
# but for rounding, and a ReLU near zero may turn. How far is measured: the one-device run is repeated with the last few
# bits of every weight changed. A difference of up to this many times that effect is rounding, too. In half precision
# it is repeated in float32 as well, and the larger of the two effects counts: sums in half precision stand still once
# they are large, so that more ranks, with shorter sums, come nearer to float32 than one device does.
ROUNDING_MARGIN = 20.0
HALF_MARGIN = 6.0  # what the model families of the tests need is up to 5.6
_HEADROOM = 2.0**4  # of the loss scale in fp16: a rank's term of a sum may be larger than the sum
_LAST_BITS = {"fp32": 1e-6, "bf16": 2.0**-9, "fp16": 2.0**-12}


@dataclass(frozen=True)
class Difference:
    """How far one tensor is from the one-device run: largest absolute difference over largest value.

    Where rounding on one device makes up more than the tolerance, the difference is given in parts of that instead, so
    that it exceeds the tolerance exactly if it is more than rounding explains.
    """

    name: str
    relative: float

    def __str__(self) -> str:
        return f"{self.relative:.2e}  {self.name}"


@dataclass(frozen=True)
class Report:
    """What `verify` found. `ok` says whether every difference is within the tolerance."""

    plan: str
    steps: int
    tolerance: float
    losses: tuple[tuple[float, float], ...]  # (one device, plan) of each step
    gradients: tuple[Difference, ...]  # of the first step, in the model's order
    loss: float  # the largest difference of a loss, as in Difference
    parameters: tuple[Difference, ...]  # after the last step, in the model's order
    buffers: tuple[Difference, ...]
    without_rule: tuple[str, ...] = ()

    @property
    def worst_gradient(self) -> Difference:
        return _worst(self.gradients)

    @property
    def worst_parameter(self) -> Difference:
        return _worst(self.parameters)

    @property
    def first_bad(self) -> Difference | None:
        """The first tensor that differs: the loss, else a gradient, else a parameter, else a buffer."""
        if not self.loss <= self.tolerance:
            return Difference("loss", self.loss)
        every = (*self.gradients, *self.parameters, *self.buffers)
        return next((d for d in every if not d.relative <= self.tolerance), None)

    @property
    def ok(self) -> bool:
        return self.first_bad is None

    def __str__(self) -> str:
        one, plan = self.losses[-1]
        lines = [
            f"plan             {self.plan}",
            f"steps            {self.steps}, tolerance {self.tolerance:g} of each tensor's largest value",
            f"loss             {self.loss:.2e}  (last step: one device {one:.6f}, plan {plan:.6f})",
            f"worst gradient   {self.worst_gradient}",
            f"worst parameter  {self.worst_parameter}",
        ]
        if self.buffers:
            lines.append(f"worst buffer     {_worst(self.buffers)}")
        if self.without_rule:
            lines.append(f"without a rule   {', '.join(self.without_rule)} (run whole on every rank)")
        bad = self.first_bad
        lines.append("ok" if bad is None else f"NOT EQUAL: {bad.name} differs by {bad.relative:.2e}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Run:
    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    scale: float = 1.0  # of the loss, where precision needs one: the largest that did not overflow


class Verifier:
    """Verifies plans of one model and batch; the capture and the one-device run are made once and serve every plan."""

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
        if steps < 1:
            raise PlanError(f"steps={steps}: verify takes 1 step or more")
        self.captures = Captures(model, loss_fn)
        self.batch = batch
        self.optimizer = optimizer
        self.steps = steps
        self.seed = seed
        self.clip_norm = clip_norm
        self._references: dict[Any, tuple[_Run, list[_Run]]] = {}

    def verify(self, plan: Plan | str, *, layouts: Annotations | None = None, tolerance: float = 1e-4) -> Report:
        """Compare `steps` steps under `plan` with one device; see the function `verify`."""
        plan = Plan.parse(plan) if isinstance(plan, str) else plan
        if not isinstance(plan, Plan):
            raise PlanError(f"the plan is a {type(plan).__name__}; give a Plan or its text, such as 'data=2 tensor=2'")
        compiler = Compiler(self.captures, plan, layouts)
        try:
            lowered = compiler.lowered(microbatches(self.batch, plan.micro)[0])
        except CaptureError as error:
            if not error.data_dependent:
                raise
            error.args = (
                f"{error}\nverify compares what the graph computes, so it cannot check this model; with data=N alone"
                " the model trains as it is, under PyTorch's DDP",
            )
            raise
        reference, again = self._reference(plan, lowered)
        mine = self._run_plan(compiler, min(reference.scale, again[0].scale) / _HEADROOM)
        margin, ulp = _margin(plan), _ulp(_last_bits(plan))
        return Report(
            plan=plan.title,
            steps=self.steps,
            tolerance=tolerance,
            losses=tuple(zip(reference.losses, mine.losses, strict=True)),
            loss=max(
                _relative(
                    abs(there - here),
                    abs(here),
                    max(margin * abs(r - here) for r in others),
                    ulp * abs(here),
                    tolerance,
                )
                for here, there, *others in zip(
                    reference.losses, mine.losses, *(run.losses for run in again), strict=True
                )
            ),
            gradients=_differences(
                reference.gradients, mine.gradients, [run.gradients for run in again], tolerance, margin, ulp
            ),
            parameters=_differences(
                reference.parameters, mine.parameters, [run.parameters for run in again], tolerance, margin, ulp
            ),
            buffers=_differences(
                reference.buffers, mine.buffers, [run.buffers for run in again], tolerance, margin, ulp
            ),
            without_rule=tuple(sorted(lowered.without_rule)),
        )

    def _run_plan(self, compiler: Compiler, scale: float) -> _Run:
        def rank(world: World) -> _Run:
            trainer = Trainer(
                compiler.model, compiler.loss_fn, self.optimizer, compiler.plan,
                seed=self.seed, clip_norm=self.clip_norm, world=world, compiler=compiler, on_nan="warn",
            )  # fmt: skip
            if trainer.loss_scale is not None:
                trainer.loss_scale.value = scale
            gradients: dict[str, Tensor] = {}
            losses = []
            for step in range(self.steps):
                loss, found = trainer.step_with_gradients(self.batch, want=step == 0)
                losses.append(float(loss))
                gradients = found or gradients
            replica = trainer.replica
            parameters = {n: replica.whole(n, replica.local(n)).clone() for n in replica.layouts}
            return _Run(losses, gradients, parameters, replica.buffers)

        return run_ranks(compiler.plan.mesh, rank, algorithm=compiler.plan.allreduce)[0]

    def _reference(self, plan: Plan, lowered: Lowered) -> tuple[_Run, list[_Run]]:
        """The run on one device, and again with weights that differ by rounding, and of half precision in float32;
        local batch norm, microbatches and precision have their own."""
        num_parts = plan.num_batch_parts if plan.batchnorm == "local" else 1
        pipeline = lowered.pipeline
        stale = pipeline if pipeline is not None and pipeline.schedule.asynchronous else None
        key = (num_parts, plan.micro, plan.precision, plan.exceptions, str(plan) if stale else "")
        if key not in self._references:
            again = [self._run_one_device(plan, num_parts, _last_bits(plan), stale=stale)]
            if _in_half(plan):
                full = replace(plan, precision="fp32", exceptions=())
                again.append(self._run_one_device(full, num_parts, stale=stale))
            self._references[key] = self._run_one_device(plan, num_parts, stale=stale), again
        return self._references[key]

    def _run_one_device(
        self,
        plan: Plan,
        num_parts: int,
        rounding: float = 0.0,
        scale: float | None = None,
        stale: Pipeline | None = None,
    ) -> _Run:
        scaled = Precision(plan.precision, plan.exceptions).scaled
        if scale is None:
            scale = FIRST_SCALE if scaled else 1.0
        twin = copy.deepcopy(self.captures.model).train()
        named = dict(twin.named_parameters())
        for name, original in self.captures.model.named_parameters():
            for hook in (original._backward_hooks or {}).values():  # which a copy does not have
                named[name].register_hook(hook)
        if rounding:
            generator = torch.Generator().manual_seed(self.seed)
            for parameter in (p for p in named.values() if p.is_floating_point()):
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                last_bits = max(rounding, torch.finfo(parameter.dtype).eps / 4)
                parameter.data.mul_(1 + last_bits * noise)
        optimizer = self.optimizer([p for p in named.values() if p.requires_grad])
        losses: list[float] = []
        gradients: dict[str, Tensor] = {}
        for step in range(self.steps):
            optimizer.zero_grad(set_to_none=True)
            key = step_key(self.seed, step)
            given = (twin, self.captures.loss_fn, self.batch, plan, key)
            if stale is not None:  # which updates as it goes
                losses.append(float(stale_step(*given, stale, optimizer)))
                continue
            losses.append(float(one_device_step(*given, num_parts, scale)))
            if not math.isfinite(losses[-1]):
                raise LossError(
                    f"the loss of step {step + 1} is {losses[-1]} on one device: there is nothing to compare"
                )
            overflown = scaled and any(p.grad is not None and not p.grad.isfinite().all() for p in named.values())
            if overflown and scale > 1:  # as the trainer's scale comes down, but before the first step
                return self._run_one_device(plan, num_parts, rounding, scale / 2)
            if step == 0:
                gradients = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
            if self.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([p for p in named.values() if p.grad is not None], self.clip_norm)
            optimizer.step()
        return _Run(losses, gradients, {n: p.detach() for n, p in named.items()}, dict(twin.named_buffers()), scale)


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
    """Compare `steps` steps under `plan`, ranks as threads of this process, with one device.

    The reference is the user's own model under ordinary autograd and `optimizer`, on the whole `batch`; only its
    random draws are those that the plan makes. Gradients are compared after the first step; parameters and buffers
    after the last. The model given is left as it was.

    With batchnorm=local the reference runs the model on each rank's part of the batch in turn, and cannot draw the
    same dropout masks: verify such a plan with dropout off.
    """
    verifier = Verifier(model, loss_fn, batch, optimizer=optimizer, steps=steps, seed=seed, clip_norm=clip_norm)
    return verifier.verify(plan, layouts=layouts, tolerance=tolerance)


def _differences(
    reference: Mapping[str, Tensor],
    mine: Mapping[str, Tensor],
    again: Sequence[Mapping[str, Tensor]],
    tolerance: float,
    margin: float,
    ulp: float,
) -> tuple[Difference, ...]:
    found = []
    for name, tensor in reference.items():
        if name not in mine:
            # autograd gives an unused parameter no gradient, or zeros; both mean the same
            found.append(Difference(name, 0.0 if _largest(tensor) == 0 else math.inf))
            continue
        apart = _apart(mine[name], tensor)
        largest = _largest(tensor)
        own_ulp = _ulp(torch.finfo(tensor.dtype).eps / 4) if tensor.is_floating_point() else 0.0
        rounding = max(margin * _apart(run[name], tensor) for run in again)
        found.append(Difference(name, _relative(apart, largest, rounding, max(ulp, own_ulp) * largest, tolerance)))
    found += [Difference(name, math.inf) for name in mine if name not in reference and _largest(mine[name]) > 0]
    return tuple(found)


def _last_bits(plan: Plan) -> float:
    return max(_LAST_BITS[name] for name in (plan.precision, *dict(plan.exceptions).values()))


def _in_half(plan: Plan) -> bool:
    return _last_bits(plan) > _LAST_BITS["fp32"]


def _margin(plan: Plan) -> float:
    return HALF_MARGIN if _in_half(plan) else ROUNDING_MARGIN


def _ulp(last_bits: float) -> float:
    """What rounding explains of a value in half precision, relative to the largest, whatever the repetitions show: of a
    scalar they may show nothing by chance. An ulp and a quarter: parts are rounded, and so is their sum."""
    return 5 * last_bits if last_bits > _LAST_BITS["fp32"] else 0.0


def _relative(apart: float, largest: float, rounding: float, ulp: float, tolerance: float) -> float:
    scale = max(largest, max(rounding, ulp) / tolerance)
    return 0.0 if apart == 0 else apart / scale if scale else math.inf


def _apart(one: Tensor, other: Tensor) -> float:
    return _largest(one.detach().to(other.device).double() - other.detach().double())


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().double().abs().max()) if tensor.numel() else 0.0


def _worst(differences: tuple[Difference, ...]) -> Difference:
    return max(differences, key=_badness, default=Difference("(none)", 0.0))


def _badness(difference: Difference) -> float:
    return math.inf if math.isnan(difference.relative) else difference.relative
