"""plait memory, plait simulate and plait plan: what a job takes under a plan, and the best plans. Nothing is run.

A file of a job is simulated as `plait.simulate` does: its model is captured, and lowered for the plan. A shape alone
will do for plait simulate and plait plan:

    [shape]               a decoder, without any code; keys of cost/transformer.py's TransformerShape
    layers = 80
    hidden = 8192
    heads = 64
    ...
    [train]
    batch_size = 1024     sequences, of all ranks together
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.api.job.config import Config, load_config
from plait.api.job.metrics import measured_noise
from plait.cost.found_plans import FoundPlans, Goal
from plait.cost.noise_scale import NoiseScale
from plait.cost.outline_search import SearchProgress
from plait.cost.plan_evaluator import PlanEvaluator
from plait.cost.plan_search import search
from plait.cost.shape_evaluator import ShapeEvaluator
from plait.errors import DataError, PlanError
from plait.plan.plan import Plan
from plait.plan.plan_space import Limits, batches_of, memory_of
from plait.spec.cluster import Cluster
from plait.spec.text_files import SETTINGS, read_bounded

if TYPE_CHECKING:
    from plait.api.plan_model import ModelEvaluator  # needs torch, and a [shape] does not
import difflib
import tomllib
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING

import torch

from plait.api.job.from_config import check_job, first_batch, make_data, make_model, optimizer_factory
from plait.api.memory import Estimator
from plait.compile.capture.capture import LossFn
from plait.cost.transformer import TransformerShape
from plait.cost.transformer_simulation import SimulatedStep, simulate_step
from plait.errors import ConfigError, PlaitError
from plait.plan.key_values import Bytes
from plait.plan.plan_space import MOST_ROWS
from plait.report.memory_table import verdict
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
    from plait.api.simulate_step import Simulator

    check_job(config, plan, writes=False)
    model, loss_fn = make_model_without_values(config)
    batch = first_batch(config, make_data(config))
    simulator = Simulator(
        model, loss_fn, batch, cluster, optimizer=optimizer_factory(config), layouts=config.layouts, built=True,
        clip_norm=config.train.clip_norm,
    )  # fmt: skip
    return simulator.simulate(plan)


def _shape_file(path: Path) -> dict[str, object] | None:
    """The tables of a file with a [shape]; None for others, whose mistakes `load_config` names."""
    try:
        raw = parse_toml(read_bounded(path, SETTINGS))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return None
    return raw if "shape" in raw else None


def _read_shape(raw: dict[str, object], path: Path) -> TransformerShape:
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


def print_memory(config: Config, plan: Plan, limit: str | None) -> bool:
    """Print the estimate of a job, and with a limit such as `16GiB` whether it fits. Returns whether it fits."""
    most = _bytes(limit) if limit is not None else None
    check_job(config, plan, writes=False)
    model, loss_fn = make_model_without_values(config)
    estimator = Estimator(
        model, loss_fn, first_batch(config, make_data(config)), optimizer_factory(config), config.layouts, built=True
    )
    found = estimator.estimate(plan)
    print(found)
    if most is None:
        return True
    print()
    print(verdict(found, most, [] if found.fits(most) else estimator.until_it_fits(plan, most)))
    return found.fits(most)


def _bytes(limit: str) -> int:
    try:
        number = Bytes().parse(limit)
        Bytes().check(number)
    except ValueError as error:
        raise PlanError(f"cannot read --limit {limit!r}: {error}") from None
    return number


def make_model_without_values(config: Config) -> tuple[torch.nn.Module, LossFn]:
    """The model on the meta device if its constructor works there, else with values."""
    try:
        with torch.device("meta"):
            return make_model(config)
    except PlaitError:
        raise
    except Exception:
        return make_model(config)


def plan_config(
    path: Path,
    find: Callable[[], Cluster],
    memory: str = "",
    batch: str = "",
    limits: str = "",
    changes: Sequence[str] = (),
    goal: str = "tokens",
    noise: str = "",
) -> FoundPlans:
    """The best plans for the file `path`: closed forms of a [shape], and of a job's model what `plait.search` finds.

    `find` gives the cluster; it may have to measure it, and is called once file and options have been read.

    With the goal "loss" they are ranked by the time to a loss; `noise` is the gradient noise scale, a number of rows or
    the folder of a run that measured it. Of a job the loss is that which its steps come to.

    Raises ConfigError for a bad file, PlanError for options that cannot be read and if no plan is legal, DataError for
    a run that measured nothing, and CaptureError for a model that cannot be captured.
    """
    wanted = goal_of(goal, noise)
    limit = float(memory_of(memory)) if memory else None
    allowed = Limits.parse(limits)
    sizes = batches_of(batch) if batch else ()
    evaluator: PlanEvaluator
    if has_shape(path):
        shape, rows = read_shape(path, changes)
        evaluator = ShapeEvaluator(shape, cluster := find())
    else:
        config = load_config(path, changes)
        rows = config.train.batch_size
        if wanted.to_loss:
            wanted = replace(wanted, steps=config.train.steps, of_rows=rows)
        evaluator = _of_job(config, max(sizes, default=rows), find)
        cluster = evaluator.cluster
    with _progress_bar() as progress:
        return search(evaluator, cluster, sizes or (rows,), allowed, limit, progress, goal=wanted)


def goal_of(text: str, noise: str) -> Goal:
    """What plans are ranked by. Raises PlanError for another text, and DataError for a run that measured nothing."""
    if text not in ("tokens", "loss"):
        raise PlanError(
            f"--goal {text}: plans are ranked by tokens per second, --goal tokens, or by the time to a loss, --goal"
            " loss"
        )
    if not noise:
        return Goal(text == "loss")
    if text != "loss":
        raise PlanError(f"--noise-scale {noise}: tokens per second do not depend on it; add --goal loss")
    try:
        rows = float(noise)
    except ValueError:
        if not Path(noise).is_dir():
            raise PlanError(
                f"--noise-scale {noise}: it is a number of rows, or the folder of a run that measured it, its train.out"
            ) from None
        return Goal(True, measured_noise(Path(noise)))
    if not 0 < rows < math.inf:
        raise PlanError(f"--noise-scale {noise}: a number of rows is more than 0")
    return Goal(True, NoiseScale(rows))


def how_to_measure(path: Path) -> str:
    """The command that measures the noise scale of a job, or words for a shape, which has no data."""
    if has_shape(path):
        return "train a job of this model with train.noise_every=5, and give its train.out: --noise-scale RUN"
    out = load_config(path).train.out
    return f"plait train {path} --set train.noise_every=5, then add --noise-scale {out}"


def _of_job(config: Config, most_rows: int, find: Callable[[], Cluster]) -> ModelEvaluator:
    """The job's model on the cluster that is found, with batches of up to so many rows."""
    from plait.api.job.from_config import check_job, first_batch, make_data, optimizer_factory
    from plait.api.plan_model import ModelEvaluator
    from plait.compile.capture.batch import map_batch

    check_job(config, Plan(), writes=False)
    model, loss_fn = make_model_without_values(config)
    data = make_data(config)

    if most_rows > len(data.train):
        raise DataError(
            f"--batch: a batch of {most_rows} rows has more than the {len(data.train)} items that data.source ="
            f" {config.data.source!r} has to train on; give a range that ends below"
        )
    own, given = first_batch(config, data), config.train.batch_size

    def batch_of(rows: int) -> Any:
        """A global batch of so many rows; of another size than the given one it has shapes only, without values."""
        if rows == given:
            return own
        return map_batch(lambda _, leaf: _with_rows(leaf, rows), own)

    return ModelEvaluator(
        model, loss_fn, batch_of, given, find(), optimizer_factory(config), config.layouts, True, config.train.clip_norm
    )


def _with_rows(leaf: Any, rows: int) -> Any:
    """A tensor of a batch without values, with another number of rows; other leaves as they are."""
    shape = getattr(leaf, "shape", ())
    return leaf.new_empty((rows, *shape[1:]), device="meta") if shape else leaf


def line_to_run(found: FoundPlans, path: Path, cluster: str, changes: Sequence[str] = ()) -> str:
    """The command that runs the best plan; of a shape alone the one that simulates it. "" if nothing fits."""
    if not found.best:
        return ""
    best = found.best[0]
    words = f"plait train {path}"
    if has_shape(path):
        words = f"plait simulate {path}" + (f" --cluster {cluster}" if cluster else "")
    given = list(changes)
    if not has_shape(path) and best.rows != load_config(path, changes).train.batch_size:
        given.append(f"train.batch_size={best.rows}")
    return " ".join([words, *(f"--set {change}" for change in given), f'--plan "{best.plan}"'])


@contextmanager
def _progress_bar() -> Iterator[SearchProgress]:
    """A bar on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, int] = {}

        def tell(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=of)
            bar.update(tasks[what], completed=done, total=of)  # type: ignore[arg-type]

        yield tell
