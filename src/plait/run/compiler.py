"""Captures and lowers a step once for each shape of batch; plans share captures, ranks that are threads a compiler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from plait.graph.batch import batch_signature
from plait.graph.capture import Captured, capture
from plait.graph.lower import Lowered, lower
from plait.graph.pipeline import updates_within
from plait.graph.precision import FULL, Precision
from plait.spec.annotation import Annotations
from plait.spec.layout import Layout
from plait.spec.plan import Plan

LossFn = Callable[[Any, Any], Any]


class Captures:
    """The captured steps of one model and loss, by the batch's structure and shapes; plans may share them."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, device: torch.device | None = None) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.device = device  # where the steps will run, if not where the model is
        self._found: dict[tuple[str, bool, Precision, bool], Captured] = {}

    def captured(self, batch: Any, train: bool, precision: Precision = FULL, normalised: bool = True) -> Captured:
        """The step on a global batch; `train=False` is the forward of evaluation. CaptureError if it cannot be had."""
        key = (batch_signature(batch), train, precision, normalised)
        if key not in self._found:
            self._found[key] = capture(
                self.model,
                self.loss_fn,
                batch,
                train=train,
                differentiate=train,
                device=self.device,
                precision=precision,
                normalised=normalised,
            )
        return self._found[key]


class Compiler:
    """From captures and a plan to the lowered step, cached by the batch's structure and shapes.

    Layouts of parameters are decided with the first batch and kept from then on.
    """

    def __init__(self, captures: Captures, plan: Plan, annotations: Annotations | None = None) -> None:
        self.captures = captures
        self.plan = plan
        self.annotations = annotations
        self._found: dict[tuple[str, bool, int], Lowered] = {}
        self._settled: Mapping[str, Layout] | None = None
        self._stages: Mapping[str, tuple[int, ...]] | None = None
        self._lock = threading.Lock()

    @property
    def model(self) -> nn.Module:
        return self.captures.model

    @property
    def loss_fn(self) -> LossFn:
        return self.captures.loss_fn

    def lowered(self, batch: Any, train: bool = True, num_micro: int = 1) -> Lowered:
        """The lowered step for a global microbatch; of an evaluation for the first of so many."""
        plan = self.plan if train else replace(self.plan, micro=num_micro)
        key = (batch_signature(batch), train, plan.micro)
        with self._lock:
            if key not in self._found:
                precision = Precision(self.plan.precision, self.plan.exceptions)
                captured = self.captures.captured(
                    batch, train, precision, self.plan.micro == 1 or updates_within(self.plan)
                )
                found = lower(captured, plan, self.annotations, self._settled, self._stages)
                if self._stages is None and found.pipeline is not None:
                    self._stages = found.pipeline.stages
                if self._settled is None:
                    parameters = {i.name for i in captured.inputs if i.kind == "parameter"}
                    self._settled = {name: found.layouts[name] for name in parameters}
                self._found[key] = found
            return self._found[key]
