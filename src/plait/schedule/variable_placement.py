"""Places variables on parameter servers, so that all servers hold, send and receive nearly the same number of bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

_NEAR = 0.05  # a variable is not cut if it exceeds its server's share by less than this fraction of the share


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of a variable. A scalar has no rows; its one piece is the scalar.

    Attributes:
        name: the variable.
        shape: shape of the whole variable.
        dtype: the torch name of its dtype.
        start: first row.
        stop: row after the last.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int

    @functools.cached_property  # servers ask for it at every push
    def own_shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.shape[1:]) if self.shape else ()

    @functools.cached_property
    def num_elements(self) -> int:
        return math.prod(self.own_shape)

    @property
    def is_whole(self) -> bool:
        return not self.shape or (self.start, self.stop) == (0, self.shape[0])


@dataclass(frozen=True)
class Variable:
    """A parameter that servers hold: name, shape, dtype by its torch name, and bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int

    def piece(self, start: int, stop: int) -> Piece:
        return Piece(self.name, self.shape, self.dtype, start, stop)

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


def place_variables(variables: Sequence[Variable], num_servers: int, may_cut: bool) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each server, in the order of the variables. A server has at most one piece of a variable.

    With `may_cut` the variables are laid end to end and cut into equal parts: at the end of a variable if one is near,
    else between two rows. Without it, each variable stays whole. The largest goes first, to the server that holds the
    fewest bytes.
    """
    found = _cut(variables, num_servers) if may_cut and num_servers > 1 else _whole(variables, num_servers)
    return tuple(tuple(pieces) for pieces in found)


def _whole(variables: Sequence[Variable], num_servers: int) -> list[list[Piece]]:
    held = [0] * num_servers
    server_of: dict[str, int] = {}
    for variable in sorted(variables, key=lambda v: (-v.num_bytes, v.name)):
        server = held.index(min(held))
        held[server] += variable.num_bytes
        server_of[variable.name] = server
    return [[v.piece(0, v.rows) for v in variables if server_of[v.name] == i] for i in range(num_servers)]


def _cut(variables: Sequence[Variable], num_servers: int) -> list[list[Piece]]:
    total = sum(variable.num_bytes for variable in variables)
    found: list[list[Piece]] = [[] for _ in range(num_servers)]
    server, before = 0, 0
    for variable in variables:
        start = 0
        row_bytes = variable.num_bytes / max(variable.rows, 1)
        while start < variable.rows:
            stop = variable.rows
            end = total * (server + 1) / num_servers  # of this server's share
            over = before + (stop - start) * row_bytes - end
            if server < num_servers - 1 and over > _NEAR * total / num_servers:
                stop = min(stop, start + round((end - before) / row_bytes))
            if stop > start:
                found[server].append(variable.piece(start, stop))
                before += round((stop - start) * row_bytes)
                start = stop
            if server < num_servers - 1 and (before >= end - _NEAR * total / num_servers or start < variable.rows):
                server += 1
    return found
