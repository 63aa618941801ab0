"""search: the plans with which a model trains fastest on a cluster. Nothing is run."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from plait.api.simulate_step import Simulator
from plait.compile.capture.capture import LossFn
from plait.cost.collective_time import CollectiveKind
from plait.cost.found_plans import Candidate
from plait.cost.memory_model import GRADIENTS, OPTIMIZER, PARAMETERS, StateBytes
from plait.cost.model_forms import AxisForms, ExpertForms, ModelForms, PrecisionForms
from plait.cost.op_time import CallTimes
from plait.cost.outline_search import least_on_device, rough_steps
from plait.cost.pipeline_forms import schedule_activations
from plait.cost.plan_evaluator import PlanEvaluator, Relief, RoughStep
from plait.cost.plan_search import search as search_plans
from plait.cost.step_program import CollectiveCall, OpCall, StepProgram
from plait.cost.transformer_simulation import misses_by
from plait.cost.transformer_step import CellTimes, StateTimes, StepEstimate
from plait.engine.arguments import check_arguments
from plait.engine.local_batch import num_rows, num_tokens
from plait.engine.rank_optimizers import OptimizerFactory
from plait.engine.setup_checks import check_given
from plait.errors import LayoutError, PlanError
from plait.plan.annotation import Annotations
from plait.plan.axes import axis_kind
from plait.plan.parallelism import BUDGET, FULL, NONE, Homes, Parallelism
from plait.plan.plan import Plan
from plait.plan.plan_space import NO_LIMITS, Limits, PlanSpace, ProbePlans, probe_plans
from plait.plan.sharding_plan import ShardingPlan
from plait.report.memory_table import MemoryEstimate
from plait.report.step_prediction import StepPrediction
from plait.spec.cluster import Cluster
from plait.spec.cluster_file import find_cluster
from plait.spec.layout import Only, Shard

_ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
_HALVES = (("bf16-params", "bfloat16"), ("bf16", "bfloat16"), ("fp16-params", "float16"), ("fp16", "float16"))


def search(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    cluster: Cluster | str,
    *,
    optimizer: OptimizerFactory = _ADAMW,
    layouts: Annotations | None = None,
    clip_norm: float | None = None,
    memory: float | None = None,
    limits: str = "",
) -> list[Candidate]:
    """The plans with which a step on a global batch has the most tokens per second on a cluster, best first.

    Closed forms prune all legal plans, and the best few are lowered and simulated as `plait.simulate` does.

    Args:
        model: the model, which may be on the meta device; its values are not read.
        loss_fn: as the Trainer takes it.
        batch: a global batch, which may be on the meta device.
        cluster: a Cluster, or what `plait cluster show` takes: a name such as "h100x64", or a TOML file.
        optimizer: as the Trainer takes it.
        layouts: annotations of parameters by name pattern.
        clip_norm: as the Trainer takes it.
        memory: bytes that a rank may take; by default 92% of those of a device.
        limits: what keys may be, such as "tensor=1..8 zero=1,3 sync=1".

    Returns candidates, each with its plan, step and memory: the best one of each way to spread the ranks. Raises
    PlanError if no plan is legal or none fits, CaptureError for a model that cannot be captured, and ConfigError for an
    unknown cluster.
    """
    check_given(model, loss_fn, optimizer, clip_norm)
    check_arguments(cluster=cluster, layouts=layouts, limits=limits)
    where = cluster if isinstance(cluster, Cluster) else find_cluster(cluster)
    rows = num_rows(batch)
    evaluator = ModelEvaluator(
        model, loss_fn, lambda _: batch, rows, where, optimizer, layouts, clip_norm=clip_norm
    )  # fmt: skip
    found = search_plans(evaluator, where, (rows,), Limits.parse(limits), memory)
    return list(found.fitting())


class ModelEvaluator:
    """Any model, for a search: `ModelForms` from a few simulated steps, candidates lowered and simulated.

    Args:
        make_batch: from a number of rows to a global batch, which may be on the meta device.
        rows: of the batch from which closed forms are made.
        built: as `Estimator` takes it.
    Others are those of `search`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        make_batch: Callable[[int], Any],
        rows: int,
        cluster: Cluster,
        optimizer: OptimizerFactory = _ADAMW,
        layouts: Annotations | None = None,
        built: bool | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self.cluster = cluster
        self._make = functools.cache(
            lambda num: Simulator(
                model,
                loss_fn,
                make_batch(num),
                cluster,
                optimizer=optimizer,
                layouts=layouts,
                built=built,
                clip_norm=clip_norm,
            )
        )
        self._on = lambda other: ModelEvaluator(
            model, loss_fn, make_batch, rows, other, optimizer, layouts, built, clip_norm
        )  # fmt: skip
        self._rows = rows
        batch = make_batch(rows)
        self._positions = max(num_tokens(batch) // max(rows, 1), 1)
        self._forms: ModelForms | None = None

    @property
    def most_simulated(self) -> int:
        """How many plans are worth a simulation: lowering one takes seconds."""
        return 12

    def on(self, cluster: Cluster) -> PlanEvaluator:
        """The same model on another cluster."""
        found: ModelEvaluator = self._on(cluster)
        if self._forms is not None:
            found._forms = replace(self._forms, cluster=cluster)
        return found

    @property
    def divides(self) -> str:
        """What ranks must divide, in words."""
        return "the sizes of weights, positions or layers, as far as the model's graph allows it"

    @property
    def forms(self) -> ModelForms:
        """What is known of the model in closed form."""
        return self._probed(NO_LIMITS)

    def _probed(self, limits: Limits) -> ModelForms:
        """The closed forms. If they are not made yet, they are made for the plans that the limits allow."""
        if self._forms is None:
            words = [word for word in self._words() if limits.allow("precision", word)] or ["fp32"]
            self._forms = _probe(self._make(self._rows), self._rows, words, limits)
        return self._forms

    def _words(self) -> list[str]:
        device = self.cluster.device
        return ["fp32", *(word for word, dtype in _HALVES[:2] if dtype in dict(device.peak) and device.overlaps)]

    def space(self, num_ranks: int, rows: tuple[int, ...], limits: Limits) -> PlanSpace:
        """The plans for so many ranks."""
        forms = self._probed(limits)
        return PlanSpace(
            num_ranks,
            rows,
            self.cluster.sizes,
            forms.layers,
            () if forms.weights is not None else (1,),
            self._positions if forms.context is not None else 1,
            tuple(forms.precisions),
            self.cluster.has_host_memory,
            limits,
            experts=forms.experts.number if forms.experts is not None else 1,
            splits_sequence=forms.sequence is not None,
            repeats_layers=any(FULL in each.kept for each in forms.precisions.values()),
        )

    def cells(self, outline: Parallelism, rows: int) -> CellTimes:
        """What a microbatch takes on the rank that computes longest."""
        return self.forms.cells(outline, rows)

    def kept(self, outline: Parallelism, rows: int) -> tuple[float, float]:
        """Bytes that a microbatch keeps on its ranks for backward: of all layers, and of one."""
        return self.forms.kept(outline, rows)

    def relief(self, outline: Parallelism, rows: int) -> Relief:
        """Always (): only the simulation of all calls shows what a budget of recomputation saves."""
        return ()

    def states(self, how: Parallelism, rows: int, cells: CellTimes) -> StateTimes:
        """What sums of gradients, the update, copies and exchanges take."""
        return self.forms.states(how, rows, cells)

    def least_memory(self, how: Parallelism, rows: int) -> tuple[dict[str, float], dict[str, float]]:
        """Bytes by class on the device and outside it, without the activations of microbatches in flight."""
        return self.forms.least_memory(how, rows)

    def rough(
        self, space: PlanSpace, outline: Parallelism, rows: int, homes: Sequence[Homes], memory: float, most: float
    ) -> Iterator[RoughStep]:
        """Closed forms of all plans of an outline with these homes, except plans that take more than `most` seconds."""
        return rough_steps(self, space, outline, rows, homes, memory, most)

    def least(self, space: PlanSpace, outline: Parallelism, rows: int, homes: Sequence[Homes]) -> float:
        """Bytes on the device that each plan of an outline with these homes takes at least."""
        return least_on_device(self, space, outline, rows, homes)

    def refine(self, how: Parallelism, rows: int, memory: float, limits: Limits) -> Parallelism:
        """The same plan with a budget of recomputation in place of whole layers, if there is room."""
        sizes = limits.sizes("bucket")
        how = replace(how, bucket=sizes[0]) if sizes else how
        if how.recompute != FULL or not limits.allow("recompute", "budget"):
            return how
        budget = self._budget(how, rows, memory)
        return replace(how, recompute=BUDGET, budget=budget) if budget else how

    def _budget(self, how: Parallelism, rows: int, memory: float) -> int:
        """The bytes that a microbatch may keep, half of what is left over as a margin; 0 if layers are repeated."""
        least, _ = self.forms.least_memory(how, rows)
        kept, _ = self.forms.kept(how, rows)
        whole, _ = self.forms.kept(replace(how, recompute=NONE), rows)
        in_flight = schedule_activations(how.order, how.pipeline, how.num_micro, how.chunks)
        room = (memory - sum(least.values())) / in_flight
        if room < 1.5 * kept:
            return 0
        return int(min((kept + room) / 2, whole)) // 2**20 * 2**20

    def simulate(self, plan: Plan, rows: int) -> ModelStep:
        """The step of a plan. Raises PlanError for a plan that the model does not allow."""
        how, simulator = Parallelism.of(plan), self._make(rows)
        try:
            found = simulator.simulate(plan, memory=False)
        except LayoutError as error:
            raise PlanError(str(error)) from None
        least, away = self.forms.least_memory(how, rows)
        factor = schedule_activations(how.order, how.pipeline, how.num_micro, how.chunks)
        size = sum(least.values()) + sum(away.values()) + self.forms.kept(how, rows)[0] * factor
        return ModelStep(plan, found, lambda: simulator.memory(plan), size)


@dataclass(frozen=True)
class ModelStep:
    """A simulated step of a model.

    Attributes:
        plan: the plan.
        prediction: its step.
        estimated: estimates its memory, which takes longer than its step.
        size: about the bytes that a rank takes, wherever they are kept.
    """

    plan: Plan
    prediction: StepPrediction
    estimated: Callable[[], MemoryEstimate]
    size: float

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def tokens(self) -> int:
        return self.prediction.program.tokens * self.prediction.replicas

    @property
    def tokens_per_second(self) -> float:
        return self.prediction.tokens_per_second

    @property
    def mfu(self) -> float:
        return self.prediction.mfu

    @property
    def dollars_per_million_tokens(self) -> float | None:
        return self.prediction.dollars_per_million_tokens

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by what they are spent on, in words."""
        times = self.prediction.simulated.times
        named = {
            "compute": "compute",
            "collectives": "collectives",
            "bubble": "bubble and messages",
            "update": "update",
        }
        found = {words: times.get(name, 0.0) for name, words in named.items()}
        found["compute"] += max(self.prediction.simulated.seconds - sum(found.values()), 0.0)
        return found | {"exchanges": self.prediction.exchanges}

    @functools.cached_property
    def estimate(self) -> StepEstimate:
        """Times and memory by class."""
        parts, fullest = self.parts, self.estimated().fullest
        homes = {
            PARAMETERS: self.plan.home_parameters, GRADIENTS: self.plan.home_parameters,
            OPTIMIZER: self.plan.home_optimizer, "activations": self.plan.home_activations,
        }  # fmt: skip
        sizes = {kind: float(size) for kind, size in fullest.at_peak.items()}
        away = {kind: size for kind, size in sizes.items() if homes.get(kind, "device") != "device"}
        flops = self.prediction.program.model_flops * self.prediction.replicas
        return StepEstimate(
            compute=parts["compute"], weights=0.0, messages=0.0, bubble=parts["bubble and messages"],
            data=parts["collectives"], optimizer=parts["update"], model_flops=flops, hardware_flops=flops,
            memory={kind: size for kind, size in sizes.items() if kind not in away},
            sent=dict(self.prediction.sent), exchanges=self.prediction.exchanges, host_memory=away,
        )  # fmt: skip

    def misses_by(self, memory: float) -> float:
        """Bytes that the step takes beyond `memory` of a device, or beyond the host's memory; at most 0 if it fits.

        A step whose rough size is below half of `memory` is not estimated exactly."""
        if 2 * self.size < memory:
            return self.size - memory
        found, cluster = self.estimate, self.prediction.cluster
        homes = Homes(self.plan.home_parameters, self.plan.home_activations, self.plan.home_optimizer)
        ranks = self.plan.num_processes
        return misses_by(found.peak_memory - memory, found.host_memory, cluster, ranks, homes)


def _probe(simulator: Simulator, rows: int, words: Sequence[str], limits: Limits) -> ModelForms:
    """What is known of a model from steps on one device, and over two ranks of each kind that it allows."""
    one, whole_memory = simulator.simulate(Plan(), memory=False), simulator.memory(Plan())
    times = CallTimes(simulator.cluster)
    calls = [call for graph in one.program.graphs.values() for call in graph if isinstance(call, OpCall)]
    names = {found[0] for call in calls if (found := re.match(r"(.*?\.)?\d+(?=\.|$)", call.module))}
    overhead = len(calls) * simulator.cluster.device.op_seconds
    most, elements = whole_memory.fullest.most, whole_memory.num_parameters
    precisions = {}
    for word in words:
        try:
            plain = one if word == "fp32" else simulator.simulate(Plan(precision=word), memory=False)
            saved = (whole_memory if word == "fp32" else simulator.memory(Plan(precision=word))).fullest.saved
        except PlanError:
            continue
        forward, backward = _phases(plain.program, times)
        kept = {NONE: saved / rows}
        with contextlib.suppress(PlanError):  # of a model without layers
            if not limits.fixes("recompute", "none"):
                kept[FULL] = simulator.memory(Plan.parse(f"recompute=layer precision={word}")).fullest.saved / rows
        scale = 1 / rows
        spent = min(overhead, 0.9 * (forward + backward))
        precisions[word] = PrecisionForms(
            (forward - spent / 3) * scale, (backward - 2 * spent / 3) * scale, kept
        )  # fmt: skip
    probes = probe_plans(limits, simulator.cluster.num_devices)
    boundary = _two_stages(simulator, probes.stages, rows)
    layers = max(len(names), 2)
    return ModelForms(
        simulator.cluster,
        layers if boundary is not None else 1,
        float(elements),
        StateBytes(*(most.get(kind, 0) / elements for kind in (PARAMETERS, GRADIENTS, OPTIMIZER))),
        overhead,
        one.simulated.times["update"],
        boundary or 0.0,
        precisions,
        _two_ranks(simulator, probes.weights, one, whole_memory, rows),
        _two_ranks(simulator, probes.sequence, one, whole_memory, rows),
        _two_ranks(simulator, probes.context, one, whole_memory, rows),
        _experts(simulator, probes, rows),
    )


def _phases(program: StepProgram, times: CallTimes) -> tuple[float, float]:
    """Seconds of the ops of a forward, and of a backward, on one rank."""
    found = {"forward": 0.0, "backward": 0.0}
    for graph in program.graphs.values():
        for call in graph:
            if isinstance(call, OpCall):
                kind = "forward" if call.phase == "forward" else "backward"
                found[kind] += times.seconds(call)
    return found["forward"], found["backward"]


def _two_stages(simulator: Simulator, plan: Plan | None, rows: int) -> float | None:
    """Bytes of a row between two stages; None if the model is not cut."""
    if plan is None:
        return None
    try:
        program = simulator.program(plan)
    except (PlanError, LayoutError):
        return None
    assert program.pipeline is not None
    return max(program.pipeline.messages.values(), default=0) / rows


def _two_ranks(
    simulator: Simulator, plan: Plan | None, one: StepPrediction, alone: MemoryEstimate, rows: int
) -> AxisForms | None:
    """What two ranks of an axis share; None if the model does not allow it."""
    if plan is None:
        return None
    try:
        two, shared = simulator.simulate(plan, memory=False), simulator.memory(plan)
    except (PlanError, LayoutError):
        return None
    times = CallTimes(simulator.cluster)
    sent: dict[CollectiveKind, tuple[int, float]] = {}
    for graph in two.program.graphs.values():
        for call in graph:
            if isinstance(call, CollectiveCall) and call.part != "wait":
                for transfer in call.transfers:
                    count, num_bytes = sent.get(transfer.kind, (0, 0.0))
                    sent[transfer.kind] = count + 1, num_bytes + transfer.kind.whole_bytes(transfer.held, 2) / rows
    before, after = sum(_phases(one.program, times)), sum(_phases(two.program, times))
    return AxisForms(
        _split(before, after),
        _split(alone.fullest.most.get(PARAMETERS, 0), shared.fullest.most.get(PARAMETERS, 0)),
        _split(alone.fullest.saved, shared.fullest.saved),
        sent,
    )


def _experts(simulator: Simulator, probes: ProbePlans, rows: int) -> ExpertForms | None:
    """What two ranks of experts share; None if the model has none, or does not allow it."""
    plan = probes.experts
    if plan is None:
        return None
    try:
        number = _num_experts(simulator.lowered(plan).sharding)
        two, shared = simulator.simulate(plan, memory=False), simulator.memory(plan)
        alone = simulator.memory(probes.rows)
    except (PlanError, LayoutError):
        return None
    sent = [
        transfer.held
        for graph in two.program.graphs.values()
        for call in graph
        if isinstance(call, CollectiveCall) and call.part != "wait"
        for transfer in call.transfers
        if transfer.kind is CollectiveKind.ALL_TO_ALL
    ]
    fraction = _split(alone.fullest.most.get(PARAMETERS, 0), shared.fullest.most.get(PARAMETERS, 0))
    return ExpertForms(number, fraction, max(len(sent), 1), 2 * sum(sent) / rows)


def _num_experts(sharding: ShardingPlan) -> int:
    """The experts of each mixture: those of its tables, or of modules whose names differ in a number alone."""
    sizes, alike = [], Counter[str]()
    for name, each in sharding.parameters.items():
        for axis, placement in each.compute.placements:
            if axis_kind(axis).cuts_experts and isinstance(placement, Shard):
                sizes.append(each.compute.shape[placement.dim])
            elif axis_kind(axis).cuts_experts and isinstance(placement, Only):
                alike[re.sub(r"\.\d+\.(?!.*\.\d+\.)", ".", name)] += 1
    return math.gcd(*sizes, *alike.values())


def _split(one: float, two: float) -> float:
    """The fraction of something that two ranks have split, if each has `two` of `one`."""
    return min(max(2 * (1 - two / max(one, 1e-12)), 0.0), 1.0)
