"""The state of a training run on one rank: what a checkpoint saves and restores, whoever trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from plait.comm.protocol import World
from plait.engine.average import MovingAverage
from plait.engine.executor import ModelParts
from plait.engine.local_sgd.replicas import Replicas
from plait.engine.scaling import LossScale
from plait.errors import PlanError
from plait.plan.plan import Plan

NO_BATCH_YET = "the trainer has not seen a batch yet; call prepare(batch) or step(batch) first"


@dataclass
class TrainState:
    """Live objects, which training changes, not copies of them.

    executor    what the rank holds of the model; None before the first batch, when `held` raises PlanError
    update      the optimizer's step, which knows where the optimizer's state is kept
    loss_scale  of fp16
    replicas    of a plan whose ranks agree later
    average     a moving average of the weights
    """

    plan: Plan
    world: World
    seed: int
    step_number: int = 0
    executor: ModelParts | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    update: Any = None
    loss_scale: LossScale | None = None
    replicas: Replicas | None = None
    average: MovingAverage | None = None

    @property
    def held(self) -> ModelParts:
        """What the rank holds of the model, once there is a batch."""
        if self.executor is None:
            raise PlanError(NO_BATCH_YET)
        return self.executor
