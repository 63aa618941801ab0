"""plait trains any PyTorch model on any number of devices: a line of plan says how the step is spread."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Imported when first used: `plait --help` and the plan's own checks need no torch.
_HOME = {
    "Plan": "plait.plan.plan",
    "Layout": "plait.spec.layout",
    "Mesh": "plait.spec.mesh",
    "Trainer": "plait.api.trainer",
    "StepEnd": "plait.api.trainer",
    "LocalBatch": "plait.engine.local_batch",
    "loader": "plait.engine.data.loader",
    "verify": "plait.api.verify",
    "Verifier": "plait.api.verify",
    "Report": "plait.api.verify",
    "explain": "plait.api.explain",
    "memory": "plait.api.memory",
    "simulate": "plait.api.simulate_step",
    "search": "plait.api.plan_model",
    "run_ranks": "plait.comm.thread_world",
    "Weighted": "plait.compile.capture.loss_values",
    "Sum": "plait.compile.capture.loss_values",
    "Mean": "plait.compile.capture.loss_values",
    "Max": "plait.compile.capture.loss_values",
    "Min": "plait.compile.capture.loss_values",
    "SparseTable": "plait.integrations.ray_servers.tables.sparse_table",
    "op_rule": "plait.compile.ops.custom",
    "optim": "plait.optim",
    "PlaitError": "plait.errors",
    "PlanError": "plait.errors",
    "ScheduleError": "plait.errors",
    "LayoutError": "plait.errors",
    "CaptureError": "plait.errors",
    "BatchError": "plait.errors",
    "LossError": "plait.errors",
    "ModelError": "plait.errors",
    "ConfigError": "plait.errors",
    "DataError": "plait.errors",
    "CheckpointError": "plait.errors",
    "HomeError": "plait.errors",
    "WorldError": "plait.errors",
    "RankFailed": "plait.errors",
}

__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
