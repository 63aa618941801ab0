"""One case: a plan of a model verified, and what came of it."""

from __future__ import annotations

import copy
import re
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import plait
from fuzz import texts
from fuzz.grammar import Made, Spec, make
from plait.errors import CaptureError, LayoutError, PlaitError, PlanError, RankFailed
from plait.reference.one_device import one_device_loss

KINDS = ("verified", "refused", "wrong", "crashed", "late", "hung")  # late: refused when ranks already ran
FAULTS = ("wrong", "crashed", "late", "hung")
SLOW_SECONDS = 20.0  # of processor time, for one case
_SOURCE = str(Path(plait.__file__).parent)


@dataclass(frozen=True)
class Outcome:
    """`reason` is what is counted together: a refusal's text without values, a crash's error and place."""

    kind: str
    reason: str = ""
    detail: str = ""
    seconds: float = 0.0

    @property
    def slow(self) -> bool:
        return self.seconds > SLOW_SECONDS

    def same_fault(self, other: Outcome) -> bool:
        """Whether two failures are taken for one while a case is made smaller."""
        return self.kind == other.kind and (self.kind in ("wrong", "hung") or self.reason == other.reason)


class Checker:
    """Verifies plans of one model; captures and references are shared by its plans."""

    def __init__(self, spec: Spec) -> None:
        self.made: Made = make(spec)
        self.verifier = plait.Verifier(
            self.made.model, self.made.loss_fn, self.made.batch, optimizer=self.made.optimizer, clip_norm=spec.clip_norm
        )

    def check(self, text: str) -> Outcome:
        plan, layouts = texts.split(text)
        start = time.process_time()
        before = _state(self.made.model)
        try:
            with tempfile.TemporaryDirectory() as folder:
                report = self.verifier.verify(texts.with_file(plan, Path(folder)), layouts=layouts or None)
        except Exception as error:  # whatever comes is the finding
            found = classify(error)
        else:
            found = Outcome("verified") if report.ok else Outcome("wrong", _what(report), str(report))
            if found.kind == "wrong" and not repeats_itself(self.made):
                found = Outcome("refused", "PyTorch has other gradients each time, on one device and without plait")
        after = _state(self.made.model)
        if found.kind in ("verified", "refused") and not _equal(before, after):
            found = Outcome("crashed", "the user's model was changed", found.reason)
        return Outcome(found.kind, found.reason, found.detail, time.process_time() - start)


def repeats_itself(made: Made, times: int = 8) -> bool:
    """Whether the step in plain PyTorch has the same gradients each time: a kernel may read memory that nobody has
    written."""
    found = []
    for _ in range(times):
        model = copy.deepcopy(made.model)
        torch.manual_seed(0)
        one_device_loss(model, made.loss_fn, made.batch).total.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    return all(
        torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(one.abs().max()))
        for again in found[1:]
        for one, other in zip(found[0], again, strict=True)
    )


def classify(error: BaseException) -> Outcome:
    """What an exception of verify is: a refusal, one that came too late, or a crash."""
    detail = "".join(traceback.format_exception(error))
    cause: BaseException | None = error
    while isinstance(cause, RankFailed) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(error, RankFailed):
        if isinstance(cause, (PlanError, CaptureError, LayoutError)):
            return Outcome("late", without_values(str(cause)), detail)
        return Outcome("crashed", _place(cause), detail)
    if isinstance(error, PlaitError):
        return Outcome("refused", f"{type(error).__name__}: {without_values(str(error))}", detail)
    return Outcome("crashed", _place(error), detail)


def without_values(text: str) -> str:
    """The first lines of a message with numbers, names and quotations taken out, so that like is counted with like."""
    text = " ".join(text.split())
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'_'", text)
    text = re.sub(r"\b[\w*]+(\.[\w*]+)+", "NAME", text)
    text = re.sub(r"\[[^\]]*\]|\([^)]*\)", "()", text)
    return re.sub(r"\d+", "N", text)[:160]


def _what(report: plait.Report) -> str:
    bad = report.first_bad
    assert bad is not None
    if bad.name == "loss":
        return "loss"
    for kind in ("outputs", "gradients", "parameters", "buffers"):
        if bad in getattr(report, kind):
            return kind
    return "?"


def _place(error: BaseException | None) -> str:
    """The error, and the last line of plait that it went through."""
    place = "outside"
    for frame in traceback.extract_tb(error.__traceback__ if error else None):
        if frame.filename.startswith(_SOURCE):
            place = f"{Path(frame.filename).relative_to(_SOURCE)}:{frame.name}"
    return f"{type(error).__name__} at {place}: {without_values(str(error))[:90]}"


def _state(model: torch.nn.Module) -> dict[str, Any]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and one[n].device == other[n].device and torch.equal(one[n], other[n])
        for n in one
    )
