"""A transformer's step under a plan on a cluster: closed forms for the cells of a pipeline, its schedule simulated.

simulate_step(shape, plan, rows, cluster) -> SimulatedStep
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.cost.costs import Costs
from plait.cost.memory_model import StateBytes
from plait.cost.simulate import simulate
from plait.cost.transformer import HALF_BYTES, TransformerShape
from plait.cost.transformer_step import (
    StepEstimate,
    TransformerProgram,
    estimate_step,
    head_time,
    kept_bytes,
    layer_time,
    message_time,
)
from plait.errors import PlanError, Refusal
from plait.plan.parallelism import Parallelism
from plait.plan.plan import Plan
from plait.schedule.families import make_schedule
from plait.spec.cluster import Cluster
from plait.spec.schedule import Schedule
from plait.spec.trace import Trace


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
        schedule: of the pipeline, if there is one.
        trace: of the pipeline's ranks, without sums of gradients and updates.
    """

    plan: Plan
    cluster: Cluster
    rows: int
    tokens: int
    dtype: str
    estimate: StepEstimate
    schedule: Schedule | None = None
    trace: Trace | None = None

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

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
        return self.estimate.peak_memory <= self.cluster.device.memory

    @property
    def dollars_per_million_tokens(self) -> float | None:
        """The price of the plan's devices; None where it is not known."""
        price = self.cluster.device.price_per_hour
        if price is None:
            return None
        return price * self.plan.num_processes / 3600 / self.tokens_per_second * 1e6


def program_of(plan: Plan) -> TransformerProgram:
    """What plait does of a step: float32 parameters, gradients and moments, copies of parameters in half precision, and
    attention that skips what is masked."""
    base, _, params = plan.precision.partition("-")
    wide = base == "fp32"
    return TransformerProgram(
        {"bf16": "bfloat16", "fp16": "float16"}.get(base, "float32"),
        StateBytes(4 if wide else 6, 4, 8),
        causal=0.5,
        loss_bytes=12
        if wide
        else 14,  # the logits, a float32 copy unless they are that, their log-softmax and gradient
        value_bytes=4 if wide else HALF_BYTES,
        stream_bytes=HALF_BYTES if params else 4,
        reduce_bytes=HALF_BYTES if plan.reduce == "bf16" else 0,
    )


def simulate_step(
    shape: TransformerShape, plan: Plan, rows: int, cluster: Cluster, program: TransformerProgram | None = None
) -> SimulatedStep:
    """The step of a plan.

    Raises PlanError for a plan that does not divide rows, layers or heads, that has more ranks than the cluster, or
    that closed forms do not describe: stages that differ, workers, replicas that agree later, values kept off the
    device.
    """
    _refuse(plan)
    program = program or program_of(plan)
    how = Parallelism.of(plan)
    if how.pipeline == 1:
        found = estimate_step(shape, how, rows, cluster, program)
        return SimulatedStep(plan, cluster, rows, rows * shape.sequence, program.dtype, found)
    schedule = make_schedule(plan.schedule, how.pipeline, how.num_micro, plan.chunks if plan.chunks > 1 else None)
    if schedule.asynchronous:
        raise PlanError(Refusal(f"schedule={plan.schedule}", "it has no end of a step", "take a synchronous schedule"))
    how = replace(how, chunks=schedule.num_stages // how.pipeline)
    found = estimate_step(shape, how, rows, cluster, program)
    trace = simulate(schedule, cell_costs(shape, how, rows, cluster, program, schedule.num_stages))
    # The rank that computes longest is the one of the estimate; what it does not compute is messages and bubble.
    busy = max(trace.busy(rank) for rank in range(schedule.num_ranks))
    worked = found.compute + found.weights
    waits = max(trace.seconds - busy, 0.0)
    found = replace(found, compute=found.compute * busy / worked, weights=found.weights * busy / worked, messages=0.0,
                    bubble=waits)  # fmt: skip
    return SimulatedStep(plan, cluster, rows, rows * shape.sequence, program.dtype, found, schedule, trace)


def cell_costs(
    shape: TransformerShape,
    how: Parallelism,
    rows: int,
    cluster: Cluster,
    program: TransformerProgram,
    num_stages: int,
) -> Costs:
    """The costs of the stages: whole layers, as even as can be, the output layer on the last."""
    tokens = rows / (how.batch * how.num_micro) * shape.sequence / how.context
    layer = layer_time(shape, how, tokens, cluster, program)
    head = head_time(shape, how, tokens, cluster, program) / 3
    least, more = divmod(shape.layers, num_stages)
    # Later stages keep fewer microbatches, and the last has the output layer: the middle has what is left over.
    extra = set(range(max((num_stages - more) // 2, 0), max((num_stages - more) // 2, 0) + more))
    layers = [least + (stage in extra) for stage in range(num_stages)]
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


def _refuse(plan: Plan) -> None:
    if plan.relaxed_axis:
        raise PlanError(
            Refusal(f"the plan {plan.title!r}", "its replicas agree later than at every step",
                    f"simulate the plan of one replica, {plan.inner_plan.title!r}")
        )  # fmt: skip
    if {plan.home_parameters, plan.home_activations, plan.home_optimizer} != {"device"} or plan.shares_parameters:
        raise PlanError(
            Refusal(f"the plan {plan.title!r}", "it keeps values outside the device, whose copies are not simulated",
                    "leave home.* and central= out")
        )  # fmt: skip
