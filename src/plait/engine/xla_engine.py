"""The engine of backend=xla: one process, and all devices that jax has.

Forward, backward and update are one program of XLA where a step is taken as a whole, and two where the user takes it
by halves. Parameters, gradients and the optimizer's state stay on the devices; whoever asks for them gets copies in
host memory, and what is written to these is what the next step reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from plait.backends.backend import StepResult
from plait.backends.xla.jax_arrays import bytes_on_a_device
from plait.backends.xla.xla_step import Rules
from plait.cost.memory_model import GRADIENTS, OPTIMIZER, PARAMETERS
from plait.engine.ddp_fallback import refuse_unless_data_only
from plait.engine.device_memory import explained
from plait.engine.engine import Engine, StepLoss
from plait.engine.executor import StepExecutor
from plait.engine.train_state import TrainState
from plait.engine.xla_executor import XlaExecutor
from plait.engine.xla_update import XlaUpdate
from plait.errors import CaptureError


class XlaTrainState(TrainState):
    """The state of a run whose optimizer has its state on devices: whoever reads `optimizer` has it in host memory."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        update = self.__dict__.get("update")
        if isinstance(update, XlaUpdate):
            update.fetch()
        return self.__dict__.get("_optimizer")

    @optimizer.setter
    def optimizer(self, value: torch.optim.Optimizer | None) -> None:
        self.__dict__["_optimizer"] = value


class XlaEngine(Engine):
    """An Engine whose steps XLA runs."""

    _updates = False  # whether the update follows the step that is run now

    def _make_state(self, seed: int) -> TrainState:
        return XlaTrainState(self.plan, self.world, seed)

    def hold(self, batch: Any) -> None:
        try:
            found = XlaExecutor(self.compiler, self.world, batch, self.state.seed, self._adopt)
        except CaptureError as error:
            refuse_unless_data_only(error, self.plan, self.world, self.compiler, batch)
            raise
        self._executor = self.state.executor = found
        self._frozen = found.frozen
        self._trained = found.layouts.keys() - {*found.frozen}

    @property
    def xla(self) -> XlaExecutor:
        """The executor."""
        found = self.executor
        assert isinstance(found, XlaExecutor)
        return found

    def make_optimizer(self) -> None:
        super().make_optimizer()
        if self.factories[0] is not None:
            self._update.check(self.xla.gradient_dtypes)

    def _make_update(self) -> XlaUpdate:
        optimizer = self.state.optimizer
        assert optimizer is not None
        return XlaUpdate(optimizer, self.xla)

    @property
    def _update(self) -> XlaUpdate:
        found = self.state.update
        assert isinstance(found, XlaUpdate)
        return found

    @property
    def _rules(self) -> Rules:
        """What updates obey, without a loss to look at."""
        return Rules(self.clip_norm, guards=self.state.loss_scale is not None)

    def forward_backward(self, batch: Any, updates: bool = False) -> StepLoss:
        self.prepare(batch)
        self._updates = updates and not self._num_waiting and self.state.update is not None
        try:
            return super().forward_backward(batch)
        finally:
            self._updates = False

    def run(self, batch: Any, key: int) -> StepResult:
        scale = None if self.state.loss_scale is None else self.state.loss_scale.tensor()
        executor = self.xla
        if self.state.update is not None:
            self._update.outcome = None
        with self.span("backward", "step"):
            if not self._updates:
                return executor.run(batch, key, scale=scale)
            rules = Rules(self.clip_norm, self._on_nan == "raise", self._rules.guards)
            with executor.updating(functools.partial(self._update.run_with, rules), self._frozen):
                return executor.run(batch, key, scale=scale)

    def _waiting(self) -> dict[str, Tensor]:
        return {}  # they are on the devices, where `_keep_gradients` adds to them

    def _keep_gradients(self, result: StepResult, waiting: Mapping[str, Tensor]) -> None:
        if self.state.update is None or self._update.outcome is None:
            self.xla.keep_gradients()

    def _update_with_gradients(self) -> tuple[bool, Tensor | None, Tensor | None]:
        what = f"the update of step {self.state.step_number + 1}"
        with self.span("optimizer", "STEP"), self._explained(what, lambda: self._rows):
            updated, norm = self._update.finish(self._rules)
        if self.state.loss_scale is not None:
            self.state.loss_scale.update([torch.ones(()) if updated else torch.full((), float("inf"))])
        return updated, norm if updated else None, None

    def _read_updated(self, executor: StepExecutor) -> None:
        """Nothing to do: they are where steps read them."""

    def _explained(self, what: str, num_rows: Callable[[], int]) -> AbstractContextManager[None]:
        return explained(self.state, what, num_rows, self._held_by_class)

    def _held_by_class(self) -> dict[str, int]:
        """Bytes on one device of parameters, gradients and optimizer state."""
        executor, update = self._executor, self.state.update
        if not isinstance(executor, XlaExecutor):
            return {}
        arrays = {PARAMETERS: [*executor.arrays.values()], GRADIENTS: [*executor.gradients.values()]}
        arrays[OPTIMIZER] = update.arrays if isinstance(update, XlaUpdate) else []
        return {name: sum(map(bytes_on_a_device, each)) for name, each in arrays.items()}

    def zero_grad(self) -> None:
        self._num_waiting = 0
        if self._executor is not None:
            self.xla.set_gradients({})
