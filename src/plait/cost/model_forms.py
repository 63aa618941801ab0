"""Closed forms of any model, from a few simulated steps of it: on one device, and over two ranks of each kind.

The forms assume that more ranks split and send the same parts of the step as two ranks do. That orders plans well
enough to choose those to simulate. Whether an axis divides every weight only shows when a plan is lowered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.cost.collective_time import CollectiveKind, collective_time, send_time
from plait.cost.memory_model import StateBytes
from plait.cost.transformer_states import Owned, StateTraffic, exchange_time, held_states, host_work, sums_time, trained
from plait.cost.transformer_step import CellTimes, StateTimes
from plait.plan.parallelism import FULL, NONE, Parallelism
from plait.plan.sharding_plan import DEVICE
from plait.spec.cluster import Cluster


@dataclass(frozen=True)
class AxisForms:
    """What two ranks of an axis share.

    Attributes:
        compute: the fraction of a device's seconds that they split.
        parameters: the fraction of the parameters that they split.
        kept: the fraction of the activations that they split.
        collectives: by kind, how many there are for a microbatch, and the whole tensors' bytes for a row.
    """

    compute: float
    parameters: float
    kept: float
    collectives: Mapping[CollectiveKind, tuple[int, float]]

    def seconds(self, rows: float, ranks: int, stride: int, cluster: Cluster) -> float:
        """Seconds of the collectives of a microbatch of so many rows."""
        group = range(0, ranks * stride, stride)
        return sum(
            count * collective_time(kind, num_bytes * rows / count, group, cluster)
            for kind, (count, num_bytes) in self.collectives.items()
        )


@dataclass(frozen=True)
class ExpertForms:
    """What two ranks of experts share.

    Attributes:
        number: experts of a mixture, which ranks divide.
        parameters: the fraction of the parameters that they are.
        exchanges: of rows, by a microbatch, between the ranks.
        num_bytes: of all of them, for a row of the batch.
    """

    number: int
    parameters: float
    exchanges: int
    num_bytes: float

    def seconds(self, rows: float, how: Parallelism, stride: int, cluster: Cluster) -> float:
        """Seconds of the exchanges of a microbatch of so many rows on each rank."""
        each = self.num_bytes * rows * how.sent_rows / self.exchanges
        group = range(0, how.experts * stride, stride)
        again = 1.5 if how.recompute == FULL else 1.0  # those of the forward once more
        return again * self.exchanges * collective_time(CollectiveKind.ALL_TO_ALL, each, group, cluster)


@dataclass(frozen=True)
class PrecisionForms:
    """What a row takes on one device in a precision: seconds of forward and backward beside those of every microbatch,
    and bytes that are kept for backward, without and with recomputation of layers."""

    forward: float
    backward: float
    kept: Mapping[str, float]


@dataclass(frozen=True)
class ModelForms:
    """What is known of a model.

    Attributes:
        cluster: where it is to run.
        layers: that a pipeline may cut and recomputation repeats; 1 if the model has none.
        parameters: elements.
        each: bytes of states per parameter.
        overhead: seconds of every microbatch, whatever its rows.
        update: seconds of the update of all parameters on one device.
        boundary: bytes of a row between stages.
        precisions: by word.
        weights: ranks that split weights; None if they cannot.
        sequence: the same if they split the sequence between weights too.
        context: ranks that split sequences.
        experts: of its mixtures; None if it has none that ranks can split.
    """

    cluster: Cluster
    layers: int
    parameters: float
    each: StateBytes
    overhead: float
    update: float
    boundary: float
    precisions: Mapping[str, PrecisionForms]
    weights: AxisForms | None = None
    sequence: AxisForms | None = None
    context: AxisForms | None = None
    experts: ExpertForms | None = None

    def _axes(self, how: Parallelism) -> list[tuple[AxisForms, int, int]]:
        """(what its ranks share, ranks, how far apart they are) of the axes that split what a row takes."""
        weights = self.sequence if how.sequence else self.weights
        found = [(weights, how.weights, 1), (self.context, how.context, how.weights)]
        return [(axis, size, stride) for axis, size, stride in found if axis is not None and size > 1]

    def _share(self, how: Parallelism, what: str) -> float:
        """The fraction of something that a rank has."""
        found = 1.0
        for axis, size, _ in self._axes(how):
            found *= 1 - float(getattr(axis, what)) * (1 - 1 / size)
        return found

    def own(self, how: Parallelism) -> Owned:
        """Parameters of a rank before ZeRO cuts them."""
        elements = self.parameters * self._share(how, "parameters") / how.pipeline
        if self.experts is None:
            return Owned(elements)
        experts = self.parameters * self.experts.parameters / how.pipeline  # ranks of weights may split them too
        experts = min(experts, elements)
        return Owned(elements - experts, experts / how.experts, how.experts)

    def cells(self, outline: Parallelism, rows: int) -> CellTimes:
        """What a microbatch takes on the rank that computes longest."""
        of, micro_rows = self.precisions[outline.precision], rows / (outline.batch * outline.num_micro)
        part = micro_rows * self._share(outline, "compute")
        stages = -(-self.layers // outline.pipeline) / self.layers if outline.pipeline > 1 else 1.0
        forward = stages * (self.overhead / 3 + of.forward * part)
        backward = stages * (2 * self.overhead / 3 + of.backward * part)
        if outline.recompute == FULL:
            backward += forward
        sent = stages * sum(
            a.seconds(micro_rows, size, stride, self.cluster) for a, size, stride in self._axes(outline)
        )
        if self.experts is not None and outline.experts > 1:
            sent += stages * self.experts.seconds(micro_rows, outline, outline.context * outline.weights, self.cluster)
        messages = 0.0
        if outline.pipeline > 1:
            stride = outline.num_ranks // outline.pipeline
            sources = range(0, outline.num_ranks - stride, stride)
            farthest = max(sources, key=lambda source: self.cluster.between(source, source + stride))
            num_bytes = self.boundary * micro_rows / outline.context
            messages = 2 * send_time(num_bytes, farthest, farthest + stride, self.cluster)
        return CellTimes(forward + backward, sent, messages, forward + (sent + messages) / 3, backward / 2)

    def kept(self, outline: Parallelism, rows: int) -> tuple[float, float]:
        """Bytes that a microbatch keeps on its ranks for backward: of all layers, and of one."""
        micro_rows = rows / (outline.batch * outline.num_micro)
        kept = self.precisions[outline.precision].kept
        whole = kept.get(outline.recompute, kept[NONE]) * micro_rows * self._share(outline, "kept")
        return whole, whole / self.layers

    def states(self, how: Parallelism, rows: int, cells: CellTimes) -> StateTimes:
        """What sums of gradients, the update, copies and exchanges take."""
        own, whole = self.own(how), how.num_micro * cells.compute
        half = self.each.parameters / 2 if how.precision.endswith("-params") else self.each.parameters
        hides = self.cluster.device.overlaps
        traffic = StateTraffic(self.each, self.each.gradients, half, half, hides_sums=hides, repeats_sums=False)
        data = sums_time(own, how, self.cluster, traffic, whole if hides else 0.0, cells.seconds - cells.forward)
        update, copies = self.update * trained(own, how) / self.parameters, 0.0
        if how.homes.any_away:
            kept = how.num_micro * self.kept(how, rows)[0] / how.pipeline
            host = host_work(own, kept, how, self.cluster, traffic, *cells.working(how.num_micro), data)
            update, copies = host.update or update, host.copies
        return StateTimes(data, update, copies, exchange_time(own, how, self.cluster))

    def least_memory(self, how: Parallelism, rows: int) -> tuple[dict[str, float], dict[str, float]]:
        """Bytes by class on the device and outside it, without the activations of microbatches in flight."""
        own, cuts, homes = self.own(how), how.cuts, how.homes
        sizes = held_states(own, how, self.each)
        away: dict[str, float] = {}
        layer = 2 * own.held * self.each.parameters / self.layers
        if cuts.parameters:
            sizes["buffers"] = layer
        if homes.optimizer != DEVICE:
            away["optimizer"] = sizes.pop("optimizer")
            away["gradients"], sizes["gradients"] = sizes["gradients"], min(layer, sizes["gradients"])
        if homes.parameters != DEVICE:
            away["parameters"] = sizes.pop("parameters")
            sizes["buffers"] = layer
        if how.recompute == FULL:
            kept = self.precisions[how.precision].kept[NONE]
            sizes["repeated"] = kept * rows / (how.batch * how.num_micro) * self._share(how, "kept") / self.layers
        return sizes, away
