"""plait plan: the best plans for a job, or for a shape alone, on a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.api.job.config import Config, load_config
from plait.api.job.metrics import measured_noise
from plait.api.job.simulate_command import has_shape, read_shape
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

if TYPE_CHECKING:
    from plait.api.plan_model import ModelEvaluator  # needs torch, and a [shape] does not


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
    from plait.api.job.memory_command import make_model_without_values
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
