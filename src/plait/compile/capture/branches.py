"""What the bytecode of a function says of a branch or a loop: which side only raises, which part a side leaves out,
whether that only prints, and which local variables are read later on."""

from __future__ import annotations

import dis
import functools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

from plait.compile.capture.log_only import LOGS, idle_lines

_MAX_STEPS = 400  # instructions to follow in order to decide whether a branch only raises
_BETWEEN = ("CACHE", "EXTENDED_ARG")  # do nothing
_IDLE = ("NOP", "NOT_TAKEN", "RESUME")
_ACTS = ("RETURN", "DELETE", "YIELD", "RERAISE", "FOR_ITER", "SEND", "PUSH_EXC")  # do more than raise and assign
_LEAVES = ("RETURN", "RAISE", "RERAISE", "YIELD", "SEND")  # how instructions begin that leave the function


# ---- a side of a branch that only raises ----


def forced_branch(frame: FrameType) -> bool | None:
    """The truth value with which the frame continues, if with the other one it only raises; else None.

    The frame must be about to branch on a value: `assert x`, `if x: raise ...`, and chains of `and` and `or` in them.
    Or it is about to return `bool(x)`, and its caller branches on that.
    """
    asks, returned = frame, False
    while asks.f_back is not None and _returns_truth(asks):
        asks, returned = asks.f_back, True
    code = instructions(asks.f_code)
    at = _jump_at(asks, code, behind_call=returned)
    if at is None:
        return None
    targets = _targets(code, at)
    if targets is None:
        return None
    caught = _caught(asks.f_code, code)
    flow = _Flow(asks.f_code, code)
    on_true, on_false = (_only_raises(flow, target, caught) for target in targets)
    if on_true == on_false:
        return None
    return not on_true


def instructions(code: CodeType) -> list[dis.Instruction]:
    return [each for each in dis.get_instructions(code) if each.opname not in _BETWEEN]


def instruction_of(frame: FrameType) -> dis.Instruction | None:
    """The instruction that a frame executes."""
    return next((each for each in instructions(frame.f_code) if each.offset == frame.f_lasti), None)


def _jump_at(frame: FrameType, code: Sequence[dis.Instruction], behind_call: bool = False) -> int | None:
    """The place of the conditional jump that asks for the value that a frame is about to branch on; `behind_call` if
    the frame awaits the value from a call."""
    at: int | None = _behind_call(frame, code)
    if not behind_call:
        at = next((i for i, each in enumerate(code) if each.offset == frame.f_lasti), None)
    return at if at is None or at >= len(code) or code[at].opname != "TO_BOOL" else at + 1


def _behind_call(frame: FrameType, code: Sequence[dis.Instruction]) -> int:
    """The place behind the call that a frame awaits."""
    at = sum(each.offset <= frame.f_lasti for each in code)  # the frame may have passed the caches of the call
    while at < len(code) and code[at].opname == "CALL":  # Python 3.11 may call in what comes before it
        at += 1
    return at


def _returns_truth(frame: FrameType) -> bool:
    """Whether the frame awaits a call of `bool`, whose result it returns."""
    code = instructions(frame.f_code)
    at = _behind_call(frame, code)
    if at >= len(code) or code[at].opname != "RETURN_VALUE" or code[at - 1].opname != "CALL":
        return False
    begins = _begins(code[at - 1])
    called = (each.argval for each in code[:at] if each.opname.startswith("LOAD_GLOBAL") and _begins(each) == begins)
    return "bool" in called and frame.f_globals.get("bool", bool) is bool


def _begins(one: dis.Instruction) -> tuple[int | None, int | None]:
    """Line and column at which the expression of an instruction begins."""
    return (None, None) if one.positions is None else (one.positions.lineno, one.positions.col_offset)


def _targets(code: Sequence[dis.Instruction], at: int) -> tuple[int, int] | None:
    """The instructions at which a conditional jump continues if its condition is true, and if it is false."""
    name = code[at].opname
    if "JUMP" not in name or ("IF_TRUE" not in name and "IF_FALSE" not in name):
        return None
    offset = code[at].argval
    jumped = next((i for i, each in enumerate(code) if each.offset >= offset), len(code))
    return (jumped, at + 1) if "IF_TRUE" in name else (at + 1, jumped)


def _caught(code: CodeType, every: list[dis.Instruction]) -> list[tuple[int, int]]:
    """Ranges of offsets whose exceptions the function handles itself, other than by leaving a `with`."""
    found = []
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        handler = [each.opname for each in every if each.offset >= entry.target][:2]
        if handler != ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]:
            found.append((entry.start, entry.end))
    return found


def _only_raises(flow: _Flow, start: int, caught: list[tuple[int, int]]) -> bool:
    """Whether every path from `start` ends by raising, and at most assigns local variables before that."""
    for num, at in enumerate(flow.walk(start), 1):
        one = flow.every[at]
        stores = one.opname.startswith("STORE") and not one.opname.startswith("STORE_FAST")
        if num > _MAX_STEPS or stores or one.opname.startswith(_ACTS):
            return False
        if one.opname == "RAISE_VARARGS" and any(low <= one.offset < high for low, high in caught):
            return False
    return True


# ---- a part of a function that one side of a branch leaves out ----


@dataclass(frozen=True)
class Part:
    """A part of a function that runs only with one value of a condition; with both it goes on from the same place.

    Attributes:
        runs: the value of the condition with which the part runs.
        offsets: the offsets of its instructions, and of the caches behind them.
        changed: local variables that it may assign, and that may be read behind it.
        is_local: whether it assigns no other names than local variables.
        adds_zeros: whether the other side adds zero times parameters, which then have a gradient.
    """

    runs: bool
    offsets: frozenset[int]
    changed: frozenset[str]
    is_local: bool
    adds_zeros: bool


def part_left_out(frame: FrameType) -> Part | None:
    """The part of a function that only one side of the branch runs which its frame is about to take.

    None if both sides do something, or if one leaves the function."""
    code = instructions(frame.f_code)
    at = _jump_at(frame, code)
    return None if at is None else _part(frame.f_code, code, at, idle_lines(frame))


def part_behind_length(frame: FrameType) -> Part | None:
    """As `part_left_out`, if the frame asks for a length to branch on whether it is 0: `if len(rows) == 0`.

    `runs` of the part is then whether it runs if the length is not 0.
    """
    code = instructions(frame.f_code)
    at = _behind_call(frame, code)
    outcome: dict[bool, bool] = {False: False, True: True}  # whether the length is not 0 -> the condition
    if at + 1 < len(code) and code[at].opname.startswith("LOAD") and code[at + 1].opname == "COMPARE_OP":
        limit, compared = code[at].argval, _COMPARED.get(str(code[at + 1].argval).removeprefix("bool(").rstrip(")"))
        if compared is None or type(limit) is not int:
            return None
        if compared(1, limit) != compared(1 << 30, limit):  # other lengths than 0 are told apart
            return None
        outcome, at = {False: compared(0, limit), True: compared(1, limit)}, at + 2
    if at < len(code) and code[at].opname == "TO_BOOL":
        at += 1
    tells = at < len(code) and outcome[False] != outcome[True]
    found = _part(frame.f_code, code, at, idle_lines(frame)) if tells else None
    return found and replace(found, runs=outcome[True] == found.runs)


_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def _part(code: CodeType, every: Sequence[dis.Instruction], at: int, idle: Collection[int]) -> Part | None:
    """The part that the conditional jump at this place leaves out. What is in `idle` lines changes no number."""
    if (targets := _targets(every, at)) is None:
        return None
    flow = _Flow(code, every, idle)
    on_true, on_false = targets
    for runs, inside, outside in ((True, on_true, on_false), (False, on_false, on_true)):
        join = flow.skip_idle(outside)
        found = set(flow.walk(inside, flow.same_ends(join)))
        if not found or at in found or any(every[i].opname.startswith(_LEAVES) for i in found):
            continue
        assigned = {name for i in found for name in _assigned(every[i])}
        return Part(
            runs,
            frozenset(o for i in found for o in range(every[i].offset, flow.end_of(i), 2)),
            frozenset(assigned & flow.live_at(join)),
            not any(every[i].opname in ("STORE_GLOBAL", "STORE_DEREF", "DELETE_FAST") for i in found),
            any(every[i].opname == "BINARY_OP" for i in flow.walk(outside, {join, at})) and join != outside,
        )
    return None


# ---- a part that only prints or logs ----


def past_what_is_shown(frame: FrameType) -> bool | None:
    """The truth value with which the branch that the frame is about to take leaves out calls of print or of a log, and
    nothing else; None if it leaves out more. For functions without source: log_only.py knows more of those with it."""
    code = instructions(frame.f_code)
    at = _jump_at(frame, code)
    part = None if at is None else _part(frame.f_code, code, at, ())
    if part is None or not _only_shows([each for each in code if each.offset in part.offsets]):
        return None
    return not part.runs


def _only_shows(part: Sequence[dis.Instruction]) -> bool:
    """Whether instructions are calls of print or of a log alone, each without a branch or an assignment in it."""
    todo = [each for each in part if each.opname not in _IDLE]
    if todo and todo[-1].opname.startswith("JUMP"):
        del todo[-1]
    while todo:
        end = _end_of_shown(todo)
        if end is None:
            return False
        del todo[:end]
    return True


def _end_of_shown(part: Sequence[dis.Instruction]) -> int | None:
    """The place behind the statement `print(...)` or `log.info(...)` with which instructions begin; None for others."""
    root = next((i for i, each in enumerate(part) if each.opname != "PUSH_NULL"), 0)
    behind = root + 1
    while behind < len(part) and part[behind].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        behind += 1
    name = part[behind - 1].argval
    if not part[root].opname.startswith("LOAD") or name not in (["print"] if behind == root + 1 else LOGS):
        return None
    depth = called = sum(map(_effect, part[:behind]))  # what is called stays on the stack until its arguments are
    for at in range(behind, len(part) - 1):
        one = part[at]
        if one.opname.startswith(("STORE", "DELETE", "IMPORT", *_ACTS, *_LEAVES)) or "JUMP" in one.opname:
            return None
        depth += _effect(one)
        if depth < called:
            return at + 2 if depth == 1 and part[at + 1].opname == "POP_TOP" else None
    return None


def _effect(one: dis.Instruction) -> int:
    return dis.stack_effect(one.opcode, one.arg, jump=False)


# ---- local variables ----


def read_behind(frame: FrameType) -> set[str]:
    """The local variables that the code behind a `for` loop, whose next round the frame begins, may read before it
    assigns them."""
    code = instructions(frame.f_code)
    at = next(i for i, each in enumerate(code) if each.offset >= frame.f_lasti and each.opname == "FOR_ITER")
    flow = _Flow(frame.f_code, code)
    return flow.live_at(flow.index_of(code[at].argval))


class _Flow:
    """The order in which instructions may follow each other, by their places in a list."""

    def __init__(self, code: CodeType, every: Sequence[dis.Instruction], idle: Collection[int] = ()) -> None:
        self.every = every
        lines = [None if each.positions is None else each.positions.lineno for each in every]
        self._idle = {i for i, line in enumerate(lines) if line in idle}
        self._index = {each.offset: i for i, each in enumerate(every)}
        self._last = max(self._index)
        self._handlers = [
            (entry.start, entry.end, self.index_of(entry.target))
            for entry in dis._parse_exception_table(code)  # type: ignore[attr-defined]
        ]

    def index_of(self, offset: int) -> int:
        while offset not in self._index and offset < self._last:  # behind a CACHE or before an EXTENDED_ARG
            offset += 2
        return self._index[offset]

    def end_of(self, at: int) -> int:
        """The offset behind an instruction and its caches."""
        return self.every[at + 1].offset if at + 1 < len(self.every) else self._last + 2

    def following(self, at: int) -> Iterator[int]:
        """The instructions that may run after this one; not those that handle its exceptions."""
        one = self.every[at]
        jumps = one.opcode in dis.hasjrel or one.opcode in dis.hasjabs
        if jumps:
            yield self.index_of(one.argval)
        always = jumps and "IF" not in one.opname and one.opname.startswith("JUMP")
        if not always and not one.opname.startswith(("RETURN", "RAISE", "RERAISE")) and at + 1 < len(self.every):
            yield at + 1

    def skip_idle(self, at: int) -> int:
        """The first instruction from here that does anything."""
        if at in self._idle:
            behind = {i for each in self.walk(at, self._behind_idle) for i in self.following(each)} & self._behind_idle
            return self.skip_idle(behind.pop()) if len(behind) == 1 else at
        seen = set()
        while at not in seen and (self.every[at].opname in _IDLE or self._always_jumps(at)):
            seen.add(at)
            (at,) = self.following(at)
        return at

    @functools.cached_property
    def _behind_idle(self) -> set[int]:
        return set(range(len(self.every))) - self._idle

    def _always_jumps(self, at: int) -> bool:
        name = self.every[at].opname
        return name.startswith("JUMP") and "IF" not in name

    def same_ends(self, at: int) -> set[int]:
        """Where the same goes on as from here: here, and if the function returns, wherever it returns the same."""
        end = self._returned(at)
        return {at} | {i for i in range(len(self.every)) if end is not None and self._returned(i) == end}

    def _returned(self, at: int) -> tuple[Any, ...] | None:
        """The local variable or constant that the function returns at once; None if it does anything else."""
        one = self.every[at]
        if one.opname == "RETURN_CONST":
            return "LOAD_CONST", one.arg
        if one.opname in ("LOAD_CONST", "LOAD_FAST", "LOAD_FAST_BORROW") and at + 1 < len(self.every):
            return (one.opname, one.arg) if self.every[at + 1].opname == "RETURN_VALUE" else None
        return None

    def walk(self, start: int, ends: Collection[int] = ()) -> Iterator[int]:
        """What runs from `start` on, before any of the ends, each instruction once."""
        found: set[int] = set()
        todo = [start]
        while todo:
            at = todo.pop()
            if at not in found and at not in ends:
                found.add(at)
                yield at
                todo += self.following(at)

    def live_at(self, start: int) -> set[str]:
        """The local variables that may be read from here on before they are assigned."""
        live: list[set[str]] = [set() for _ in self.every]
        changed = True
        while changed:
            changed = False
            for at in reversed(range(len(self.every))):
                one = self.every[at]
                behind = set[str]().union(*(live[i] for i in self.following(at)))
                behind |= set[str]().union(
                    *(live[i] for first, last, i in self._handlers if first <= one.offset < last)
                )
                found = (behind - set(_assigned(one))) | set(_read(one))
                if found != live[at]:
                    live[at], changed = found, True
        return live[start]


def _assigned(one: dis.Instruction) -> tuple[str, ...]:
    if one.opname == "STORE_FAST_LOAD_FAST":
        return (one.argval[0],)
    return _names(one) if one.opname.startswith("STORE_FAST") else ()


def _read(one: dis.Instruction) -> tuple[str, ...]:
    if one.opname == "STORE_FAST_LOAD_FAST":
        return () if one.argval[0] == one.argval[1] else (one.argval[1],)
    return _names(one) if one.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "DELETE_FAST")) else ()


def _names(one: dis.Instruction) -> tuple[str, ...]:
    value = one.argval
    return (
        tuple(each for each in value if isinstance(each, str))
        if isinstance(value, tuple)
        else ((value,) if isinstance(value, str) else ())
    )
