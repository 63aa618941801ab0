"""The update of a plan with backend=xla: the user's optimizer as a part of XLA's program.

What the optimizer does to an element is recorded anew at each step (engine/recorded_update.py). Its program is compiled
once; its numbers, such as a learning rate that a scheduler has changed, are inputs. The optimizer's tensors are on the
devices. `fetch` copies them to the optimizer's own `state`, and what has been written there since is what the next step
reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
import torch
from jax import Array
from torch import Tensor, nn

from plait.backends.xla.element_update import StateArrays, UpdateOfKind, check_lowered
from plait.backends.xla.jax_arrays import as_in_torch, put, to_torch
from plait.backends.xla.lowerings.table import jax_dtype, torch_dtype
from plait.backends.xla.xla_step import Arrays, Found, Inputs, Rules, Stepped, XlaStep, update_alone
from plait.engine.recorded_update import KindOfParameter, RecordedStep, record_step
from plait.engine.xla_executor import XlaExecutor
from plait.errors import PlanError, Refusal
from plait.optim.combined import CombinedOptimizer

_COUNTS = ("step", "mu_product", "eta", "mu")  # 0-d state in torch.optim that is no element of a 0-d parameter


@dataclass(frozen=True)
class UpdateOutcome:
    """The outcome of an update: whether it was made, and the norm of the gradients before clipping."""

    updated: bool
    norm: Tensor | None


@dataclass(frozen=True)
class _Planned:
    """The update of the next step: its programs, their numbers, and what to count once it is made."""

    updates: tuple[UpdateOfKind, ...]
    numbers: list[np.ndarray]
    counts: dict[str, dict[str, object]]
    steps: list[RecordedStep]
    made: dict[str, set[str]]  # keys of state that it has made, by parameter


class XlaUpdate:
    """Steps an optimizer whose parameters and state are on devices.

    Raises PlanError for an optimizer that does not work element by element, or that runs code of the user's around its
    steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, executor: XlaExecutor) -> None:
        self._optimizer, self._executor = optimizer, executor
        self._members: list[torch.optim.Optimizer] = [optimizer]
        if isinstance(optimizer, CombinedOptimizer):
            self._members = list(optimizer.members.values())
        self._names: dict[Tensor, str] = {p: name for name, p in executor.own_parameters.items()}
        self._state: StateArrays = {}
        self._counts: dict[str, dict[str, object]] = {}
        self._seen: dict[str, dict[str, tuple[object, int]]] = {}  # what the host had when both were equal
        self._newer: set[str] = set()  # parameters whose state on the devices is newer
        self._alone: dict[tuple[tuple[UpdateOfKind, ...], Rules], Callable[..., Stepped]] = {}
        self.outcome: UpdateOutcome | None = None
        _refuse(optimizer, self._members)

    def check(self, gradients: Mapping[str, torch.dtype]) -> None:
        """Raise PlanError if the optimizer cannot be compiled, before the first step."""
        self._absorb()
        planned = self._plan_step(gradients, keeps=False)
        for update in planned.updates:
            check_lowered(update.program, type(self._optimizer).__name__)

    # The state on the host

    @torch.no_grad()
    def fetch(self) -> None:
        """Copy the state on the devices, where it is newer, to the optimizer's own."""
        for parameter, name in self._names.items():
            if name not in self._newer:
                continue
            kept = self._optimizer.state[parameter]
            for key, count in self._counts.get(name, {}).items():
                kept[key] = count.clone() if isinstance(count, Tensor) else count
            for key, array in self._state.get(name, {}).items():
                values = to_torch(array)
                own = kept.get(key)
                if isinstance(own, Tensor) and own.shape == values.shape and own.dtype == values.dtype:
                    own.copy_(values)
                else:
                    kept[key] = values
            self._note(name, kept)
        self._newer.clear()

    def _note(self, name: str, kept: Mapping[str, object]) -> None:
        self._seen[name] = {key: (value, _version(value)) for key, value in kept.items()}

    def _absorb(self) -> None:
        """Copy what was written to the optimizer's own state to the devices."""
        arrays = {key for own in self._state.values() for key in own}
        for parameter, name in self._names.items():
            kept = self._optimizer.state.get(parameter)
            seen = self._seen.get(name, {})
            if name in self._newer or (not kept and not seen):
                continue
            kept = kept or {}
            if kept.keys() == seen.keys() and all(
                value is seen[key][0] and _version(value) == seen[key][1] for key, value in kept.items()
            ):
                continue
            self._state[name], self._counts[name] = {}, {}
            sharding = self._executor.shardings.of_layout(self._executor.device_sharding.states[name])
            for key, value in kept.items():
                if _is_of_elements(key, value, parameter, arrays):
                    with as_in_torch():
                        self._state[name][key] = put(value, sharding)
                else:
                    self._counts[name][key] = value.clone() if isinstance(value, Tensor) else value
            self._note(name, kept)

    @property
    def arrays(self) -> list[Array]:
        """The state on the devices."""
        return [array for own in self._state.values() for array in own.values()]

    def state_of(self, parameter: nn.Parameter) -> dict[str, object]:
        """A parameter's state by key, in host memory."""
        self.fetch()
        return dict(self._optimizer.state.get(parameter, {}))

    def settle(self, parameter: nn.Parameter) -> None:
        """Nothing to do: the next step reads the state that was set."""

    # Steps

    def _plan_step(self, gradients: Mapping[str, torch.dtype], keeps: bool = True) -> _Planned:
        """Record the next step for parameters with gradients of these dtypes."""
        planned = _Planned((), [], {}, [], {})
        updates: list[UpdateOfKind] = []
        for member in self._members:
            kinds = self._kinds(member, gradients)
            if not kinds:
                continue
            step = record_step(member, [kind for kind, _ in kinds])
            planned.steps.append(step)
            for record, (_, names) in zip(step.kinds, kinds, strict=True):
                updates.append(UpdateOfKind(record.program, tuple(names)))
                planned.numbers.append(np.asarray(record.numbers, np.float64))
                for name in names:
                    planned.counts[name] = record.counts
                    planned.made[name] = set(record.initial)
                    if keeps:
                        self._begin(name, record.initial)
        return _Planned(tuple(updates), planned.numbers, planned.counts, planned.steps, planned.made)

    def _kinds(
        self, member: torch.optim.Optimizer, gradients: Mapping[str, torch.dtype]
    ) -> list[tuple[KindOfParameter, list[str]]]:
        """The kinds of parameters that one optimizer updates, each with the names of its parameters."""
        found: dict[tuple[object, ...], tuple[KindOfParameter, list[str]]] = {}
        for index, group in enumerate(member.param_groups):
            for parameter in group["params"]:
                name = self._names.get(parameter, "")
                if name not in gradients:
                    continue
                state = tuple((key, torch_dtype(a.dtype)) for key, a in self._state.get(name, {}).items())
                counts = tuple(self._counts.get(name, {}).items())
                kind = KindOfParameter(index, parameter.ndim, parameter.dtype, gradients[name], state, counts)
                token = (index, parameter.ndim, parameter.dtype, gradients[name], state, _token(counts))
                found.setdefault(token, (kind, []))[1].append(name)
        return list(found.values())

    def _begin(self, name: str, initial: Mapping[str, tuple[float, torch.dtype]]) -> None:
        layout = self._executor.device_sharding.states[name]
        sharding = self._executor.shardings.of_layout(layout)
        for key, (value, dtype) in initial.items():
            made = np.full(layout.shape, value, jax_dtype(dtype))
            self._state.setdefault(name, {})[key] = jax.device_put(made, sharding)

    def run_with(self, rules: Rules, step: XlaStep, inputs: Inputs) -> Found:
        """Run a step, and update, in one program. `outcome` then says what the update has come to."""
        self._absorb()
        planned = self._plan_step(step.gradient_dtypes)
        trained, others = self._split(planned)
        program = step.step_and_update(planned.updates, rules)
        found: Found
        found, new, state, norm, finite = program(trained, others, self._of(planned), inputs, planned.numbers)
        self._take_over(planned, new, state, norm, finite)
        return found

    def finish(self, rules: Rules) -> tuple[bool, Tensor | None]:
        """The outcome of the update, which is made now if it was not made with the step."""
        if self.outcome is None:
            self._step(rules)
        assert self.outcome is not None
        outcome, self.outcome = self.outcome, None
        return outcome.updated, outcome.norm

    def step(self) -> None:
        """Update with the gradients that wait."""
        self._step(Rules())
        self.outcome = None

    def _step(self, rules: Rules) -> None:
        self._absorb()
        executor = self._executor
        with as_in_torch():
            planned = self._plan_step({name: torch_dtype(g.dtype) for name, g in executor.gradients.items()})
            trained, _ = self._split(planned)
            gradients = {name: executor.gradients[name] for name in planned.counts}
            key = (planned.updates, rules)
            if key not in self._alone:
                self._alone[key] = update_alone(executor.placed, planned.updates, rules)
            new, state, norm, finite = self._alone[key](trained, gradients, self._of(planned), planned.numbers)
            self._take_over(planned, new, state, norm, finite)

    def _split(self, planned: _Planned) -> tuple[Arrays, Arrays]:
        arrays = self._executor.arrays
        trained = {name: arrays[name] for update in planned.updates for name in update.names}
        return trained, {name: array for name, array in arrays.items() if name not in trained}

    def _of(self, planned: _Planned) -> StateArrays:
        return {name: self._state.get(name, {}) for name in planned.counts}

    def _take_over(self, planned: _Planned, new: Arrays, state: StateArrays, norm: Array | None, finite: Array) -> None:
        self._executor.replace_parameters(new)
        self._state |= state
        updated = bool(finite)
        if updated:
            for step in planned.steps:
                step.advance()
            self._counts |= planned.counts
        else:
            for name, keys in planned.made.items():
                self._state[name] = {key: a for key, a in self._state[name].items() if key not in keys}
        self._newer |= planned.counts.keys()
        for each in (self._optimizer, *self._members):  # which a scheduler looks for
            each._opt_called = True  # type: ignore[attr-defined]
        self.outcome = UpdateOutcome(updated, None if norm is None else to_torch(norm))


def _refuse(optimizer: torch.optim.Optimizer, members: list[torch.optim.Optimizer]) -> None:
    if isinstance(optimizer, CombinedOptimizer) and optimizer.wrappers:
        what = f"backend=xla compiles the steps of optimizers, and {optimizer.title} does more around them"
        raise PlanError(Refusal(what, "", "give the optimizers within it, or leave backend=xla out"))
    for each in members:
        hooks = (*each._optimizer_step_pre_hooks.values(), *each._optimizer_step_post_hooks.values())
        if hooks:
            what = f"backend=xla compiles the optimizer's step, and {type(each).__name__} has hooks around it"
            raise PlanError(Refusal(what, "", "call them after trainer.step, or leave backend=xla out"))


def _version(value: object) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _token(counts: tuple[tuple[str, object], ...]) -> tuple[object, ...]:
    """A hashable key of what an optimizer counts."""
    return tuple((key, (str(v.dtype), v.tolist()) if isinstance(v, Tensor) else repr(v)) for key, v in counts)


def _is_of_elements(key: str, value: object, parameter: Tensor, arrays: set[str]) -> bool:
    """Whether a value of the state is a tensor with an element for each of the parameter's."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return False
    return bool(value.ndim) or key in arrays or key not in _COUNTS
