"""`plait cluster measure`: what this machine's devices, memory and links reach, as a cluster file.

All ranks measure at the same time, because in training they share cores and memory. The time of a call is the least of
several runs, as other programs may use the machine; the time of a step is the median. The slowest rank counts. Latency
and bandwidth of a link are fitted: with them, the formulas of cost/collective_time.py come nearest to the measured
collectives over the link, each weighed by its own time.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from scipy.optimize import nnls
from torch import Tensor

from plait.api.step_measurement import (
    StepOverhead,
    in_step_of,
    measure_overhead,
    measure_together,
    measure_yardstick,
)
from plait.comm.device import default_kind, device_name, is_host, memory_of, num_accelerators, pinned_like, synchronize
from plait.comm.process_world import ProcessWorld, process_world
from plait.comm.protocol import Comm
from plait.compile.ir.dtypes import torch_name
from plait.cost.collective_time import CollectiveKind, collective_time
from plait.engine.environment import num_processes
from plait.errors import ConfigError
from plait.plan.axes import AXES
from plait.spec.cluster import Cluster, DeviceSpec, LinkSpec
from plait.spec.cluster_file import NUMBERS, parse_cluster
from plait.spec.mesh import Mesh

_MOST_SECONDS = 0.15  # of the runs of one thing; the first of them, which is not counted, is not stopped
_MOST_RUNS = 7
_RUNS = 5  # of a collective, of which all ranks run as many
_COPIES = (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24, 1 << 26)  # bytes of a tensor that is copied
_MESSAGES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24)  # bytes of the whole tensor of a collective
_DISK = 1 << 26  # bytes of the file that is written
_TO_HOST = 1 << 26  # bytes that are copied between host and device
# Rows, columns and inner length of products, in units of a size: square, thin, and as of a layer of a transformer.
_SHAPES = ((1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 1, 4))
_WIDTHS = {True: (32, 64, 128, 256, 512), False: (256, 512, 1024, 2048, 4096)}  # on a CPU, on an accelerator


@dataclass(frozen=True)
class MeasuredCollective:
    """One collective that was measured: over the link of `level`, by a group of ranks `stride` apart."""

    kind: CollectiveKind
    num_bytes: int
    size: int
    stride: int
    seconds: float

    @property
    def group(self) -> range:
        return range(0, self.size * self.stride, self.stride)


def default_processes() -> int:
    """As many ranks as this machine has accelerators, or else cores, of which 8 at most."""
    return num_accelerators() or min(os.cpu_count() or 1, 8)


def describe_here() -> tuple[str, int]:
    """The name of this machine's devices, and the number of its cores, as a measurement has them."""
    return (device_name(default_kind()) or _cpu()), os.cpu_count() or 1


def measure_here() -> str:
    """Measure with all ranks of this launch. Returns the text of a cluster file on rank 0, and "" on the others."""
    size = num_processes()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    world = process_world(_mesh(size, local))
    try:
        with torch.no_grad():  # not inference_mode, whose tensors the world would keep and steps could not write
            products = dict(_products(world))
            copies = {each: _slowest(world, _copy_seconds(world.device, each)) for each in _COPIES}
            within = list(_collectives(world, world.mesh.names[1:], local))
            across = list(_collectives(world, world.mesh.names[:1], size)) if size > local else []
            to_host = _slowest(world, _host_seconds(world.device))
            disk = _disk() if world.rank == 0 else (0.0, 0.0)
            together = measure_together(world, local) if is_host(world.device) else ()
        overhead = StepOverhead(*(_slowest(world, each) for each in measure_overhead(world.device)))
        program, seconds = measure_yardstick(world.device)
        seconds = _slowest(world, seconds)
    finally:
        world.close()
    if world.rank:
        return ""
    describe = functools.partial(
        _as_toml, world.device, size, local, products, copies, overhead, together, within, across, to_host, disk
    )
    text = describe(1.0)
    return describe(in_step_of(parse_cluster(text, "the measurement", "measured"), program, seconds))


def check_out(out: Path | None) -> None:
    """Raise ConfigError, before anything is measured, for a file that could not be written or read as a cluster."""
    if out is None:
        return
    if out.suffix != ".toml":
        raise ConfigError(
            f"--out {str(out)!r}: a cluster is read from a file whose name ends in .toml; write {out}.toml"
        )
    if os.path.isdir(out) or not os.path.isdir(out.absolute().parent):
        why = "it is a folder" if os.path.isdir(out) else f"there is no folder {str(out.absolute().parent)!r}"
        raise ConfigError(f"cannot write the cluster file {str(out)!r}: {why}; give a file in a folder that is there")
    if not os.access(out.absolute().parent, os.W_OK):
        raise ConfigError(
            f"cannot write the cluster file {str(out)!r}: its folder cannot be written; give a file in another folder"
        )


def write_measured(text: str, out: Path | None) -> None:
    """Print the text of a cluster file, or write it, whole or not at all. Raises ConfigError if it cannot be
    written."""
    if out is None:
        print(text, end="")
        return
    written = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        written.write_text(text, encoding="utf-8")
        written.replace(out)
    except OSError as error:
        raise ConfigError(f"cannot write the cluster file {str(out)!r}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)
    print(f"wrote {out}; see it with `plait cluster show {out}`")


def _mesh(size: int, local: int) -> Mesh:
    """Hosts, pairs of ranks, and the ranks of a pair, so that groups of several sizes are measured."""
    apart = [kind for kind in AXES if not (kind.within or kind.per_stage)]
    outer, middle, inner = [kind.name for kind in apart if kind.cuts_rows or kind.cuts_weights]
    pair = 2 if local % 2 == 0 and local > 2 else 1
    return Mesh(((outer, size // local), (middle, local // pair), (inner, pair)))


def _seconds(run: Callable[[], object], device: torch.device, runs: int = 0) -> float:
    """The least time of `runs`; by default of as many as take a moment."""
    run()
    synchronize(device)
    found: list[float] = []
    while len(found) < (runs or 3) or (not runs and len(found) < _MOST_RUNS and sum(found) < _MOST_SECONDS):
        begin = time.perf_counter()
        run()
        synchronize(device)
        found.append(time.perf_counter() - begin)
        if found[-1] > _MOST_SECONDS and not runs:
            break
    return min(found)


def _slowest(world: ProcessWorld, seconds: float) -> float:
    return float(world.everyone().all_gather(torch.tensor([seconds], device=world.device)).wait().max())


def _products(world: ProcessWorld) -> Iterator[tuple[tuple[str, float], float]]:
    """((dtype, flops of a product), flop/s) of matrix products."""
    device = world.device
    dtypes = [torch.float32, torch.bfloat16] + ([] if is_host(device) else [torch.float16])
    for dtype in dtypes:
        for width in _WIDTHS[is_host(device)]:
            rates: dict[float, list[float]] = {}
            for rows, columns, inner in _SHAPES:
                left = torch.ones(rows * width, inner * width, dtype=dtype, device=device)
                right = torch.ones(inner * width, columns * width, dtype=dtype, device=device)
                seconds = _slowest(world, _seconds(_product(left, right), device))
                flops = 2.0 * rows * columns * inner * width**3
                rates.setdefault(flops, []).append(flops / seconds)
            for flops, each in rates.items():
                yield (torch_name(dtype), flops), mean(each)


def _product(left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    return lambda: left @ right


def _copy_seconds(device: torch.device, num_bytes: int) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _seconds(lambda: target.copy_(source), device)


def _host_seconds(device: torch.device) -> float:
    """Seconds of a copy of _TO_HOST bytes between host and device."""
    there = torch.ones(_TO_HOST, dtype=torch.uint8, device=device)
    here = pinned_like(there, device)
    return _seconds(lambda: here.copy_(there, non_blocking=True), device)


def _disk() -> tuple[float, float]:
    """(bytes, bytes/s) of the disk of the current folder, or of that for temporary files; (0, 0) if none can be
    written."""
    for folder in (Path(), Path(tempfile.gettempdir())):
        if bandwidth := _disk_bandwidth(folder):
            return shutil.disk_usage(folder).total, bandwidth
    return 0.0, 0.0


def _disk_bandwidth(folder: Path) -> float:
    """Bytes/s of writing a file in a folder, until it is on the disk; 0 for a folder that cannot be written."""
    path = folder / f".plait-measure-{os.getpid()}"
    begin = time.perf_counter()
    try:
        with path.open("wb") as file:
            file.write(bytes(_DISK))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return 0.0
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return _DISK / (time.perf_counter() - begin)


def _collectives(world: ProcessWorld, axes: tuple[str, ...], within: int) -> Iterator[MeasuredCollective]:
    comms: list[tuple[Comm, int, int]] = [
        (world.comm(axis), world.mesh.axis_size(axis), world.mesh.stride(axis)) for axis in axes
    ]
    if within == world.mesh.size and sum(size > 1 for _, size, _ in comms) > 1:
        comms.append((world.everyone(), within, 1))
    for comm, size, stride in comms:
        for num_bytes in _MESSAGES if size > 1 else ():
            for kind in _MEASURED:
                run = _collective(comm, kind, num_bytes, world.device)
                seconds = _slowest(world, _seconds(run, world.device, _RUNS))
                yield MeasuredCollective(kind, num_bytes // size * size, size, stride, seconds)


def _collective(comm: Comm, kind: CollectiveKind, num_bytes: int, device: torch.device) -> Callable[[], object]:
    part = max(num_bytes // comm.size // 4, 1)
    rows = torch.ones(comm.size, part, device=device)
    if kind is CollectiveKind.ALL_GATHER:
        return lambda: comm.all_gather(rows[0]).wait()
    if kind is CollectiveKind.REDUCE_SCATTER:
        return lambda: comm.reduce_scatter(rows).wait()
    if kind is CollectiveKind.ALL_TO_ALL:
        return lambda: comm.all_to_all(rows).wait()
    if kind is CollectiveKind.BROADCAST:
        return lambda: comm.broadcast(rows, 0).wait()
    return lambda: comm.all_reduce(rows).wait()


def fit_link(level: str, size: int, measured: list[MeasuredCollective], inner: tuple[LinkSpec, ...] = ()) -> LinkSpec:
    """The link over which the measured collectives come nearest to their formulas."""

    def time_of(one: MeasuredCollective, latency: float, bandwidth: float) -> float:
        link = LinkSpec(level, latency, bandwidth, at_once=10**4, size=size)
        device = DeviceSpec("", (("float32", 1.0),), 1.0, 1.0)
        cluster = Cluster("measured", max(size, one.group[-1] + 1), device, (*inner, link))
        return collective_time(one.kind, one.num_bytes, one.group, cluster, "" if inner else _FORMS[one.kind])

    rows = [
        (time_of(one, 1.0, 1e30) / one.seconds, time_of(one, 0.0, 1.0) / one.seconds) for one in measured
    ]  # a time is linear in the latency and in the seconds of a byte
    (latency, per_byte), _ = nnls(rows, [1.0] * len(rows))
    return LinkSpec(level, max(float(latency), 1e-9), 1.0 / max(float(per_byte), 1e-14), size=size)


_MESSAGES_ALONE = (CollectiveKind.RING, CollectiveKind.HALO)  # made of messages
_MEASURED = [kind for kind in CollectiveKind if kind not in _MESSAGES_ALONE]
_FORMS = {kind: "pairwise" if kind is CollectiveKind.ALL_TO_ALL else "ring" for kind in _MEASURED}


def _as_toml(
    device: torch.device,
    size: int,
    local: int,
    products: dict[tuple[str, float], float],
    copies: dict[int, float],
    overhead: StepOverhead,
    together: Sequence[tuple[int, float]],
    within: list[MeasuredCollective],
    across: list[MeasuredCollective],
    to_host: float,
    disk: tuple[float, float],
    in_step: float,
) -> str:
    dtypes = list(dict.fromkeys(dtype for dtype, _ in products))
    peak = {dtype: max(rate for (of, _), rate in products.items() if of == dtype) for dtype in dtypes}
    sizes = sorted({flops for _, flops in products})
    # A larger product is never less efficient: what looks so is noise. Caches are faster than memory.
    parts = [mean(products[dtype, flops] / peak[dtype] for dtype in dtypes) for flops in sizes]
    rates = {num_bytes: 2 * num_bytes / seconds for num_bytes, seconds in copies.items()}
    bandwidth = rates[_COPIES[-1]]  # larger than the caches, which are faster
    node = fit_link("node", local if across else 0, within) if within else LinkSpec("node", 1e-6, bandwidth)
    links = [(node, within)]
    if across:
        links.append((fit_link("pod", 0, across), across))
    name = device_name(device.type) or _cpu()
    host = socket.gethostname()
    today = datetime.date.today().isoformat()
    lines = [
        f"# Measured by `plait cluster measure` on {host}, {today}: {size} ranks, torch {torch.__version__}.",
        f"doc = {_text(f'{size} x {name}, as measured')}",
        f"measured = {_text(f'{today} on {host}')}",
        f"devices = {size}",
        "",
        "[device]",
        f"name = {_text(name)}",
        f"memory = {memory_of(device) / (local if is_host(device) else 1):.4g}",
        f"memory_bandwidth = {bandwidth:.4g}",
        *(f"{name} = {seconds:.3g}" for name, seconds in overhead._asdict().items()),
        f"in_step = {in_step:.3g}",
        *([f"together = {_points([num for num, _ in together], [speed for _, speed in together])}"] * bool(together)),
        f"overlaps = {'false' if is_host(device) else 'true'}",
        f"matmul_efficiency = {_points(sizes, list(itertools.accumulate(parts, max)))}",
        f"memory_efficiency = {_points([2.0 * each for each in rates], [each / bandwidth for each in rates.values()])}",
        "",
        "[device.peak]",
        *(f"{dtype} = {rate:.4g}" for dtype, rate in peak.items()),
    ]
    for link, measured in links:
        lines += ["", "[[links]]", f'level = "{link.level}"', f"size = {link.size}", f"latency = {link.latency:.3g}"]
        lines += [
            f"bandwidth = {min(link.bandwidth, bandwidth):.4g}",
            f"at_once = {local if link.level == 'pod' else 1}",
        ]
        if is_host(device) and link.level == "node":
            lines.append("overlaps = false")  # ranks copy through the memory that they share
        lines += [
            f"# {one.kind.title} of {one.size} ranks, {one.num_bytes} bytes: {one.seconds:.3g} s" for one in measured
        ]
    lines += [
        "",
        "[host]",
        f"cpu = {_text(_cpu())}",
        f"cores = {os.cpu_count() or 1}",
        f"ram = {memory_of(torch.device('cpu')):.4g}",
    ]
    lines += [f"ram_bandwidth = {bandwidth * local if is_host(device) else 2 * _TO_HOST / to_host:.4g}"]
    lines += [f"disk = {disk[0]:.4g}", f"disk_bandwidth = {max(disk[1], NUMBERS['host.disk_bandwidth'].least):.4g}"]
    lines += [f"device_bandwidth = {_TO_HOST / to_host:.4g}", *_network_cards(), "", "[sources]"]
    how = f"plait cluster measure, {today}"
    lines += [f'"devices" = "{how}"', f'"device" = "{how}"', f'"links" = "{how}"']
    lines += [f'"host" = "{how}; the operating system says the sizes, and what the cards are made for"']
    return "\n".join(lines) + "\n"


def _text(words: str) -> str:
    """A text as TOML has it."""
    return json.dumps(words, ensure_ascii=False)


def _points(sizes: Sequence[float], parts: Sequence[float]) -> str:
    """Points of a curve."""
    return f"[{', '.join(f'[{size:.4g}, {part:.3g}]' for size, part in zip(sizes, parts, strict=True))}]"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _network_cards() -> list[str]:
    """Cards that say how many Mbit/s they are made for."""
    speeds: list[float] = []
    for path in Path("/sys/class/net").glob("*/speed"):
        try:
            speeds.append(float(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
    speeds = [speed for speed in speeds if speed > 0]
    return [f"nics = {len(speeds)}", f"nic_bandwidth = {max(speeds, default=0.0) * 1e6 / 8:.4g}"]
