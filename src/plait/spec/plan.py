"""The plan: one line of text that says how a training step is spread.

    data=2 tensor=2 batchnorm=local allreduce=ring bucket=25MiB

Each key is one row, a field of `Plan`: its kind reads, checks and prints it, and its default is left out of the text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields
from typing import Any, cast

from plait.errors import PlanError
from plait.spec.mesh import Mesh
from plait.spec.refusals import names_not_yet, refuse_key

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Axis:
    """The size of a mesh axis: 1, 2, 3..."""

    def parse(self, word: str) -> int:
        try:
            return int(word)
        except ValueError:
            raise ValueError("a size is a whole number, 1 or more") from None

    def check(self, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError("a size is a whole number, 1 or more")

    def show(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    def parse(self, word: str) -> str:
        return word

    def check(self, value: Any) -> None:
        if value not in self.words:
            raise ValueError(f"it is one of {', '.join(self.words)}")

    def show(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True)
class Bytes:
    """A number of bytes with its unit: 512KiB, 25MiB."""

    def parse(self, word: str) -> int:
        if (found := re.fullmatch(r"(\d+)([A-Za-z]+)", word)) and found[2] in _UNITS:
            return int(found[1]) * _UNITS[found[2]]
        raise ValueError(f"a size has a number and a unit of {', '.join(_UNITS)}, like 25MiB")

    def check(self, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError("a size is 1B or more")

    def show(self, value: Any) -> str:
        unit = max((unit for unit in _UNITS if value % _UNITS[unit] == 0), key=lambda unit: _UNITS[unit])
        return f"{value // _UNITS[unit]}{unit}"


Kind = Axis | Choice | Bytes  # parse(word) and check(value) raise ValueError saying what was expected


def _key(kind: Kind, default: object, doc: str, name: str = "") -> Any:
    """A row of the table: `name` is the key's text where it is not the field's own name."""
    return field(default=default, metadata={"kind": kind, "doc": doc, "name": name})


@dataclass(frozen=True)
class Plan:
    """How one training step is spread over ranks. `Plan()` is one device.

    >>> str(Plan.parse("tensor=2 data=4 bucket=25MiB"))
    'data=4 tensor=2'
    """

    data: int = _key(Axis(), 1, "ranks that each take a part of the batch")
    tensor: int = _key(Axis(), 1, "ranks that each take a part of the weights")
    batchnorm: str = _key(Choice(("global", "local")), "global", "batch statistics over all ranks, or over each alone")
    allreduce: str = _key(Choice(("backend", "ring", "naive")), "backend", "the algorithm that sums gradients")
    bucket_bytes: int = _key(Bytes(), 25 * 2**20, "gradients are summed in buckets of this size", name="bucket")

    def __post_init__(self) -> None:
        for row in fields(self):
            value, kind = getattr(self, row.name), _kind(row)
            try:
                kind.check(value)
            except ValueError as error:
                raise PlanError(f"{key_name(row)}={value}: {error}") from None

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read a plan; the order of keys is free, empty text is one device. PlanError names the word and its place."""
        rows = {key_name(row): row for row in fields(cls)}
        found: dict[str, Any] = {}
        for number, word in enumerate(text.split(), start=1):
            place = f"word {number} of the plan {text!r}"
            key, equals, value = word.partition("=")
            if not equals or not key or not value:
                raise PlanError(f"cannot read {word!r} ({place}): a plan is made of key=value, like data=2 tensor=2")
            if key not in rows:
                refuse_key(key, value, place)
                raise PlanError(f"unknown key {key!r} ({place}); {_hint(key, rows)}")
            row = rows[key]
            if row.name in found:
                raise PlanError(f"{key} is given twice, the second time as {word!r} ({place}); give it once")
            try:
                found[row.name] = _kind(row).parse(value)
                _kind(row).check(found[row.name])
            except ValueError as error:
                spaces = "; separate the words of a plan with spaces" if "," in value and "=" in value else ""
                raise PlanError(f"bad value {value!r} in {word!r} ({place}): {error}{spaces}") from None
        return cls(**found)

    @classmethod
    def for_processes(cls, num_processes: int) -> Plan:
        """The plan for that many processes when nobody gave one: data parallel over all of them."""
        return cls(data=num_processes)

    def __str__(self) -> str:
        given = [row for row in fields(self) if getattr(self, row.name) != row.default]
        return " ".join(f"{key_name(row)}={_kind(row).show(getattr(self, row.name))}" for row in given)

    @property
    def title(self) -> str:
        """The text for people to read, which names the empty plan too."""
        return str(self) or "one device"

    @property
    def mesh(self) -> Mesh:
        """Every axis, outermost first; those of size 1 too, so that layouts may name what a plan leaves out."""
        return Mesh(
            tuple((key_name(row), getattr(self, row.name)) for row in fields(self) if isinstance(_kind(row), Axis))
        )

    @property
    def num_processes(self) -> int:
        """Ranks that the plan runs on: the product of its axes."""
        return self.mesh.size

    def check_processes(self, num_processes: int) -> None:
        """Raise PlanError unless the axes multiply to the number of processes."""
        if (need := self.num_processes) == num_processes:
            return
        product = " x ".join(f"{name}={size}" for name, size in self.mesh.axes if size > 1)
        sum_text = f"{product} = {need}" if " x " in product else f"{need}"
        raise PlanError(
            f"the plan {self.title!r} is for {sum_text} {'process' if need == 1 else 'processes'}, not {num_processes};"
            f" start {need} (--processes {need}), or give a plan whose sizes multiply to {num_processes}, such as"
            f" data={num_processes}"
        )


def key_name(row: Field[Any]) -> str:
    """The key's name in a plan's text."""
    return cast(str, row.metadata["name"]) or row.name


def describe_keys() -> list[tuple[str, str, str]]:
    """(name, default as text, what it does) of every key, in the order in which a plan prints."""
    return [(key_name(row), _kind(row).show(row.default), row.metadata["doc"]) for row in fields(Plan)]


def _kind(row: Field[Any]) -> Kind:
    return cast(Kind, row.metadata["kind"])


def _hint(key: str, names: Iterable[str]) -> str:
    known = list(names)
    near = difflib.get_close_matches(key.lower(), [*known, *names_not_yet()], n=2, cutoff=0.6)
    near = [name for name in near if name in known] or near
    return (f"did you mean {' or '.join(near)}? " if near else "") + f"the keys are {', '.join(known)}"
