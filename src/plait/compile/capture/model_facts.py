"""The facts of a model that are known before its step is captured, as plain values."""

from __future__ import annotations

from torch import nn

from plait.compile.ir.dtypes import torch_name
from plait.plan.step_facts import ParameterFacts, StepFacts


def model_facts(model: nn.Module) -> StepFacts:
    """The facts of a model: its parameters, and the names of its modules."""
    parameters = {
        name: ParameterFacts(tuple(p.shape), torch_name(p.dtype), p.requires_grad)
        for name, p in model.named_parameters()
    }
    return StepFacts(parameters, tuple(name for name, _ in model.named_modules()))
