"""Checks between ranks outside the step: all hold the same value, or all have finished some work.

They use no collective, because some ranks may be inside one. A rank that lives may be as late as PLAIT_TIMEOUT says. A
rank that has ended, or that waits elsewhere for this rank, is named within seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import TypeVar
from weakref import WeakKeyDictionary

from plait.comm.key_value_store import KeyValueStore
from plait.comm.monitor import ranks_text, timeout
from plait.comm.protocol import World
from plait.errors import CaptureError, PlanError, RankFailed, Refusal, WorldError

T = TypeVar("T")

_LOOK_SECONDS = 0.25
_LEAVE_SECONDS = 1.0  # a failed rank stays this long, so that the others can read its note
_num_calls: WeakKeyDictionary[World, int] = WeakKeyDictionary()


def agree(world: World, value: str, what: str = "value", *, remedy: str = "") -> None:
    """Check that all ranks hold the same text. `what` names it in messages, and `remedy` is added to them.

    A rank calls this after a change that must be the same on all ranks. Raises WorldError on every rank, with the ranks
    that differ. If the other ranks have not changed, and wait for this rank elsewhere, the WorldError says so.
    """
    if world.mesh.size > 1:
        after = f"; {remedy}" if remedy else ""
        notes = _exchanged(world, value, f"the agreement on the {what} ({value}){after}")
        _check_same(dict(enumerate(notes)), what, after)


def attempt(world: World, work: Callable[[], T], what: str, same: Callable[[T], str] | None = None,
            remedy: str = "") -> T:  # fmt: skip
    """Call `work` on every rank, and return this rank's result once all ranks are done.

    If `work` raises on some ranks, `attempt` raises on all. Ranks on which it raised get their own exception. The
    others get a RankFailed that names the first of those ranks; or a CaptureError, or a PlanError with its Refusal, if
    all of those ranks raised one. `same`, if given, turns a result into text; a WorldError names the ranks whose texts
    differ.
    """
    if world.mesh.size == 1:
        return work()
    try:
        result = work()
        note = {"text": "" if same is None else same(result)}
    except BaseException as error:
        note = _note_of(error)
        if note["error"] != "other":  # other ranks raise it too
            found = _notes(_exchanged(world, json.dumps(note), what))
            if others := {rank: note for rank, note in found.items() if note.get("error") == "other"}:
                rank, note = next(iter(others.items()))
                raise RankFailed(rank, note["message"]) from error
            if note["error"] == "refused":
                _leave(world, "")  # after all have read the refusal
            raise
        if isinstance(error, Exception):
            _leave(world, json.dumps(note))
        else:
            _post(world, json.dumps(note))
        raise
    found = _notes(_exchanged(world, json.dumps(note), what))
    failed = {rank: note for rank, note in found.items() if "error" in note}
    if others := {rank: note for rank, note in failed.items() if note["error"] == "other"}:
        rank, note = next(iter(others.items()))
        raise RankFailed(rank, note["message"])
    if failed:
        rank, note = next(iter(failed.items()))
        if note["error"] == "refused":
            _leave(world, "")
            raise PlanError(Refusal(note["what"], note["why"], note["instead"]))
        raise CaptureError(f"on {ranks_text(list(failed))} of {world.mesh.size}: {note['message']}")
    after = f"; {remedy}" if remedy else ""
    _check_same({rank: note["text"] for rank, note in found.items()}, f"result of {what}", after)
    return result


def from_first_rank(world: World, work: Callable[[], str], what: str) -> str:
    """The text that `work` returns on rank 0, on every rank. If it raises, all ranks raise as `attempt` does."""
    text = attempt(world, lambda: work() if world.rank == 0 else "", what)
    return text if world.mesh.size == 1 else _exchanged(world, text, what)[0]


def _leave(world: World, text: str) -> None:
    """Set this rank's last text. Rank 0, which may host the store, then waits a moment for the other ranks."""
    keys = _post(world, text)
    if world.rank == 0:
        with contextlib.suppress(RuntimeError, WorldError):  # the store is gone, or another rank has failed
            world.store.missing(list(keys.values()), _LEAVE_SECONDS)


def _note_of(error: BaseException) -> dict[str, str]:
    """The note that tells other ranks of an error."""
    if isinstance(error, PlanError) and error.refusal is not None:
        return {"error": "refused", "message": str(error), **dataclasses.asdict(error.refusal)}
    if isinstance(error, CaptureError):
        return {"error": "capture", "message": str(error)}
    return {"error": "other", "message": f"{type(error).__name__}: {error}"}


def wait_for_notes(world: World, keys: Mapping[int, str], what: str, store: KeyValueStore | None = None) -> None:
    """Wait until each rank in `keys` has set its key in the store. Raises WorldError if one of them has ended or is too
    late."""
    store = world.store if store is None else store
    absent = store.missing(list(keys.values()), 0.05)
    if not absent:
        return
    rank_of = {key: rank for rank, key in keys.items()}
    if world.monitor is None:
        raise WorldError(f"{what}: there is no rank that could do it")
    begun = time.monotonic()
    with world.monitor.waiting(what, lambda: [rank for rank, key in keys.items() if store.get(key) is None]) as wait:
        while absent := _missing(store, list(keys.values())):
            wait.check()
            if time.monotonic() - begun > timeout() + 60.0:  # the monitor's thread has ended
                raise WorldError(f"waited {timeout():.0f} s for {ranks_text([rank_of[k] for k in absent])} in {what}")


def _missing(store: KeyValueStore, keys: list[str]) -> list[str]:
    try:
        return store.missing(keys, _LOOK_SECONDS)
    except WorldError:
        raise
    except RuntimeError as error:  # raised by stores whose host is gone
        raise WorldError(
            "the store where ranks leave notes is out of reach: the process that keeps it, which is rank 0 or the"
            " launcher, has ended"
        ) from error


def _exchanged(world: World, text: str, what: str) -> list[str]:
    """The text of every rank, in rank order."""
    keys = _post(world, text)
    wait_for_notes(world, keys, what)
    return [world.store.get(key) or "" for key in keys.values()]


def _post(world: World, text: str) -> dict[int, str]:
    """Set this rank's text of the next exchange. Returns the key of every rank's text."""
    number = _num_calls[world] = _num_calls.get(world, 0) + 1
    keys = {rank: f"agree/{number}/{rank}" for rank in range(world.mesh.size)}
    world.store.set(keys[world.rank], text)
    return keys


def _notes(texts: list[str]) -> dict[int, dict[str, str]]:
    """The note of each rank, from its text. A text of another exchange counts as an error."""
    found = {}
    for rank, text in enumerate(texts):
        try:
            note = json.loads(text)
        except ValueError:
            note = None
        found[rank] = note if isinstance(note, dict) else {"error": "other", "message": f"it is elsewhere: {text}"}
    return found


def _check_same(text_of: Mapping[int, str], what: str, after: str) -> None:
    ranks_of: dict[str, list[int]] = {}
    for rank, text in text_of.items():
        ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) > 1:
        found = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_of.items())
        raise WorldError(f"the ranks do not agree on the {what}: {found}{after}")
