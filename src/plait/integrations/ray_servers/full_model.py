"""The full model, joined from the servers' pieces and cut into them, to write and read checkpoints.

What the checkpoint of a run with servers contains besides parameters is untrusted data. It is validated before any of
it is loaded, and a CheckpointError names the place of an invalid value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from plait.compile.ir.dtypes import torch_name
from plait.engine.checkpoint import load, saved_state
from plait.engine.checkpoint.write import Saver
from plait.errors import CheckpointError
from plait.integrations.ray_servers.arrays import dtype_of, packed, to_array, to_tensor, unpacked
from plait.integrations.ray_servers.optimizer_shard import OptimizerShard
from plait.integrations.ray_servers.server_job import Job
from plait.integrations.ray_servers.tables.sparse_table import tables_away
from plait.integrations.ray_servers.tables.table_shard import TableSpec, by_server
from plait.schedule.variable_placement import Piece, Variable

_KEPT = {"adagrad": ("values", "squares"), "adam": ("values", "squares", "means", "counts")}
_BY_ROW = ("squares", "counts")  # one number per row; the others have `dim`
_MOMENTUM = "momentum_buffer"  # the state of the outer optimizer
_LARGEST = 1 << 40  # limit of the epoch, and of the items done in it


def checked_data(extra: Mapping[str, object], where: str) -> Mapping[str, Any]:
    """The saved run's position in its data: epoch, items, seed and size."""
    data = extra.get("data")
    if not isinstance(data, Mapping) or not {"epoch", "items", "seed", "size"} <= set(data):
        raise CheckpointError(f"the checkpoint in {where} does not say where its data stood")
    for key in ("epoch", "items"):
        if type(data[key]) is not int or not 0 <= data[key] < _LARGEST:
            raise CheckpointError(f"the checkpoint in {where}: data.{key} is {_shown(data[key])}, not a count")
    for key in ("seed", "size"):
        if type(data[key]) is not int:
            raise CheckpointError(f"the checkpoint in {where}: data.{key} is {_shown(data[key])}, not a number")
    return data


def checked_tables(extra: Mapping[str, object], specs: Sequence[TableSpec], where: str) -> dict[str, dict[str, Any]]:
    """The saved rows of the given tables, in the format of the servers' state; empty if the run had no tables."""
    found = _mapping(extra.get("tables", {}), "tables", where)
    by_name = {spec.name: spec for spec in specs}
    for name, kept in found.items():
        if name not in by_name:
            known = f"; it has {', '.join(sorted(by_name))}" if by_name else ""
            raise CheckpointError(
                f"the checkpoint in {where} has rows of the table {_shown(name)} (tables), and the model has no such"
                f" table{known}"
            )
        _check_table(kept, by_name[name], where)
    return dict(found)


def checked_outer(extra: Mapping[str, object], variables: Sequence[Variable], where: str) -> dict[str, dict[str, Any]]:
    """The state of the outer optimizer, SGD, by variable: its momentum, or empty if it has none."""
    found = _mapping(extra.get("outer", {}), "outer", where)
    forms = {v.name: torch.empty(v.shape, dtype=getattr(torch, v.dtype), device="meta") for v in variables}
    kept: dict[str, dict[str, object]] = {}
    for name, values in found.items():
        if name not in forms:
            raise CheckpointError(f"the checkpoint in {where}: outer.{_shown(name)}: the model has no such variable")
        for key, value in _mapping(values, f"outer.{name}", where).items():
            place = f"the checkpoint in {where}: outer.{name}.{_shown(key)}"
            if key != _MOMENTUM:
                raise CheckpointError(f"{place}: the outer optimizer has no such state")
            if not torch.is_tensor(value):
                raise CheckpointError(f"{place}: it is a {type(value).__name__}, not a tensor")
            if value.shape != forms[name].shape or value.dtype != forms[name].dtype:
                raise CheckpointError(f"{place}: it is {_form(value)}, and the variable is {_form(forms[name])}")
            kept[name] = {key: value}
    if kept:  # a variable without a gradient so far has no momentum, but fused SGD needs it for all or none
        kept |= {n: {_MOMENTUM: torch.zeros_like(f, device="cpu")} for n, f in forms.items() if n not in kept}
    return kept


def _check_table(kept: object, spec: TableSpec, where: str) -> None:
    place = f"tables.{spec.name}"
    found = _mapping(kept, place, where)
    expected = {"ids", *_KEPT[spec.optimizer]}
    if set(found) != expected:
        odd = sorted(set(map(str, found)) ^ expected)[0]
        raise CheckpointError(
            f"the checkpoint in {where}: {place} was made with another optimizer of rows than {spec.optimizer}:"
            f" {_shown(odd)} is {'missing' if odd in expected else 'not of it'}; use that of the saved run"
        )
    for key, value in found.items():
        if not torch.is_tensor(value):
            raise CheckpointError(f"the checkpoint in {where}: {place}.{key} is a {type(value).__name__}, not a tensor")
    ids = found["ids"]
    if ids.dtype != torch.int64 or ids.ndim != 1 or len(ids.unique()) != len(ids):
        raise CheckpointError(f"the checkpoint in {where}: {place}.ids are {_form(ids)}, not ids that all differ")
    for key in _KEPT[spec.optimizer]:
        shape = (len(ids),) if key in _BY_ROW else (len(ids), spec.dim)
        if tuple(found[key].shape) != shape or found[key].dtype != torch.float32:
            raise CheckpointError(
                f"the checkpoint in {where}: {place}.{key} is {_form(found[key])}, not float32{list(shape)}"
            )


def _mapping(value: object, place: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"the checkpoint in {where}: {place} is a {type(value).__name__}, not a table of names")
    return value


def _form(tensor: torch.Tensor) -> str:
    return f"{torch_name(tensor.dtype)}{list(tensor.shape)}"


def _shown(value: object) -> str:
    return repr(value)[:60]


# The state of a server: values, optimizer state, tables.
ServerState = tuple[Sequence[np.ndarray], Mapping[str, Mapping[str, Any]], Mapping[str, Mapping[str, object]]]


class FullModel:
    """The coordinator's copy of the model, with which it writes checkpoints that load under any plan.

    shard   parameters, optimizer and scheduler of the full model
    tables  all rows of every table, in the format of the servers' state
    outer   the state of the servers' outer optimizer, if workers take steps of their own
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        with tables_away():
            model, _ = job.make_model()
        self.tables: dict[str, dict[str, Any]] = {}
        self.shard = OptimizerShard(
            dict(model.named_parameters()), job.optimizer, job.scheduler, job.plan, job.seed, model=model
        )  # fmt: skip
        self.outer: dict[str, dict[str, object]] = {}
        self._saver = Saver()
        small = {v.name: nn.Parameter(torch.zeros((1,) * len(v.shape))) for v in job.variables}
        # An optimizer of tiny parameters, whose scheduler gives the learning rate of each step.
        self._rates = OptimizerShard(small, job.optimizer, job.scheduler, job.plan, job.seed)
        self._first_batch = 0  # the batch of the data at step `_first_step`
        self._first_step = 0

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self.shard.step_number

    def load(self) -> int:
        """Load the newest checkpoint. Returns the batch of the data to continue with, counted through all epochs."""
        extra = load.load(self.shard, self.job.begins_at or self.job.folder)
        data, where = self._checked(extra), self.job.begins_at or self.job.folder
        self.tables = checked_tables(extra, self.job.tables, where)
        self.outer = checked_outer(extra, self.job.variables, where)
        scheduler = self.shard.scheduler
        self._rates.set_options(self.shard.options(), None if scheduler is None else scheduler.state_dict())
        self._first_step = self._rates.step_number = self.step
        self._first_batch = int(data["epoch"]) * self._batches + int(data["items"]) // self.job.batch_size
        return self._first_batch

    def check(self) -> None:
        """Raise what `load` would raise for another model, optimizer or data, without reading any values."""
        self._checked(load.check(self.shard, self.job.begins_at or self.job.folder))

    def _checked(self, extra: Mapping[str, object]) -> Mapping[str, Any]:
        """The position in the data of the saved run. Raises CheckpointError if the data is not the same."""
        data = checked_data(extra, self.job.begins_at or self.job.folder)
        here = (self.job.seed, self.job.num_items)
        if (data["seed"], data["size"]) != here:
            raise CheckpointError(
                f"the data is not that of the saved run: seed and number of items were {data['seed']} and"
                f" {data['size']}, and are now {here[0]} and {here[1]}; use the same data and seed, or start anew"
            )
        return data

    def rate(self, step: int) -> float:
        """The learning rate of the step after `step`. Calls must have increasing steps."""
        self._rates.advance(step)
        return self._rates.rate

    def values(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        """The values of a server's pieces."""
        return [to_array(_rows(self.shard.parameters[piece.name].detach(), piece)) for piece in pieces]

    def state(self, server: int) -> dict[str, Any]:
        """The state that a server's optimizer, scheduler and tables start with."""
        pieces = self.job.shards[server]
        scheduler, local = self.shard.scheduler, self.job.is_local
        kept = self.outer if local else self.shard.optimizer_state()
        return {
            "optimizer": {
                piece.name: {
                    key: packed(_rows(value, piece) if torch.is_tensor(value) and _like(value, piece) else value)
                    for key, value in kept.get(piece.name, {}).items()
                }
                for piece in pieces
            },
            "tables": {name: self._rows_of(kept, server) for name, kept in self.tables.items()},
            "groups": None if local else self.shard.options(),
            "scheduler": None if scheduler is None or local else scheduler.state_dict(),
        }

    def save(
        self,
        step: int,
        states: Sequence[ServerState],
        buffers: Mapping[str, np.ndarray],
        moments: Mapping[str, Mapping[str, object]],
    ) -> None:
        """Write the checkpoint of a step from the servers' states, a worker's buffers and, if workers have optimizers
        of their own, the state of a worker's optimizer (`moments`).

        Raises CheckpointError if it cannot be written.
        """
        self.join(states)
        if moments:
            self.shard.set_optimizer_state({n: {k: unpacked(v) for k, v in of.items()} for n, of in moments.items()})
        for name, buffer in self.shard.held.buffers.items():
            if name in buffers:
                buffer.copy_(to_tensor(buffers[name], buffer.dtype))
        self.shard.advance(step)
        extra: dict[str, Any] = {"data": self._data(step), "job": self.job.name}
        extra |= {name: kept for name, kept in (("tables", self.tables), ("outer", self.outer)) if kept}
        saved_state.save(self.shard, self.job.folder, extra, self.job.keep, self._saver, True)

    def join(self, states: Sequence[ServerState]) -> None:
        """Take over the servers' states."""
        state: dict[str, dict[str, Any]] = {}
        for pieces, (values, kept, _) in zip(self.job.shards, states, strict=True):
            for piece, value in zip(pieces, values, strict=True):
                _rows(self.shard.parameters[piece.name].detach(), piece).copy_(to_tensor(value, dtype_of(piece)))
                self._join(state.setdefault(piece.name, {}), kept[piece.name], piece)
        if self.job.is_local:
            self.outer = state
        else:
            self.shard.set_optimizer_state(state)
        for table in self.job.tables:
            parts = [{key: unpacked(value) for key, value in tables[table.name].items()} for _, _, tables in states]
            self.tables[table.name] = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    def _join(self, into: dict[str, Any], kept: Mapping[str, object], piece: Piece) -> None:
        """Copy a piece's optimizer state into its place in the state of the whole variable."""
        for key, value in kept.items():
            found = unpacked(value)
            if not torch.is_tensor(found) or piece.is_whole or tuple(found.shape) != piece.own_shape:
                into.setdefault(key, found)
                continue
            whole = into.setdefault(key, torch.zeros(piece.shape, dtype=found.dtype))
            _rows(whole, piece).copy_(found)

    def _data(self, step: int) -> dict[str, Any]:
        """The position of a loader after this step, in the format of plait.loader's state_dict."""
        batch = self._first_batch + step - self._first_step
        epoch, items = batch // self._batches, batch % self._batches * self.job.batch_size
        return {"epoch": epoch, "items": items, "seed": self.job.seed, "shuffle": True, "size": self.job.num_items}

    def _rows_of(self, kept: Mapping[str, Any], server: int) -> dict[str, object]:
        """A server's rows of a table, whatever the number of servers that saved them."""
        mine = torch.from_numpy(by_server(kept["ids"].numpy(), len(self.job.shards))[server])
        return {key: packed(value[mine]) for key, value in kept.items()}

    @property
    def _batches(self) -> int:
        return self.job.num_items // self.job.batch_size


def _rows(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    return whole[piece.start : piece.stop] if piece.shape else whole


def _like(value: torch.Tensor, piece: Piece) -> bool:
    return tuple(value.shape) == piece.shape and bool(piece.shape)
