"""The state of a plan with backend=xla: parameters on devices, and their copies in host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph

from plait.backends.backend import Executable, StepResult, Update
from plait.backends.recorder import TraceRecorder
from plait.backends.xla.jax_arrays import as_in_torch, put, to_torch
from plait.backends.xla.mesh_shardings import (
    Constrained,
    MeshShardings,
    ParameterShardings,
    constrained,
    refuse_layouts,
)
from plait.backends.xla.xla_executable import DeviceCopies, XlaExecutable
from plait.backends.xla.xla_step import Arrays, Found, Inputs, XlaStep, added, norm_of, scaled
from plait.comm.protocol import World
from plait.compile.capture.captured import Captured
from plait.compile.rank_program import RankProgram
from plait.engine.compiler import Compiler
from plait.engine.local_batch import LocalBatch, first_microbatch, global_like
from plait.engine.model_weights import release, where
from plait.engine.rank_executor import RankExecutor
from plait.plan.plan import Plan

StepRunner = Callable[[XlaStep, Inputs], Found]


class _XlaBackend:
    """A Backend whose executables share what is on the devices."""

    def __init__(
        self,
        placed: ParameterShardings,
        shardings: MeshShardings,
        copies: DeviceCopies,
        run_step: StepRunner,
        constrain: Callable[[Captured], tuple[Graph, Constrained]],
    ) -> None:
        self._given = (placed, shardings, copies, run_step, constrain)

    def build(self, program: RankProgram, world: World, recorder: TraceRecorder | None = None) -> Executable:
        return XlaExecutable(program, *self._given)


def host_plan(plan: Plan) -> Plan:
    """The plan of the one process that drives the devices, for which every tensor is whole."""
    return Plan(micro=plan.micro, precision=plan.precision, exceptions=plan.exceptions)


class XlaExecutor(RankExecutor):
    """The counterpart of RankExecutor where XLA has the devices. It is the only rank, and sees every tensor whole.

    It captures steps, reads batches and follows Python as RankExecutor does, with the graph of one device; the layouts
    come from compiling the step for the plan. Raises PlanError for too few devices, and for what XLA cannot have.
    """

    def __init__(self, compiler: Compiler, world: World, batch: Any, seed: int = 0, adopt: bool = False) -> None:
        plan = self._plan = compiler.plan
        self.shardings = MeshShardings(plan)
        first = first_microbatch(batch, plan.micro)
        compiled = compiler.compiled(global_like(first) if isinstance(first, LocalBatch) else first)
        self.device_sharding = compiled.program.sharding  # how the devices hold each parameter
        refuse_layouts(self.device_sharding.states)
        self.placed = ParameterShardings(self.device_sharding, self.shardings)
        self.arrays: Arrays = {}  # the parameters on the devices
        self.gradients: Arrays = {}  # those that wait for an update
        self._new_gradients: Arrays = {}  # those of the last step
        self._updating: tuple[StepRunner, tuple[str, ...]] | None = None
        self._are_newer = False  # whether the devices have newer parameters than the host
        self._versions: dict[str, int] = {}  # of the host's parameters, when both were equal
        self._adopted = adopt
        self._copies = DeviceCopies(self.shardings)
        constrain = functools.partial(constrained, plan=plan, parameters=self.device_sharding, shardings=self.shardings)
        backend = _XlaBackend(self.placed, self.shardings, self._copies, self._run_step, constrain)
        super().__init__(Compiler(compiler.captures, host_plan(plan)), world, batch, seed, adopt, backend=backend)
        self.compiled = compiled
        self.layouts = {name: self.device_sharding.states[name] for name in self.layouts}
        self._held = []  # the model has no parameters that a user may exchange
        self._upload()

    @property
    def gradient_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each gradient of the first step, by parameter."""
        (first, *_) = self._executables.values()
        assert isinstance(first, XlaExecutable)
        return first.step.gradient_dtypes

    def release(self) -> None:
        """Take the parameters out of the model: their values on the host are old after the first step."""
        if self._adopted:
            own = self.rank_parameters.parameters.keys()
            release(self.model, own, {n: where(self.device_sharding.parameters[n], self._plan) for n in own})

    # Parameters

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters in host memory, whole and as new as the devices'. A step reads what is written to them."""
        self._fetch()
        return self.rank_parameters.parameters

    @property
    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters in host memory, whose values may be older than those on the devices."""
        return self.rank_parameters.parameters

    @torch.no_grad()
    def _fetch(self) -> None:
        if not self._are_newer:
            return
        self._are_newer = False
        for name, array in self.arrays.items():
            parameter = self.rank_parameters.parameters[name]
            parameter.detach().copy_(to_torch(array))
            self._versions[name] = parameter._version

    def _upload(self) -> None:
        """Copy parameters that were written on the host to the devices."""
        for name, parameter in self.rank_parameters.parameters.items():
            if self._versions.get(name) != parameter._version:
                with as_in_torch():
                    self.arrays[name] = put(parameter, self.placed.held[name])
                self._versions[name] = parameter._version

    def replace_parameters(self, new: Arrays) -> None:
        """Take over parameters that an update has made on the devices."""
        self.arrays |= new
        self._are_newer = True

    def local(self, name: str) -> Tensor | None:
        self._fetch()
        return super().local(name)

    def set_local(self, name: str, part: Tensor) -> None:
        self._fetch()
        super().set_local(name, part)

    def set_whole(self, name: str, whole: Tensor) -> None:
        self.set_local(name, whole)

    def updated(self) -> None:
        """Make steps read what is in host memory, also where it was written past PyTorch, as from a file."""
        if not self._are_newer:
            self._versions.clear()
        self._copies.clear()

    # Steps

    def run(
        self, batch: Any, key: int, train: bool = True, scale: Tensor | None = None, update: Update | None = None
    ) -> StepResult:
        self._upload()
        return super().run(batch, key, train, scale, update)

    def _run_step(self, step: XlaStep, inputs: Inputs) -> Found:
        if self._updating is not None and step.captured.frozen == self._updating[1]:
            return self._updating[0](step, inputs)
        found, self._new_gradients = step.run(self.arrays, inputs)
        return found

    @contextmanager
    def updating(self, run: StepRunner, frozen: tuple[str, ...]) -> Iterator[None]:
        """Context in which `run` runs steps together with their updates.

        It does so only while the `frozen` parameters are the same as before: the optimizer must first take over a
        parameter that begins to train."""
        self._updating = (run, frozen)
        try:
            yield
        finally:
            self._updating = None

    # Gradients

    def keep_gradients(self) -> None:
        """Add the gradients of the last step to those that wait."""
        with as_in_torch():
            self.gradients = added(self.gradients, self._new_gradients) if self.gradients else self._new_gradients
        self._new_gradients = {}

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        assert not gradients, "gradients are on the devices"
        self.gradients = {}

    def whole_gradients(self) -> dict[str, Tensor]:
        return {name: to_torch(gradient) for name, gradient in self.gradients.items()}

    def scale_gradients(self, factor: Tensor) -> None:
        with as_in_torch():
            self.gradients = scaled(self.gradients, put(factor, self.shardings.whole))

    def gradient_norm(self) -> Tensor:
        with as_in_torch():
            return to_torch(norm_of(self.gradients))
