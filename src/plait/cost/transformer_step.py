"""The time and memory of a transformer's training step, from its shape, its parallelism and a cluster.

    estimate_step(shape, parallelism, rows, cluster) -> StepEstimate

Closed forms: nothing is captured, nothing is simulated op by op. A layer is four products with matrices, two of
attention, and the reading and writing of what lies between them, each timed on the device (cost/op_time.py);
collectives are timed on the links that their ranks have (cost/collective_time.py). A step of m microbatches on p ranks
of a pipeline takes m + (p-1)/v times a microbatch on the slowest rank (Narayanan et al. 2021, equation 1).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from plait.cost.collective_time import CollectiveKind, collective_time, ring_bytes, send_time
from plait.cost.op_time import op_time
from plait.cost.pipeline_forms import schedule_wait
from plait.cost.transformer import HALF_BYTES, TransformerShape
from plait.cost.transformer_memory import kept_bytes, least_budget, memory_of_rank, own_parameters
from plait.cost.transformer_program import DEFAULT_PROGRAM, RING, TransformerProgram, attention_exchange, attention_kind
from plait.cost.transformer_states import Owned, exchange_time, host_work, sums_time, trained
from plait.errors import PlanError, Refusal
from plait.plan.key_values import Bytes
from plait.plan.parallelism import ALTERNATE, BUDGET, FULL, NONE, SELECTIVE, Parallelism
from plait.spec.cluster import Cluster


@dataclass(frozen=True)
class StepEstimate:
    """What a step takes on its slowest rank. Times are in seconds and add up to `seconds`; memory is in bytes.

    Attributes:
        compute: ops of all microbatches.
        weights: collectives between ranks that split weights, or sequences.
        messages: between neighbours of the pipeline.
        bubble: what the rank waits for the first and the last microbatches.
        data: sums of gradients, and gathers of parameters, as far as compute does not hide them.
        optimizer: the update.
        model_flops: operations of the model in the step on all ranks, without repeated ones.
        hardware_flops: with repeated ones, as papers count them.
        memory: bytes by class, on the rank with most.
        sent: bytes that the rank sends, by the level of the link.
        copies: between host and device, as far as compute does not hide them.
        exchanges: exchanges of replicas that agree every few steps, for one step, as far as steps do not hide them.
        host_memory: bytes by class that the rank keeps outside the device.
    """

    compute: float
    weights: float
    messages: float
    bubble: float
    data: float
    optimizer: float
    model_flops: float
    hardware_flops: float
    memory: dict[str, float]
    sent: dict[str, float]
    copies: float = 0.0
    exchanges: float = 0.0
    host_memory: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        within = self.compute + self.weights + self.messages + self.bubble + self.data + self.optimizer
        return within + self.copies + self.exchanges

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by what they are spent on, in words."""
        return {
            "compute": self.compute,
            "weights' sums": self.weights,
            "bubble and messages": self.messages + self.bubble,
            "gradients' sums": self.data,
            "update": self.optimizer,
            "copies to the host": self.copies,
            "exchanges": self.exchanges,
        }

    @property
    def peak_memory(self) -> float:
        return sum(self.memory.values())


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer for one microbatch.

    Attributes:
        forward: its forward.
        inputs: the part of its backward for the inputs, with what is recomputed.
        weight: the part of its backward for the weights.
        forward_sent: collectives of the forward.
        backward_sent: collectives of the backward, and of what is recomputed.
    """

    forward: float
    inputs: float
    weight: float
    forward_sent: float
    backward_sent: float

    @property
    def compute(self) -> float:
        return self.forward + self.inputs + self.weight

    @property
    def sent(self) -> float:
        return self.forward_sent + self.backward_sent


def estimate_step(
    shape: TransformerShape,
    how: Parallelism,
    rows: int,
    cluster: Cluster,
    program: TransformerProgram = DEFAULT_PROGRAM,
) -> StepEstimate:
    """What a step of `rows` sequences, of all ranks together, takes.

    Raises PlanError if ranks or microbatches do not divide the rows or the layers, or if the cluster has too few
    devices.
    """
    check_shape(shape, how, rows, cluster, program)
    tokens = rows / (how.batch * how.num_micro) * shape.sequence / how.context
    cells = cell_times(shape, how, rows, cluster, program)
    own = own_parameters(shape, how)
    whole = how.num_micro * cells.compute
    states = state_times(shape, how, rows, cluster, program, cells)
    memory, host_memory = memory_of_rank(shape, how, rows, program)
    found = StepEstimate(
        compute=whole,
        weights=how.num_micro * cells.weights,
        messages=how.num_micro * cells.messages,
        bubble=cells.wait(how),
        data=states.data,
        optimizer=states.update,
        model_flops=shape.step_flops(rows),
        hardware_flops=shape.step_flops(rows, NONE if how.recompute == BUDGET else how.recompute),
        memory=memory,
        sent=_sent(shape, how, tokens, own, cluster, program),
        copies=states.copies,
        host_memory=host_memory,
    )
    return replace(found, exchanges=exchange_per_step(how, states.exchange, found.seconds))


@dataclass(frozen=True)
class CellTimes:
    """Seconds of a microbatch on the rank of a pipeline that computes longest.

    Attributes:
        compute: ops.
        weights: collectives between ranks that split weights, or sequences.
        messages: to neighbours.
        forward: of all these, those of the forward.
        weight: the part of the backward for the weights.
    """

    compute: float
    weights: float
    messages: float
    forward: float
    weight: float

    @property
    def seconds(self) -> float:
        return self.compute + self.weights + self.messages

    @property
    def inputs(self) -> float:
        """The part of the backward for the inputs."""
        return self.seconds - self.forward - self.weight

    def scaled(self, seconds: float) -> CellTimes:
        """The same work in so many seconds, without messages."""
        factor, sent = seconds / (self.compute + self.weights), self.messages / 3
        return CellTimes(
            factor * self.compute, factor * self.weights, 0.0, factor * (self.forward - sent), factor * self.weight
        )

    def working(self, num_micro: int) -> tuple[float, float]:
        """Seconds of the forwards of so many microbatches, and of forwards and backwards, without messages."""
        return num_micro * (self.forward - self.messages / 3), num_micro * (self.compute + self.weights)

    def wait(self, how: Parallelism) -> float:
        """Seconds of the bubble."""
        if how.pipeline == 1:
            return 0.0
        return schedule_wait(how.order, how.pipeline, how.num_micro, how.chunks, self.forward, self.inputs, self.weight)


def cell_times(
    shape: TransformerShape,
    how: Parallelism,
    rows: int,
    cluster: Cluster,
    program: TransformerProgram,
    whole_layers: bool = False,
) -> CellTimes:
    """What a microbatch takes. With `whole_layers` ranks have whole layers, so that the work is as even as these allow;
    else each has its part of the layers, and the last the output layer too."""
    tokens = rows / (how.batch * how.num_micro) * shape.sequence / how.context
    layer = layer_time(shape, how, tokens, cluster, program)
    head = head_time(shape, how, tokens, cluster, program)
    layers, ends = shape.layers / how.pipeline, head
    if whole_layers:
        layers, ends = longest_rank(shape.layers, how.pipeline, layer.compute + layer.sent, head)
    messages = 2 * how.chunks * message_time(shape, how, tokens, cluster, program)
    return CellTimes(
        layers * layer.compute + ends,
        layers * layer.sent,
        messages,
        layers * (layer.forward + layer.forward_sent) + (ends + messages) / 3,
        layers * layer.weight + ends / 3,
    )


def longest_rank(layers: int, ranks: int, layer: float, head: float) -> tuple[int, float]:
    """The layers, and the seconds of an output layer, of the rank that computes longest if whole layers are cut as
    evenly as can be: a layer takes `layer` seconds, and the last rank has an output layer of `head` too."""
    if ranks == 1:
        return layers, head
    even = layers / ranks
    found = []
    for last in range(max(math.floor(even - head / layer), 0), math.ceil(even) + 1):
        others = -(-(layers - last) // (ranks - 1))
        found.append(max((others * layer, others, 0.0), (last * layer + head, last, head)))
    _, longest, ends = min(found)
    return longest, ends


@dataclass(frozen=True)
class StateTimes:
    """Seconds of what states take in a step; `exchange` is of one exchange between replicas that agree later."""

    data: float
    update: float
    copies: float
    exchange: float


def state_times(
    shape: TransformerShape,
    how: Parallelism,
    rows: int,
    cluster: Cluster,
    program: TransformerProgram,
    cells: CellTimes,
) -> StateTimes:
    """What sums of gradients, the update, copies and exchanges take beside a rank's cells."""
    own, traffic = own_parameters(shape, how), program.state_traffic
    whole = how.num_micro * cells.compute
    data = sums_time(own, how, cluster, traffic, whole, cells.seconds - cells.forward)
    update, copies = 2 * trained(own, how) * program.states.optimizer / cluster.device.memory_bandwidth, 0.0
    if how.homes.any_away:
        kept = kept_bytes(shape, how, rows / (how.batch * how.num_micro * how.context), program, how.recompute)
        activations = how.num_micro * shape.layers / how.pipeline * kept
        host = host_work(own, activations, how, cluster, traffic, *cells.working(how.num_micro), data)
        update, copies = host.update or update, host.copies
    return StateTimes(data, update, copies, exchange_time(own, how, cluster))


def exchange_per_step(how: Parallelism, exchange: float, seconds: float) -> float:
    """Seconds a step of exchanges that take `exchange`, as far as steps of `seconds` do not hide them."""
    return 0.0 if how.later is None else max(exchange - how.later.overlap * seconds, 0.0) / how.later.steps


def check_shape(
    shape: TransformerShape, how: Parallelism, rows: int, cluster: Cluster, program: TransformerProgram
) -> None:
    """Raise PlanError for what closed forms cannot spread over these ranks of the cluster."""
    if rows % (how.batch * how.num_micro):
        raise PlanError(
            f"{rows} rows are not whole microbatches: {how.batch} ranks with {how.num_micro} microbatches each; give a"
            f" multiple of {how.batch * how.num_micro} rows"
        )
    if shape.layers < how.pipeline * how.chunks:
        raise PlanError(
            f"{shape.layers} layers are fewer than {how.pipeline} ranks x {how.chunks} chunks of a pipeline; use fewer"
        )
    if how.num_ranks > cluster.num_devices:
        raise PlanError(
            f"the plan has {how.num_ranks} ranks, and the cluster {cluster.name} {cluster.num_devices} devices; name a"
            f" larger cluster, as in --cluster h100x{how.num_ranks}, or write devices = {how.num_ranks} in its file"
        )
    if how.recompute == BUDGET:
        micro_rows = rows / (how.batch * how.num_micro * how.context)
        if how.budget < (least := least_budget(shape, how, micro_rows, program)):
            shown = Bytes().show(-(-int(least) // 2**20) * 2**20)
            raise PlanError(
                Refusal(f"recompute=budget={Bytes().show(how.budget)} cannot be met",
                        f"the inputs of layers and the loss of a microbatch take {shown}", "give at least that")
            )  # fmt: skip
    if shape.num_experts % how.experts:
        raise PlanError(f"{shape.num_experts} experts do not divide over {how.experts} ranks that have experts")
    if shape.heads % how.weights:
        raise PlanError(f"{shape.heads} heads do not divide over {how.weights} ranks that split weights")


def layer_time(
    shape: TransformerShape, how: Parallelism, tokens: float, cluster: Cluster, program: TransformerProgram
) -> LayerTime:
    """Seconds of a layer for a microbatch of `tokens` tokens on each rank."""
    spread = Parallelism(
        weights=how.weights, context=how.context, recompute=how.recompute, sequence=how.sequence, budget=how.budget,
        experts=how.experts, capacity=how.sent_rows, context_kind=how.context_kind,
    )  # fmt: skip
    return _layer_time(shape, spread, tokens, cluster, program)


@functools.lru_cache(maxsize=1 << 14)
def _layer_time(
    shape: TransformerShape, how: Parallelism, tokens: float, cluster: Cluster, program: TransformerProgram
) -> LayerTime:
    device, parts, hidden = cluster.device, how.weights, shape.hidden

    def product(inner: float, columns: float, rows: float = tokens) -> float:
        moved = program.value_bytes * (rows * inner + inner * columns + rows * columns)
        return op_time(device, 2 * rows * inner * columns, moved, program.dtype)

    def mlp(width: float, rows: float) -> float:
        return product(hidden, shape.num_gates * width / parts, rows) + product(width / parts, hidden, rows)

    queries = shape.attention_width
    matrices = product(hidden, (queries + 2 * shape.kv_width) / parts) + product(queries / parts, hidden)
    local = shape.num_experts / how.experts  # experts of the rank, with as many rows together as the rank's own have
    each = tokens * shape.experts_per_token / local
    matrices += local * mlp(shape.inner, each)
    matrices += product(hidden, shape.num_experts) if shape.num_experts > 1 else 0.0
    matrices += mlp(shape.shared_ffn, tokens) if shape.shared_ffn else 0.0
    scores = program.causal * shape.attention_flops(tokens) / parts
    kept = 0.0 if shape.stores_scores else 4 * program.value_bytes * tokens * queries / parts
    half = "float16" if program.dtype.startswith("float8") else program.dtype  # attention stays in half precision
    fused = not (shape.stores_scores or program.attention)
    attention = 2 * op_time(device, scores / 2, kept / 2, half, fused) / (program.attention or 1.0)
    rows = tokens / shape.sequence
    scale = program.value_bytes / HALF_BYTES
    whole, without = (
        scale * shape.activation_bytes(rows, parts, how.sequence, kind, how.sent_rows) for kind in (NONE, SELECTIVE)
    )
    between = op_time(device, 0, program.traffic * without, program.dtype)
    scoring = op_time(device, 0, 2.0 * (whole - without), program.dtype) if whole > without else 0.0
    merges, sums = (
        op_time(device, 0, (how.context - 1) * each * tokens * queries / parts, program.dtype)
        if how.context > 1 and attention_kind(shape, how) == RING
        else 0.0
        for each in program.ring_traffic
    )
    forward = matrices + attention + scoring + between + merges
    again = {
        NONE: 0.0,
        SELECTIVE: attention + scoring + merges,
        ALTERNATE: shape.alternate_fraction * matrices + between,
        FULL: forward,
    }
    if how.recompute == BUDGET:
        again[BUDGET] = _repeated(shape, how, rows, program, again)
    # Products take twice as long in backward, and what lies between them as long: it reads what forward has written.
    # Attention that does not keep its scores makes them again, a fifth product beside four.
    scores_again = 0.0 if shape.stores_scores else attention / 2
    inputs = matrices + 2 * attention + scoring + between + sums + scores_again + again[how.recompute]
    num_bytes = program.value_bytes * tokens * hidden
    each = collective_time(CollectiveKind.ALL_REDUCE, num_bytes, range(parts), cluster)
    # An all-gather and a reduce-scatter take as long as an all-reduce.
    sent = [num * each for num in _num_sums(shape, how, program)]
    ranks = range(0, how.context * parts, parts)
    for phase, messages in enumerate(attention_exchange(shape, how, tokens, program)):
        sent[phase] += sum(collective_time(kind, num_bytes, ranks, cluster) for kind, num_bytes in messages)
    if how.experts > 1:  # rows go to the ranks of their experts and back, in backward their gradients
        stride = how.context * parts
        held = num_bytes * shape.experts_per_token * how.capacity
        rows_sent = collective_time(
            CollectiveKind.ALL_TO_ALL, held, range(0, how.experts * stride, stride), cluster
        )  # fmt: skip
        sent = [sent[0] + 2 * rows_sent, sent[1] + (_num_exchanges(how) - 2) * rows_sent]
    return LayerTime(forward, inputs, matrices, *sent)


def head_time(
    shape: TransformerShape, how: Parallelism, tokens: float, cluster: Cluster, program: TransformerProgram
) -> float:
    """Seconds of the output layer and the loss, forward and backward, on the last rank of the pipeline."""
    columns = shape.vocab / how.weights
    moved = program.loss_bytes * tokens * columns
    half = "float16" if program.dtype.startswith("float8") else program.dtype
    return 3 * op_time(cluster.device, 2 * tokens * shape.hidden * columns, moved, half)


def message_time(
    shape: TransformerShape, how: Parallelism, tokens: float, cluster: Cluster, program: TransformerProgram
) -> float:
    """Seconds of a value between the neighbours of the pipeline that have the slowest link. Ranks that split weights
    send a part each, and gather."""
    if how.pipeline == 1:
        return 0.0
    num_bytes = program.value_bytes * tokens * shape.hidden
    stride = how.num_ranks // how.pipeline
    sources = range(0, how.num_ranks - stride, stride)
    farthest = max(sources, key=lambda source: cluster.between(source, source + stride))
    seconds = send_time(num_bytes / how.weights, farthest, farthest + stride, cluster)
    if not how.sequence:
        seconds += collective_time(CollectiveKind.ALL_GATHER, num_bytes, range(how.weights), cluster)
    return seconds


def _num_sums(shape: TransformerShape, how: Parallelism, program: TransformerProgram) -> tuple[float, float]:
    """How many sums over ranks that split weights a layer has in its forward and in its backward, each of the residual
    stream: one of attention, one of the MLP. Results of a token's experts are weighted and added up before they are
    summed over ranks, and so are their gradients."""
    forward = backward = 2.0 + int(shape.num_experts > 1 and shape.shared_ffn > 0)
    if how.recompute == FULL:
        backward += forward if program.repeats_sums else how.sequence * forward / 2  # a gather is half a sum
    return forward, backward


def _num_exchanges(how: Parallelism) -> int:
    """How often rows go to the ranks of their experts or back, in forward and in backward."""
    return 6 if how.recompute == FULL else 4


def _repeated(
    shape: TransformerShape, how: Parallelism, rows: float, program: TransformerProgram, again: dict[str, float]
) -> float:
    """Seconds that are repeated so that a layer keeps what the budget leaves it: between those of the kinds of
    recomputation that keep a little more and a little less."""
    kept = kept_bytes(shape, how, rows, program, BUDGET)
    points = sorted((kept_bytes(shape, how, rows, program, kind), again[kind]) for kind in (FULL, ALTERNATE, NONE))
    for (less, longer), (more, shorter) in itertools.pairwise(points):
        if kept <= more:
            return longer + (shorter - longer) * (kept - less) / max(more - less, 1.0)
    return 0.0


def _sent(
    shape: TransformerShape,
    how: Parallelism,
    tokens: float,
    own: Owned,
    cluster: Cluster,
    program: TransformerProgram,
) -> dict[str, float]:
    """Bytes that a rank sends in a step, by the level of the outermost link that they pass."""
    found: dict[str, float] = {}

    def add(group: Sequence[int], num_bytes: float) -> None:
        if len(group) > 1 and num_bytes:
            level = cluster.links[cluster.between(group[0], group[-1])].level
            found[level] = found.get(level, 0.0) + num_bytes

    layers, whole = shape.layers / how.pipeline, program.value_bytes * tokens * shape.hidden
    num_sums = sum(_num_sums(shape, how, program)) * layers * how.num_micro
    add(range(how.weights), CollectiveKind.ALL_REDUCE.sent_bytes(int(whole), how.weights) * num_sums)
    stride = how.context * how.weights
    rows_sent = shape.experts_per_token * whole * how.sent_rows * (how.experts - 1) / how.experts
    exchanges = _num_exchanges(how) * layers * how.num_micro
    add(range(0, how.experts * stride, stride), rows_sent * exchanges)
    messages = itertools.chain(*attention_exchange(shape, how, tokens, program))
    pairs = sum(ring_bytes(num_bytes, how.context) for _, num_bytes in messages)
    add(range(0, stride, how.weights), pairs * layers * how.num_micro)
    if how.later is not None:
        stride = how.synchronous * how.context * how.weights
        changes = CollectiveKind.ALL_REDUCE.sent_bytes(int(trained(own, how) * how.later.sent_bytes), how.num_replicas)
        add(range(0, how.num_replicas * stride, stride), changes / how.later.steps)
    for elements, apart in ((own.dense, 1), (own.expert, own.ranks)):  # ranks with the same experts are some apart
        sharded, step = max(how.sharded // apart, 1), how.weights * apart
        gradients, gathered = elements * program.summed_bytes, elements * program.value_bytes
        if how.cuts.optimizer:
            sums = CollectiveKind.REDUCE_SCATTER.sent_bytes(int(gradients), sharded)
            gathers = CollectiveKind.ALL_GATHER.sent_bytes(int(gathered / sharded), sharded)
            gathers_again = how.recompute == FULL and program.repeats_sums
            uses = (2 + gathers_again) * how.num_micro if how.cuts.parameters else 1
            add(range(0, sharded * step, step), sums * (how.num_micro if how.cuts.gradients else 1) + gathers * uses)
        copies = how.synchronous * how.context // apart // sharded
        alike = range(0, copies * sharded * step, sharded * step)
        add(alike, CollectiveKind.ALL_REDUCE.sent_bytes(int(gradients / sharded), copies))
    if how.pipeline > 1:
        stride = how.num_ranks // how.pipeline
        add((0, stride), 2 * how.chunks * how.num_micro * whole / how.weights)
    return found
