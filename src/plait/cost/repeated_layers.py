"""The program of a deep model from those of two shallow ones: what one layer adds, as often as there are layers.

    fewer:  embed A head            more:  embed A A head            wanted:  embed A A ... A head

Layers that are equal add the same calls to a graph. The calls that the deeper model has more are found, and repeated
where they stand: a layer's calls where the layer is, and the waits for its gradients where these are. Gradients are
joined in buckets, of which a model with more layers has more, or larger ones: the bytes of all collectives of a kind
are those of all layers, in the buckets that were found.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from plait.cost.step_program import AxisCollective, CollectiveCall, CopyCall, OpCall, ProgramCall

_AHEAD = (16, 8, 4, 2, 1)  # calls that are alike after one that is not, the most first


def with_layers(
    fewer: Sequence[ProgramCall], more: Sequence[ProgramCall], times: int
) -> tuple[ProgramCall, ...] | None:
    """The calls of a graph that has what `more` has beyond `fewer` so many times; 0 gives `fewer`, and 1 `more`.

    None if the calls of `fewer` are not all in `more` in their order.
    """
    added = _added(fewer, more)
    if added is None:
        return None
    found: list[tuple[ProgramCall, int]] = []  # with the position in `more`
    at = 0
    while at < len(more):
        if not added[at]:
            found.append((more[at], at))
            at += 1
            continue
        end = at
        while end < len(more) and added[end]:
            end += 1
        found += [(more[index], index) for index in range(at, end)] * times
        at = end
    return _with_bytes(_linked(found, more), fewer, more, times)


def _added(fewer: Sequence[ProgramCall], more: Sequence[ProgramCall]) -> list[bool] | None:
    """Which calls of `more` are not those of `fewer`: runs of calls, each as short as can be, after which the calls are
    alike for a while."""
    few, many = [_looks(call) for call in fewer], [_looks(call) for call in more]
    found = [False] * len(many)
    at = place = 0
    while place < len(many):
        if at < len(few) and few[at] == many[place]:
            at, place = at + 1, place + 1
            continue
        most = len(many) - place - (len(few) - at)  # calls that are still to be found
        end = next(
            (place + run for length in _AHEAD for run in range(1, most + 1)
             if many[place + run : place + run + length] == few[at : at + length]),
            0,
        )  # fmt: skip
        if not end:
            return None
        found[place:end] = [True] * (end - place)
        place = end
    return found if at == len(few) else None


def _looks(call: ProgramCall) -> tuple[object, ...]:
    """What calls of equal layers have in common."""
    if isinstance(call, CollectiveCall):
        return (call.part, call.stream, tuple(each.kind for each in call.transfers), call.phase)
    if isinstance(call, CopyCall):
        return (call.part, call.num_bytes, call.phase)
    name = call.signature.partition("(")[0]
    return (name if call.num_bytes == 0 or "..." in call.signature else call.signature, call.phase)


def _linked(found: Sequence[tuple[ProgramCall, int]], more: Sequence[ProgramCall]) -> tuple[ProgramCall, ...]:
    """The calls, with each wait at the earliest start like its own that nothing has waited for."""
    begun: dict[tuple[object, ...], deque[int]] = defaultdict(deque)
    result: list[ProgramCall] = []
    for call, _ in found:
        if not isinstance(call, OpCall):
            if call.part == "start":
                begun[_looks(call)].append(len(result))
            elif call.part == "wait":
                waiting = begun[_looks(more[call.begun])]
                call = replace(call, begun=waiting.popleft() if waiting else -1)
        result.append(call)
    return tuple(result)


def _with_bytes(
    calls: tuple[ProgramCall, ...], fewer: Sequence[ProgramCall], more: Sequence[ProgramCall], times: int
) -> tuple[ProgramCall, ...]:
    """The calls, whose collectives have the bytes of all layers."""
    have, one, two = (_held(each) for each in (calls, fewer, more))
    factor = {key: (one[key] + times * (two[key] - one[key])) / num for key, num in have.items() if num}

    def scaled(call: CollectiveCall) -> CollectiveCall:
        found = (replace(each, held=round(each.held * factor.get(_kind(call, each), 1.0))) for each in call.transfers)
        return replace(call, transfers=tuple(found))

    return tuple(scaled(call) if isinstance(call, CollectiveCall) else call for call in calls)


def _held(calls: Sequence[ProgramCall]) -> Counter[tuple[object, ...]]:
    """Bytes of collectives, by what they are."""
    found: Counter[tuple[object, ...]] = Counter()
    for call in calls:
        if isinstance(call, CollectiveCall):
            for each in call.transfers:
                found[_kind(call, each)] += each.held
    return found


def _kind(call: CollectiveCall, transfer: AxisCollective) -> tuple[object, ...]:
    return (call.part, transfer.kind, transfer.axis, call.phase)
