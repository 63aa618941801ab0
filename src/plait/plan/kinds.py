"""The kinds of a plan's values: each reads a word, checks a value and prints it.

`parse` and `check` raise ValueError that says what was expected.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from typing import Any

from plait.plan.axes import axis_kind
from plait.plan.compression import Compression
from plait.plan.recompute import Recompute

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Axis:
    """The size of a mesh axis: 1, 2, 3... `axis` is its name on the mesh where that is not the key's."""

    axis: str = ""

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

    def num_ranks(self, value: Any) -> int:
        return int(value)


@dataclass(frozen=True)
class Places(Axis):
    """The places of a pipeline: how many, or of each how many ranks share its microbatches, as [1,2,1]."""

    def parse(self, word: str) -> int | tuple[int, ...]:  # type: ignore[override]
        if not word.startswith("["):
            return super().parse(word)
        try:
            if not word.endswith("]"):
                raise ValueError(word)
            return tuple(int(part) for part in word.removeprefix("[").removesuffix("]").split(","))
        except ValueError:
            raise ValueError("it is a whole number, or the ranks of each stage like [1,2,1]") from None

    def check(self, value: Any) -> None:
        if not isinstance(value, tuple):
            super().check(value)
            return
        for each in value:
            super().check(each)
        if len(value) < 2:
            raise ValueError("a pipeline has two places or more; to share microbatches among all ranks use data=N")

    def show(self, value: Any) -> str:
        return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)

    def num_ranks(self, value: Any) -> int:
        return sum(value) if isinstance(value, tuple) else super().num_ranks(value)


@dataclass(frozen=True)
class StagePlans(Axis):
    """What the ranks of each place of a pipeline are to each other, as [tensor=2|data=2]; the size is theirs."""

    axis: str = "inner"

    def parse(self, word: str) -> tuple[tuple[str, int], ...]:  # type: ignore[override]
        if not (word.startswith("[") and word.endswith("]")):
            raise ValueError("it is the plan of each stage like [tensor=2 | data=2], between brackets")
        found = []
        for number, text in enumerate(word[1:-1].split("|")):
            name, _, size = text.partition("=")
            if name not in ("tensor", "data") or not size.isdecimal():
                raise ValueError(
                    f"stage {number} is {text or 'empty'!r}, and a stage is tensor=N or data=N; what all stages have in"
                    " common stands outside the brackets"
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
                f"its stages have {', '.join(map(str, sizes))} ranks, and must have as many each; to give a slow stage"
                " more ranks use pipeline=[1,2,1]"
            )
        if 1 in sizes:
            raise ValueError(f"its stages have one rank each; use pipeline={len(value)}")

    def show(self, value: Any) -> str:
        return f"[{'|'.join(f'{name}={size}' for name, size in value)}]" if value else "none"

    def num_ranks(self, value: Any) -> int:
        return value[0][1] if value else 1


@dataclass(frozen=True)
class Number:
    """A whole number from `low` to `high` that is no axis."""

    low: int
    high: int | None = None

    def parse(self, word: str) -> int:
        try:
            return int(word)
        except ValueError:
            raise ValueError(self._expected) from None

    def check(self, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < self.low or value > (self.high or value):
            raise ValueError(self._expected)

    def show(self, value: Any) -> str:
        return str(value)

    @property
    def _expected(self) -> str:
        return f"it is a whole number, {self.low} {'or more' if self.high is None else f'to {self.high}'}"


@dataclass(frozen=True)
class Maybe(Number):
    """A whole number as Number has it, or None, which prints as `none`."""

    def parse(self, word: str) -> Any:
        return None if word == "none" else super().parse(word)

    def check(self, value: Any) -> None:
        if value is not None:
            super().check(value)

    def show(self, value: Any) -> str:
        return "none" if value is None else str(value)


@dataclass(frozen=True)
class Real:
    """A number of at least `low`, and below `below` where that is given; or None, which prints as `none`."""

    low: float
    below: float = math.inf

    def parse(self, word: str) -> float:
        try:
            return float(word)
        except ValueError:
            raise ValueError(self._expected) from None

    def check(self, value: Any) -> None:
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.low <= value < self.below:
            raise ValueError(self._expected)

    def show(self, value: Any) -> str:
        return "none" if value is None else f"{value:g}"

    @property
    def _expected(self) -> str:
        return f"it is a number, {self.low:g} or more" + (f" and below {self.below:g}" if self.below < math.inf else "")


@dataclass(frozen=True)
class Interval:
    """Steps from one agreement to the next: a number, or `4..64`, which begins with 4 and doubles up to 64."""

    def parse(self, word: str) -> int | tuple[int, int]:
        first, dots, last = word.partition("..")
        try:
            return (int(first), int(last)) if dots else int(word)
        except ValueError:
            raise ValueError(self._expected) from None

    def check(self, value: Any) -> None:
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, bool) or not isinstance(each, int) or each < 1:
                raise ValueError(f"{self._expected}; sync=1 agrees at every step")
        if isinstance(value, tuple) and not (len(value) == 2 and value[0] < value[1]):
            raise ValueError("an interval that grows begins with the smaller number, like 4..64")

    def show(self, value: Any) -> str:
        return "..".join(map(str, value)) if isinstance(value, tuple) else str(value)

    _expected = "it is a number of steps, 1 or more, or one that grows like 4..64"


@dataclass(frozen=True)
class Compressions:
    """A Compression."""

    def parse(self, word: str) -> Compression:
        return Compression.parse(word)

    def check(self, value: Any) -> None:
        value.check()

    def show(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True)
class Recomputes:
    """`none`, `layer`, `budget=4GiB`, or a pattern of module names."""

    def parse(self, word: str) -> Recompute:
        if word in ("none", "layer"):
            return Recompute(word)
        if word.partition("=")[0] == "budget":
            return Recompute("budget", budget_bytes=Bytes().parse(word.partition("=")[2]))
        return Recompute("pattern", pattern=word)

    def check(self, value: Any) -> None:
        if not isinstance(value, Recompute):
            raise ValueError("it is none, layer, budget=SIZE or a pattern of module names")
        if value.kind == "budget":
            Bytes().check(value.budget_bytes)

    def show(self, value: Any) -> str:
        if value.kind == "budget":
            return f"budget={Bytes().show(value.budget_bytes)}"
        return str(value.pattern or value.kind)


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


# Names of schedule/families, which a test compares; anything with a dot or a slash is a file.
SCHEDULE_NAMES = (
    "naive", "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "pipedream",
    "pipedream-vertical", "pipedream-2bw",
)  # fmt: skip


@dataclass(frozen=True)
class ScheduleName:
    """A schedule that plait has, or the path of a file with one of the user's own."""

    def parse(self, word: str) -> str:
        return word

    def check(self, value: Any) -> None:
        if not isinstance(value, str) or not value:
            raise ValueError("it is the name of a schedule or a file")
        if value not in SCHEDULE_NAMES and not self.is_file(value):
            near = difflib.get_close_matches(value.lower(), SCHEDULE_NAMES, n=2, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(f"{hint}the schedules are {', '.join(SCHEDULE_NAMES)}, or a file such as ./mine.txt")

    def show(self, value: Any) -> str:
        return str(value)

    @staticmethod
    def is_file(value: str) -> bool:
        return "/" in value or "." in value


@dataclass(frozen=True)
class Names:
    """Names of modules, separated by commas."""

    def parse(self, word: str) -> tuple[str, ...]:
        return tuple(word.split(","))

    def check(self, value: Any) -> None:
        if not isinstance(value, tuple) or not all(isinstance(name, str) and name for name in value):
            raise ValueError("it is a list of module names, such as layers.4,layers.8")
        if len(set(value)) < len(value):
            raise ValueError("it names a module twice")

    def show(self, value: Any) -> str:
        return ",".join(value) or "none"


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


@dataclass(frozen=True)
class Family:
    """Several keys that share a prefix, `precision.PATTERN=fp32`: pairs of what follows the prefix and a word."""

    prefix: str
    value: Choice
    members: tuple[str, ...] = ()  # what may follow the prefix; empty: any pattern

    def parse(self, word: str) -> tuple[tuple[str, str], ...]:
        member, _, value = word.partition("=")
        return ((member, self.value.parse(value)),)

    def check(self, value: Any) -> None:
        for member, word in value:
            if self.members and member not in self.members:
                raise ValueError(f"{self.prefix} is followed by one of {', '.join(self.members)}")
            self.value.check(word)

    def show(self, value: Any) -> str:
        return " ".join(f"{self.prefix}{member}={word}" for member, word in value)


@dataclass(frozen=True)
class AxisSizes(Family):
    """Sizes of axes, `shelf=2`, each under its own name."""

    value: Choice = Choice(())

    def parse(self, word: str) -> tuple[tuple[str, int], ...]:  # type: ignore[override]
        name, _, size = word.partition("=")
        return ((name, Axis().parse(size)),)

    def check(self, value: Any) -> None:
        for name, size in value:
            axis_kind(name)
            Axis().check(size)

    def show(self, value: Any) -> str:
        return " ".join(f"{name}={size}" for name, size in value)


Kind = Axis | Number | Real | Interval | Compressions | Choice | Recomputes | ScheduleName | Names | Bytes | Family
