"""Schedule: what each rank of a pipeline does in a step, in order. Its text is also the file that a user may write.

    # a comment
    name=mine micro=2 stages=0|1
    0: F0 F1 B0 B1
    1: F0 B0 F1 B1

The first line gives the name, the number of microbatches, and for each rank the stages of its chunks: `0,3|1,2` puts
stages 0 and 3 on rank 0. Without `stages=` rank r has stage r. A stage may be on several ranks, which then take
microbatches in turn: `0|1|1|2` gives even microbatches of stage 1 to rank 1 and odd ones to rank 2.

Each word is an Action, which prints and parses:

    F3.1          forward of microbatch 3 through this rank's chunk 1; `.chunk` is left out if it is 0
    B3  W3        backward; if a rank also has W3, B3 computes the gradients of inputs and W3 those of weights
    SEND:F3.1>2   send the result of this rank's F3.1 to rank 2
    RECV:F3.1<0   receive the result of F3.1 from rank 0; the chunk is counted on rank 0
    REDUCE.1      sum the gradients of chunk 1 with those of other stages or replicas that have the same parameters
    STEP  STEP3   update the parameters; with a number, once the backwards of all microbatches up to it are done
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from plait.errors import ScheduleError

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"
SEND, RECV, REDUCE, STEP = "SEND", "RECV", "REDUCE", "STEP"
COMPUTE = (FORWARD, BACKWARD, WEIGHT)
TRANSFER = (SEND, RECV)

_COMPUTE = re.compile(r"(?P<kind>[FBW])(?P<micro>\d+)(\.(?P<chunk>\d+))?")
_TRANSFER = re.compile(r"(SEND|RECV):(?P<of>[FBW])(?P<micro>\d+)(\.(?P<chunk>\d+))?(?P<arrow>[<>])(?P<peer>\d+)")
_REDUCE = re.compile(r"REDUCE(\.(?P<chunk>\d+))?")
_STEP = re.compile(r"STEP(?P<micro>\d+)?")


@dataclass(frozen=True, order=True)
class Action:
    """One action of one rank: its kind, its microbatch, its chunk, and for a transfer the other rank.

    Attributes:
        kind: one of F, B, W, SEND, RECV, REDUCE and STEP.
        micro: the microbatch, from 0; None for an action of no microbatch.
        chunk: the chunk; for a transfer, a chunk of the rank that computes the value.
        peer: for a transfer, the other rank.
        of: for a transfer, the kind of action whose result is sent: F, B or W.

    Raises ValueError if a field is missing, superfluous or negative.

    >>> Action.parse("SEND:F3.1>2")
    Action(kind='SEND', micro=3, chunk=1, peer=2, of='F')
    """

    kind: str
    micro: int | None = None
    chunk: int = 0
    peer: int | None = None
    of: str | None = None

    def __post_init__(self) -> None:
        transfer, known = self.kind in TRANSFER, (*COMPUTE, *TRANSFER, REDUCE, STEP)
        if self.kind not in known:
            raise ValueError(f"unknown kind {self.kind!r}; it is one of {', '.join(known)}")
        if (self.peer is None) == transfer or (self.of is None) == transfer:
            raise ValueError(f"{self.kind} {'needs' if transfer else 'has no'} peer and `of`")
        if self.kind != STEP and (self.micro is None) == (self.kind in (*COMPUTE, *TRANSFER)):
            raise ValueError(f"{self.kind} {'has no' if self.micro is not None else 'needs a'} microbatch")
        if self.of is not None and self.of not in COMPUTE:
            raise ValueError(f"a result is that of F, B or W, not of {self.of!r}")
        if min(self.micro or 0, self.chunk, self.peer or 0) < 0:
            raise ValueError(f"negative number in {self.kind}")

    @classmethod
    def parse(cls, word: str) -> Action:
        """Parse one word. Raises ValueError with examples of words for anything else."""
        if found := _COMPUTE.fullmatch(word):
            return cls(found["kind"], int(found["micro"]), int(found["chunk"] or 0))
        if (found := _TRANSFER.fullmatch(word)) and (found["arrow"] == ">") == (found[1] == SEND):
            return cls(found[1], int(found["micro"]), int(found["chunk"] or 0), int(found["peer"]), found["of"])
        if found := _REDUCE.fullmatch(word):
            return cls(REDUCE, chunk=int(found["chunk"] or 0))
        if found := _STEP.fullmatch(word):
            return cls(STEP, None if found["micro"] is None else int(found["micro"]))
        raise ValueError("an action looks like F3, B3.1, W3, SEND:F3>1, RECV:F3<0, REDUCE.1 or STEP")

    def __str__(self) -> str:
        micro = "" if self.micro is None else self.micro
        chunk = f".{self.chunk}" if self.chunk else ""
        if self.of is not None:
            return f"{self.kind}:{self.of}{micro}{chunk}{'>' if self.kind == SEND else '<'}{self.peer}"
        return f"{self.kind}{micro}{chunk}"

    @property
    def computes(self) -> bool:
        """Whether this is a forward, a backward, or the weight part of a backward."""
        return self.kind in COMPUTE

    @property
    def producer(self) -> Action:
        """The action whose result a transfer moves, as the sending rank names it."""
        assert self.of is not None
        return cell(self.of, self.micro, self.chunk)


@lru_cache(maxsize=2**15)
def cell(kind: str, micro: int | None, chunk: int) -> Action:
    """The forward, backward or weight action of a microbatch and chunk. Cached, because large schedules ask often."""
    return Action(kind, micro, chunk)


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank.

    Attributes:
        name: one word.
        num_micro: microbatches in a step.
        stages: `stages[rank][chunk]` is a stage of the whole pipeline, counted from 0.
        ranks: the actions of each rank, in order.
        vertical: whether a microbatch uses one weight version on all ranks, for schedules that update within the step.

    Raises ScheduleError if a rank has no stage, a stage is on no rank, or a rank has a stage twice.

    >>> print(Schedule.parse("name=mine micro=1\\n0: F0 B0\\n1: F0 B0"))
    name=mine micro=1 stages=0|1
    0: F0 B0
    1: F0 B0
    """

    name: str
    num_micro: int
    stages: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[Action, ...], ...]
    vertical: bool = False

    def __post_init__(self) -> None:
        if not self.name or set(self.name) & set(" #=|\n\t"):
            raise ScheduleError(f"the name of a schedule is one word, without = | #: {self.name!r}")
        if self.num_micro < 1:
            raise ScheduleError(f"the schedule {self.name} has {self.num_micro} microbatches; it needs 1 or more")
        if len(self.ranks) != len(self.stages) or not self.ranks:
            raise ScheduleError(
                f"the schedule {self.name} has actions of {len(self.ranks)} ranks, but places stages on"
                f" {len(self.stages)}; give one line for each rank"
            )
        placed = {stage for chunks in self.stages for stage in chunks}
        if placed != set(range(len(placed))) or not all(self.stages):
            missing = sorted(set(range(max(placed, default=0) + 1)) - placed)
            raise ScheduleError(
                f"the schedule {self.name} places stages {self.placement}"
                f"{f', without stage {missing[0]}' if missing else ''}; each rank needs a stage, and each stage a rank"
            )
        for chunks in self.stages:
            if len(set(chunks)) < len(chunks):
                raise ScheduleError(f"the schedule {self.name} gives a rank the same stage twice: {self.placement}")

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse the text of a schedule. ScheduleError names the line and the word that cannot be read."""
        lines = [(number, line.partition("#")[0].split()) for number, line in enumerate(text.splitlines(), start=1)]
        lines = [(number, words) for number, words in lines if words]
        if not lines:
            raise ScheduleError("the schedule is empty: its first line is like name=mine micro=4 stages=0|1")
        name, num_micro, stages, vertical = _header(*lines[0])
        ranks: list[tuple[Action, ...]] = []
        for number, (first, *words) in lines[1:]:
            if first != f"{len(ranks)}:":
                raise ScheduleError(
                    f"line {number}: {first!r} stands where the actions of rank {len(ranks)} are expected, which start"
                    f" with {f'{len(ranks)}:'!r}"
                )
            ranks.append(tuple(_action(number, word) for word in words))
        return cls(name, num_micro, stages or tuple((rank,) for rank in range(len(ranks))), tuple(ranks), vertical)

    def __str__(self) -> str:
        lines = [f"name={self.name} micro={self.num_micro} stages={self.placement}{' vertical=yes' * self.vertical}"]
        lines += [f"{rank}: {' '.join(map(str, actions))}".rstrip() for rank, actions in enumerate(self.ranks)]
        return "\n".join(lines)

    @property
    def placement(self) -> str:
        """The stages of each rank as text: `0,3|1,2`."""
        return "|".join(",".join(map(str, chunks)) for chunks in self.stages)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @cached_property
    def num_stages(self) -> int:
        return len(self._holders)

    @cached_property
    def _holders(self) -> dict[int, tuple[tuple[int, int], ...]]:
        held: dict[int, tuple[tuple[int, int], ...]] = {}
        for rank, chunks in enumerate(self.stages):
            for chunk, stage in enumerate(chunks):
                held[stage] = (*held.get(stage, ()), (rank, chunk))
        return held

    def holders(self, stage: int) -> tuple[tuple[int, int], ...]:
        """(rank, chunk) of every rank that has the stage; several if the stage is replicated."""
        return self._holders[stage]

    def where(self, stage: int, micro: int = 0) -> tuple[int, int]:
        """(rank, chunk) at which a microbatch passes through the stage; replicas take microbatches in turn."""
        holders = self._holders[stage]
        return holders[micro % len(holders)]

    def stage_of(self, rank: int, action: Action) -> int:
        """The stage of an action of this rank; for a RECV, the stage that computed the value."""
        return self.stages[action.peer if action.kind == "RECV" and action.peer is not None else rank][action.chunk]

    @cached_property
    def _present(self) -> tuple[frozenset[Action], ...]:
        return tuple(frozenset(actions) for actions in self.ranks)

    @cached_property
    def _weights(self) -> tuple[frozenset[tuple[int | None, int]], ...]:
        return tuple(frozenset((a.micro, a.chunk) for a in actions if a.kind == WEIGHT) for actions in self.ranks)

    def has(self, rank: int, action: Action) -> bool:
        """Whether the rank has this action."""
        return action in self._present[rank]

    @cached_property
    def has_transfers(self) -> bool:
        """Whether the schedule has any SEND or RECV."""
        return any(action.kind in TRANSFER for actions in self.ranks for action in actions)

    def splits(self, rank: int, action: Action) -> bool:
        """Whether the backward of the action's microbatch and chunk is split: B for the inputs, W for the weights."""
        return (action.micro, action.chunk) in self._weights[rank]

    def last_backward(self, rank: int, micro: int, chunk: int) -> Action:
        """The action that completes the weight gradients of a microbatch: its W if it has one, else its B."""
        return cell(WEIGHT if (micro, chunk) in self._weights[rank] else BACKWARD, micro, chunk)

    @cached_property
    def forward_only(self) -> bool:
        """Whether no rank has a backward, as in evaluation."""
        return all(action.kind == FORWARD or not action.computes for actions in self.ranks for action in actions)

    @cached_property
    def asynchronous(self) -> bool:
        """Whether parameters are updated within the step, while other microbatches are in flight."""
        return any(action.kind == STEP and action.micro is not None for actions in self.ranks for action in actions)

    def version(self, rank: int, micro: int) -> int:
        """The weight version that an asynchronous schedule gives a microbatch on a rank, as a number of updates.

        With an update after every microbatch (PipeDream): the version at the microbatch's forward on this rank, or with
        vertical sync on the first rank. With an update after each group of microbatches (2BW): on every rank the
        version before the previous group's update.
        """
        groups = self.groups()
        starts = sorted({first for first, _ in groups.values()})
        if len(starts) < len(groups):
            return max(starts.index(groups[micro][0]) - 1, 0)
        actions = self.ranks[0 if self.vertical else rank]
        first = next(i for i, action in enumerate(actions) if action.kind == FORWARD and action.micro == micro)
        return sum(action.kind == STEP for action in actions[:first])

    def groups(self) -> dict[int, tuple[int, int]]:
        """For each microbatch, the first microbatch of the group that is updated together, and the group's size."""
        ends = sorted({action.micro for action in self.ranks[0] if action.kind == STEP and action.micro is not None})
        found: dict[int, tuple[int, int]] = {}
        first = 0
        for last in ends:
            found |= dict.fromkeys(range(first, last + 1), (first, last + 1 - first))
            first = last + 1
        return found

    def num_micro_of(self, rank: int, chunk: int) -> int:
        """The number of microbatches that pass through a chunk of a rank."""
        return sum(action.kind == FORWARD and action.chunk == chunk for action in self.ranks[rank])

    def cells(self) -> Iterator[tuple[int, Action]]:
        """Yield (rank, action) for every forward, backward and weight action, rank by rank."""
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if action.kind in COMPUTE:
                    yield rank, action


def _header(number: int, words: list[str]) -> tuple[str, int, tuple[tuple[int, ...], ...], bool]:
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in ("name", "micro", "stages", "vertical") or key in found:
            raise ScheduleError(
                f"line {number}: cannot read {word!r}; the first line is like name=mine micro=4 stages=0|1, each once"
            )
        found[key] = value
    if missing := [key for key in ("name", "micro") if key not in found]:
        raise ScheduleError(f"line {number}: {missing[0]}= is missing; the first line is like name=mine micro=4")
    try:
        num_micro = int(found["micro"])
    except ValueError:
        raise ScheduleError(f"line {number}: micro={found['micro']}: it is a whole number, 1 or more") from None
    if found.get("vertical", "no") not in ("yes", "no"):
        raise ScheduleError(f"line {number}: vertical={found['vertical']}: it is yes or no")
    vertical = found.get("vertical") == "yes"
    if "stages" not in found:
        return found["name"], num_micro, (), vertical
    try:
        stages = tuple(tuple(int(stage) for stage in chunks.split(",")) for chunks in found["stages"].split("|"))
    except ValueError:
        raise ScheduleError(
            f"line {number}: cannot read stages={found['stages']}; the stages of each rank are like 0,3|1,2"
        ) from None
    return found["name"], num_micro, stages, vertical


def _action(number: int, word: str) -> Action:
    try:
        return Action.parse(word)
    except ValueError as error:
        raise ScheduleError(f"line {number}: cannot read {word!r}: {error}") from None
