"""plait simulate: a step of a job, or of a shape alone, under a plan on a cluster.

    [shape]               a decoder, without any code; keys of cost/transformer.py's TransformerShape
    layers = 80
    hidden = 8192
    heads = 64
    ...
    [train]
    batch_size = 1024     sequences, of all ranks together

The file of a job has a shape if its model is `bytes_gpt`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from plait.api.job.config import Config, load_config
from plait.cost.transformer import TransformerShape
from plait.cost.transformer_simulation import SimulatedStep, simulate_step
from plait.errors import ConfigError
from plait.plan.plan import Plan
from plait.spec.cluster_file import find_cluster

_GPT = {"layers": 8, "width": 256, "heads": 8, "sequence": 128, "dropout": 0.0}  # as job/gpt.py has by default


def simulate_config(path: Path, plan: Plan, cluster: str, changes: Sequence[str] = ()) -> SimulatedStep:
    """The step of the file `path`. Raises ConfigError for a file without a shape, and what `simulate_step` raises."""
    where = find_cluster(cluster)
    raw = _shape_file(path)
    if raw is None:
        config = load_config(path, changes)
        return simulate_step(_shape_of(config, path), plan, config.train.batch_size, where)
    if changes:
        raise ConfigError(f"--set {changes[0]!r}: {path} has a [shape]; change the file")
    return simulate_step(_read_shape(raw, path), plan, _rows(raw, path), where)


def _shape_file(path: Path) -> dict[str, Any] | None:
    """The tables of a file with a [shape]; None for others, whose mistakes `load_config` names."""
    try:
        raw = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return None
    return raw if "shape" in raw else None


def _read_shape(raw: dict[str, Any], path: Path) -> TransformerShape:
    rows = {each.name: each for each in fields(TransformerShape)}
    given = raw["shape"]
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: shape = {given!r}; it should be a table")
    for key, value in given.items():
        if key not in rows:
            near = difflib.get_close_matches(key, rows, n=2)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise ConfigError(f"{path}: unknown key shape.{key}; {hint}[shape] has {', '.join(rows)}")
        expected = bool if rows[key].type == "bool" else int
        if type(value) is not expected:
            what = "true or false" if expected is bool else "a whole number"
            raise ConfigError(f"{path}: shape.{key} = {value!r}; it should be {what}")
    if lacking := [name for name, row in rows.items() if row.default is MISSING and name not in given]:
        raise ConfigError(f"{path}: shape.{lacking[0]} is missing; {', '.join(lacking)} is needed")
    return TransformerShape(**given)


def _rows(raw: dict[str, Any], path: Path) -> int:
    train = raw.get("train", {})
    rows = train.get("batch_size") if isinstance(train, dict) else None
    if type(rows) is not int or rows < 1:
        raise ConfigError(f"{path}: train.batch_size = {rows!r}; it should be the sequences of a step, 1 or more")
    if unknown := (raw.keys() - {"shape", "train"}) | {f"train.{key}" for key in train.keys() - {"batch_size"}}:
        raise ConfigError(f"{path}: unknown key {min(unknown)}; a file with a [shape] has that and train.batch_size")
    return rows


def _shape_of(config: Config, path: Path) -> TransformerShape:
    if config.model.name != "bytes_gpt":
        raise ConfigError(
            f"{path}: model.name = {config.model.name!r} has no shape that plait simulate knows; give a file with a"
            " [shape] (layers, hidden, heads, vocab, sequence...), or model.name = 'bytes_gpt'"
        )
    given = _GPT | config.model.arguments
    return TransformerShape(
        layers=given["layers"], hidden=given["width"], heads=given["heads"], vocab=256, sequence=given["sequence"],
        tied=False, dropout=given["dropout"] > 0, stores_scores=False,
    )  # fmt: skip
