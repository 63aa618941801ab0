"""Costs: the seconds and bytes of each pipeline stage that the simulator needs, and the file that a user gives.

    {"forward": [1.0, 1.0, 4.0, 1.0],      seconds per microbatch, one number per stage or one for all
     "backward": 1.0, "weight": 1.0,       the parts of a backward for inputs and for weights; a whole B takes both
     "communication": 0.1,                 seconds from stage to stage; or instead these three:
     "latency": 1e-5, "bytes_per_second": 25e9, "bytes": 1e6,     bytes also as {"0>1": 1e6, "0>3": 5e5}
     "activation_bytes": 4e6,              kept per microbatch from the start of F to the end of B
     "weight_activation_bytes": 1e6,       the part of these kept to the end of W, where backward is split
     "state_bytes": 1e9,                   parameters, gradients and optimizer state
     "reduce": 0, "step": 0}               seconds to sum a stage's gradients over ranks, and to update it

`forward`, `backward` and `weight` are required. All others are 0 by default, except `weight_activation_bytes`, which by
default is all of `activation_bytes`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import ConfigError
from plait.spec.text_files import TABLES, read_bounded

_STAGES = (
    "forward",
    "backward",
    "weight",
    "activation_bytes",
    "weight_activation_bytes",
    "state_bytes",
    "reduce",
    "step",
)
_LINKS = ("communication", "latency", "bytes_per_second", "bytes")
_NEEDED = ("forward", "backward", "weight")


@dataclass(frozen=True)
class Costs:
    """The costs of each stage. Tuples have one entry per stage; seconds and bytes are per microbatch.

    Attributes:
        forward: seconds of a forward.
        backward: seconds of the part of a backward for the inputs.
        weight: seconds of the part of a backward for the weights.
        communication: seconds of every transfer between ranks, on top of those that latency and bytes take.
        latency: seconds of a transfer without any bytes.
        bytes_per_second: bandwidth between ranks.
        crossing: bytes of the value from one stage to another, by pair or for all; its gradient is as large.
        activation_bytes: kept from the start of the forward to the end of the backward.
        weight_activation_bytes: the part kept to the end of the weight part, where backward is split.
        state_bytes: parameters, gradients and optimizer state, once per stage.
        reduce: seconds to sum the stage's gradients over ranks, once per step.
        step: seconds to update the stage's parameters, once per update.

    Raises ConfigError for a value that is negative or infinite, and for numbers of stages that differ.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    communication: float = 0.0
    latency: float = 0.0
    bytes_per_second: float = math.inf
    crossing: Mapping[tuple[int, int], int] | int = 0
    activation_bytes: tuple[int, ...] = ()
    weight_activation_bytes: tuple[int, ...] = ()
    state_bytes: tuple[int, ...] = ()
    reduce: tuple[float, ...] = ()
    step: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in _STAGES:
            values = getattr(self, name)
            if len(values) != self.num_stages and (values or name in _NEEDED):
                raise ConfigError(f"costs: {name} has {len(values)} stages, and forward {self.num_stages}")
            if any(not value >= 0 or value == math.inf for value in values):
                raise ConfigError(f"costs: {name}={list(values)}: seconds and bytes are 0 or more")
        if self.bytes_per_second <= 0 or self.latency < 0 or self.communication < 0:
            raise ConfigError("costs: bytes_per_second is above 0, latency and communication are 0 or more")

    @classmethod
    def equal(
        cls, num_stages: int, forward: float = 1, backward: float = 1, weight: float = 1, communication: float = 0
    ) -> Costs:
        """Costs of stages that are all equal."""
        each = num_stages
        return cls((forward,) * each, (backward,) * each, (weight,) * each, communication)

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    def bytes_between(self, stage: int, other: int) -> int:
        """Bytes of the value, or of its gradient, that goes between two stages."""
        if isinstance(self.crossing, int):
            return self.crossing
        return self.crossing.get((min(stage, other), max(stage, other)), 0)

    def transfer(self, stage: int, other: int) -> float:
        """Seconds that this value takes between two ranks."""
        return self.communication + self.latency + self.bytes_between(stage, other) / self.bytes_per_second

    def of(self, name: str, stage: int) -> float:
        """The value of attribute `name` for a stage; 0 if the attribute is not given."""
        values = getattr(self, name)
        return float(values[stage]) if values else 0.0

    def kept_for_weight(self, stage: int) -> int:
        """Bytes per microbatch that the weight part of a split backward needs."""
        kept = self.weight_activation_bytes or self.activation_bytes
        return kept[stage] if kept else 0


def read_costs(path: Path, num_stages: int) -> Costs:
    """Read a file of costs for `num_stages` stages. ConfigError names the key, its value and what is expected."""
    try:
        rows = json.loads(read_bounded(path, TABLES))
    except OSError as error:
        raise ConfigError(f"cannot read the costs {str(path)!r}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"the costs {str(path)!r} are not JSON: {error}") from None
    if not isinstance(rows, dict):
        raise ConfigError(
            f"the costs {str(path)!r} are not an object like {{'forward': 1, 'backward': 1, 'weight': 1}}"
        )
    place = f"the costs {str(path)!r}"
    if unknown := [key for key in rows if key not in (*_STAGES, *_LINKS)]:
        raise ConfigError(f"{place}: unknown key {unknown[0]!r}; the keys are {', '.join((*_STAGES, *_LINKS))}")
    if missing := [key for key in _NEEDED if key not in rows]:
        raise ConfigError(f"{place}: {missing[0]!r} is missing; {', '.join(_NEEDED)} are needed, in seconds")
    if "communication" in rows and (both := [key for key in _LINKS[1:] if key in rows]):
        raise ConfigError(f"{place}: communication and {both[0]} are both given; give seconds, or latency and bytes")
    if "bytes" in rows and "bytes_per_second" not in rows:
        raise ConfigError(f"{place}: bytes without bytes_per_second; give both")
    found: dict[str, Any] = {}
    for key in _STAGES:
        if key in rows:
            found[key] = _each_stage(place, key, rows[key], num_stages)
    for key in _LINKS[:3]:
        if key in rows:
            found[key] = _number(place, key, rows[key])
    if "bytes" in rows:
        found["crossing"] = _crossing(place, rows["bytes"], num_stages)
    return Costs(**found)


def _each_stage(place: str, key: str, value: object, num_stages: int) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value] * num_stages
    if len(values) != num_stages:
        raise ConfigError(
            f"{place}: {key} has {len(values)} numbers for {num_stages} stages; give one for each, or one for all"
        )
    numbers = tuple(_number(place, key, each) for each in values)
    return tuple(map(int, numbers)) if key.endswith("bytes") else numbers


def _crossing(place: str, value: object, num_stages: int) -> dict[tuple[int, int], int] | int:
    if not isinstance(value, dict):
        return int(_number(place, "bytes", value))
    found = {}
    for pair, each in value.items():
        ends = pair.split(">")
        if len(ends) != 2 or not all(end.isdecimal() for end in ends) or not int(ends[0]) < int(ends[1]) < num_stages:
            raise ConfigError(
                f"{place}: bytes has {pair!r}; a key is like '0>1', from an earlier to a later of {num_stages} stages"
            )
        found[int(ends[0]), int(ends[1])] = int(_number(place, f"bytes {pair}", each))
    return found


def _number(place: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{place}: {key} has {value!r}; it is a number, 0 or more")
    return float(value)
