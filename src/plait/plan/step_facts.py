"""What is known of a run beside its plan, as plain values: of the model, the batch, the captured step, the optimizer
and the machines. `refusals` in plan/legality.py decides by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ParameterFacts:
    """One parameter: its dtype by torch's name, such as float32, and whether it trains."""

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    trains: bool = True


@dataclass(frozen=True)
class CutTrial:
    """An optimizer that may update a part of a cut parameter in another way than the whole.

    name, why   the optimizer's type, and what it does
    parameter   the name of one that is cut, and its layout as text
    wraps       whether it is an object that steps several optimizers at once
    """

    name: str
    why: str
    parameter: str
    layout: str
    wraps: bool = False


@dataclass(frozen=True)
class OptimizerFacts:
    """What an optimizer does where parameters lie as they do, as trials on small tensors show.

    apart      those that do not work on parts
    together   (type, why) of optimizers of the user's that may update a parameter by what others are
    scattered  the axis, with its size, along which each rank has parameters of its own
    wrappers   types of objects that step several optimizers at once
    """

    apart: tuple[CutTrial, ...] = ()
    together: tuple[tuple[str, str], ...] = ()
    scattered: tuple[str, int] | None = None
    wrappers: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepFacts:
    """What is known of a run; what is not known yet is None, or empty, and refuses nothing.

    parameters       by name
    modules          names of all modules of the model
    clip_norm        as a Trainer is given it
    updates_within   whether the plan's schedule updates weights within a step
    num_stages       of the plan's schedule; 1 without a pipeline
    rows             of the global batch
    called           names of the modules whose forward makes calls of the step, in the order of their first call
    uncaptured       why the step is not there as a graph, where it cannot be captured
    nearest          the plan nearest to the given one under which the model runs without a graph
    changed_outside  tensors outside the model that the step changes, by place
    unsteady         a Python value that the step changes, and with which the next step is another graph
    optimizer        once the layouts of all parameters are known
    """

    parameters: Mapping[str, ParameterFacts] | None = None
    modules: tuple[str, ...] | None = None
    clip_norm: float | None = None
    updates_within: bool = False
    num_stages: int = 1
    rows: int | None = None
    called: tuple[str, ...] | None = None
    uncaptured: str = ""
    nearest: str = ""
    changed_outside: tuple[str, ...] = ()
    unsteady: str = ""
    optimizer: OptimizerFacts = OptimizerFacts()


@dataclass(frozen=True)
class Place:
    """Where ranks are to run: the type of their device, how many of them a host has, and whether the processes of a
    host may open each other's memory."""

    device: str = "cpu"
    ranks_per_host: int | None = None  # all
    shares_memory: bool = True
