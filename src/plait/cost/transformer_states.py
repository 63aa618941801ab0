"""Time and memory of a transformer's states: sums of gradients, gathers, updates, copies, exchanges of replicas.

Closed forms, as in cost/transformer_step.py, which adds them up. A rank has `own` parameters before ZeRO cuts them.

    held       parameters, gradients and the optimizer's state, each whole or a part, by the stage of ZeRO
    sums       an all-reduce a step; with zero=1 a reduce-scatter a step, and a gather of what was updated; with zero=2
               a reduce-scatter a microbatch; with zero=3 gathers for each use too (Rajbhandari et al. 2020, "ZeRO").
               Over several replicas parts are summed between them
    hidden     sums of the last microbatch run while its backward computes, all but the last bucket's (Li et al. 2020,
               "PyTorch Distributed")
    copies     over the link between host and device, while the device computes (Rajbhandari et al. 2021,
               "ZeRO-Infinity"); an update on the host reads and writes the states in the host's memory
    exchanges  replicas that agree every H steps all-reduce their weights (Douillard et al. 2023, "DiLoCo"), of which
               `overlap` steps hide what they can
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from plait.cost.collective_time import CollectiveKind, collective_time
from plait.cost.memory_model import GRADIENTS, OPTIMIZER, PARAMETERS, StateBytes
from plait.errors import PlanError, Refusal
from plait.plan.parallelism import FULL, Parallelism
from plait.plan.sharding_plan import DEVICE, DISK
from plait.spec.cluster import Cluster, HostSpec

_COPIES_REACH = 0.8  # of the bandwidth between host and device; assumed
_FIRST_BUCKETS = 16  # a bucket has at most such a part of the gradients, but 1 MiB at least (schedule/buckets.py)


class Owned(NamedTuple):
    """The parameters of a rank before ZeRO cuts them.

    Attributes:
        dense: those that all ranks with other rows have too.
        expert: those of the experts of the rank.
        ranks: among how many the experts are spread.
    """

    dense: float
    expert: float = 0.0
    ranks: int = 1

    @property
    def held(self) -> float:
        """The parameters of the rank, dense and of experts."""
        return self.dense + self.expert

    def cut(self, parts: int) -> float:
        """The parameters of a rank if ZeRO cuts over `parts` ranks, and experts over those that have the same."""
        return self.held if parts == 1 else (self.dense + self.expert * self.ranks) / parts


def held_states(own: Owned, how: Parallelism, each: StateBytes) -> dict[str, float]:
    """Bytes of parameters, gradients and the optimizer's state on a rank, wherever they are kept.

    `each` has the bytes per parameter. Gradients count as they are while the activations of a microbatch are there."""
    cuts, parts = how.cuts, how.sharded
    later = 0.0 if how.later is None else how.later.kept_bytes * trained(own, how)
    return {
        PARAMETERS: own.cut(parts if cuts.parameters else 1) * each.parameters,
        GRADIENTS: own.cut(parts if how.holds_gradient_parts else 1) * each.gradients,
        OPTIMIZER: trained(own, how) * each.optimizer + later,
    }


@dataclass(frozen=True)
class StateTraffic:
    """How a program stores and sends states.

    Attributes:
        states: bytes per parameter.
        summed_bytes: of a gradient, as it is summed.
        value_bytes: of a parameter, as it is gathered.
        fetched_bytes: of a parameter, as it is copied to the device.
        gather_efficiency: of the links, in gathers of parameters for their use.
        hides_sums: whether sums of gradients run while the last backward computes.
        repeats_sums: whether a layer that is recomputed gathers its parameters for that too.
        contention: the seconds that compute loses for each second of a collective that it hides.
    """

    states: StateBytes
    summed_bytes: float
    value_bytes: float
    fetched_bytes: float
    gather_efficiency: float = 1.0
    hides_sums: bool = False
    repeats_sums: bool = True
    contention: float = 0.0

    def exposed(self, seconds: float, compute: float) -> float:
        """What collectives of so many seconds add to a step in which they run beside `compute` seconds of ops."""
        return max(seconds - compute, 0.0) + self.contention * min(seconds, compute)


def sums_time(
    own: Owned, how: Parallelism, cluster: Cluster, traffic: StateTraffic, compute: float, backward: float
) -> float:
    """Seconds of sums of gradients, and of gathers of parameters, as far as compute does not hide them.

    `compute` are the seconds of all microbatches, `backward` those of the last microbatch's backward.
    """
    share = own.dense / own.held if own.expert else 1.0  # of the time behind which sums hide
    seconds = _sums(own.dense, how, cluster, traffic, compute * share, backward * share)
    if own.expert:  # summed over the ranks that have the same experts
        num, rest = own.ranks, 1 - share
        alike = how.having(batch=how.batch // num, sharded=max(how.sharded // num, 1), experts=1)
        seconds += _sums(own.expert, alike, cluster, traffic, compute * rest, backward * rest, num)
    return seconds


def _sums(
    own: float,
    how: Parallelism,
    cluster: Cluster,
    traffic: StateTraffic,
    compute: float,
    backward: float,
    apart: int = 1,
) -> float:
    """The same of parameters that all ranks have which are `apart` from each other."""
    ranks = how.synchronous * how.context
    if ranks == 1 or not own:
        return 0.0
    step = how.weights * apart
    group = range(0, ranks * step, step)
    gradients = own * traffic.summed_bytes
    inner = range(0, how.sharded * step, step)
    rest = 0.0  # sums of the parts, over ranks that do not cut them
    if how.cuts.optimizer and how.sharded < ranks:
        part = gradients / how.sharded
        rest = collective_time(CollectiveKind.ALL_REDUCE, part, range(0, ranks * step, how.sharded * step), cluster)
    if how.cuts.parameters:
        half = traffic.value_bytes * own
        gathers = (3 if how.recompute == FULL and traffic.repeats_sums else 2) * how.num_micro
        seconds = gathers * collective_time(CollectiveKind.ALL_GATHER, half, inner, cluster)
        seconds += how.num_micro * collective_time(CollectiveKind.REDUCE_SCATTER, gradients, inner, cluster)
        seconds /= traffic.gather_efficiency
        return traffic.exposed(seconds, compute) + rest  # a layer's are gathered while the layer before it computes
    hides = traffic.hides_sums and cluster.device.overlaps
    size = min(how.bucket, max(gradients / _FIRST_BUCKETS, 2**20)) if hides else gradients
    num = max(round(gradients / size), 1)
    if how.cuts.optimizer:
        each = collective_time(CollectiveKind.REDUCE_SCATTER, gradients / num, inner, cluster)
        earlier = (how.num_micro - 1) * num * each if how.cuts.gradients else 0.0
        gathered = collective_time(CollectiveKind.ALL_GATHER, own * traffic.value_bytes, inner, cluster)
    else:
        each = collective_time(CollectiveKind.ALL_REDUCE, gradients / num, group, cluster)
        earlier = gathered = 0.0
    if not hides:
        return earlier + num * each + rest + gathered
    earlier = traffic.exposed(earlier, (how.num_micro - 1) * backward)
    return earlier + traffic.exposed((num - 1) * each, backward * (num - 1) / num) + each + rest + gathered


@dataclass(frozen=True)
class HostWork:
    """What keeping values off the device takes in a step: seconds of copies that compute does not hide, and of the
    update on the host."""

    copies: float = 0.0
    update: float = 0.0


def host_work(
    own: Owned,
    activations: float,
    how: Parallelism,
    cluster: Cluster,
    traffic: StateTraffic,
    forward: float,
    computing: float,
    sums: float,
) -> HostWork:
    """Seconds of copies and of the update on the host.

    Args:
        activations: bytes that a rank keeps for backward, of all microbatches.
        forward: seconds of the forwards of all microbatches, behind which copies hide.
        computing: seconds of forwards and backwards.
        sums: seconds of sums and gathers that compute does not hide; copies run beside them too.

    Raises PlanError for a cluster of whose host nothing is known.
    """
    homes = how.homes
    if not homes.any_away:
        return HostWork()
    host = _host(cluster, how)
    share = min(cluster.node_size, how.num_ranks)
    to_device = to_host = after = from_disk = 0.0
    held = own.cut(how.sharded if how.cuts.parameters else 1)
    if homes.parameters != DEVICE:
        fetched = 2 * how.num_micro * held * traffic.fetched_bytes  # for forward, and again for backward
        to_device += fetched
        from_disk += fetched if homes.parameters == DISK else 0.0
    gradients = own.cut(how.sharded if how.holds_gradient_parts else 1) * traffic.states.gradients
    updated = trained(own, how)
    update = 0.0
    if homes.optimizer != DEVICE:
        to_host += how.num_micro * gradients
        to_device += (how.num_micro - 1) * gradients  # earlier microbatches' sums, to be added to
        states = updated * traffic.states.optimizer
        if homes.parameters == DEVICE:
            after = updated * traffic.fetched_bytes / host.device_bandwidth
        moved = 2 * states + updated * (traffic.states.gradients + 2 * 4)  # a float32 parameter is read and written
        update = moved / (host.ram_bandwidth / share)
        from_disk += 2 * states if homes.optimizer == DISK else 0.0
    link, ram = (
        _COPIES_REACH * host.device_bandwidth,
        host.ram_bandwidth / share,
    )  # all ranks of a host share its memory
    disk = host.disk_bandwidth / share
    seconds = max(max(to_host, to_device) / link, (to_host + to_device) / ram, from_disk / disk if from_disk else 0.0)
    backward = computing - forward
    if homes.activations == DEVICE:
        beyond = max(seconds - computing, 0.0)
    else:
        each = max(activations / link, activations / ram, activations / disk if homes.activations == DISK else 0.0)
        beyond = max(each + seconds / 3 - forward, 0.0) + max(each + 2 * seconds / 3 - backward, 0.0)
    return HostWork(max(beyond - sums, 0.0) + after, update)


def _host(cluster: Cluster, how: Parallelism) -> HostSpec:
    if not cluster.has_host_memory or cluster.host is None:
        why = (
            "nothing is known of its hosts"
            if cluster.host is None
            else "its devices have no memory beside their host's"
        )
        raise PlanError(Refusal(f"a plan with home.* on the cluster {cluster.name}", why, "leave home.* out"))
    return cluster.host


def exchange_time(own: Owned, how: Parallelism, cluster: Cluster) -> float:
    """Seconds of one exchange of replicas that agree later; 0 if there are none."""
    if how.later is None:
        return 0.0
    stride = how.synchronous * how.context * how.weights
    group = range(0, how.later.replicas * stride, stride)
    num_bytes = trained(own, how) * how.later.sent_bytes
    return collective_time(CollectiveKind.ALL_REDUCE, num_bytes, group, cluster)


def trained(own: Owned, how: Parallelism) -> float:
    """Elements that a rank updates."""
    return own.cut(how.sharded if how.cuts.optimizer else 1)
