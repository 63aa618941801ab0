"""plait simulate: a step of a job, or of a shape alone, under a plan on a cluster.

    [shape]               a decoder, without any code; keys of cost/transformer.py's TransformerShape
    layers = 80
    hidden = 8192
    heads = 64
    ...
    [train]
    batch_size = 1024     sequences, of all ranks together

A file of a job is simulated as `plait.simulate` does: its model is captured, and lowered for the plan.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.api.job.config import Config, load_config
from plait.cost.transformer import TransformerShape
from plait.cost.transformer_simulation import SimulatedStep, simulate_step
from plait.errors import ConfigError
from plait.plan.plan import Plan
from plait.plan.plan_space import MOST_ROWS
from plait.spec.cluster import Cluster
from plait.spec.cluster_file import find_cluster
from plait.spec.toml_text import parse_toml

if TYPE_CHECKING:
    from plait.report.step_prediction import StepPrediction  # needs torch, and a [shape] does not

_MOST_ACTIONS = 400_000  # of a schedule that is simulated, and drawn, whole


def simulate_config(
    path: Path, plan: Plan, cluster: str, changes: Sequence[str] = ()
) -> SimulatedStep | StepPrediction:
    """The step of the file `path`: closed forms of a [shape], and of a job the program that its ranks would run.

    Raises ConfigError for a bad file, and what `simulate_step` and `plait.simulate` raise.
    """
    where = find_cluster(cluster)
    if not has_shape(path):
        return _simulate_job(load_config(path, changes), plan, where)
    shape, rows = read_shape(path, changes)
    return simulate_step(shape, plan, rows, where, most_actions=_MOST_ACTIONS)


def read_shape(path: Path, changes: Sequence[str] = ()) -> tuple[TransformerShape, int]:
    """The shape of a file that has one, and the rows of its global batch. Raises ConfigError for bad ones."""
    if changes:
        raise ConfigError(f"--set {changes[0]!r}: {path} has a [shape]; change the file")
    raw = _shape_file(path)
    assert raw is not None
    return _read_shape(raw, path), _rows(raw, path)


def has_shape(path: Path) -> bool:
    """Whether a file has a [shape], and so no job that could run."""
    return _shape_file(path) is not None


def _simulate_job(config: Config, plan: Plan, cluster: Cluster) -> StepPrediction:
    from plait.api.job.from_config import check_job, first_batch, make_data, optimizer_factory
    from plait.api.job.memory_command import make_model_without_values
    from plait.api.simulate_step import Simulator

    check_job(config, plan, writes=False)
    model, loss_fn = make_model_without_values(config)
    batch = first_batch(config, make_data(config))
    simulator = Simulator(
        model, loss_fn, batch, cluster, optimizer=optimizer_factory(config), layouts=config.layouts, built=True,
        clip_norm=config.train.clip_norm,
    )  # fmt: skip
    return simulator.simulate(plan)


def _shape_file(path: Path) -> dict[str, Any] | None:
    """The tables of a file with a [shape]; None for others, whose mistakes `load_config` names."""
    try:
        raw = parse_toml(path.read_text())
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
    keys = train.keys() if isinstance(train, dict) else set()
    if unknown := (raw.keys() - {"shape", "train"}) | {f"train.{key}" for key in keys - {"batch_size"}}:
        raise ConfigError(f"{path}: unknown key {min(unknown)}; a file with a [shape] has that and train.batch_size")
    if "batch_size" not in keys:
        raise ConfigError(f"{path}: train.batch_size is missing; it is the sequences of a step, such as 64")
    rows = train["batch_size"]
    if type(rows) is not int or not 1 <= rows <= MOST_ROWS:
        raise ConfigError(
            f"{path}: train.batch_size = {repr(rows)[:40]}; it should be the sequences of a step, from 1 to {MOST_ROWS}"
        )
    return rows
