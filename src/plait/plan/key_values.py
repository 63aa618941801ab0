"""The kinds of values of a plan's keys: each kind reads a word of the plan, checks a value and prints it."""

from __future__ import annotations

import difflib
import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from plait.plan.axes import axis_kind
from plait.plan.compression import Compression

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Kind(ABC):
    """A kind of value. `parse` and `check` raise ValueError with a text that says what was expected."""

    def parse(self, word: str) -> Any:
        """The value that a word of the plan means."""
        return word

    @abstractmethod
    def check(self, value: object) -> None:
        """Raise ValueError if the value cannot be of this kind."""

    def show(self, value: Any) -> str:
        """The value as a word of the plan."""
        return str(value)


@dataclass(frozen=True)
class Axis(Kind):
    """The size of a mesh axis: 1, 2, 3... `axis` is the name of the axis if it is not that of the key."""

    axis: str = ""

    def parse(self, word: str) -> Any:
        try:
            return int(word)
        except ValueError:
            raise ValueError("a size is a whole number, 1 or more") from None

    def check(self, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError("a size is a whole number, 1 or more")

    def num_ranks(self, value: Any) -> int:
        """The number of ranks along the axis."""
        return int(value)


@dataclass(frozen=True)
class Places(Axis):
    """The size of a pipeline: the number of its ranks, or for each place the ranks that share it, as [1,2,1]."""

    def parse(self, word: str) -> Any:
        if not word.startswith("["):
            return super().parse(word)
        try:
            if not word.endswith("]"):
                raise ValueError(word)
            return tuple(int(part) for part in word.removeprefix("[").removesuffix("]").split(","))
        except ValueError:
            raise ValueError("it is a whole number, or the number of ranks of each stage like [1,2,1]") from None

    def check(self, value: object) -> None:
        if not isinstance(value, tuple):
            super().check(value)
            return
        for each in value:
            super().check(each)
        if len(value) < 2:
            raise ValueError("a pipeline has two stages or more; to share microbatches among all ranks use data=N")

    def show(self, value: int | tuple[int, ...]) -> str:
        return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)

    def num_ranks(self, value: int | tuple[int, ...]) -> int:
        return sum(value) if isinstance(value, tuple) else super().num_ranks(value)


@dataclass(frozen=True)
class StagePlans(Axis):
    """How the ranks of each place of a pipeline split their stage, as [tensor=2|data=2]; the size is that of a
    place."""

    axis: str = "inner"

    def parse(self, word: str) -> tuple[tuple[str, int], ...]:
        if not (word.startswith("[") and word.endswith("]")):
            raise ValueError("it is a list, in brackets, with the plan of each stage, like [tensor=2 | data=2]")
        found = []
        for number, text in enumerate(word[1:-1].split("|")):
            name, _, size = text.partition("=")
            if name not in ("tensor", "data") or not size.isdecimal():
                raise ValueError(
                    f"stage {number} is {text or 'empty'!r}, but a stage is tensor=N or data=N; keys for all stages go"
                    " outside the brackets"
                )
            found.append((name, int(size)))
        return tuple(found)

    def check(self, value: Any) -> None:
        sizes = [size for _, size in value]
        for size in sizes:
            super().check(size)
        if len(value) == 1:
            raise ValueError("a pipeline has two stages or more")
        if len(set(sizes)) > 1:
            raise ValueError(
                f"its stages have {', '.join(map(str, sizes))} ranks, but all must have the same number; to give a slow"
                " stage more ranks use pipeline=[1,2,1]"
            )
        if 1 in sizes:
            raise ValueError(f"its stages have one rank each; use pipeline={len(value)}")

    def show(self, value: tuple[tuple[str, int], ...]) -> str:
        return f"[{'|'.join(f'{name}={size}' for name, size in value)}]" if value else "none"

    def num_ranks(self, value: tuple[tuple[str, int], ...]) -> int:
        return value[0][1] if value else 1


@dataclass(frozen=True)
class Number(Kind):
    """A whole number from `low` to `high`; None for no upper bound."""

    low: int
    high: int | None = None

    def parse(self, word: str) -> Any:
        try:
            return int(word)
        except ValueError:
            raise ValueError(self._expected) from None

    def check(self, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < self.low or value > (self.high or value):
            raise ValueError(self._expected)

    @property
    def _expected(self) -> str:
        return f"it is a whole number, {self.low} {'or more' if self.high is None else f'to {self.high}'}"


@dataclass(frozen=True)
class Maybe(Number):
    """A `Number`, or None, which prints as `none`."""

    def parse(self, word: str) -> int | None:
        return None if word == "none" else super().parse(word)

    def check(self, value: object) -> None:
        if value is not None:
            super().check(value)

    def show(self, value: int | None) -> str:
        return "none" if value is None else str(value)


@dataclass(frozen=True)
class Real(Kind):
    """A number of at least `low` and less than `below`; or None, which prints as `none`."""

    low: float
    below: float = math.inf

    def parse(self, word: str) -> float:
        try:
            return float(word)
        except ValueError:
            raise ValueError(self._expected) from None

    def check(self, value: object) -> None:
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.low <= value < self.below:
            raise ValueError(self._expected)

    def show(self, value: float | None) -> str:
        return "none" if value is None else f"{value:g}"

    @property
    def _expected(self) -> str:
        return f"it is a number, {self.low:g} or more" + (f" and below {self.below:g}" if self.below < math.inf else "")


@dataclass(frozen=True)
class Interval(Kind):
    """The steps between two synchronisations: a number, or `4..64`, which begins with 4 and doubles up to 64."""

    def parse(self, word: str) -> int | tuple[int, int]:
        first, dots, last = word.partition("..")
        try:
            return (int(first), int(last)) if dots else int(word)
        except ValueError:
            raise ValueError(self._expected) from None

    def check(self, value: object) -> None:
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, bool) or not isinstance(each, int) or each < 1:
                raise ValueError(f"{self._expected}; sync=1 synchronises at every step")
        if isinstance(value, tuple) and not (len(value) == 2 and value[0] < value[1]):
            raise ValueError("an interval that grows begins with the smaller number, like 4..64")

    def show(self, value: int | tuple[int, int]) -> str:
        return "..".join(map(str, value)) if isinstance(value, tuple) else str(value)

    _expected = "it is a number of steps, 1 or more, or one that grows like 4..64"


@dataclass(frozen=True)
class Compressions(Kind):
    """A `Compression`."""

    def parse(self, word: str) -> Compression:
        return Compression.parse(word)

    def check(self, value: Any) -> None:
        value.check()


@dataclass(frozen=True)
class Recompute:
    """The activations that are dropped after forward and recomputed in backward.

    `kind` is `none`, `layer` (all within each layer), `gathers` (those that were gathered from other ranks), `budget`
    (as many as are needed so that the rest fits into `budget_bytes`), or `pattern` (those within modules whose name
    matches).
    """

    kind: str = "none"
    budget_bytes: int = 0
    pattern: str = ""


NO_RECOMPUTE = Recompute()


@dataclass(frozen=True)
class Recomputes(Kind):
    """A `Recompute`: `none`, `layer`, `gathers`, `budget=4GiB`, or a pattern of module names."""

    def parse(self, word: str) -> Recompute:
        if word in ("none", "layer", "gathers"):
            return Recompute(word)
        if word.partition("=")[0] == "budget":
            return Recompute("budget", budget_bytes=Bytes().parse(word.partition("=")[2]))
        return Recompute("pattern", pattern=word)

    def check(self, value: object) -> None:
        if not isinstance(value, Recompute):
            raise ValueError("it is none, layer, gathers, budget=SIZE or a pattern of module names")
        if value.kind == "budget":
            Bytes().check(value.budget_bytes)

    def show(self, value: Recompute) -> str:
        if value.kind == "budget":
            return f"budget={Bytes().show(value.budget_bytes)}"
        return str(value.pattern or value.kind)


@dataclass(frozen=True)
class Choice(Kind):
    """One of a few words."""

    words: tuple[str, ...]

    def check(self, value: object) -> None:
        if value not in self.words:
            raise ValueError(f"it is one of {', '.join(self.words)}")


# The names in schedule/families, which a test compares. A word with a dot or a slash is a file.
SCHEDULE_NAMES = (
    "naive", "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "pipedream",
    "pipedream-vertical", "pipedream-2bw",
)  # fmt: skip


@dataclass(frozen=True)
class ScheduleName(Kind):
    """The name of a schedule, or the path of a file with one."""

    def check(self, value: object) -> None:
        if not isinstance(value, str) or not value:
            raise ValueError("it is the name of a schedule or a file")
        if value not in SCHEDULE_NAMES and not self.is_file(value):
            near = difflib.get_close_matches(value.lower(), SCHEDULE_NAMES, n=2, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(f"{hint}the schedules are {', '.join(SCHEDULE_NAMES)}, or a file such as ./mine.txt")

    @staticmethod
    def is_file(value: str) -> bool:
        """Whether the value is the path of a file."""
        return "/" in value or "." in value


@dataclass(frozen=True)
class Buckets(Kind):
    """The number of which sequences of a batch are padded to a multiple, as `bucket:64`; 0, as `exact`, for none."""

    def parse(self, word: str) -> int:
        if word == "exact":
            return 0
        kind, colon, number = word.partition(":")
        if kind != "bucket" or not colon or not number.isdecimal() or not int(number):
            raise ValueError(self._expected)
        return int(number)

    def check(self, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(self._expected)

    def show(self, value: int) -> str:
        return f"bucket:{value}" if value else "exact"

    _expected = "it is exact, or bucket:N with a whole number of positions, 1 or more, like bucket:64"


@dataclass(frozen=True)
class Names(Kind):
    """Names of modules, separated by commas."""

    def parse(self, word: str) -> tuple[str, ...]:
        return tuple(word.split(","))

    def check(self, value: object) -> None:
        if not isinstance(value, tuple) or not all(isinstance(name, str) and name for name in value):
            raise ValueError("it is a list of module names, such as layers.4,layers.8")
        if len(set(value)) < len(value):
            raise ValueError("it names a module twice")

    def show(self, value: tuple[str, ...]) -> str:
        return ",".join(value) or "none"


@dataclass(frozen=True)
class Bytes(Kind):
    """A number of bytes with its unit: 512KiB, 25MiB."""

    def parse(self, word: str) -> int:
        if (found := re.fullmatch(r"(\d+)([A-Za-z]+)", word)) and found[2] in _UNITS:
            return int(found[1]) * _UNITS[found[2]]
        raise ValueError(f"a size has a number and a unit of {', '.join(_UNITS)}, like 25MiB")

    def check(self, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError("a size is 1B or more")

    def show(self, value: int) -> str:
        unit = max((unit for unit in _UNITS if value % _UNITS[unit] == 0), key=lambda unit: _UNITS[unit])
        return f"{value // _UNITS[unit]}{unit}"


@dataclass(frozen=True)
class Family(Kind):
    """Several keys with a common prefix, such as `precision.PATTERN=fp32`. The value is pairs of (suffix, word)."""

    prefix: str
    value: Choice
    members: tuple[str, ...] = ()  # the suffixes that there are; empty: any pattern

    def parse(self, word: str) -> tuple[tuple[str, object], ...]:
        member, _, value = word.partition("=")
        return ((member, self.value.parse(value)),)

    def check(self, value: Any) -> None:
        for member, word in value:
            if self.members and member not in self.members:
                raise ValueError(f"{self.prefix} is followed by one of {', '.join(self.members)}")
            self.value.check(word)

    def show(self, value: tuple[tuple[str, object], ...]) -> str:
        return " ".join(f"{self.prefix}{member}={word}" for member, word in value)


@dataclass(frozen=True)
class AxisSizes(Family):
    """Sizes of axes that have no field in `Plan`, each under the name of the axis, as `shelf=2`."""

    value: Choice = Choice(())

    def parse(self, word: str) -> tuple[tuple[str, int], ...]:
        name, _, size = word.partition("=")
        return ((name, Axis().parse(size)),)

    def check(self, value: Any) -> None:
        for name, size in value:
            axis_kind(name)
            Axis().check(size)

    def show(self, value: tuple[tuple[str, object], ...]) -> str:
        return " ".join(f"{name}={size}" for name, size in value)
