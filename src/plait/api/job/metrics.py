"""The metrics of a job: a line of JSON for each step, and TensorBoard if the config asks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plait.errors import DataError

METRICS = "metrics.jsonl"


class MetricsLog:
    """Writes `metrics.jsonl`, on rank 0 only.

    A line has these keys:

        step                counted from 1
        loss, lr            of the step
        tokens_per_s        of all ranks
        seconds             of the step
        data_seconds        the part of `seconds` spent waiting for data
        sent_bytes          by this rank
        agree_seconds       spent on exchanges of replicas that synchronize later
        gradient_norm       with clip_norm
        held_out_loss       after steps with an evaluation
        aux/NAME            each single number that the loss function returns beside the loss
        held_out_aux/NAME   the same of an evaluation
        plan                on the first line since the run was started or resumed

    With parameter servers a line also has the counts of integrations/servers/run_metrics.py, and `held_out_loss` has
    lines of its own, because it comes from another process.
    """

    def __init__(self, folder: Path, first_step: int, tensorboard: bool = False, plan: str = "") -> None:
        self._first = {"plan": plan} if plan else {}
        self.path = folder / METRICS
        kept = _lines_before(self.path, first_step)
        self._file = open(self.path, "w", buffering=1)  # noqa: SIM115  (closed by `close`)
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


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The lines of steps that can be read: a run may be killed while it writes one. None for a file that is missing.

    Raises DataError if the file exists and cannot be read.
    """
    found = []
    try:
        lines = path.read_text().splitlines() if path.exists() else []
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


def _lines_before(path: Path, step: int) -> list[str]:
    """The lines of steps before `step`: a run that resumes from a checkpoint repeats the later ones."""
    if step <= 1 or not path.exists():
        return []
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] < step:
                kept.append(line + "\n")
        except (ValueError, KeyError):  # the last line of a run that was killed
            continue
    return kept


def _rounded(value: Any) -> Any:
    """Times and rates need no 17 digits; losses keep 9, which distinguish any two float32 numbers."""
    return float(f"{value:.9g}") if isinstance(value, float) else value
