"""What a collective sends, and the time that it takes on a cluster.

A ring of N ranks passes each of N parts of a tensor on N-1 times (Patarasuk and Yuan 2009, "Bandwidth optimal
all-reduce algorithms for clusters of workstations"). Every rank is in one group of the same axis and all groups run at
the same time, so each device has its share of a link that several use (`Cluster.share`).

    ring           reduced and gathered once around all ranks: the latencies of n-1 hops, and S*(n-1)/n bytes over the
                   narrowest link. Rings begin at different members, so that a domain uses the links of all its members
    tree           up and down a binary tree between domains: the latencies of log2 of their number, and S bytes over
                   the narrowest link (Sanders et al. 2009, "Two-tree algorithms for full bandwidth broadcast, reduction
                   and scan")
    hierarchical   a ring of m on S bytes within domains, then one of n/m on S/m between them, in which all members send
                   (Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH")

n ranks in domains of m have S bytes.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Sequence

from plait.errors import PlanError
from plait.spec.cluster import Cluster


def ring_bytes(whole: float, size: int) -> float:
    """Bytes that each of `size` ranks sends for a tensor of `whole` bytes to go once around the ring."""
    return whole * (size - 1) / size


class CollectiveKind(enum.Enum):
    """A collective: its title, and how often the whole tensor goes around the ring."""

    ALL_REDUCE = "all_reduce", 2
    ALL_GATHER = "all_gather", 1
    REDUCE_SCATTER = "reduce_scatter", 1
    ALL_TO_ALL = "all_to_all", 1
    BROADCAST = "broadcast", 1
    RING = "ring", 1
    HALO = "halo", 1

    def __init__(self, title: str, ways: int) -> None:
        self.title = title
        self.ways = ways

    def whole_bytes(self, held: int, size: int) -> int:
        """Bytes of the whole tensor, if a rank's input has `held` bytes."""
        return held * size if self in (CollectiveKind.ALL_GATHER, CollectiveKind.RING) else held

    def sent_bytes(self, held: int, size: int) -> float:
        """Bytes that each of `size` ranks sends, if its input has `held` bytes. For a halo, `held` are the bytes for
        neighbours."""
        if self is CollectiveKind.HALO:
            return held if size > 1 else 0
        return self.ways * ring_bytes(self.whole_bytes(held, size), size)


def collective_time(
    kind: CollectiveKind, num_bytes: float, group: Sequence[int], cluster: Cluster, form: str = ""
) -> float:
    """Seconds of one collective.

    Args:
        kind: the collective.
        num_bytes: of the whole tensor: the input of a reduction, the output of an all-gather, what one rank has for an
            all-to-all, what it sends to its neighbours for a halo.
        group: the ranks, such as `range(0, 64, 8)`.
        cluster: where they are.
        form: "ring", "tree" or "hierarchical"; by default as measured, or the fastest that the collective has.

    Raises PlanError for a form that the collective does not have.
    """
    return _collective_time(kind, num_bytes, group if isinstance(group, range) else tuple(group), cluster, form)


@functools.lru_cache(maxsize=1 << 16)
def _collective_time(
    kind: CollectiveKind, num_bytes: float, group: range | tuple[int, ...], cluster: Cluster, form: str
) -> float:
    spread = cluster.spread(group)
    if math.prod(spread) == 1 or num_bytes == 0:
        return 0.0
    if not form and (known := cluster.measured_seconds(kind.title, num_bytes, spread)) is not None:
        return known
    if kind is CollectiveKind.ALL_TO_ALL:
        forms = {"pairwise": _pairwise}
    elif kind is CollectiveKind.BROADCAST:
        forms = {"ring": _ring, "tree": _tree}
    elif kind is CollectiveKind.RING:
        forms = {"ring": _ring}
    elif kind is CollectiveKind.HALO:
        forms = {"neighbours": _neighbours}
    else:
        forms = {"ring": _ring, "hierarchical": _hierarchical}
        forms |= {"tree": _tree} if kind is CollectiveKind.ALL_REDUCE else {}
    if form and form not in forms:
        raise PlanError(f"{kind.title} has no form {form!r}; it has {', '.join(forms)}")
    chosen: list[Callable[[float, Sequence[int], Cluster], float]] = [forms[form]] if form else list(forms.values())
    return kind.ways * min(one(num_bytes, spread, cluster) for one in chosen)


def send_time(num_bytes: float, source: int, target: int, cluster: Cluster) -> float:
    """Seconds of a message from one rank to another, while all devices send such a message."""
    if source == target:
        return 0.0
    index = cluster.between(source, target)
    return cluster.links[index].latency + num_bytes / _bandwidth(cluster, index, num_bytes)


def _bandwidth(cluster: Cluster, index: int, num_bytes: float, members: int = 2) -> float:
    """Bytes/s of one device over link `index`, in transfers of `num_bytes`, with `members` along it in the group."""
    link = cluster.links[index]
    axes = link.at_once / 2 if link.torus and members == cluster.sizes[index] else 1.0  # rings along all axes of it
    return cluster.share(index) * max(axes, 1.0) * link.efficiency.at(max(num_bytes, 1.0))


def _ring(num_bytes: float, spread: Sequence[int], cluster: Cluster) -> float:
    size, within = math.prod(spread), 1
    latency, slowest = 0.0, math.inf
    for index, members in enumerate(spread):
        if members > 1:
            latency += cluster.links[index].latency * (members - 1) * (size // (within * members))
            slowest = min(slowest, within * _bandwidth(cluster, index, num_bytes / size, members))
        within *= members
    return latency + ring_bytes(num_bytes, size) / slowest


def _tree(num_bytes: float, spread: Sequence[int], cluster: Cluster) -> float:
    latency, slowest, within = 0.0, math.inf, 1
    for index, members in enumerate(spread):
        if members > 1:
            hops = math.ceil(math.log2(members)) if within > 1 or index > 0 else members - 1
            latency += cluster.links[index].latency * hops
            slowest = min(slowest, within * _bandwidth(cluster, index, num_bytes, members))
        within *= members
    return latency + num_bytes / slowest


def _hierarchical(num_bytes: float, spread: Sequence[int], cluster: Cluster) -> float:
    seconds, rest = 0.0, num_bytes
    for index, members in enumerate(spread):
        if members > 1:
            seconds += cluster.links[index].latency * (members - 1)
            seconds += ring_bytes(rest, members) / _bandwidth(cluster, index, rest / members, members)
        rest /= members
    return seconds


def _neighbours(num_bytes: float, spread: Sequence[int], cluster: Cluster) -> float:
    """Each rank sends its edges to the ranks before and after it, over the outermost link between any two of them."""
    index = max(index for index, members in enumerate(spread) if members > 1)
    return cluster.links[index].latency + num_bytes / _bandwidth(cluster, index, num_bytes)


def _pairwise(num_bytes: float, spread: Sequence[int], cluster: Cluster) -> float:
    """Each rank sends a part to each other. On a ring of n neighbours a part goes n/4 hops on average."""
    latency, slowest, within = 0.0, 0.0, 1
    each = num_bytes / math.prod(spread)
    for index, members in enumerate(spread):
        if members > 1:
            others = within * (members - 1)
            hops = max(members / 4, 1.0) if cluster.links[index].torus else 1.0
            latency += cluster.links[index].latency * (members - 1)
            slowest = max(slowest, each * others * hops / _bandwidth(cluster, index, each, members))
        within *= members
    return latency + slowest
