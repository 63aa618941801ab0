"""plait plan: the best plans for a job, or for a shape alone, on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from plait.api.job.config import load_config
from plait.api.job.simulate_command import has_shape, read_shape
from plait.cost.plan_search import FoundPlans, Progress, search
from plait.cost.shape_evaluator import ShapeEvaluator
from plait.cost.transformer import TransformerShape
from plait.errors import ConfigError
from plait.plan.plan_space import Limits, batches_of, memory_of
from plait.spec.cluster import Cluster

_GPT = {"layers": 8, "width": 256, "heads": 8, "sequence": 128, "dropout": 0.0}  # as job/gpt.py has by default


def plan_config(
    path: Path,
    cluster: Cluster,
    memory: str = "",
    batch: str = "",
    limits: str = "",
    changes: Sequence[str] = (),
    smaller: bool = True,
) -> FoundPlans:
    """The best plans for the file `path`. Raises ConfigError for a file without a shape, and PlanError for options that
    cannot be read, and if no plan is legal."""
    shape, rows = _shape_of(path, changes)
    sizes = batches_of(batch) if batch else (rows,)
    limit = float(memory_of(memory)) if memory else None
    allowed = Limits.parse(limits)
    with _progress_bar() as progress:
        return search(ShapeEvaluator(shape, cluster), cluster, sizes, allowed, limit, progress, smaller)


def _shape_of(path: Path, changes: Sequence[str]) -> tuple[TransformerShape, int]:
    if has_shape(path):
        return read_shape(path, changes)
    config = load_config(path, changes)
    if config.model.name != "bytes_gpt":
        raise ConfigError(
            f"model.name = {config.model.name!r} has no shape that plait plan knows; give a file with a"
            " [shape] (layers, hidden, heads, vocab, sequence...), or model.name = 'bytes_gpt'"
        )
    given = _GPT | config.model.arguments
    shape = TransformerShape(
        layers=given["layers"], hidden=given["width"], heads=given["heads"], vocab=256, sequence=given["sequence"],
        tied=False, dropout=given["dropout"] > 0, stores_scores=False,
    )  # fmt: skip
    return shape, config.train.batch_size


def line_to_run(found: FoundPlans, path: Path, cluster: str, changes: Sequence[str] = ()) -> str:
    """The command that runs the best plan; of a shape alone the one that simulates it. "" if nothing fits."""
    if not found.best:
        return ""
    best = found.best[0]
    words = f"plait simulate {path} --cluster {cluster}" if has_shape(path) else f"plait train {path}"
    given = list(changes)
    if not has_shape(path) and best.rows != load_config(path, changes).train.batch_size:
        given.append(f"train.batch_size={best.rows}")
    return " ".join([words, *(f"--set {change}" for change in given), f'--plan "{best.plan}"'])


@contextmanager
def _progress_bar() -> Iterator[Progress]:
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
