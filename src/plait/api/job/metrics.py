"""The metrics and the progress of a job: a line of JSON for each step, TensorBoard if the config asks for it, and a
progress bar, or plain lines if there is no terminal."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from plait.cost.noise_scale import NoiseSample, NoiseScale, noise_scale
from plait.errors import DataError
from plait.spec.text_files import open_in_run

METRICS = "metrics.jsonl"


class MetricsLog:
    """Writes `metrics.jsonl`, on rank 0 only.

    A line has these keys:

        step                counted from 1
        loss, lr            the step's loss and learning rate
        tokens_per_s        of all ranks together
        seconds             the time of the step
        data_seconds        the part of `seconds` spent waiting for data
        sent_bytes          bytes that this rank sent
        agree_seconds       time spent on exchanges of replicas that synchronize later
        gradient_norm       with clip_norm
        noise_signal        with noise_every: the square of the true gradient's norm, as the step shows it
        noise_trace         the trace of the covariance of one row's gradient, as the step shows it
        noise_scale         the gradient noise scale in rows, by running means of both
        held_out_loss       after steps with an evaluation
        aux/NAME            each single number that the loss function returns beside the loss
        held_out_aux/NAME   the same of an evaluation
        plan                on the first line since the run was started or resumed

    With parameter servers a line also has the counts of integrations/ray_servers/run_metrics.py, and `held_out_loss`
    has lines of its own, because it comes from another process.
    """

    def __init__(self, folder: Path, first_step: int, tensorboard: bool = False, plan: str = "") -> None:
        self._first = {"plan": plan} if plan else {}
        self.path = folder / METRICS
        kept = _lines_before(self.path, first_step)
        self._file = open_in_run(self.path)  # closed by `close`
        self._file.writelines(kept)
        self._tensorboard: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(folder / "tensorboard", purge_step=first_step)

    def write(self, values: dict[str, Any]) -> None:
        """Write a line of numbers by name. A mapping from integers, as text, to counts is a histogram."""
        first, self._first = self._first, {}
        self._file.write(json.dumps({key: _rounded(value) for key, value in (values | first).items()}) + "\n")
        if self._tensorboard is not None:
            for key, value in values.items():
                if isinstance(value, dict):
                    self._write_histogram(key, value, values["step"])
                elif key != "step":
                    self._tensorboard.add_scalar(key, value, values["step"])

    def _write_histogram(self, name: str, counts: dict[str, int], step: int) -> None:
        at = {int(key): number for key, number in sorted(counts.items(), key=lambda pair: int(pair[0]))}
        if not at:
            return
        self._tensorboard.add_histogram_raw(
            name, min(at), max(at), sum(at.values()), sum(k * n for k, n in at.items()),
            sum(k * k * n for k, n in at.items()), [k + 0.5 for k in at], list(at.values()), step,
        )  # fmt: skip

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def read_steps(path: Path) -> list[dict[str, object]]:
    """The lines of steps. Lines that cannot be parsed are skipped, because a run may be killed while it writes one.

    A file that does not exist has no lines. Raises DataError if the file exists and cannot be read.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    for text in lines:
        try:
            values = json.loads(text)
        except ValueError:
            continue
        if isinstance(values, dict) and {"step", "loss", "tokens_per_s"} <= set(values):
            found.append(values)
        elif isinstance(values, dict) and "held_out_loss" in values:  # of an evaluator, written after the step's line
            for line in (line for line in found if line["step"] == values.get("step")):
                line["held_out_loss"] = values["held_out_loss"]
    return found


def measured_noise(run: Path) -> NoiseScale:
    """The gradient noise scale of a run, by the later half of its measurements: it grows while a model trains.

    Raises DataError for a folder without measurements, or whose measurements do not show it.
    """
    found = noise_of(read_steps(run / METRICS), str(run))
    if found is None:
        raise DataError(
            f"{str(run)!r} has no gradient noise scale that was measured; run its job with --set train.noise_every=5"
            " for a few hundred steps, and give its train.out"
        )
    return found


def noise_of(lines: Sequence[Mapping[str, Any]], run: str = "") -> NoiseScale | None:
    """The gradient noise scale of the later half of the measurements in a run's lines; None if they do not show it."""
    measured = [line for line in lines if "noise_signal" in line and "noise_trace" in line]
    later = measured[len(measured) // 2 :]
    first, last = (later[0]["step"], later[-1]["step"]) if later else (0, 0)
    where = f"measured {len(later)} times, at steps {first} to {last}" + (f" of {run}" if run else "")
    return noise_scale([NoiseSample(line["noise_signal"], line["noise_trace"]) for line in later], where)


def _lines_before(path: Path, step: int) -> list[str]:
    """The lines of steps before `step`: a run that resumes from a checkpoint repeats the later ones."""
    if step <= 1 or not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] < step:
                kept.append(line + "\n")
        except (ValueError, KeyError):  # the last line of a run that was killed
            continue
    return kept


def printable(text: str) -> str:
    r"""The text with what a terminal would obey, such as escape sequences, written as Python writes it.

    >>> printable("a\x1b[2J\0b")
    'a\\x1b[2J\\x00b'
    """
    return "".join(
        each if each in "\n\t" or each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def _rounded(value: object) -> Any:
    """A number with 9 digits, which distinguish any two float32 numbers; any other value unchanged."""
    return float(f"{value:.9g}") if isinstance(value, float) else value


_LINE_SECONDS = 5.0


class _Lines(logging.Handler):
    """Prints log records, at most one in so many seconds."""

    _said = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if record.created - self._said >= _LINE_SECONDS:
            self._said = record.created
            print(record.getMessage(), flush=True)


@contextmanager
def compile_progress() -> Iterator[None]:
    """Print a line every few seconds while regions of a plan with `compile=` are compiled."""
    log, handler = logging.getLogger("plait.inductor"), _Lines()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


class Reporter:
    """Shows a job's progress, on rank 0 only. Of the job's `steps`, `done` were taken before it resumed."""

    def __init__(self, steps: int, done: int) -> None:
        self.console = Console(highlight=False, emoji=False)
        self._steps = steps
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=20)  # steps, tokens and seconds of the last calls
        self._done = done
        self._last_line = 0.0
        self._bar: Progress | None = None
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s  left"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._bar.add_task("", total=steps, completed=done, loss=float("nan"), speed=0.0)
            self._bar.start()

    def step(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        """Show that `step` steps are done. Those since the last call took `tokens` tokens and `seconds` seconds."""
        self._recent.append((step - self._done, tokens, seconds))
        self._done = step
        num, all_tokens, spent = (sum(each) for each in zip(*self._recent, strict=True))
        speed = all_tokens / max(spent, 1e-9)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=loss, speed=speed)
            return
        now = time.monotonic()
        if now - self._last_line >= _LINE_SECONDS or step == self._steps:
            self._last_line = now
            left = (self._steps - step) * spent / num
            self.say(f"step {step}/{self._steps}  loss {loss:.3f}  {speed:,.0f} tokens/s  {left:.0f} s left")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
