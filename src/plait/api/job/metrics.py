"""What a job measures: a line of JSON for each step, and TensorBoard where it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plait.errors import DataError

METRICS = "metrics.jsonl"


class MetricsLog:
    """Writes `metrics.jsonl`; only rank 0 makes one.

    A line has `step` (counted from 1), `loss`, `lr`, `tokens_per_s`, `seconds` of the step, `data_seconds` of them
    spent on waiting for data, `sent_bytes` by this rank, `agree_seconds` spent on exchanges of replicas that agree
    later, `gradient_norm` where gradients are clipped, and `held_out_loss` where it was evaluated. Of what the loss
    function returns beside the loss, each single number is `aux/NAME`, and `held_out_aux/NAME` of an evaluation. The
    first line since the run was started, or went on, has its `plan`.
    With parameter servers it also has what integrations/servers/run_metrics.py counts, and `held_out_loss` has lines of
    its own: it comes from another process.
    """

    def __init__(self, folder: Path, first_step: int, tensorboard: bool = False, plan: str = "") -> None:
        self._first = {"plan": plan} if plan else {}
        self.path = folder / METRICS
        kept = _lines_before(self.path, first_step)
        self._file = open(self.path, "w", buffering=1)  # noqa: SIM115  (closed by `close`)
        self._file.writelines(kept)
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(folder / "tensorboard", purge_step=first_step)

    def write(self, values: dict[str, Any]) -> None:
        """A line, with numbers by name; a mapping from whole numbers, as text, to counts is a histogram."""
        first, self._first = self._first, {}
        self._file.write(json.dumps({key: _rounded(value) for key, value in (values | first).items()}) + "\n")
        if self._board is not None:
            for key, value in values.items():
                if isinstance(value, dict):
                    self._write_histogram(key, value, values["step"])
                elif key != "step":
                    self._board.add_scalar(key, value, values["step"])

    def _write_histogram(self, name: str, counts: dict[str, int], step: int) -> None:
        at = {int(key): number for key, number in sorted(counts.items(), key=lambda pair: int(pair[0]))}
        if not at:
            return
        self._board.add_histogram_raw(
            name, min(at), max(at), sum(at.values()), sum(k * n for k, n in at.items()),
            sum(k * k * n for k, n in at.items()), [k + 0.5 for k in at], list(at.values()), step,
        )  # fmt: skip

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every line of a metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The lines of steps, as far as they can be read: a run may be killed, or go on, while it writes one.

    DataError for a file that cannot be read at all; one that is not there has none.
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
        elif isinstance(values, dict) and "held_out_loss" in values:  # of an evaluator, which comes later than the step
            for line in (line for line in found if line["step"] == values.get("step")):
                line["held_out_loss"] = values["held_out_loss"]
    return found


def _lines_before(path: Path, step: int) -> list[str]:
    """The lines of the steps before `step`: a run that goes on from a checkpoint does the later ones again."""
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
    """Times and rates need no 17 digits; losses keep 9, which tell any two float32 numbers apart."""
    return float(f"{value:.9g}") if isinstance(value, float) else value
