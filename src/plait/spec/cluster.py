"""Cluster: devices, the links between them and their hosts, as a value. It needs no devices to be there.

Links are by level, innermost first. A domain of a level is a run of consecutive ranks: with nodes of 8 devices, ranks 0
to 7 are the first domain of level `node`. Two ranks talk over the link of the innermost level with both in one domain.

Bytes are bytes, seconds are seconds, and a bandwidth is bytes per second in one direction.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from plait.errors import ConfigError

LEVELS = ("package", "node", "rail", "pod", "site")  # innermost first; a cluster has some of them


@dataclass(frozen=True)
class EfficiencyCurve:
    """The fraction of a peak that is reached, by the size of the work: points (size, fraction), sizes ascending.

    Between points it is linear in the logarithm of the size; beyond them it is constant. Where work would take longer
    than more work, it takes as long: a small product can be part of a larger one.

    >>> EfficiencyCurve(((1e6, 0.1), (1e8, 0.5))).at(1e7)
    0.3
    """

    points: tuple[tuple[float, float], ...] = ((1.0, 1.0),)

    def at(self, size: float) -> float:
        """The fraction at a size."""
        found = self._between(size)
        for larger, fraction in self._fastest:
            if larger > size:
                found = max(found, fraction * size / larger)
        return found

    @cached_property
    def _fastest(self) -> tuple[tuple[float, float], ...]:
        """(size, fraction) where the time of work may be less than that of less work: at points, and between two of
        which the fraction rises faster than the size."""
        found = list(self.points[1:])
        for (low, first), (high, last) in itertools.pairwise(self.points):
            slope = (last - first) / math.log(high / low)
            if first < slope < last:
                found.append((low * math.exp((slope - first) / slope), slope))
        return tuple(
            (size, fraction)
            for size, fraction in found
            if any(less < size and size / fraction < less / lower for less, lower in self.points)
        )

    def _between(self, size: float) -> float:
        """The fraction at a size, by the points alone."""
        if len(self.points) == 1:
            return self.points[0][1]
        sizes = [each for each, _ in self.points]
        after = bisect.bisect_left(sizes, size)
        if after == 0:
            return self.points[0][1]
        if after == len(sizes):
            return self.points[-1][1]
        (low, first), (high, last) = self.points[after - 1 : after + 1]
        return round(first + (last - first) * math.log(size / low) / math.log(high / low), 12)


@dataclass(frozen=True)
class DeviceSpec:
    """One kind of device.

    Attributes:
        name: as its vendor writes it.
        peak: flop/s by dtype, of dense matrix products; float32 is there.
        memory: bytes.
        memory_bandwidth: bytes/s.
        matches: texts of which one is in the name that the driver gives the device, in lower case.
        matmul_efficiency: of the peak, by the floating-point operations of one product.
        memory_efficiency: of the memory's bandwidth, by the bytes of one op.
        attention_efficiency: how fast attention's products are where no scores are stored (FlashAttention), over those
            of matrices of their size.
        overlaps: whether an op reads memory while it computes, so that it takes the longer of the two and not the sum.
        op_seconds: what every op takes at least.
        view_seconds: what a call takes that only makes a view.
        update_seconds: what the update of one parameter takes besides its memory traffic.
        in_step: how long calls take in a step, over what they take when they are measured one by one: their operands
            are in no cache, and Python has other code to run in between.
        step_seconds: what a step takes besides its calls: checks, the loss, what Python does between two steps.
        together: the speed of one rank if so many of its host's ranks compute, in units of that at which calls were
            measured: points (ranks, speed). Ranks on cores of one host share its cores and memory; a device of its own
            always has speed 1.
        beside_transfers: the fraction of its speed at which a rank computes while it sends and receives.
        price_per_hour: of one device, in US dollars; None where it is not known.
    """

    name: str
    peak: tuple[tuple[str, float], ...]
    memory: float
    memory_bandwidth: float
    matches: tuple[str, ...] = ()
    matmul_efficiency: EfficiencyCurve = EfficiencyCurve()
    memory_efficiency: EfficiencyCurve = EfficiencyCurve()
    attention_efficiency: float = 1.0
    overlaps: bool = True
    op_seconds: float = 0.0
    view_seconds: float = 0.0
    update_seconds: float = 0.0
    in_step: float = 1.0
    step_seconds: float = 0.0
    together: tuple[tuple[int, float], ...] = ()
    beside_transfers: float = 1.0
    price_per_hour: float | None = None

    def peak_of(self, dtype: str) -> float:
        """Flop/s of a dtype such as "bfloat16"; one that is not listed is computed as float32."""
        peaks = dict(self.peak)
        return peaks.get(dtype, peaks["float32"])

    @property
    def fastest(self) -> tuple[str, float]:
        """The dtype with the highest peak, and the peak."""
        return max(self.peak, key=lambda each: each[1])

    def speed(self, num_active: float) -> float:
        """The speed of a rank if `num_active` ranks of its host compute, in units of that of measured calls."""
        if not self.together:
            return 1.0
        for (low, first), (high, last) in itertools.pairwise(self.together):
            if num_active <= high:
                return first + (last - first) * max(num_active - low, 0.0) / (high - low)
        return self.together[-1][1]


@dataclass(frozen=True)
class LinkSpec:
    """The link of one level: it joins the domains of the level below, or single devices if it is the innermost.

    Attributes:
        level: one of LEVELS.
        latency: seconds of a message without bytes.
        bandwidth: bytes/s of one transfer, in one direction.
        at_once: how many transfers leave a domain of the level below side by side, each at `bandwidth`; more share it.
            On a torus these are the links of a device, two for each of its axes.
        size: the devices in a domain of this level; 0 for all of the cluster.
        efficiency: of the bandwidth, by the bytes of one transfer.
        torus: whether a device is joined only to its neighbours, on a ring along each axis.
        overlaps: whether ranks compute while it transfers; if not, they themselves copy, as in memory that they share.
    """

    level: str
    latency: float
    bandwidth: float
    at_once: int = 1
    size: int = 0
    efficiency: EfficiencyCurve = EfficiencyCurve()
    torus: bool = False
    overlaps: bool = True


@dataclass(frozen=True)
class CallTime:
    """One call that was measured.

    Attributes:
        signature: the op with the shapes and dtypes of its arguments, as in cost/step_program.py.
        seconds: of the call.
        flops: floating-point operations of a product; 0 for other ops.
        num_bytes: bytes that it reads and writes.
        dtype: in which it computes.
    """

    signature: str
    seconds: float
    flops: float = 0.0
    num_bytes: float = 0.0
    dtype: str = "float32"


@dataclass(frozen=True)
class CollectiveTime:
    """One collective that was measured, on a group of ranks `stride` apart.

    Attributes:
        kind: its title, such as all_reduce.
        size: ranks of the group.
        stride: between neighbours.
        num_bytes: of the whole tensor.
        seconds: while all such groups do it.
    """

    kind: str
    size: int
    stride: int
    num_bytes: float
    seconds: float


@dataclass(frozen=True)
class HostSpec:
    """The computer that has the devices of one node.

    Attributes:
        cpu: its processors.
        cores: their cores, of all together.
        ram: bytes.
        ram_bandwidth: bytes/s.
        disk: bytes, of all together.
        disk_bandwidth: bytes/s of reading, of all together.
        device_bandwidth: bytes/s between the host and one device, in one direction.
        nics: network cards for the devices.
        nic_bandwidth: bytes/s of one of them, in one direction.
    """

    cpu: str
    cores: int
    ram: float
    ram_bandwidth: float
    disk: float
    disk_bandwidth: float
    device_bandwidth: float
    nics: int
    nic_bandwidth: float


@dataclass(frozen=True)
class Cluster:
    """`num_devices` equal devices, the links between them by level, and their hosts.

    Attributes:
        name: as it is asked for.
        doc: what it is, in a sentence.
        num_devices: all of them.
        device: their kind.
        links: innermost level first.
        host: None where nothing is known of it.
        sources: where the numbers are from, by the path of the key in the file.
        measured: host and date of the measurement; empty for a description from data sheets.
        calls: calls that were measured.
        collectives: collectives that were measured.

    Raises ConfigError for levels out of order, and for domains that do not divide each other or the devices.
    """

    name: str
    num_devices: int
    device: DeviceSpec
    links: tuple[LinkSpec, ...]
    doc: str = ""
    host: HostSpec | None = None
    sources: tuple[tuple[str, str], ...] = ()
    measured: str = ""
    calls: tuple[CallTime, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()

    def __post_init__(self) -> None:
        if not self.links:
            raise ConfigError(f"cluster {self.name}: it has no links; give one at least, such as level = 'node'")
        names = [link.level for link in self.links]
        if [level for level in LEVELS if level in names] != names:
            raise ConfigError(
                f"cluster {self.name}: its links are of {', '.join(names)}; give each level once, innermost first:"
                f" {', '.join(LEVELS)}"
            )
        if self.num_devices < 1:
            raise ConfigError(f"cluster {self.name}: {self.num_devices} devices; give 1 or more")
        below = 1
        for link, size in zip(self.links, self.sizes, strict=True):
            if size % below:
                raise ConfigError(
                    f"cluster {self.name}: {size} devices on level {link.level} are not whole domains of {below}; give"
                    f" a multiple of {below} devices"
                )
            below = size
        if below < self.num_devices:
            raise ConfigError(
                f"cluster {self.name}: {self.num_devices} devices, and level {self.links[-1].level} joins {below} at"
                f" most; give {below} devices, or a further level"
            )

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.num_devices, self.device, self.links, self.host))

    def __hash__(self) -> int:  # computed once: what is looked up by cluster is looked up often
        return self._hash

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The devices in a domain of each level, at most those that there are."""
        return tuple(min(link.size or self.num_devices, self.num_devices) for link in self.links)

    @cached_property
    def _measured(self) -> dict[tuple[str, tuple[int, ...]], list[tuple[float, float]]]:
        """Points (bytes, seconds) of the collectives that were measured, by kind and spread of the group."""
        found: dict[tuple[str, tuple[int, ...]], list[tuple[float, float]]] = {}
        for each in self.collectives:
            group = range(0, each.size * each.stride, each.stride)
            found.setdefault((each.kind, self.spread(group)), []).append((each.num_bytes, each.seconds))
        return {key: sorted(points) for key, points in found.items()}

    def measured_seconds(self, kind: str, num_bytes: float, spread: tuple[int, ...]) -> float | None:
        """Seconds of a collective, interpolated linearly in bytes between collectives that were measured on groups with
        the same spread. Beyond the largest, the seconds per byte stay the same. None if no such group was measured."""
        points = self._measured.get((kind, spread))
        if not points:
            return None
        after = bisect.bisect_left([size for size, _ in points], num_bytes)
        if after == 0:
            return points[0][1]
        if after == len(points):
            return points[-1][1] * num_bytes / points[-1][0]
        (low, first), (high, last) = points[after - 1 : after + 1]
        return first + (last - first) * (num_bytes - low) / (high - low)

    @property
    def node_size(self) -> int:
        """Devices of one host."""
        within = [size for link, size in zip(self.links, self.sizes, strict=True) if link.level in ("package", "node")]
        return within[-1] if within else 1

    @property
    def has_host_memory(self) -> bool:
        """Whether hosts are known to have memory beside that of their devices: one that a device reads about as fast as
        its own is its own."""
        return self.host is not None and 4 * self.host.device_bandwidth < self.device.memory_bandwidth

    def with_devices(self, num_devices: int, name: str = "") -> Cluster:
        """The same kind of cluster with another number of devices."""
        return replace(self, num_devices=num_devices, name=name or self.name)

    def between(self, rank: int, other: int) -> int:
        """The index of the link over which two ranks talk."""
        for index, size in enumerate(self.sizes):
            if rank // size == other // size:
                return index
        raise ConfigError(f"cluster {self.name} of {self.num_devices} devices has no ranks {rank} and {other}")

    def share(self, index: int) -> float:
        """Bytes/s that each device has of link `index` if all devices send over it at the same time."""
        link = self.links[index]
        if link.torus:
            return link.bandwidth * min(2, link.at_once)  # both directions of a ring along one axis
        below = self.sizes[index - 1] if index else 1
        return link.bandwidth * min(1.0, link.at_once / below)

    def bandwidth_between(self, rank: int, other: int) -> float:
        """Bytes/s of long messages from one rank to another, while all devices send such messages."""
        index = self.between(rank, other)
        return self.share(index) * self.links[index].efficiency.points[-1][1]

    def spread(self, group: Sequence[int]) -> tuple[int, ...]:
        """For each link how many parts of the group it joins: of the first domain of its level, how many domains of
        the level below have members. Their product is the size of the group if its members lie evenly.

        >>> find = Cluster("c", 16, DeviceSpec("d", (("float32", 1.0),), 1, 1), (LinkSpec("node", 0, 1, size=8),
        ...     LinkSpec("pod", 0, 1)))
        >>> find.spread(range(16)), find.spread(range(0, 16, 8)), find.spread(range(4))
        ((8, 2), (1, 2), (4, 1))
        """
        return _spread(self.sizes, group if isinstance(group, range) else tuple(group))


@lru_cache(maxsize=4096)
def _spread(sizes: tuple[int, ...], group: Sequence[int]) -> tuple[int, ...]:
    parts: set[int] = set(group)
    found, below = [], 1
    for size in sizes:
        by_domain: dict[int, int] = {}
        for part in parts:
            domain = part * below // size
            by_domain[domain] = by_domain.get(domain, 0) + 1
        found.append(max(by_domain.values(), default=1))
        parts, below = set(by_domain), size
    return tuple(found)
