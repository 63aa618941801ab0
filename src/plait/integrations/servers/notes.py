"""The messages between coordinator and workers. They hold references to values and gradients, not the arrays
themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Task:
    """What a worker does next: read the values of `version`, given as one reference per server, and train on `piece`.

    then       the piece after it, which is read ahead
    step       steps of the run that are done
    num_steps  steps that the worker takes before it pushes, one on each of as many batches: `piece` is of the first
    saves      whether the push must contain the state of the worker's own optimizer
    """

    version: int
    piece: int
    then: int
    values: tuple[Any, ...]
    step: int = 0
    num_steps: int = 1
    saves: bool = False


@dataclass(frozen=True)
class Refused:
    """Why a worker may not join."""

    why: str


@dataclass(frozen=True)
class Note:
    """The message that comes with a push.

    number   its number among the worker's pushes
    piece    the piece of data that the gradient was computed on
    base     the version of the values that it was computed on
    weight   the weight of the loss in the mean over pieces
    waited   seconds that the worker waited for values
    data     seconds that the worker waited for data
    moved    bytes that the worker read and pushed
    moments  the state of the worker's own optimizer, by name and key, if the task asked for it
    """

    worker: int
    number: int
    job: str
    piece: int
    base: int
    loss: float
    weight: float
    tokens: int
    waited: float = 0.0
    data: float = 0.0
    moved: int = 0
    buffers: dict[str, np.ndarray] = field(default_factory=dict)
    moments: Any = None


@dataclass(frozen=True)
class Progress:
    """The progress of a run, for display. `tokens` are counted since the coordinator's process started."""

    step: int = 0
    loss: float = float("nan")
    tokens: int = 0
    workers: int = 0
    rate: float = 0.0
    over: bool = False
    messages: tuple[str, ...] = ()


@dataclass(frozen=True)
class End:
    """How a run ended. `error` is the reason if it ended before its last step; `of_loss` says that the loss is the
    reason."""

    step: int
    loss: float
    stopped: bool = False
    error: str = ""
    of_loss: bool = False
