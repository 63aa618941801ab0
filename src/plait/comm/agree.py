"""Agreement outside the step: all ranks must hold the same text."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from plait.comm.protocol import World
from plait.errors import WorldError

_num_calls: WeakKeyDictionary[World, int] = WeakKeyDictionary()


def agree(world: World, value: str, what: str = "value", *, remedy: str = "", seconds: float = 10.0) -> None:
    """Check that all ranks hold the same text; WorldError on every rank, naming those that differ, with the remedy.

    Every rank calls it when it finds that something has changed, taking it to have changed for all. Ranks that do not
    come within the time, as for them nothing has changed, are named in the WorldError. No collective is involved: the
    others may be in the middle of one.
    """
    size = world.mesh.size
    if size == 1:
        return
    after = f"; {remedy}" if remedy else ""
    number = _num_calls[world] = _num_calls.get(world, 0) + 1
    keys = [f"agree/{number}/{rank}" for rank in range(size)]
    world.board.set(keys[world.rank], value)
    if absent := world.board.missing(keys, seconds):
        late = [int(key.rpartition("/")[2]) for key in absent]
        raise WorldError(
            f"rank {world.rank} has a new {what}, {value}, but {_ranks(late)} did not come to agree on it within"
            f" {seconds:g} s: it has changed on some ranks only{after}"
        )
    ranks_of: dict[str | None, list[int]] = {}
    for rank, key in enumerate(keys):
        ranks_of.setdefault(world.board.get(key), []).append(rank)
    if len(ranks_of) > 1:
        found = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in ranks_of.items())
        raise WorldError(f"the ranks do not agree on the {what}: {found}{after}")


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
