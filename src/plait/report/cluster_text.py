"""The text of `plait cluster show`: a cluster's devices, links and hosts, and where each number is from."""

from __future__ import annotations

from plait.spec.cluster import Cluster, EfficiencyCurve
from plait.spec.cluster_file import find_cluster, shipped


def list_clusters() -> str:
    """The clusters that plait comes with, one a line."""
    found = [(name, find_cluster(name)) for name in shipped()]
    return "\n".join(f"{name:10}  {cluster.doc}" for name, cluster in found)


def describe_cluster(cluster: Cluster) -> str:
    """A cluster as text."""
    device, host = cluster.device, cluster.host
    lines = [f"{cluster.name}: {cluster.num_devices} x {device.name}"]
    lines += [cluster.doc] if cluster.doc else []
    lines += [f"measured {cluster.measured}"] if cluster.measured else []
    dtype, most = device.fastest
    lines += ["", "device"]
    lines += [f"  {'peak of ' + name:20} {_si(peak)}flop/s" for name, peak in device.peak]
    lines.append(f"  {'memory':20} {_si(device.memory)}B at {_si(device.memory_bandwidth)}B/s")
    lines.append(f"  {'flops per byte':20} {most / device.memory_bandwidth:.0f} in {dtype}")
    lines.append(f"  {'products reach':20} {_curve(device.matmul_efficiency, 'flop')}")
    lines.append(f"  {'memory reaches':20} {_curve(device.memory_efficiency, 'B')}")
    if device.price_per_hour is not None:
        lines.append(f"  {'price':20} {device.price_per_hour:g} USD an hour, {_total(cluster)} USD for all")
    lines += ["", "links, innermost first", f"  {'level':8} {'joins':>8} {'a device has':>14} {'latency':>9}  reaches"]
    for index, (link, size) in enumerate(zip(cluster.links, cluster.sizes, strict=True)):
        shared = f", {link.at_once} at once" if link.at_once > 1 else ""
        shape = ", torus" if link.torus else ""
        reaches = _curve(link.efficiency, "B")
        lines.append(
            f"  {link.level:8} {size:8} {_si(cluster.share(index)):>9}B/s  {_si(link.latency):>7}s  {reaches}{shared}"
            f"{shape}"
        )
    if host is not None:
        lines += ["", "host", f"  {'cpu':20} {host.cpu}, {host.cores} cores"]
        lines.append(f"  {'ram':20} {_si(host.ram)}B at {_si(host.ram_bandwidth)}B/s")
        lines.append(f"  {'disk':20} {_si(host.disk)}B at {_si(host.disk_bandwidth)}B/s")
        lines.append(f"  {'to each device':20} {_si(host.device_bandwidth)}B/s")
        lines.append(f"  {'network cards':20} {host.nics} of {_si(host.nic_bandwidth)}B/s")
    lines += ["", "sources", *(f"  {path:28} {source}" for path, source in cluster.sources)]
    return "\n".join(lines)


def _total(cluster: Cluster) -> str:
    return f"{(cluster.device.price_per_hour or 0.0) * cluster.num_devices:,.0f}"


def _curve(curve: EfficiencyCurve, unit: str) -> str:
    if len(curve.points) == 1:
        return f"{curve.points[0][1]:.0%}"
    return ", ".join(f"{part:.0%} at {_si(size)}{unit}" for size, part in curve.points)


def _si(number: float) -> str:
    """A number with the prefix of its unit: 3.35e12 -> '3.35 T'."""
    if number == 0:
        return "0 "
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m")):
        if number >= scale:
            return f"{number / scale:.3g} {prefix}"
    return f"{number / 1e-6:.3g} u"
