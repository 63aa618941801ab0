"""What coordinator and workers tell each other: references to where values and gradients lie, not these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Task:
    """What a worker does next: pull the values of `version`, one reference a server, and train on `piece`.

    `step` steps of the run are done. A worker that takes `num_steps` of its own before it pushes has its part of as
    many batches, `piece` of the first; with `saves` it tells the coordinator then what its optimizer keeps.
    """

    version: int
    piece: int
    then: int  # the piece after it, to be read ahead
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
    """What comes with a push, the `number`th of its worker, made on a piece of the data and on values of version
    `base`. Seconds are of the step that made it: waiting for values, and for data; `moved` are the bytes that it
    pulled and pushed."""

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
    moments: Any = None  # what the worker's own optimizer keeps, by name and key, where the task asked for it


@dataclass(frozen=True)
class Progress:
    """Where a run is, for people to look at."""

    step: int = 0
    loss: float = float("nan")
    tokens: int = 0  # so far in this process
    workers: int = 0
    rate: float = 0.0
    over: bool = False
    messages: tuple[str, ...] = ()


@dataclass(frozen=True)
class End:
    """How a run ended; `error` says why where it was not by its last step, and `of_loss` that it is a loss's."""

    step: int
    loss: float
    stopped: bool = False
    error: str = ""
    of_loss: bool = False
