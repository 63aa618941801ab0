"""Validates what the checkpoint of a run with servers contains besides parameters, before anything of it is loaded.

A checkpoint is untrusted data. CheckpointError names the place of an invalid value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from plait.compile.ir.dtypes import torch_name
from plait.errors import CheckpointError
from plait.integrations.servers.tables.table_shard import TableSpec
from plait.schedule.balance import Variable

_KEPT = {"adagrad": ("values", "squares"), "adam": ("values", "squares", "means", "counts")}
_BY_ROW = ("squares", "counts")  # one number per row; the others have `dim`
_MOMENTUM = "momentum_buffer"  # the state of the outer optimizer
_LARGEST = 1 << 40  # limit of the epoch, and of the items done in it


def checked_data(extra: Mapping[str, Any], where: str) -> Mapping[str, Any]:
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


def checked_tables(extra: Mapping[str, Any], specs: Sequence[TableSpec], where: str) -> dict[str, dict[str, Any]]:
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


def checked_outer(extra: Mapping[str, Any], variables: Sequence[Variable], where: str) -> dict[str, dict[str, Any]]:
    """The state of the outer optimizer, SGD, by variable: its momentum, or empty if it has none."""
    found = _mapping(extra.get("outer", {}), "outer", where)
    forms = {v.name: torch.empty(v.shape, dtype=getattr(torch, v.dtype), device="meta") for v in variables}
    kept: dict[str, dict[str, Any]] = {}
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


def _check_table(kept: Any, spec: TableSpec, where: str) -> None:
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


def _mapping(value: Any, place: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"the checkpoint in {where}: {place} is a {type(value).__name__}, not a table of names")
    return value


def _form(tensor: torch.Tensor) -> str:
    return f"{torch_name(tensor.dtype)}{list(tensor.shape)}"


def _shown(value: Any) -> str:
    return repr(value)[:60]
