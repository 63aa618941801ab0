"""Captures and lowers a step once for each shape of batch; ranks that are threads share one compiler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from plait.graph.batch import batch_signature
from plait.graph.capture import capture
from plait.graph.lower import Lowered, lower
from plait.spec.annotation import Annotations
from plait.spec.layout import Layout
from plait.spec.plan import Plan

LossFn = Callable[[Any, Any], Any]


class Compiler:
    """From (model, loss, plan) and a batch to the lowered step, cached by the batch's structure and shapes."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, plan: Plan, annotations: Annotations | None = None) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.plan = plan
        self.annotations = annotations
        self._found: dict[tuple[str, bool], Lowered] = {}
        self._settled: Mapping[str, Layout] | None = None
        self._lock = threading.Lock()

    def knows(self, signature: str, train: bool) -> bool:
        return (signature, train) in self._found

    def lowered(self, batch: Any, train: bool = True) -> Lowered:
        """The lowered step for a global batch; `train=False` is the forward of evaluation."""
        key = (batch_signature(batch), train)
        with self._lock:
            if key not in self._found:
                captured = capture(self.model, self.loss_fn, batch, train=train, differentiate=train)
                found = lower(captured, self.plan, self.annotations, self._settled)
                if self._settled is None:
                    parameters = {i.name for i in captured.inputs if i.kind == "parameter"}
                    self._settled = {name: found.layouts[name] for name in parameters}
                self._found[key] = found
            return self._found[key]
