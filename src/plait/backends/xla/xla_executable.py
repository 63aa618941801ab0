"""A step of XLA behind the protocol of executables: tensors of torch in host memory go in and come out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax import Array
from torch import Tensor
from torch.fx import Graph

from plait.backends.backend import StepResult, Update
from plait.backends.xla.jax_arrays import as_in_torch, put, to_torch
from plait.backends.xla.mesh_shardings import Constrained, MeshShardings, ParameterShardings
from plait.backends.xla.xla_step import Arrays, Found, Inputs, XlaStep
from plait.compile.capture.captured import Captured
from plait.compile.capture.loss_values import LossPart, Outputs
from plait.compile.ops.draw import micro_key, seed_of
from plait.compile.rank_program import RankProgram


class DeviceCopies:
    """The arrays of tensors in host memory, which are copied again where they were written to."""

    def __init__(self, shardings: MeshShardings) -> None:
        self._shardings = shardings
        self._known: dict[str, tuple[Tensor, int, Array]] = {}

    def array(self, name: str, tensor: Tensor) -> Array:
        """The array of a tensor, which has the name."""
        known = self._known.get(name)
        if known is None or known[0].data_ptr() != tensor.data_ptr() or known[1] != tensor._version:
            self._known[name] = known = (tensor, tensor._version, put(tensor, self._shardings.whole))
        return known[2]

    def clear(self) -> None:
        """Copy every tensor again when its array is next asked for."""
        self._known.clear()

    @torch.no_grad()
    def write_back(self, name: str, tensor: Tensor, array: Array) -> None:
        """Copy the values of an array to its tensor."""
        tensor.copy_(to_torch(array))
        self._known[name] = (tensor, tensor._version, array)


class XlaExecutable:
    """The Executable of a captured step. `run_step` has the parameters, and takes the gradients; `constrain` gives the
    graph of the step with constraints (mesh_shardings.py)."""

    collective_order = ""

    def __init__(
        self,
        program: RankProgram,
        placed: ParameterShardings,
        shardings: MeshShardings,
        copies: DeviceCopies,
        run_step: Callable[[XlaStep, Inputs], Found],
        constrain: Callable[[Captured], tuple[Graph, Constrained]],
    ) -> None:
        self.program = program
        self._shardings, self._copies, self._run_step = shardings, copies, run_step
        captured = program.captured
        self.step = XlaStep(captured, program.plan.micro, placed, constrain(captured))
        with as_in_torch():
            self.step.graph.check()
            self._constants = {name: put(value, shardings.whole) for name, value in captured.constants.items()}

    def run(
        self,
        key: int,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        batches: Iterable[Mapping[str, Tensor]],
        scale: Tensor | None = None,
        update: Update | None = None,
    ) -> list[StepResult]:
        """One result, of all microbatches together, without gradients. The parameters that are passed are not read."""
        leaves = list(batches)
        with as_in_torch():
            inputs = self._inputs(key, buffers, leaves, scale)
            found = self._run_step(self.step, inputs)
            for name, array in found.buffers.items():
                self._copies.write_back(name, buffers[name], array)
            return [self._result(found, len(leaves))]

    def _inputs(
        self, key: int, buffers: Mapping[str, Tensor], leaves: list[Mapping[str, Tensor]], scale: Tensor | None
    ) -> Inputs:
        captured = self.program.captured
        wanted = [one.name for one in captured.inputs if one.kind == "buffer"]
        wanted += [o.name for o in captured.outputs if o.kind == "buffer" and o.name not in wanted]
        return Inputs(
            {name: self._copies.array(name, buffers[name]) for name in wanted},
            self._constants,
            {one.name: self._leaf(one.name, leaves) for one in captured.inputs if one.kind == "batch"},
            self._seeds(key, len(leaves)),
            None if scale is None else put(scale, self._shardings.whole),
        )

    def _leaf(self, name: str, leaves: list[Mapping[str, Tensor]]) -> Array:
        """A leaf of the batch, of all microbatches."""
        dim = self.program.captured.row_dims.get(name)
        first = leaves[0][name]
        if len(leaves) == 1:
            return put(first, self._shardings.of_rows(tuple(first.shape), dim))
        stacked = torch.stack([each[name] for each in leaves])
        return put(stacked, self._shardings.of_rows(tuple(first.shape), dim, lead=1))

    def _seeds(self, key: int, num: int) -> Array:
        seeds = [seed_of(micro_key(key, index)) for index in range(num)]
        halves = np.array([(seed & 0xFFFFFFFF, seed >> 32) for seed in seeds], np.uint32)
        placed: Array = jax.device_put(halves, self._shardings.whole)
        return placed

    def _result(self, found: Found, num: int) -> StepResult:
        loss, parts, aux = jax.device_get((found.loss, found.parts, found.aux))
        outputs = None
        if self.program.captured.aux is not None:
            outputs = tuple(self._outputs(aux, index) for index in range(num))
        tensors = None if parts is None else (to_torch(parts[0]), to_torch(parts[1]))
        return StepResult(to_torch(loss), tensors, {}, {}, aux=outputs)

    def _outputs(self, aux: dict[str, Arrays], index: int) -> Outputs:
        """The outputs of one microbatch beside its loss."""
        captured = self.program.captured
        assert captured.aux is not None
        found: Outputs = {}
        for name, kind in captured.aux.items():
            weight: Any = aux["aux_weight"].get(name)
            weight = float(captured.rows) if weight is None else to_torch(weight[index])
            found[name] = LossPart(kind, to_torch(aux["aux"][name][index]), weight)
        return found
