"""A transformer's step under a plan on a cluster: closed forms for the cells of a pipeline, its schedule simulated.

simulate_step(shape, plan, rows, cluster) -> SimulatedStep
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

from plait.cost.costs import Costs
from plait.cost.memory_model import StateBytes
from plait.cost.simulate import ScheduleTimes, schedule_times, simulate
from plait.cost.transformer import HALF_BYTES, TransformerShape
from plait.cost.transformer_memory import kept_bytes, memory_of_rank
from plait.cost.transformer_program import TransformerProgram
from plait.cost.transformer_step import (
    StepEstimate,
    cell_times,
    check_shape,
    estimate_step,
    exchange_per_step,
    head_time,
    layer_time,
    message_time,
    state_times,
)
from plait.errors import PlanError, Refusal
from plait.plan.parallelism import ON_DEVICE, Homes, Parallelism
from plait.plan.plan import Plan
from plait.plan.sharding_plan import DEVICE, DISK, HOST
from plait.schedule.families import make_schedule
from plait.spec.cluster import Cluster
from plait.spec.schedule import Schedule
from plait.spec.trace import Span, Trace

# What lies between products is moved so often in torch's programs, as fitted to half of torchtitan's runs on H100s; its
# runs on A100s, which it was not fitted to, are met with it too (docs/bench/published.md).
_TRAFFIC = 5.75
_MOST_ACTIONS = 1_000_000  # that are simulated: they take a minute
BUCKETS = (25 * 2**20, 5 * 2**20, 100 * 2**20, 400 * 2**20)  # that are worth a try, the default first
_CONTENTION = 0.15  # assumed: collectives take some of a GPU's multiprocessors, and of its memory's bandwidth


@dataclass(frozen=True)
class SimulatedStep:
    """What a step of a plan takes.

    Attributes:
        plan: the plan.
        cluster: where it runs.
        rows: sequences of the step, of all ranks together.
        tokens: tokens of the step.
        dtype: of products.
        estimate: the closed forms; `bubble` is replaced by what the simulated schedule has.
        costs: of the stages of the pipeline, if there is one.
        num_simulated: microbatches that were simulated: the first ones alone, if there are many.
        layers: of each stage of the pipeline.
        shape: of the model.
        forward: the fraction of compute and weights' sums that forwards are, without a pipeline.
    """

    plan: Plan
    cluster: Cluster
    rows: int
    tokens: int
    dtype: str
    estimate: StepEstimate
    costs: Costs | None = None
    num_simulated: int = 0
    layers: tuple[int, ...] = ()
    shape: TransformerShape | None = None
    forward: float = 1 / 3

    @cached_property
    def schedule(self) -> Schedule | None:
        """The schedule of the pipeline, if there is one, of the microbatches that were simulated."""
        return None if self.costs is None else _schedule(self.plan, self.num_simulated)

    @cached_property
    def trace(self) -> Trace:
        """The spans of the pipeline's ranks, without sums of gradients and updates, of the microbatches that were
        simulated. Without a pipeline those of one rank, microbatches together, and what follows them."""
        if self.costs is not None and self.schedule is not None:
            return simulate(self.schedule, self.costs)
        found, spans, now = self.estimate, list[Span](), 0.0
        for kind, name, seconds in (
            ("forward", "forward", found.compute * self.forward),
            ("reduce", "weights' sums of forwards", found.weights * self.forward),
            ("backward", "backward", found.compute * (1 - self.forward)),
            ("reduce", "weights' sums of backwards", found.weights * (1 - self.forward)),
            ("reduce", "gradients' sums that compute does not hide", found.data),
            ("wait", "copies to the host that compute does not hide", found.copies),
            ("optimizer", "update", found.optimizer),
            ("reduce", "exchanges of replicas, for one step", found.exchanges),
        ):
            if seconds:
                spans.append(Span(0, kind, name, now, now + seconds))
                now += seconds
        return Trace(tuple(spans), 1)

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

    @property
    def size(self) -> float:
        """Bytes on the device."""
        return self.estimate.peak_memory

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by what they are spent on, in words."""
        return self.estimate.parts

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """The model's flop/s over the peak of the ranks' devices in the dtype of the products."""
        peak = self.cluster.device.peak_of(self.dtype) * self.plan.num_processes
        return self.estimate.model_flops / self.seconds / peak

    @property
    def fits(self) -> bool:
        """Whether the device and its host have room."""
        return self.misses_by(self.cluster.device.memory) <= 0

    def misses_by(self, memory: float) -> float:
        """Bytes that the step takes beyond `memory` of the device, or beyond the host's; at most 0 if it fits."""
        found, ranks = self.estimate, self.plan.num_processes
        homes = Homes(self.plan.home_parameters, self.plan.home_activations, self.plan.home_optimizer)
        return misses_by(found.peak_memory - memory, found.host_memory, self.cluster, ranks, homes)

    @property
    def dollars_per_million_tokens(self) -> float | None:
        """The price of the plan's devices; None where it is not known."""
        price = self.cluster.device.price_per_hour
        if price is None:
            return None
        return price * self.plan.num_processes / 3600 / self.tokens_per_second * 1e6


def misses_by(
    beyond: float, away: Mapping[str, float], cluster: Cluster, num_ranks: int, homes: Homes = ON_DEVICE
) -> float:
    """Bytes by which a plan exceeds memory; at most 0 if it fits.

    `beyond` are those of the device, and `away` those that a rank keeps outside it, by class: all ranks of a host share
    its memory and disk."""
    if not away or cluster.host is None:
        return beyond
    share = min(cluster.node_size, num_ranks)
    kept = {DISK: 0.0, HOST: 0.0, DEVICE: 0.0}
    places = {"parameters": homes.parameters, "activations": homes.activations, "optimizer": homes.optimizer}
    for kind, num_bytes in away.items():
        kept[places.get(kind, homes.parameters if homes.parameters == DISK else HOST)] += num_bytes * share
    return max(beyond, kept[HOST] - cluster.host.ram, kept[DISK] - cluster.host.disk)


def program_of(plan: Plan) -> TransformerProgram:
    """What plait does of a step: float32 parameters, gradients and moments, copies of parameters in half precision,
    attention that skips what is masked, and sums of gradients in buckets while backward computes."""
    return program_in(plan.precision, plan.reduce)


@cache
def program_in(precision: str, reduce: str = "fp32") -> TransformerProgram:
    """The same by the words of precision= and reduce=."""
    base, _, params = precision.partition("-")
    wide = base == "fp32"
    return TransformerProgram(
        {"bf16": "bfloat16", "fp16": "float16"}.get(base, "float32"),
        StateBytes(4 if wide else 6, 4, 8),
        traffic=_TRAFFIC,
        causal=0.5,
        loss_bytes=12
        if wide
        else 14,  # the logits, a float32 copy unless they are that, their log-softmax and gradient
        value_bytes=4 if wide else HALF_BYTES,
        stream_bytes=HALF_BYTES if params else 4,
        reduce_bytes=HALF_BYTES if reduce == "bf16" else 0,
        hides_sums=True,
        repeats_sums=False,
        contention=_CONTENTION,
    )


def simulate_step(
    shape: TransformerShape,
    plan: Plan,
    rows: int,
    cluster: Cluster,
    program: TransformerProgram | None = None,
    most_actions: int = 0,
) -> SimulatedStep:
    """The step of a plan.

    With `most_actions`, fewer microbatches are simulated of a schedule that has more actions: 3 times as many as ranks,
    or a few more. What each further round of as many as ranks takes is what the last simulated one took.

    Raises PlanError for a plan that does not divide rows, layers or heads, that has more ranks than the cluster, that
    closed forms do not describe (stages that differ, workers, parameters that ranks share, homes on a cluster of whose
    hosts nothing is known), or whose schedule has more actions than can be simulated.
    """
    program = program or program_of(plan)
    how = Parallelism.of(plan)
    if how.pipeline == 1:
        found = estimate_step(shape, how, rows, cluster, program)
        cells = cell_times(shape, how, rows, cluster, program)
        forward = cells.forward / cells.seconds
        return SimulatedStep(
            plan, cluster, rows, rows * shape.sequence, program.dtype, found, shape=shape, forward=forward
        )  # fmt: skip
    check_shape(shape, how, rows, cluster, program)
    one = _schedule(plan, 1)  # a microbatch tells how many stages there are
    if one.asynchronous:
        raise PlanError(Refusal(f"schedule={plan.schedule}", "it has no end of a step", "take a synchronous schedule"))
    how = replace(how, chunks=one.num_stages // how.pipeline)
    found = estimate_step(shape, how, rows, cluster, program)
    layers = stage_layers(shape, how, rows, cluster, program, one.num_stages)
    costs = cell_costs(shape, how, rows, cluster, program, layers)
    each = sum(map(len, one.ranks))
    num_simulated, run = _run(plan, costs, each, max(most_actions // each, 1) if most_actions else plan.micro)
    # A value is on its way while ranks compute, but the next one waits until the link is free again.
    seconds = max(run.seconds, run.busy / how.num_micro + how.num_micro * how.chunks * costs.communication)
    # The rank that computes longest is the one of the estimate; what it does not compute is messages and bubble. Sums
    # and copies run beside all of them.
    cells = cell_times(shape, how, rows, cluster, program)
    states = state_times(shape, how, rows, cluster, program, cells.scaled(seconds / how.num_micro))
    worked = found.compute + found.weights
    memory, host_memory = memory_of_rank(shape, how, rows, program, run.kept)
    found = replace(
        found,
        compute=found.compute * run.busy / worked,
        weights=found.weights * run.busy / worked,
        messages=0.0,
        bubble=max(seconds - run.busy, 0.0),
        data=states.data,
        optimizer=states.update,
        copies=states.copies,
        exchanges=0.0,
        memory=memory,
        host_memory=host_memory,
    )
    found = replace(found, exchanges=exchange_per_step(how, states.exchange, found.seconds))
    return SimulatedStep(
        plan, cluster, rows, rows * shape.sequence, program.dtype, found, costs, num_simulated, layers, shape
    )  # fmt: skip


def larger_buckets(step: SimulatedStep) -> tuple[int, float] | None:
    """Buckets for sums of gradients that are larger than the plan's, and the seconds that they save in closed form;
    None if they save less than a twentieth of the step."""
    shape, plan = step.shape, step.plan
    if shape is None:
        return None
    how, program = Parallelism.of(plan), program_of(plan)

    def data(bucket: int) -> float:
        return estimate_step(shape, how.having(bucket=bucket), step.rows, step.cluster, program).data

    found = [(data(size), size) for size in (plan.bucket_bytes, *BUCKETS) if size >= plan.bucket_bytes]
    seconds, size = min(found)
    saved = found[0][0] - seconds
    return (size, saved) if saved >= 0.05 * step.seconds else None


@lru_cache(maxsize=64)
def _made(name: str, ranks: int, num_micro: int, chunks: int | None) -> Schedule:
    return make_schedule(name, ranks, num_micro, chunks)


def _schedule(plan: Plan, num_micro: int) -> Schedule:
    """The schedule of a plan for so many microbatches."""
    return _made(plan.schedule, len(plan.copies), num_micro, plan.chunks if plan.chunks > 1 else None)


def _run(plan: Plan, costs: Costs, num_actions: int, most_micro: int) -> tuple[int, ScheduleTimes]:
    """How many microbatches are simulated, and what a step takes: if there are more than `most_micro`, those of the
    first rounds, with what is repeated added. A microbatch has so many actions."""
    ranks, num_micro, chunks = len(plan.copies), plan.micro, plan.chunks if plan.chunks > 1 else None
    rounds = max((num_micro - 3 * ranks) // ranks, 0)
    least = num_micro - (rounds + 1) * ranks
    whole = rounds < 2 or num_micro <= most_micro
    if (actions := num_actions * (num_micro if whole else least + ranks)) > _MOST_ACTIONS:
        raise PlanError(
            Refusal(f"the plan {plan.title!r}", f"{actions:,} actions of its schedule would be simulated",
                    f"take fewer stages or microbatches, with {_MOST_ACTIONS:,} actions at most")
        )  # fmt: skip
    if whole:
        return num_micro, schedule_times(plan.schedule, ranks, num_micro, chunks, costs)
    before, last = (schedule_times(plan.schedule, ranks, least + more, chunks, costs) for more in (0, ranks))
    found = (each + rounds * (each - less) for less, each in zip(before, last, strict=True))
    return least + ranks, ScheduleTimes(*found)


def stage_layers(
    shape: TransformerShape,
    how: Parallelism,
    rows: int,
    cluster: Cluster,
    program: TransformerProgram,
    num_stages: int,
) -> tuple[int, ...]:
    """The layers of each stage: as even in time as whole layers can be, the output layer on the last."""
    tokens = rows / (how.batch * how.num_micro) * shape.sequence / how.context
    layer = layer_time(shape, how, tokens, cluster, program)
    head = head_time(shape, how, tokens, cluster, program)
    seconds = layer.compute + layer.sent
    even = shape.layers / num_stages
    _, last = min(
        (max(-(-(shape.layers - last) // (num_stages - 1)) * seconds, last * seconds + head), -last)
        for last in range(max(math.floor(even - head / seconds), 1), max(math.floor(even), 1) + 1)
    )
    least, more = divmod(shape.layers + last, num_stages - 1)
    # Later stages keep fewer microbatches: those in the middle have what is left over.
    begin = max((num_stages - 1 - more) // 2, 0)
    return (*(least + (begin <= stage < begin + more) for stage in range(num_stages - 1)), -last)


def cell_costs(
    shape: TransformerShape,
    how: Parallelism,
    rows: int,
    cluster: Cluster,
    program: TransformerProgram,
    layers: Sequence[int],
) -> Costs:
    """The costs of stages with so many layers each, the output layer on the last."""
    tokens = rows / (how.batch * how.num_micro) * shape.sequence / how.context
    layer = layer_time(shape, how, tokens, cluster, program)
    head = head_time(shape, how, tokens, cluster, program) / 3
    forward = [each * (layer.forward + layer.forward_sent) for each in layers]
    inputs = [each * (layer.inputs + layer.backward_sent) for each in layers]
    weight = [each * layer.weight for each in layers]
    forward[-1], inputs[-1], weight[-1] = forward[-1] + head, inputs[-1] + head, weight[-1] + head
    kept = kept_bytes(shape, how, tokens / shape.sequence, program, how.recompute)
    return Costs(
        tuple(forward),
        tuple(inputs),
        tuple(weight),
        communication=message_time(shape, how, tokens, cluster, program),
        activation_bytes=tuple(int(each * kept) for each in layers),
    )
