"""Facts of a run besides its plan: of the model, the batch, the captured step, the optimizer and the machines.

They are plain values. `refusals` in plan/legality.py decides by them whether the plan can run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ParameterFacts:
    """The shape of one parameter, its dtype by the name in torch, such as float32, and whether it trains."""

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    trains: bool = True


@dataclass(frozen=True)
class CutTrial:
    """An optimizer that may update a part of a parameter in another way than the whole parameter.

    name       the type of the optimizer
    why        what it does that depends on the whole parameter
    parameter  the name of a parameter that is cut
    layout     the layout of that parameter, as text
    wraps      whether the optimizer is an object that steps several optimizers at once
    """

    name: str
    why: str
    parameter: str
    layout: str
    wraps: bool = False


@dataclass(frozen=True)
class OptimizerFacts:
    """How the optimizers work on parameters in their layouts, as trials on small tensors show.

    apart      optimizers that do not work on parts of parameters
    together   (type, why) of user-defined optimizers whose update of a parameter may depend on other parameters
    scattered  the axis, with its size, along which each rank has different parameters
    wrappers   types of objects that step several optimizers at once
    """

    apart: tuple[CutTrial, ...] = ()
    together: tuple[tuple[str, str], ...] = ()
    scattered: tuple[str, int] | None = None
    wrappers: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepFacts:
    """The facts of a run. A fact that is not known yet is None or empty, and no refusal depends on it.

    parameters       facts of the parameters, by name
    modules          names of all modules of the model
    clip_norm        the norm to which gradients are clipped, as `Trainer` takes it
    updates_within   whether the plan's schedule updates weights within a step
    num_stages       the number of stages of the plan's schedule; 1 without a pipeline
    rows             the number of rows of the global batch
    called           names of the modules that are called in the step, in the order of their first call
    uncaptured       why the step cannot be captured as a graph
    nearest          the plan nearest to the given one under which the model runs without a graph
    changed_outside  names of tensors outside the model that the step changes
    unsteady         a Python value that the step changes, so that the next step has another graph
    left_out         names of parameters without a gradient in steps that leave out their part of the model
    optimizer        facts of the optimizer, once the layouts of all parameters are known
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
    left_out: tuple[str, ...] = ()
    optimizer: OptimizerFacts = OptimizerFacts()


@dataclass(frozen=True)
class Place:
    """The place where ranks will run.

    device          the type of their device
    ranks_per_host  the number of ranks on each host; None: all on one host
    shares_memory   whether the processes of a host may open each other's memory
    lacks           what `compile=` needs and the place does not have, in words
    without_bf16    the device in words, if it has no units for bfloat16
    """

    device: str = "cpu"
    ranks_per_host: int | None = None
    shares_memory: bool = True
    lacks: str = ""
    without_bf16: str = ""
