"""Compares a run under a plan with the run on one device, relative to the differences that rounding explains.

Gradients on one device are also rounded as ranks round their terms of a sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from plait.compile.ops.split_sums import LargestParts
from plait.errors import PlanError, Refusal
from plait.plan.legality import of_fewer_rows
from plait.plan.plan import Plan

# Rounding alone changes some tensors by much of their value: the gradient of a bias before a normalization is zero but
# for rounding, and a ReLU near zero may flip. The effect is measured: the one-device run is repeated with the last few
# bits of every weight changed, and a difference of up to ROUNDING_MARGIN times that effect counts as rounding. In half
# precision the run is repeated in float32 too, and the larger of the two effects counts: large sums in half precision
# stop growing, so that several ranks, with shorter sums, come nearer to float32 than one device does.
ROUNDING_MARGIN = 20.0
HALF_MARGIN = 6.0  # the model families of the tests need up to 5.6
LAST_BITS = {"fp32": 1e-6, "bf16": 2.0**-9, "fp16": 2.0**-12}


# The result, in another order of summation, of a sum that is zero but for rounding: in units of the last place of the
# largest value of all tensors. One device may give exactly zero, and then every repetition does too. In float64 it may
# be more, because terms that cancel can be far larger than any gradient; no error of a plan is that small.
_ZERO_SUM_ULPS = 16.0
_ZERO_SUM = 1e-12

# The change of a coded gradient, relative to the tensor's largest value, if rounding moves a number to the next code. A
# replica on several ranks rounds differently from one on one device.
_CODE_STEPS = {"bf16": 2.0**-7, "fp8": 2.0**-3, "int8": 1 / 127, "int4": 1 / 7}


_ROUNDING = "(where one device's rounding exceeds that, {:g} stands for the rounding)"


@dataclass(frozen=True)
class Difference:
    """The difference of a tensor from that of the one-device run: the largest absolute difference over the largest
    value.

    If rounding on one device exceeds the tolerance, the difference is relative to that rounding instead, scaled so that
    it exceeds the tolerance exactly if rounding does not explain it.
    """

    name: str
    relative: float

    def __str__(self) -> str:
        return f"{self.relative:.2e}  {self.name}"


@dataclass(frozen=True)
class Report:
    """The result of `verify`.

    Attributes:
        plan: the plan.
        steps: the number of steps that were run.
        tolerance: the largest difference that counts as equal.
        losses: (one device, plan) of each step; with parameter servers, of each push.
        gradients: differences of the first step's gradients, in the model's order; empty with parameter servers.
        loss: the largest difference of a loss, measured as in Difference.
        parameters: differences of parameters after the last step, in the model's order.
        buffers: differences of buffers after the last step.
        without_rule: ops that ran on whole inputs because they have no sharding rule.
        outputs: differences of what the loss function returned beside the loss, in the first step.
        rows: rows of all steps that had an expert, if the plan gives experts a capacity.
        dropped: those of them that found no room, and had zero as the result of their expert.
    """

    plan: str
    steps: int
    tolerance: float
    losses: tuple[tuple[float, float], ...]
    gradients: tuple[Difference, ...]
    loss: float
    parameters: tuple[Difference, ...]
    buffers: tuple[Difference, ...]
    without_rule: tuple[str, ...] = ()
    outputs: tuple[Difference, ...] = ()
    rows: int = 0
    dropped: int = 0

    @property
    def worst_gradient(self) -> Difference:
        """The gradient that differs most."""
        return _worst(self.gradients)

    @property
    def worst_parameter(self) -> Difference:
        """The parameter that differs most."""
        return _worst(self.parameters)

    @property
    def first_bad(self) -> Difference | None:
        """The first tensor that differs: the loss, else an output, a gradient, a parameter or a buffer."""
        if not self.loss <= self.tolerance:
            return Difference("loss", self.loss)
        every = (*self.outputs, *self.gradients, *self.parameters, *self.buffers)
        return next((d for d in every if not d.relative <= self.tolerance), None)

    @property
    def ok(self) -> bool:
        """Whether every difference is within the tolerance."""
        return self.first_bad is None

    def __str__(self) -> str:
        one, plan = self.losses[-1]
        last = "step" if len(self.losses) == self.steps else "push"
        lines = [
            f"plan             {self.plan}",
            f"steps            {self.steps}, tolerance {self.tolerance:g} of each tensor's largest value",
            *([f"                 {_ROUNDING.format(self.tolerance)}"] if self.tolerance else []),
            f"loss             {self.loss:.2e}  (last {last}: one device {one:.6f}, plan {plan:.6f})",
            *([f"worst output     {_worst(self.outputs)}"] if self.outputs else []),
            *([f"worst gradient   {self.worst_gradient}"] if self.gradients else []),
            f"worst parameter  {self.worst_parameter}",
        ]
        if self.buffers:
            lines.append(f"worst buffer     {_worst(self.buffers)}")
        if self.without_rule:
            lines.append(f"without a rule   {', '.join(self.without_rule)} (run whole on every rank)")
        if self.dropped:
            capacity = f"expert.capacity={Plan.parse(self.plan).expert_capacity:g}"
            lines.append(
                f"dropped          {self.dropped:,} of {self.rows:,} rows that had an expert, by {capacity}; give a"
                " larger one, or leave it out for none"
            )
        bad = self.first_bad
        lines.append("ok" if bad is None else f"NOT EQUAL: {bad.name} differs by {bad.relative:.2e}")
        return "\n".join(lines)


@dataclass(frozen=True)
class RunResult:
    """The values of a run that are compared.

    Attributes:
        losses: the loss of each step.
        gradients: the gradients of the first step, by parameter.
        parameters: the parameters after the last step, by name.
        buffers: the buffers after the last step, by name.
        scale: the factor of the loss, if the precision needs one: the largest that did not overflow.
        outputs: what the loss function returned beside the loss, in the first step.
        rounding: the relative change made to the weights, in a repetition.
        of_gradients: whether the repetition changed gradients instead, by what they are rounded to beyond the loss.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    scale: float = 1.0
    outputs: dict[str, Tensor] = field(default_factory=dict)
    rounding: float = 0.0
    of_gradients: bool = False


class Reference:
    """The run on one device, which runs of plans are compared with.

    `repeat` returns repetitions of it with other rounding, and is called once a difference exceeds the tolerance, which
    rounding may explain.
    """

    def __init__(self, run: RunResult, repeat: Callable[[], Sequence[RunResult]]) -> None:
        self._run = run
        self._repeat = repeat
        self._again: Sequence[RunResult] | None = None

    @property
    def again(self) -> Sequence[RunResult]:
        """Repetitions of the run with other rounding."""
        if self._again is None:
            self._again = self._repeat()
        return self._again

    @property
    def scale(self) -> float:
        """The factor of the loss with which no run on one device has overflowed."""
        return 1.0 if self._run.scale == 1 else min(self._run.scale, self.again[0].scale)

    def compare(
        self,
        mine: RunResult,
        plan: Plan,
        tolerance: float,
        bits: Mapping[str, float],
        without_rule: Sequence[str] = (),
    ) -> Report:
        """Compare a plan's run with this one; arguments as those of the function `compare`."""
        report = compare(self._run, mine, (), plan, tolerance, without_rule, bits)
        return report if report.ok else compare(self._run, mine, self.again, plan, tolerance, without_rule, bits)


def compare(
    reference: RunResult,
    mine: RunResult,
    again: Sequence[RunResult],
    plan: Plan,
    tolerance: float,
    without_rule: Sequence[str] = (),
    bits: Mapping[str, float] | None = None,
) -> Report:
    """Compare a plan's run with the run on one device.

    Args:
        reference: the run on one device.
        mine: the run under the plan.
        again: repetitions of the run on one device with different rounding.
        plan: the plan.
        tolerance: the largest difference that counts as equal.
        without_rule: ops without a sharding rule, for the report.
        bits: by gradient, buffer or "loss", the relative rounding of the precision it passes through; by default that
            of the plan's coarsest precision.
    """
    by_name = {} if bits is None else bits
    coarsest = max(by_name.values(), default=last_bits(plan))
    of_weights = [run for run in again if not run.of_gradients]
    of = functools.partial(_Rounding.of, again=of_weights, otherwise=coarsest, bits=by_name)
    # After an update every value depends on every gradient, and so on the coarsest precision that one passed through.
    updated = functools.partial(of, again=again, bits={}) if len(mine.losses) > 1 else of
    loss, by_updates = of("loss"), [run for run in again if run.of_gradients]
    code = _CODE_STEPS.get(plan.compress.kind, 0.0) if plan.inner_plan.num_processes > 1 else 0.0
    return Report(
        plan=plan.title,
        steps=len(mine.losses),
        tolerance=tolerance,
        losses=tuple(zip(reference.losses, mine.losses, strict=True)),
        loss=max(
            _relative(
                abs(there - here),
                abs(here),
                # A loss after an update has the rounding of gradients too; before one, those repetitions show none.
                max(
                    [
                        *(loss.margin * abs(run.losses[step] - here) for run in loss.again),
                        *(HALF_MARGIN * abs(run.losses[step] - here) for run in by_updates),
                        0.0,
                    ]
                ),
                loss.ulp * abs(here),
                tolerance,
            )
            for step, (here, there) in enumerate(zip(reference.losses, mine.losses, strict=True))
        ),
        gradients=_differences("gradients", reference, mine, functools.partial(of, again=again), tolerance, code),
        parameters=_differences("parameters", reference, mine, updated, tolerance),
        buffers=_differences("buffers", reference, mine, updated, tolerance),
        without_rule=tuple(without_rule),
        outputs=_differences("outputs", reference, mine, of, tolerance),
    )


@dataclass(frozen=True)
class _Rounding:
    """The difference of one value that rounding explains: `margin` times that of the runs `again`, and `ulp` times its
    size."""

    again: Sequence[RunResult]
    margin: float
    ulp: float

    @classmethod
    def of(cls, name: str, again: Sequence[RunResult], otherwise: float, bits: Mapping[str, float]) -> _Rounding:
        own = bits.get(name, otherwise)
        runs = [run for run in again if run.rounding <= own]
        return cls(runs or again, HALF_MARGIN if own > LAST_BITS["fp32"] else ROUNDING_MARGIN, _ulp(own))


def _differences(
    kind: str,
    one_device: RunResult,
    plan: RunResult,
    of: Callable[[str], _Rounding],
    tolerance: float,
    code: float = 0.0,
) -> tuple[Difference, ...]:
    found = []
    reference: dict[str, Tensor] = getattr(one_device, kind)
    mine: dict[str, Tensor] = getattr(plan, kind)
    floats = [tensor for tensor in reference.values() if tensor.is_floating_point()]
    overall = max((_largest(tensor) for tensor in floats), default=0.0)

    def rounding_of(name: str) -> float:
        own, value = of(name), reference[name]
        # A repetition may send no row to an expert, whose weights then have no gradient.
        repeated = [getattr(run, kind).get(name, torch.zeros_like(value)) for run in own.again]
        return max((own.margin * _apart(each, value) for each in repeated), default=0.0)

    for name, tensor in reference.items():
        there = mine.get(name)
        if there is None and (kind == "gradients" or not _largest(tensor)):
            there = torch.zeros_like(tensor)  # autograd gives an unused parameter no gradient or zeros
        if there is None or there.shape != tensor.shape:
            found.append(Difference(name, math.inf))
            continue
        apart = _apart(there, tensor)
        largest = _largest(_reals(tensor).nan_to_num(posinf=0.0, neginf=0.0))
        eps = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
        zero_sum = max(_ZERO_SUM_ULPS * min(eps, LAST_BITS["fp32"] / 8), _ZERO_SUM if eps else 0.0)
        zero_sum *= overall if overall < math.inf else 0.0
        own = of(name)
        rounding = rounding_of(name)
        if kind == "gradients" and not largest:
            noise = max(map(rounding_of, reference))
            if noise >= own.margin * overall / 2:  # then all gradients are zero but for rounding
                rounding = noise
        last_place = max(max(own.ulp, code, _ulp(eps / 4)) * largest, zero_sum)
        found.append(Difference(name, _relative(apart, largest, rounding, last_place, tolerance)))
    found += [Difference(name, math.inf) for name in mine if name not in reference and _largest(mine[name]) > 0]
    return tuple(found)


def last_bits(plan: Plan) -> float:
    """The relative rounding of the coarsest precision that the plan uses."""
    return max(LAST_BITS[name] for name in plan.precisions)


def in_half(plan: Plan) -> bool:
    """Whether the plan computes anything in half precision."""
    return last_bits(plan) > LAST_BITS["fp32"]


def _ulp(last_bits: float) -> float:
    """The rounding of a value in half precision relative to the largest value, whatever the repetitions show.

    For a scalar they may show nothing by chance. It is five quarters of an ulp: parts are rounded, and so is their sum.
    """
    return 5 * last_bits if last_bits > LAST_BITS["fp32"] else 0.0


def _relative(apart: float, largest: float, rounding: float, ulp: float, tolerance: float) -> float:
    scale = max(largest, max(rounding, ulp) / tolerance if tolerance else 0.0)  # 0 asks for equal bits
    return 0.0 if apart == 0 else apart / scale if scale else math.inf


def _apart(one: Tensor, other: Tensor) -> float:
    one, other = _reals(one).to(other.device), _reals(other)
    same = (one == other) | (one.isnan() & other.isnan())  # equal infinities too
    return _largest(torch.where(same, 0.0, one - other))


def _largest(tensor: Tensor) -> float:
    return float(_reals(tensor).abs().max()) if tensor.numel() else 0.0


def _reals(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def _worst(differences: tuple[Difference, ...]) -> Difference:
    return max(differences, key=_badness, default=Difference("(none)", 0.0))


def _badness(difference: Difference) -> float:
    return math.inf if math.isnan(difference.relative) else difference.relative


def refusal_of_failed_run(plan: Plan, error: Exception) -> PlanError | None:
    """The PlanError for a model that does not run on one device as the plan has it run; None if it runs it as it is."""
    if in_half(plan) and isinstance(error, RuntimeError):
        name = next(n for n in (plan.precision, *dict(plan.exceptions).values()) if n != "fp32")
        why = f"on one device the model does not run in it ({error})"
        return PlanError(Refusal(f"precision={name}", why, "keep the module in fp32, with precision.NAME=fp32"))
    if plan.micro == 1 and not plan.relaxed_axis:
        return None
    return PlanError(of_fewer_rows(plan.title, f"{type(error).__name__}: {error}"))


class RoundedGradients:
    """Changes gradients by what the rounding of their parts may come to.

    bits   the relative rounding, by parameter
    parts  the parts of the sums of the run: they may cancel, so that they are far larger than the gradient
    """

    def __init__(self, bits: Mapping[str, float], parts: LargestParts) -> None:
        self._bits = bits
        self._parts = parts

    def attach(self, model: nn.Module, generator: torch.Generator) -> None:
        """Change the gradients that the model's parameters get from now on, by random numbers of the generator."""
        named = dict(model.named_parameters())
        for name, bits in self._bits.items():
            if named[name].requires_grad:
                named[name].register_hook(functools.partial(self._changed, bits, generator))

    def _changed(self, bits: float, generator: torch.Generator, gradient: Tensor) -> Tensor:
        if not gradient.numel() or gradient.layout != torch.strided:
            return gradient
        noise = torch.randn(gradient.shape, generator=generator).to(gradient)
        return gradient + bits * self._parts.largest(gradient) * noise
