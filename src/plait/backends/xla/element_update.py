"""An optimizer's update of each element of a parameter: a program of ATen ops of no shape, and as a function of jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import torch
from jax import Array
from torch._ops import OpOverload

from plait.backends.xla.graph_function import is_lowered
from plait.backends.xla.lowerings import LOWERINGS
from plait.backends.xla.lowerings.table import Result, jax_dtype
from plait.errors import PlanError, Refusal

PARAMETER, GRADIENT = "parameter", "gradient"


@dataclass(frozen=True)
class ProgramValue:
    """A tensor of a program, by its number: first its inputs, then the results of its calls."""

    index: int


@dataclass(frozen=True)
class StepNumber:
    """A number that comes with each step, by its place among those of the program."""

    index: int


@dataclass(frozen=True)
class UpdateCall:
    """A call of a functional ATen op. Its result is the program's next value, of this dtype."""

    op: OpOverload
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ElementProgram:
    """The update of one kind of parameter.

    inputs   what the first values are: PARAMETER, GRADIENT, or a key of the optimizer's state
    calls    in order
    outputs  the value that each of PARAMETER and the keys of the state has after the step
    """

    inputs: tuple[str, ...]
    calls: tuple[UpdateCall, ...]
    outputs: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class UpdateOfKind:
    """A program, and the names of the parameters that it updates."""

    program: ElementProgram
    names: tuple[str, ...]


StateArrays = dict[str, dict[str, Array]]  # the optimizer's state: arrays by parameter and key
Numbers = Sequence[Array]  # of each UpdateOfKind


def check_lowered(program: ElementProgram, optimizer: str) -> None:
    """Raise PlanError for an op of an optimizer's update that has no lowering."""
    for call in program.calls:
        if not is_lowered(call.op):
            what = f"backend=xla has no lowering for the op {call.op}, which {optimizer} uses"
            raise PlanError(Refusal(what, "", "use SGD, Adam or AdamW, or leave backend=xla out"))


def updated(
    updates: Sequence[UpdateOfKind],
    parameters: Mapping[str, Array],
    gradients: Mapping[str, Array],
    state: Mapping[str, Mapping[str, Array]],
    numbers: Numbers,
) -> tuple[dict[str, Array], StateArrays]:
    """The new values of the parameters that are updated, and of their state.

    `numbers` has an array for each of `updates`.
    """
    new: dict[str, Array] = {}
    new_state: StateArrays = {}
    for update, given in zip(updates, numbers, strict=True):
        for name in update.names:
            inputs = {PARAMETER: parameters[name], GRADIENT: gradients[name], **state.get(name, {})}
            found = _run(update.program, inputs, given)
            new[name] = found.pop(PARAMETER)
            new_state[name] = found
    return new, new_state


def _run(program: ElementProgram, inputs: Mapping[str, Array], numbers: Array) -> dict[str, Array]:
    values = [inputs[name] for name in program.inputs]
    shape = inputs[PARAMETER].shape

    def given(argument: object) -> object:
        if isinstance(argument, ProgramValue):
            return values[argument.index]
        return numbers[argument.index] if isinstance(argument, StepNumber) else argument

    for call in program.calls:
        row, dtype = LOWERINGS[call.op], jax_dtype(call.dtype)
        kwargs = {key: given(value) for key, value in call.kwargs if key != "dtype"}
        if row.wants_result:
            kwargs["result"] = Result(shape, dtype)
        values.append(jnp.asarray(row.function(*map(given, call.args), **kwargs)).astype(dtype))
    return {key: jnp.broadcast_to(values[index], shape) for key, index in program.outputs}
