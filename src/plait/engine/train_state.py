"""The state of a training run on one rank: what a checkpoint saves and restores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from plait.comm.protocol import World
from plait.engine.executor import ModelParts
from plait.engine.local_sgd.replicas import Replicas
from plait.engine.loss_scale import LossScale
from plait.engine.moving_average import MovingAverage
from plait.errors import PlanError
from plait.plan.plan import Plan

NO_BATCH_YET = "the trainer has not seen a batch yet; call prepare(batch) or step(batch) first"


@dataclass
class TrainState:
    """The objects that hold the state of a run. Training changes them; they are not copies.

    executor    the model's parameters and buffers on this rank; None before the first batch
    update      the optimizer's step (engine/optimizer_step.py), which also reads optimizer state that is offloaded
    loss_scale  the loss scale of fp16
    replicas    the replicas of a plan whose ranks synchronise less often than every step, or through a compressor
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
        """The parameters and buffers of this rank. Raises PlanError before the first batch."""
        if self.executor is None:
            raise PlanError(NO_BATCH_YET)
        return self.executor
