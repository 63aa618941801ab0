"""The time and memory of a transformer's training step, from its shape, its parallelism and a cluster.

    estimate_step(shape, parallelism, rows, cluster) -> StepEstimate

Closed forms: nothing is captured, nothing is simulated op by op. A layer is four products with matrices, two of
attention, and the reading and writing of what lies between them, each timed on the device (cost/op_time.py);
collectives are timed on the links that their ranks have (cost/collective_time.py). A step of m microbatches on p ranks
of a pipeline takes m + (p-1)/v times a microbatch on the slowest rank (Narayanan et al. 2021, equation 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.cost.collective_time import CollectiveKind, collective_time, send_time
from plait.cost.memory_model import StateBytes
from plait.cost.op_time import op_time
from plait.cost.parallel_forms import first_stage_factor
from plait.cost.transformer import HALF_BYTES, TransformerShape
from plait.errors import PlanError
from plait.plan.parallelism import ALTERNATE, FULL, NONE, SELECTIVE, Parallelism
from plait.spec.cluster import Cluster

# Adam in mixed precision: half-precision weights and gradients, float32 weights and two moments.
MIXED = StateBytes(parameters=2, gradients=2, optimizer=12)


@dataclass(frozen=True)
class TransformerProgram:
    """What a program does of a step, beside how it is spread.

    Attributes:
        dtype: of products; its peak is the device's.
        states: bytes per parameter.
        traffic: how often what a layer keeps is read or written between products, in a forward. About 2: it is written,
            and read once. Fused kernels have less.
        causal: the fraction of attention's products that is computed: 0.5 if kernels skip what the mask hides.
        attention: how fast attention's products are, relative to products of matrices.
        gather_efficiency: of the links, in gathers of parameters for their use.
        loss_bytes: bytes per element of the logits that the loss keeps, its gradient included.
        value_bytes: bytes of an activation.
        stream_bytes: bytes of a value of the residual stream, which autocast leaves in float32.
        reduce_bytes: bytes per parameter of gradients as they are summed over ranks; 0 for those of `states`.
    """

    dtype: str = "bfloat16"
    states: StateBytes = MIXED
    traffic: float = 2.0
    causal: float = 1.0
    attention: float = 1.0
    gather_efficiency: float = 1.0
    loss_bytes: float = 6.0
    value_bytes: int = HALF_BYTES
    stream_bytes: int = HALF_BYTES
    reduce_bytes: int = 0

    @property
    def summed_bytes(self) -> float:
        """Bytes per parameter of gradients as they are summed over ranks."""
        return self.reduce_bytes or self.states.gradients


DEFAULT_PROGRAM = TransformerProgram()


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

    @property
    def seconds(self) -> float:
        return self.compute + self.weights + self.messages + self.bubble + self.data + self.optimizer

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
    _check(shape, how, rows, cluster)
    micro_rows = rows / (how.batch * how.num_micro)
    tokens = micro_rows * shape.sequence / how.context
    layers = shape.layers / how.pipeline
    layer = layer_time(shape, how, tokens, cluster, program)
    head = head_time(shape, how, tokens, cluster, program)
    compute = layers * layer.compute + head
    weights = layers * layer.sent
    message = 2 * how.chunks * message_time(shape, how, tokens, cluster, program)
    micro = compute + weights + message
    own = _own_parameters(shape, how)
    data = _data_time(own, how, cluster, program, how.num_micro * compute)
    wait = (how.pipeline - 1) / how.chunks * micro
    updated = own / (how.sharded if how.cuts.optimizer else 1)
    return StepEstimate(
        compute=how.num_micro * compute,
        weights=how.num_micro * weights,
        messages=how.num_micro * message,
        bubble=wait,
        data=data,
        optimizer=2 * updated * program.states.optimizer / cluster.device.memory_bandwidth,
        model_flops=shape.step_flops(rows),
        hardware_flops=shape.step_flops(rows, how.recompute),
        memory=_memory(shape, how, micro_rows, own, program),
        sent=_sent(shape, how, tokens, own, cluster, program),
    )


def _check(shape: TransformerShape, how: Parallelism, rows: int, cluster: Cluster) -> None:
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
            f" larger cluster, as in --cluster h100x{how.num_ranks}"
        )
    if shape.heads % how.weights:
        raise PlanError(f"{shape.heads} heads do not divide over {how.weights} ranks that split weights")


def layer_time(
    shape: TransformerShape, how: Parallelism, tokens: float, cluster: Cluster, program: TransformerProgram
) -> LayerTime:
    device, parts, hidden = cluster.device, how.weights, shape.hidden

    def product(inner: float, columns: float) -> float:
        moved = program.value_bytes * (tokens * inner + inner * columns + tokens * columns)
        return op_time(device, 2 * tokens * inner * columns, moved, program.dtype)

    gates = 2 if shape.gated else 1
    matrices = product(hidden, (hidden + 2 * shape.kv_width) / parts) + product(hidden / parts, hidden)
    matrices += product(hidden, gates * shape.inner / parts) + product(shape.inner / parts, hidden)
    scores = program.causal * shape.attention_flops(tokens) / parts
    kept = 0.0 if shape.stores_scores else 4 * program.value_bytes * tokens * hidden / parts
    half = "float16" if program.dtype.startswith("float8") else program.dtype  # attention stays in half precision
    attention = 2 * op_time(device, scores / 2, kept / 2, half) / program.attention
    rows = tokens / shape.sequence
    scale = program.value_bytes / HALF_BYTES
    whole = scale * shape.activation_bytes(rows, parts, how.sequence, NONE)
    without = scale * shape.activation_bytes(rows, parts, how.sequence, SELECTIVE)
    between = op_time(device, 0, program.traffic * without, program.dtype)
    scoring = op_time(device, 0, 2.0 * (whole - without), program.dtype) if whole > without else 0.0
    forward = matrices + attention + scoring + between
    again = {
        NONE: 0.0,
        SELECTIVE: attention + scoring,
        ALTERNATE: shape.alternate_fraction * matrices + between,
        FULL: forward,
    }
    # Products take twice as long in backward, and what lies between them as long: it reads what forward has written.
    # Attention that does not keep its scores makes them again, a fifth product beside four.
    scores_again = 0.0 if shape.stores_scores else attention / 2
    inputs = matrices + 2 * attention + scoring + between + scores_again + again[how.recompute]
    num_bytes = program.value_bytes * tokens * hidden
    each = collective_time(CollectiveKind.ALL_REDUCE, num_bytes, range(parts), cluster)
    sent = [2 * each, (4 if how.recompute == FULL else 2) * each]  # an all-gather and a reduce-scatter take as long
    if how.context > 1:  # keys and values go around, in backward with their gradients
        pairs = 2 * program.value_bytes * tokens * how.context * shape.kv_width / parts
        ring = collective_time(CollectiveKind.ALL_GATHER, pairs, range(0, how.context * parts, parts), cluster)
        sent = [sent[0] + ring, sent[1] + (3 if how.recompute == FULL else 2) * ring]
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
    """Seconds of a value between neighbours of the pipeline. Ranks that split weights send a part each, and gather."""
    if how.pipeline == 1:
        return 0.0
    num_bytes = program.value_bytes * tokens * shape.hidden
    stride = how.num_ranks // how.pipeline
    seconds = send_time(num_bytes / how.weights, 0, stride, cluster)
    if not how.sequence:
        seconds += collective_time(CollectiveKind.ALL_GATHER, num_bytes, range(how.weights), cluster)
    return seconds


def _own_parameters(shape: TransformerShape, how: Parallelism) -> float:
    """Parameters of the rank with most: its layers, and an embedding or an output layer."""
    ends = shape.embedding_parameters if how.pipeline == 1 else max(shape.vocab * shape.hidden, 1)
    return (shape.layers / how.pipeline * shape.layer_parameters + ends) / how.weights


def _data_time(own: float, how: Parallelism, cluster: Cluster, program: TransformerProgram, compute: float) -> float:
    ranks = how.batch * how.context
    if ranks == 1:
        return 0.0
    group = range(0, ranks * how.weights, how.weights)
    gradients = own * program.summed_bytes
    if not how.cuts.parameters:
        return collective_time(CollectiveKind.ALL_REDUCE, gradients, group, cluster)
    across = how.context * how.weights
    inner = group if how.sharded == ranks else range(0, how.sharded * across, across)
    half = program.value_bytes * own
    gathers = (3 if how.recompute == FULL else 2) * how.num_micro
    seconds = gathers * collective_time(CollectiveKind.ALL_GATHER, half, inner, cluster)
    seconds += how.num_micro * collective_time(CollectiveKind.REDUCE_SCATTER, gradients, inner, cluster)
    seconds /= program.gather_efficiency
    return max(seconds - compute, 0.0)  # a layer's parameters are gathered while the layer before it computes


def kept_bytes(
    shape: TransformerShape, how: Parallelism, rows: float, program: TransformerProgram, recompute: str
) -> float:
    """Bytes that a layer keeps from forward to backward on one rank, for a microbatch of `rows` sequences."""
    found = shape.activation_bytes(rows, how.weights, how.sequence, recompute) * program.value_bytes / HALF_BYTES
    inputs = 1 if recompute in (ALTERNATE, FULL) else 2  # of norms, which are of the residual stream
    wider = inputs * (program.stream_bytes - program.value_bytes) * shape.hidden * rows * shape.sequence
    return found + wider / (how.weights if how.sequence and recompute != FULL else 1)


def _memory(
    shape: TransformerShape, how: Parallelism, rows: float, own: float, program: TransformerProgram
) -> dict[str, float]:
    states, cuts, parts = program.states, how.cuts, how.sharded
    sizes = {
        "parameters": own * states.parameters / (parts if cuts.parameters else 1),
        "gradients": own * states.gradients / (parts if cuts.gradients else 1),
        "optimizer": own * states.optimizer / (parts if cuts.optimizer else 1),
    }
    rows /= how.context
    layer = kept_bytes(shape, how, rows, program, how.recompute)
    in_flight = min(how.num_micro, how.pipeline) / how.pipeline if how.chunks == 1 else 1.0
    factor = first_stage_factor(how.pipeline, how.chunks) if in_flight == 1.0 else in_flight
    sizes["activations"] = layer * shape.layers * factor
    if how.recompute in (ALTERNATE, FULL):  # of the layer that is recomputed
        sizes["activations"] += kept_bytes(shape, how, rows, program, NONE)
    logits = rows * shape.sequence * shape.vocab / how.weights
    sizes["logits"] = program.loss_bytes * logits
    if cuts.parameters:  # two layers are whole at a time
        sizes["buffers"] = 2 * program.value_bytes * shape.layer_parameters / how.weights
    return sizes


def _sent(
    shape: TransformerShape,
    how: Parallelism,
    tokens: float,
    own: float,
    cluster: Cluster,
    program: TransformerProgram,
) -> dict[str, float]:
    """Bytes that a rank sends in a step, by the level of the outermost link that they pass."""
    found: dict[str, float] = {}

    def add(group: Sequence[int], num_bytes: float) -> None:
        if len(group) > 1 and num_bytes:
            level = cluster.links[cluster.between(group[0], group[-1])].level
            found[level] = found.get(level, 0.0) + num_bytes

    again = 6 if how.recompute == FULL else 4
    layers, whole = shape.layers / how.pipeline, program.value_bytes * tokens * shape.hidden
    weights = CollectiveKind.ALL_REDUCE.sent_bytes(int(whole), how.weights) * again * layers * how.num_micro
    add(range(how.weights), weights)
    ranks = how.batch * how.context
    group = range(0, ranks * how.weights, how.weights)
    gradients = own * program.summed_bytes
    sums = (ranks - 1) / ranks * gradients
    if how.cuts.parameters:
        gathers = (3 if how.recompute == FULL else 2) * program.value_bytes * own * (how.sharded - 1) / how.sharded
        add(group, how.num_micro * (gathers + sums))
    else:
        add(group, 2 * sums)
    if how.pipeline > 1:
        stride = how.num_ranks // how.pipeline
        add((0, stride), 2 * how.chunks * how.num_micro * whole / how.weights)
    return found
