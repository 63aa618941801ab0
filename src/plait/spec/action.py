"""Action: what a rank does at one place of a pipeline schedule, as a word that prints and parses.

F3.1          forward of microbatch 3 through this rank's chunk 1; `.chunk` is left out if it is 0
B3  W3        backward; if a rank also has W3, B3 computes the gradients of inputs and W3 those of weights
SEND:F3.1>2   send the result of this rank's F3.1 to rank 2
RECV:F3.1<0   receive the result of F3.1 from rank 0; the chunk is counted on rank 0
REDUCE.1      sum the gradients of chunk 1 with those of other stages or replicas that have the same parameters
STEP  STEP3   update the parameters; with a number, once the backwards of all microbatches up to it are done
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

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
