"""Loops over the positions of a sequence, found in a graph that has their rounds one after the other.

A loop ends with what gathers a value of each round (loop_ends.py). From there the rounds are followed back together (as
by Larsen and Amarasinghe 2000, "Exploiting Superword Level Parallelism with Multimedia Instruction Sets"): `Lanes` are
the calls that do the same in all rounds, to the slice of a tensor at the round's position, to a value that all rounds
read, to other lanes, or to lanes of the round before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils._pytree import TreeSpec, tree_flatten

from plait.compile.ir.calls import is_item, is_tensor, op_spec_of, output_values, writes_in_place

aten = torch.ops.aten
EDGES = 2  # of how many rounds of a loop a value may be read by itself


class NotALoopError(Exception):
    """Calls do not do the same in all rounds."""


class _Zero:
    """Zeros that no call makes."""


ZERO: Final = _Zero()
RoundValue = Node | _Zero | None  # of one round; None if nothing reads it


@dataclass(eq=False)
class Lanes:
    """The calls that do the same in all rounds, with the operands of all; or the slices of a tensor.

    Attributes:
        values: the value of each round; None where there is none, which nothing reads.
        like: a call that stands for all.
        operands: what its arguments are, flattened; those that are no tensors as they are.
        structure: how they were flattened.
        source: the tensor that the values are slices of, and its dim; no operands then.
        keeps: whether such a slice keeps the dim, with size 1.
    """

    values: list[Node | None]
    like: Node
    operands: list[Any] = field(default_factory=list)
    structure: TreeSpec | None = None
    source: tuple[Node, int] | None = None
    keeps: bool = False

    def reads(self) -> Iterator[Operand]:
        """The operands that are tensors."""
        yield from filter(is_operand, self.operands)


@dataclass(eq=False)
class Before:
    """The values of the round before; with `reverse` of the round after, as in backward. `first` is what the first
    round to run reads instead; None if nothing reads it."""

    lanes: Lanes
    reverse: bool
    first: RoundValue


Operand = Node | Lanes | Before


def is_operand(value: object) -> bool:
    """Whether an argument of lanes is a tensor."""
    return isinstance(value, (Node, Lanes, Before))


class LoopRounds:
    """The lanes of all loops of `num` rounds that have been followed."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.home: dict[Node, tuple[Lanes, int]] = {}
        self._befores: dict[tuple[Lanes, bool], list[Before]] = {}
        self._sources: dict[tuple[Node, int, bool], Lanes] = {}
        self._undo: list[Callable[[], object]] = []

    def follow(self, values: Sequence[RoundValue]) -> Operand | None:
        """What the values of all rounds are; None if the rounds do not do the same."""
        return self._try(lambda: self._operand(values))

    def complete(self) -> None:
        """Find the calls of rounds that no end has led to, as of a state that is read alone."""
        waiting = [lanes for lanes in self._every() if lanes.source is None]
        while waiting:
            lanes = waiting.pop()
            for at in [at for at, value in enumerate(lanes.values) if value is None]:
                if any(self._takes(lanes, at, user) for user in self._readers(lanes, at)):
                    waiting += [each for each in self._every() if each.source is None and lanes in _lanes_read(each)]

    def _every(self) -> set[Lanes]:
        return {lanes for lanes, _ in self.home.values()}

    def _readers(self, lanes: Lanes, at: int) -> list[Node]:
        """The calls that read what lanes read in a round."""
        found = []
        for read in lanes.reads():
            other, place = read, at
            if isinstance(read, Before):
                other, place = read.lanes, at + 1 if read.reverse else at - 1
            if isinstance(other, Lanes) and 0 <= place < self.num and (value := other.values[place]) is not None:
                found += [user for user in value.users if user not in self.home and alike(lanes.like, user)]
        return found

    def _takes(self, lanes: Lanes, at: int, value: Node) -> bool:
        """Whether a value can be that of a round."""

        def take() -> Lanes:
            self._match(lanes, at, value)
            return lanes

        return self._try(take) is not None

    def _try(self, find: Callable[[], Operand]) -> Operand | None:
        self._undo = []
        try:
            return find()
        except NotALoopError:
            for undo in reversed(self._undo):
                undo()
            return None

    def befores(self) -> list[Before]:
        """All values of rounds before."""
        return [each for group in self._befores.values() for each in group]

    def _operand(self, values: Sequence[RoundValue]) -> Operand:
        """What the values of all rounds are."""
        real = {value for value in values if isinstance(value, Node)}
        if len(real) == 1 and ZERO not in values:
            return real.pop()
        middle = self.num // 2
        if ZERO in values[1:-1] or not isinstance(values[middle], Node):
            raise NotALoopError
        if values[middle] in self.home:
            lanes, at = self.home[values[middle]]  # type: ignore[index]
            return self._known(lanes, at - middle, values)
        sliced = _slice(values[middle], self.num)
        return self._new(values) if sliced is None else self._of_source(values, sliced, middle)

    def _of_source(self, values: Sequence[RoundValue], sliced: tuple[Node, int, bool, int], middle: int) -> Operand:
        source, dim, keeps, at = sliced
        key = source, dim, keeps
        if key not in self._sources:
            like = values[middle]
            assert isinstance(like, Node)
            self._sources[key] = Lanes([None] * self.num, like, source=(source, dim), keeps=keeps)
            self._undo.append(lambda: self._sources.pop(key))
        return self._known(self._sources[key], at - middle, values)

    def _known(self, lanes: Lanes, ahead: int, values: Sequence[RoundValue]) -> Operand:
        """The lanes if these are the values, or those of the round before or after."""
        if ahead == 0:
            for at, value in enumerate(values):
                self._match(lanes, at, value)
            return lanes
        if abs(ahead) != 1:
            raise NotALoopError
        for at, value in enumerate(values):
            if 0 <= at + ahead < self.num:
                self._match(lanes, at + ahead, value)
        return self._before(lanes, ahead == 1, values[-1 if ahead == 1 else 0])

    def _before(self, lanes: Lanes, reverse: bool, first: RoundValue) -> Before:
        if isinstance(first, Node) and is_zero(first):
            first = ZERO
        known = self._befores.setdefault((lanes, reverse), [])
        for each in known:
            if first is None or each.first is None or first is each.first:
                self._set_first(each, each.first if first is None else first)
                return each
        made = Before(lanes, reverse, first)
        known.append(made)
        self._undo.append(lambda: known.remove(made))
        return made

    def _set_first(self, before: Before, first: RoundValue) -> None:
        old = before.first
        before.first = first
        self._undo.append(lambda: setattr(before, "first", old))

    def _match(self, lanes: Lanes, at: int, value: RoundValue) -> None:
        """Raise unless the value is that of a round, or can be."""
        if value is None or lanes.values[at] is value:
            return
        if not isinstance(value, Node):
            raise NotALoopError
        if lanes.source is not None:
            sliced = _slice(value, self.num)
            if sliced is None or sliced[:2] != lanes.source or sliced[2:] != (lanes.keeps, at):
                raise NotALoopError
            self._put(lanes, at, value)
        elif lanes.values[at] is not None or not alike(lanes.like, value):
            raise NotALoopError
        else:
            self._put(lanes, at, value)
            for operand, leaf in zip(lanes.operands, _leaves(value)[0], strict=True):
                if isinstance(leaf, Node):
                    self._match_operand(operand, at, leaf)

    def _match_operand(self, operand: Operand, at: int, value: Node) -> None:
        if isinstance(operand, Lanes):
            self._match(operand, at, value)
        elif isinstance(operand, Before):
            source = at + 1 if operand.reverse else at - 1
            if 0 <= source < self.num:
                self._match(operand.lanes, source, value)
            elif operand.first is None:
                self._set_first(operand, ZERO if is_zero(value) else value)
            elif operand.first is not value and not (operand.first is ZERO and is_zero(value)):
                raise NotALoopError
        elif operand is not value:
            raise NotALoopError

    def _put(self, lanes: Lanes, at: int, value: Node) -> None:
        old = lanes.values[at]
        lanes.values[at] = value
        self._undo.append(lambda: lanes.values.__setitem__(at, old))
        if value not in self.home:
            self.home[value] = lanes, at
            self._undo.append(lambda: self.home.pop(value, None))

    def _new(self, values: Sequence[RoundValue]) -> Operand:
        """The lanes of calls that no lanes have yet."""
        like = values[self.num // 2]
        assert isinstance(like, Node)
        if not _repeats(like) or not all(value is None or alike(like, value) for value in values[1:-1]):
            raise NotALoopError
        odd = [at for at in (0, self.num - 1) if values[at] is not None and not alike(like, values[at])]
        if len(odd) > 1:
            raise NotALoopError
        term = _only_term(like, values[odd[0]], self.num) if odd else None
        if odd and term is None:
            reverse = odd[0] > 0
            moved = (None, *values[:-1]) if reverse else (*values[1:], None)
            lanes = self._operand(moved)
            if not isinstance(lanes, Lanes):
                raise NotALoopError
            return self._before(lanes, reverse, values[odd[0]])
        first, structure = _leaves(like)
        lanes = Lanes([None] * self.num, like, list(first), structure)
        for at, value in enumerate(values):
            if at in odd:
                assert isinstance(value, Node)
                lanes.values[at] = value
            elif isinstance(value, Node):
                self._put(lanes, at, value)
        leaves = [_leaves(value)[0] if isinstance(value, Node) and at not in odd else None
                  for at, value in enumerate(values)]  # fmt: skip
        for place, leaf in enumerate(first):
            if isinstance(leaf, Node):
                read: list[RoundValue] = [None if each is None else each[place] for each in leaves]
                for at in odd:
                    read[at] = values[at] if place == term else ZERO
                lanes.operands[place] = self._operand(read)
        if not any(isinstance(operand, (Lanes, Before)) for operand in lanes.operands):
            for value in values:  # the same in each round
                self.home.pop(value, None)  # type: ignore[arg-type]
            return like
        return lanes


def _lanes_read(lanes: Lanes) -> list[Any]:
    return [read.lanes if isinstance(read, Before) else read for read in lanes.reads()]


def _leaves(node: Node) -> tuple[list[Any], TreeSpec]:
    return tree_flatten((node.args, node.kwargs))


def _repeats(node: Node) -> bool:
    """Whether calls of the node's op can be one call for all rounds."""
    if is_item(node):
        return True
    op, row = node.target, op_spec_of(node)
    if not isinstance(op, OpOverload) or op.namespace != "aten" or writes_in_place(node):
        return False
    drawn = torch.Tag.nondeterministic_seeded in op.tags or row.random is not None or row.dropout is not None
    return row.known and not drawn and not row.formats and row.reads == "values" and not row.batch_statistics


def alike(node: Node, other: object) -> bool:
    """Whether two calls do the same to their tensors, of the same shapes."""
    if not isinstance(other, Node) or other.op != "call_function" or other.target is not node.target:
        return False
    (leaves, structure), (others, form) = _leaves(node), _leaves(other)
    if structure != form or [_kind(v) for v in output_values(node)] != [_kind(v) for v in output_values(other)]:
        return False
    return all(
        isinstance(other, Node) if isinstance(leaf, Node) else type(leaf) is type(other) and leaf == other
        for leaf, other in zip(leaves, others, strict=True)
    )


def _kind(value: object) -> Any:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else type(value)


def _only_term(node: Node, value: RoundValue, num: int) -> int | None:
    """The operand of a sum that a value is instead of the sum, because the others are zero in its round."""
    if node.target is not aten.add.Tensor or node.kwargs or not isinstance(value, Node):
        return None
    terms = [at for at, term in enumerate(node.args) if isinstance(term, Node) and _is_term(term, value, num)]
    return terms[0] if len(terms) == 1 else None


def _is_term(term: Node, value: Node, num: int) -> bool:
    if (sliced := _slice(term, num)) is not None:
        other = _slice(value, num)
        return other is not None and other[:3] == sliced[:3]
    return alike(term, value) or _only_term(term, value, num) is not None


def is_zero(node: Node) -> bool:
    """Whether the node only makes zeros, or is a view of such."""
    while op_spec_of(node).view is not None and not is_item(node):
        (node,) = node.all_input_nodes[:1]
    return op_spec_of(node).fills == 0


def _slice(value: RoundValue, num: int) -> tuple[Node, int, bool, int] | None:
    """The tensor of which a value is the slice at a position, the dim of `num` positions, whether the slice keeps the
    dim, and the position."""
    if not isinstance(value, Node) or value.op != "call_function":
        return None
    given: Any = value.args
    if is_item(value):
        maker, at = given
        if maker.target is aten.unbind.int:
            source, dim, keeps = maker.args[0], maker.args[1] if len(maker.args) > 1 else 0, False
        elif maker.target in (aten.split.Tensor, aten.split_with_sizes.default):
            source, dim, keeps = maker.args[0], maker.args[2] if len(maker.args) > 2 else 0, True
        else:
            return None
    elif value.target is aten.select.int:
        (source, dim, at), keeps = given, False
    elif value.target is aten.slice.Tensor and len(given) >= 4:
        (source, dim, at, *_), keeps = given, True
    else:
        return None
    shape = source.meta["val"].shape
    dim %= len(shape)
    if shape[dim] != num or (keeps and value.meta["val"].shape[dim] != 1) or not isinstance(at, int):
        return None
    return source, dim, keeps, at % num


def has_slices(graph: Graph, num: int) -> bool:
    """Whether a graph has slices of one position of so many."""
    return any(_slice(node, num) is not None for node in graph.nodes)


def reads_alone(rounds: LoopRounds, readers: Collection[Node]) -> dict[Lanes, dict[int, Node]]:
    """The values of single rounds that calls outside of the loops read, by lanes and round; `readers` only gather the
    values of all rounds."""
    every = {lanes for lanes, _ in rounds.home.values()}
    outside = {each for lanes in every for each in lanes.reads() if isinstance(each, Node)}
    outside |= {lanes.source[0] for lanes in every if lanes.source is not None}
    outside |= {each.first for each in rounds.befores() if isinstance(each.first, Node)}
    found: dict[Lanes, dict[int, Node]] = {}
    for value, (lanes, at) in rounds.home.items():
        if value in outside or any(_is_outside(user, rounds, readers) for user in value.users):
            found.setdefault(lanes, {})[at] = value
    return found


def _is_outside(user: Node, rounds: LoopRounds, readers: Collection[Node]) -> bool:
    return user not in readers and (user not in rounds.home or rounds.home[user][0].source is not None)


def whole_loops(rounds: LoopRounds, readers: Collection[Node], fits: Callable[[Before], bool]) -> set[Lanes]:
    """The lanes of the loops of which all calls can be one for all rounds.

    A loop is left as it is if `fits` is false for a value of the round before, or if values of many rounds are read by
    calls outside of it."""
    links: dict[Lanes, set[Lanes]] = {}
    every = {lanes for lanes, _ in rounds.home.values()} | {each.lanes for each in rounds.befores()}
    for lanes in every:
        links.setdefault(lanes, set())
        for other in _lanes_read(lanes):
            if isinstance(other, Lanes):
                links[lanes].add(other)
                links.setdefault(other, set()).add(lanes)
    alone = reads_alone(rounds, readers)
    bad = [lanes for lanes, values in alone.items() if lanes.source is None and len(values) > EDGES]
    bad += [lanes for lanes in alone if not is_tensor(lanes.like)]
    bad += [each.lanes for each in rounds.befores() if not fits(each)]
    left: set[Lanes] = set()
    while bad:
        if (lanes := bad.pop()) not in left:
            left.add(lanes)
            bad += links[lanes]
    return {lanes for lanes in links if lanes not in left}
