"""Clusters as TOML: files that come with plait, found by name, and files of a user's own.

    h100            one node of the shipped description h100.toml
    h100x64         64 such devices
    mine.toml       a file

Each number of a file is known to `NUMBERS`: its unit, between which values it is credible, and where to look it up.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from plait.errors import ConfigError
from plait.spec.cluster import (
    LEVELS,
    CallTime,
    Cluster,
    CollectiveTime,
    DeviceSpec,
    EfficiencyCurve,
    HostSpec,
    LinkSpec,
)
from plait.spec.text_files import SETTINGS, read_bounded
from plait.spec.toml_text import parse_toml

_DATASHEET = "the data sheet of the device"
_MEASURE = "`plait cluster measure`, which writes it"
_NETWORK = "the data sheet of the link, or all_reduce_perf of nccl-tests"


@dataclass(frozen=True)
class NumberRow:
    """What a number of a file means: its unit, the least and the most that is credible, and where to look it up.
    `whole` is of what is counted."""

    unit: str
    least: float
    most: float
    look: str
    needed: bool = True
    whole: bool = False


NUMBERS: Mapping[str, NumberRow] = {
    "devices": NumberRow("devices, where the name has no count", 1, 1e7, "the machine", whole=True),
    "device.peak": NumberRow("flop/s of dense products, not of sparse ones", 1e7, 1e17, _DATASHEET),
    "device.memory": NumberRow("bytes", 2**26, 1e14, _DATASHEET),
    "device.memory_bandwidth": NumberRow("bytes/s", 1e8, 1e15, _DATASHEET),
    "device.op_seconds": NumberRow("seconds", 0, 1e-2, _MEASURE, needed=False),
    "device.view_seconds": NumberRow("seconds", 0, 1e-2, _MEASURE, needed=False),
    "device.update_seconds": NumberRow("seconds of a parameter", 0, 1e-2, _MEASURE, needed=False),
    "device.in_step": NumberRow("times what a call takes by itself", 0.1, 10, _MEASURE, needed=False),
    "device.step_seconds": NumberRow("seconds", 0, 10, _MEASURE, needed=False),
    "device.attention_efficiency": NumberRow(
        "the fraction of the speed of other products", 0.01, 2, "a benchmark of FlashAttention", needed=False
    ),
    "device.beside_transfers": NumberRow("the fraction of its speed", 0.01, 1, _MEASURE, needed=False),
    "device.price_per_hour": NumberRow("US dollars", 0, 1e4, "the price list of the cloud", needed=False),
    "links.latency": NumberRow("seconds", 0, 1, _NETWORK),
    "links.bandwidth": NumberRow("bytes/s in one direction, not bits", 1e4, 1e14, _NETWORK),
    "links.at_once": NumberRow(
        "transfers", 1, 1e4, "the number of links or cards of a domain of the level below", False, whole=True
    ),
    "links.size": NumberRow("devices", 0, 1e7, "the number of devices in a package, node or pod", False, whole=True),
    "host.cores": NumberRow("cores", 1, 1e5, "lscpu", whole=True),
    "host.ram": NumberRow("bytes", 2**28, 1e15, "free -b"),
    "host.ram_bandwidth": NumberRow("bytes/s", 1e8, 1e14, _MEASURE),
    "host.disk": NumberRow("bytes", 0, 1e17, "df -B1"),
    "host.disk_bandwidth": NumberRow("bytes/s", 1e4, 1e13, "the data sheet of the disks"),
    "host.device_bandwidth": NumberRow("bytes/s in one direction", 1e8, 1e13, "the generation and lanes of PCIe"),
    "host.nics": NumberRow("network cards", 0, 1e3, "ip link", whole=True),
    "host.nic_bandwidth": NumberRow("bytes/s in one direction, not bits", 0, 1e13, "the data sheet of the card"),
}
_TEXTS = {"name", "doc", "measured", "device.name", "device.matches", "device.overlaps", "device.together",
          "links.level", "links.torus", "links.overlaps", "host.cpu"}  # fmt: skip
_DTYPES = {"float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "float4", "int8"}
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "ring", "halo")
_CURVES = {  # the size of what, and the highest fraction: caches are faster than memory
    "device.matmul_efficiency": ("the flops of a product", 1.0),
    "device.memory_efficiency": ("the bytes of an op", 100.0),
    "links.efficiency": ("the bytes of a transfer", 1.0),
}


def shipped() -> tuple[str, ...]:
    """The names of the descriptions that come with plait."""
    folder = files("plait.spec") / "clusters"
    return tuple(sorted(each.name.removesuffix(".toml") for each in folder.iterdir() if each.name.endswith(".toml")))


def find_cluster(name: str | Path) -> Cluster:
    """The cluster of that name, with a count of devices (`h100x64`) or without, or the one in a file.

    Raises ConfigError, with near matches, for a name that is unknown; with key, value and source for a number of a file
    that is missing or not credible; and for devices that are not whole nodes.
    """
    text = str(name)
    if text.endswith(".toml"):
        return read_cluster(Path(text))
    base, count = text, 0
    known = shipped()
    if base not in known and (parts := re.fullmatch(r"(.+)x([0-9]+)", text)):
        base, count = parts[1], _count(parts[2], text)
    if base not in known:
        near = difflib.get_close_matches(base.lower(), known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(
            f"there is no cluster {text!r}; {hint}plait comes with {', '.join(known)}, each also with a count of"
            " devices like h100x64; or give a file, such as cluster.toml"
        )
    found = _shipped(base)
    if count == 0 and base != text:
        raise ConfigError(f"cluster {text!r} has no devices; give 1 or more, like {base}x{found.num_devices}")
    return found.with_devices(count, text) if count else found


def _count(digits: str, text: str) -> int:
    """The count of devices in a name."""
    most = int(NUMBERS["devices"].most)
    if len(digits) > len(str(most)) or int(digits) > most:
        raise ConfigError(f"cluster {text[:40]!r} has more than {most} devices; give as many at most")
    return int(digits)


def cluster_of_device(kind: str, device_name: str, num_devices: int) -> Cluster:
    """The description of the machine that a step is for, by the type of its device and the name that its driver gives.

    A CPU is described by `cpu`. An accelerator that no description names is described by `a100`, which is right as far
    as ratios of arithmetic to memory go. There are `num_devices`, rounded up to whole nodes.
    """
    if kind == "cpu":
        return _shipped("cpu").with_devices(num_devices)
    found = _shipped("a100")
    for name in shipped():
        if any(text in device_name.lower() for text in _shipped(name).device.matches):
            found = _shipped(name)
            break
    node = found.node_size
    return found.with_devices(num_devices if num_devices <= node else -(-num_devices // node) * node)


@functools.cache
def _shipped(name: str) -> Cluster:
    text = (files("plait.spec") / "clusters" / f"{name}.toml").read_text(encoding="utf-8")
    return parse_cluster(text, f"{name}.toml", name)


def read_cluster(path: Path) -> Cluster:
    """The cluster in a file. Raises ConfigError as `find_cluster` does."""
    try:
        return parse_cluster(read_bounded(path, SETTINGS), str(path), path.stem)
    except FileNotFoundError:
        raise ConfigError(f"there is no cluster file {str(path)!r} (looked for {path.absolute()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the cluster file {str(path)!r}: {error}") from None


def parse_cluster(text: str, place: str, name: str) -> Cluster:
    """The cluster that a text describes. `place` is what messages call the text, `name` the cluster's."""
    try:
        raw = parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{place} is not valid TOML: {error}") from None
    sources = raw.pop("sources", {})
    if not isinstance(sources, dict) or any(not isinstance(each, str) for each in sources.values()):
        raise ConfigError(f"{place}: [sources] is a table of texts, by the path of a number: \"device.peak\" = '...'")
    reader = _Reader(place, sources)
    device = reader.table(raw, "device")
    links = raw.get("links")
    if not isinstance(links, list) or not links or not all(isinstance(each, dict) for each in links):
        raise ConfigError(
            f"{place}: [[links]] is missing; give one for each level of {', '.join(LEVELS)} that there is"
        )
    known = {"name", "doc", "measured", "devices", "device", "links", "host", "calls", "collectives"}
    if unknown := raw.keys() - known:
        raise ConfigError(f"{place}: unknown key {min(unknown)}; {_near(min(unknown), known)}")
    made = Cluster(
        name=str(raw.get("name", name)),
        num_devices=int(reader.number(raw, "devices")),
        device=_device(reader, device),
        links=tuple(_link(reader, each) for each in links),
        doc=str(raw.get("doc", "")),
        host=_host(reader, reader.table(raw, "host")) if "host" in raw else None,
        sources=tuple(sources.items()),
        measured=str(raw.get("measured", "")),
        calls=_calls(reader, raw.get("calls", {})),
        collectives=_collectives(reader, raw.get("collectives", []), raw["devices"]),
    )
    for link in made.links:
        if link.bandwidth > made.device.memory_bandwidth:
            raise ConfigError(
                f"{place}: links.bandwidth = {link.bandwidth:g} of level {link.level} is above"
                f" device.memory_bandwidth = {made.device.memory_bandwidth:g}, from which it sends; look them up in"
                f" {reader.source('links.bandwidth')}"
            )
    return made


def _device(reader: _Reader, table: dict[str, object]) -> DeviceSpec:
    peaks = reader.table(table, "peak", "device.peak")
    if "float32" not in peaks:
        raise ConfigError(reader.missing("device.peak.float32", NUMBERS["device.peak"]))
    for dtype in peaks:
        if dtype not in _DTYPES:
            raise ConfigError(f"{reader.place}: unknown dtype device.peak.{dtype}; {_near(dtype, _DTYPES)}")
    reader.check_keys(table, "device", {"peak"})
    return DeviceSpec(
        name=reader.text(table, "device.name"),
        peak=tuple((dtype, reader.number(peaks, f"device.peak.{dtype}", "device.peak")) for dtype in peaks),
        memory=reader.number(table, "device.memory"),
        memory_bandwidth=reader.number(table, "device.memory_bandwidth"),
        matches=_matches(reader, table.get("matches", [])),
        matmul_efficiency=reader.curve(table, "device.matmul_efficiency"),
        memory_efficiency=reader.curve(table, "device.memory_efficiency"),
        attention_efficiency=reader.number(table, "device.attention_efficiency", default=1.0),
        overlaps=reader.flag(table, "device.overlaps", True),
        op_seconds=reader.number(table, "device.op_seconds"),
        view_seconds=reader.number(table, "device.view_seconds"),
        update_seconds=reader.number(table, "device.update_seconds"),
        in_step=reader.number(table, "device.in_step", default=1.0),
        step_seconds=reader.number(table, "device.step_seconds"),
        together=_together(reader, table.get("together", [])),
        beside_transfers=reader.number(table, "device.beside_transfers", default=1.0),
        price_per_hour=reader.number(table, "device.price_per_hour") if "price_per_hour" in table else None,
    )


def _matches(reader: _Reader, given: object) -> tuple[str, ...]:
    """Texts, of which one is in the name of a device."""
    if not isinstance(given, list) or not all(isinstance(each, str) and each for each in given):
        raise ConfigError(f'{reader.place}: device.matches = {given!r}; it is a list of texts, like ["h100"]')
    return tuple(each.lower() for each in given)


def _link(reader: _Reader, table: dict[str, object]) -> LinkSpec:
    reader.check_keys(table, "links")
    level = reader.text(table, "links.level")
    if level not in LEVELS:
        raise ConfigError(f"{reader.place}: links.level = {level!r}; the levels are {', '.join(LEVELS)}")
    return LinkSpec(
        level=level,
        latency=reader.number(table, "links.latency"),
        bandwidth=reader.number(table, "links.bandwidth"),
        at_once=int(reader.number(table, "links.at_once", default=1)),
        size=int(reader.number(table, "links.size")),
        efficiency=reader.curve(table, "links.efficiency"),
        torus=reader.flag(table, "links.torus", False),
        overlaps=reader.flag(table, "links.overlaps", True),
    )


def _together(reader: _Reader, given: Any) -> tuple[tuple[int, float], ...]:
    """Points [ranks, speed] with ascending numbers of ranks, of which more are not faster."""
    try:
        points = [(ranks, speed) for ranks, speed in given]
        good = all(_is_count(ranks) and _is_number(speed) and 1e-5 <= speed <= 1e3 for ranks, speed in points)
        numbers, speeds = [ranks for ranks, _ in points], [speed for _, speed in points]
        good = good and numbers == sorted(set(numbers)) and speeds == sorted(speeds, reverse=True)
    except (TypeError, ValueError):
        good = False
    if not good:
        raise ConfigError(
            f"{reader.place}: device.together = {given!r}; it is points [ranks that compute, speed of one of them],"
            f" with ascending numbers of ranks and speeds that do not rise, from 1e-05 to 1000; it is from {_MEASURE}"
        )
    return tuple((ranks, float(speed)) for ranks, speed in points)


def _calls(reader: _Reader, given: object) -> tuple[CallTime, ...]:
    """The table [calls]: signature = [seconds, flops, bytes, dtype]."""
    if not isinstance(given, dict):
        raise ConfigError(f"{reader.place}: calls = {given!r}; it is a table, by the signature of a call")
    found = []
    for signature, row in given.items():
        try:
            seconds, flops, num_bytes, dtype = row
            good = all(_is_number(each) and 0 <= each < math.inf for each in (seconds, flops, num_bytes))
            good = good and seconds < 1e4 and type(dtype) is str
        except (TypeError, ValueError):
            good = False
        if not good:
            raise ConfigError(f"{reader.place}: calls.{signature!r} = {row!r}; it is [seconds, flops, bytes, dtype]")
        found.append(CallTime(signature, float(seconds), float(flops), float(num_bytes), dtype))
    return tuple(found)


def _host(reader: _Reader, table: dict[str, object]) -> HostSpec:
    reader.check_keys(table, "host")
    names = [each.name for each in fields(HostSpec) if each.name != "cpu"]
    numbers: dict[str, Any] = {name: reader.number(table, f"host.{name}") for name in names}
    counts = {name: int(numbers[name]) for name in ("cores", "nics")}
    return HostSpec(reader.text(table, "host.cpu"), **numbers | counts)


def _collectives(reader: _Reader, given: Any, num_devices: int) -> tuple[CollectiveTime, ...]:
    """The list collectives: rows [kind, ranks, stride, bytes, seconds], of groups of the devices."""
    found = []
    for row in given if isinstance(given, list) else [given]:
        try:
            kind, size, stride, num_bytes, seconds = row
            good = (
                kind in _COLLECTIVES and _is_count(size) and _is_count(stride) and 0 < (size - 1) * stride < num_devices
            )
            good = good and all(_is_number(each) and 0 <= each < math.inf for each in (num_bytes, seconds))
            good = good and num_bytes > 0 and seconds < 1e4
        except (TypeError, ValueError):
            good = False
        if not good:
            raise ConfigError(
                f"{reader.place}: collectives has {row!r}; it is rows [kind, ranks, stride, bytes of the whole tensor,"
                f" seconds] of groups of {num_devices} devices; kind is one of {', '.join(_COLLECTIVES)}"
            )
        found.append(CollectiveTime(kind, int(size), int(stride), float(num_bytes), float(seconds)))
    return tuple(found)


@dataclass(frozen=True)
class _Reader:
    """Reads values of tables, and says of a bad one where it is, what it should be and where to look it up."""

    place: str
    sources: Mapping[str, str]

    def source(self, path: str) -> str:
        """Where a number is from by the file itself, or else where to look it up."""
        given = [text for key, text in self.sources.items() if path == key or path.startswith(f"{key}.")]
        return given[-1] if given else next(row.look for key, row in NUMBERS.items() if path.startswith(key))

    def table(self, table: Mapping[str, object], key: str, path: str = "") -> dict[str, object]:
        found = table.get(key)
        if not isinstance(found, dict):
            raise ConfigError(f"{self.place}: the table [{path or key}] is missing")
        return found

    def check_keys(self, table: Mapping[str, object], name: str, more: frozenset[str] | set[str] = frozenset()) -> None:
        paths = [*NUMBERS, *_TEXTS, *_CURVES]
        known = {path.partition(".")[2] for path in paths if path.startswith(f"{name}.")} | more
        if unknown := table.keys() - known:
            raise ConfigError(f"{self.place}: unknown key {name}.{min(unknown)}; {_near(min(unknown), known)}")

    def text(self, table: Mapping[str, object], path: str) -> str:
        found = table.get(path.rpartition(".")[2])
        if not isinstance(found, str) or not found:
            raise ConfigError(f"{self.place}: {path} is missing; it is a text")
        return found

    def number(self, table: Mapping[str, Any], path: str, of: str = "", default: float = 0.0) -> float:
        row = NUMBERS[of or path]
        key = path.rpartition(".")[2]
        if key not in table:
            if row.needed:
                raise ConfigError(self.missing(path, row))
            return default
        value = table[key]
        if not _is_number(value) or not row.least <= value <= row.most or (row.whole and value != int(value)):
            raise ConfigError(
                f"{self.place}: {path} = {value!r} is not credible; it is in {row.unit},"
                f" {'a whole number ' if row.whole else ''}from {row.least:g} to {row.most:g}; look it up in"
                f" {self.source(path)}"
            )
        return float(value)

    def missing(self, path: str, row: NumberRow) -> str:
        return f"{self.place}: {path} is missing; it is in {row.unit}; look it up in {self.source(path)}"

    def flag(self, table: Mapping[str, object], path: str, default: bool) -> bool:
        """true or false; the default if it is not given."""
        given = table.get(path.rpartition(".")[2], default)
        if not isinstance(given, bool):
            raise ConfigError(f"{self.place}: {path} = {given!r}; it is true or false")
        return given

    def curve(self, table: Mapping[str, Any], path: str) -> EfficiencyCurve:
        """A number, or points [size, fraction]; 1 for all sizes if it is not given."""
        given = table.get(path.rpartition(".")[2], 1.0)
        points = given if isinstance(given, list) else [[1.0, given]]
        try:
            good = bool(points) and all(_is_number(size) and _is_number(part) for size, part in points)
            found = tuple((float(size), float(part)) for size, part in points)
            sizes = [size for size, _ in found]
            good = good and sizes == sorted(set(sizes)) and sizes[0] > 0 and sizes[-1] < math.inf
            good = good and all(0 < part <= _CURVES[path][1] for _, part in found)
        except (TypeError, ValueError):
            good = False
        if not good:
            raise ConfigError(
                f"{self.place}: {path} = {given!r}; it is a fraction above 0 and at most {_CURVES[path][1]:g}, or"
                f" points [size, fraction] with ascending sizes, which are {_CURVES[path][0]}"
            )
        return EfficiencyCurve(found)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _near(key: str, known: set[str]) -> str:
    near = difflib.get_close_matches(key, known, n=2)
    return (f"did you mean {' or '.join(near)}? " if near else "") + f"the keys here are {', '.join(sorted(known))}"
