"""The state of one rank and its programs: parameters, buffers, and a program for each shape of batch."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plait.backends.backend import Backend, Executable, StepResult, Update
from plait.backends.choose import backend_of
from plait.backends.eager.offload.store import Offload
from plait.backends.recorder import TraceRecorder
from plait.comm.agree import agree, attempt
from plait.comm.device import Event, is_host
from plait.comm.protocol import World
from plait.compile.capture.batch import batch_form, batch_leaves, batch_numbers
from plait.compile.capture.captured import Captured, captured_digest
from plait.compile.capture.parts_left_out import LeftOut
from plait.compile.compiled import Compiled
from plait.compile.ir.dtypes import dtype_named
from plait.compile.ir.rewriting import collection_paused
from plait.compile.rank_program import RankProgram
from plait.engine.compiler import Compiler, Recent, StepCapture
from plait.engine.executor import scale_all
from plait.engine.initial_values import initial_buffers
from plait.engine.local_batch import LocalBatch, first_microbatch, global_like, microbatches, num_rows
from plait.engine.local_tensors import counts_here, gather_whole, is_whole, local_part, summed_square_axes
from plait.engine.python_effects import Changes
from plait.engine.rank_parameters import RankParameters
from plait.engine.same_batch import checksum
from plait.engine.step_results import joined, without_counts
from plait.errors import CaptureError, PlanError
from plait.spec.layout import Layout

_LOG = logging.getLogger("plait")
_SAME_CODE = (
    "model and loss must do the same on every rank: look for what depends on the rank, on the clock or on random"
    " numbers of Python, and for values made with a seed of each rank's own"
)


class RankExecutor:
    """The state of one rank of a plan.

    Built from the first batch, because what is sharded is found in the graph of the step. With `adopt`, parameters
    that stay whole are the model's own tensors, so that training changes the user's model; `release` lets the model's
    copies of others go.
    """

    def __init__(
        self,
        compiler: Compiler,
        world: World,
        batch: Any,
        seed: int = 0,
        adopt: bool = False,
        offload: Offload | None = None,
        recorder: TraceRecorder | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.compiler = compiler
        self._recorder = recorder
        self.world = world
        self.offload = offload or Offload(compiler.plan, world)
        self._backend = backend or backend_of(compiler.plan, self.offload)
        self._executables: Recent[tuple[int, bool, int], Executable] = Recent()
        self.compiled: Compiled  # the step of the first batch
        self.captures: list[StepCapture] = []  # in order
        self._signatures: dict[tuple[str, bool], None] = {}  # of batches so far
        self.with_gradient: tuple[str, ...] = ()  # parameters that the last step gave gradients of, on any rank
        self._compared: set[str] = set()  # tensors outside the model of which all ranks had the same values
        self.changing: frozenset[str] = frozenset()  # parameters that do not train, and that the step itself changes
        self.frozen: tuple[str, ...] = ()  # parameters that did not train in the last step
        self.left_out = LeftOut()  # parameters to which the last step may have given no gradient
        model = compiler.model
        program = self.executable(first_microbatch(batch, compiler.plan.micro)).program
        own = {name: p for name, p in model.named_parameters() if name not in program.captured.changing}
        self.sharding = program.sharding
        self.layouts: dict[str, Layout] = {name: self.sharding.states[name] for name in own}
        self.dtypes = {name: p.dtype for name, p in own.items()}
        self.rank_parameters = RankParameters(model, program, world, self.offload, seed, adopt)
        self._lent: set[str] = set()  # parameters whose memory is that of the values they were last given
        self.buffers: dict[str, Tensor] = {}
        buffers = dict(model.named_buffers())
        for name, buffer in initial_buffers(model, world).items():
            if adopt and (buffer is not buffers[name] or buffer.device != world.device):
                buffers[name].data = buffer.to(world.device)
            self.buffers[name] = buffers[name] if adopt else buffer.detach().clone().to(world.device)
        self.buffers |= self.rank_parameters.changing
        self._places = [
            (name, module, key)
            for prefix, module in (model.named_modules() if adopt else ())
            for key in module._buffers
            if (name := f"{prefix}.{key}" if prefix else key) in buffers
        ]
        held = {} if compiler.plan.shares_parameters or not adopt else self.rank_parameters.parameters
        self._held = [
            (name, module, key, p)
            for prefix, module in model.named_modules()
            for key, p in module._parameters.items()
            if p is not None and held.get(name := f"{prefix}.{key}" if prefix else key) is p
        ]

    def release(self) -> None:
        """Free the model's own copies of parameters that are stored elsewhere."""
        self.rank_parameters.release()

    @property
    def model(self) -> nn.Module:
        return self.compiler.model

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The tensors that the optimizer updates: this rank's part of each parameter, by name."""
        return self.rank_parameters.parameters

    @property
    def absent(self) -> dict[str, nn.Parameter]:
        """For each parameter that only other ranks have, a meta tensor of its local shape there."""
        here, own = self.world.mesh.coordinates(self.world.rank), dict(self.compiler.model.named_parameters())
        shapes = {n: layout.local_shape(self.world.mesh, here) for n, layout in self.layouts.items()}
        return {
            name: nn.Parameter(torch.empty(shape, dtype=self.dtypes[name], device="meta"), own[name].requires_grad)
            for name, shape in shapes.items()
            if name not in self.parameters
        }

    def executable(self, batch: Any, train: bool = True, num_micro: int = 1) -> Executable:
        """The program for a microbatch of this structure and shape; to evaluate, for the first of `num_micro`."""
        started = time.perf_counter()
        whole = global_like(batch) if isinstance(batch, LocalBatch) else batch
        signature = batch_form(whole)
        is_new = (signature, train) not in self._signatures
        if is_new:
            # A rank with a shape of its own would wait for the others for ever.
            before = ", ".join(one for one, mode in self._signatures if mode == train)
            remedy = (
                "give every rank rows of the same shapes at every step; shapes=bucket:N pads sequences to one length"
            )
            agree(self.world, signature, "shape of batch", remedy=f"{remedy} (so far: {before})" if before else remedy)
            captured = attempt(
                self.world,
                lambda: self.compiler.captured(whole, train),
                "capturing the step",
                captured_digest,
                _SAME_CODE,
            )
            self._signatures[signature, train] = None
        else:
            captured = self.compiler.captured(whole, train)
        key = (id(captured), train, num_micro)
        if key not in self._executables:
            if not is_new:
                remedy = "change what loss_fn and model read in Python on all ranks alike, before the same step"
                agree(self.world, captured_digest(captured), "step, captured anew", remedy=remedy)
            self._check_kinds(captured)
            with collection_paused():  # once for both
                compiled, executable = attempt(
                    self.world,
                    lambda: self._build(captured, train, num_micro),
                    "laying out the step",
                    lambda built: built[1].collective_order,
                    _SAME_CODE,
                )
            if not self._executables:
                self.compiled = compiled
            self._check_outside(captured)
            self._executables[key] = executable
            self._note(captured, train, time.perf_counter() - started)
        return self._executables[key]

    def _note(self, captured: Captured, train: bool, seconds: float) -> None:
        """Note a capture, and log all but the first."""
        first = not any(each.train == train for each in self.captures)
        cause = "the first batch" if first else self.compiler.captures.cause(captured) or "captured by another trainer"
        self.captures.append(StepCapture(cause, seconds, train))
        if not first and self.world.rank == 0:
            what = f"{'the step' if train else 'the evaluation'} was captured again in {seconds:.1f} s"
            _LOG.info("%s, time %d: %s", what, len(self.captures), cause)

    def _build(self, captured: Captured, train: bool, num_micro: int) -> tuple[Compiled, Executable]:
        compiled = self.compiler.compiled_from(captured, train, num_micro)
        if self.compiler.plan.compile != "none" and self.world.monitor is not None:
            self.world.monitor.does("compiling the step")
        return compiled, self._backend.build(compiled.program, self.world, self._recorder)

    def _check_kinds(self, captured: Captured) -> None:
        """Raise PlanError if a later step changes parameters that the first step did not."""
        if not self._executables:
            self.changing, self.frozen = captured.changing, captured.frozen
        if late := sorted(captured.changing - self.changing):
            raise PlanError(
                f"the step changes {late[0]}, a parameter that does not train, and did not do so when training began;"
                " let it change from the first step on, or make it a buffer with register_buffer"
            )

    def _check_outside(self, captured: Captured) -> None:
        """Raise WorldError if ranks have other values in tensors outside the model that no step has read before."""
        tensors = {name: self.compiler.captures.tensor(captured, name) for name in captured.outside}
        new = {name: one for name, one in tensors.items() if name not in self._compared and not one.is_meta}
        if new and self.world.mesh.size > 1:
            first, more = next(iter(new)), len(new) - 1
            what = f"values of {first}" + (f" and {more} more" if more else "")
            remedy = (
                "the step reads them outside the model: give every rank the same, with torch.manual_seed before they"
                " are made, or make them part of the model, of which rank 0's values go to all"
            )
            agree(self.world, f"checksum {int(checksum(new, 0)):016x}", what, remedy=remedy)
        self._compared |= new.keys()

    def run(
        self, batch: Any, key: int, train: bool = True, scale: Tensor | None = None, update: Update | None = None
    ) -> StepResult:
        """Forward (and with `train` backward) of one batch, microbatch after microbatch.

        Buffers take their new values, parameters do not. Gradients are of the loss, also where a scale was given.
        """
        parts = microbatches(batch, self.compiler.plan.micro if train else self._parts_of_evaluation(batch))
        self.offload.begin_step()
        executable = self.executable(parts[0]) if train else self.executable(parts[0], False, len(parts))
        program, captured = executable.program, executable.program.captured
        self._follow_model()
        outside = self._outside(captured)
        buffers = {**self.buffers, **outside}
        changes = self.compiler.captures.changes.get(id(captured), Changes())
        if len(parts) > 1 and not changes.steady:
            raise CaptureError(
                f"the step changes {changes.effects[0].place}, and needs another graph with the new value, but the"
                f" microbatches of micro={len(parts)} share one graph; leave micro out, or set the value before the"
                " first step"
            )
        before = changes.begin()
        leaves = (self._leaves(part, program) for part in parts)
        results = executable.run(key, self._inputs(program), buffers, leaves, scale, update)
        self._hand_out(captured, outside)
        changes.end(before, len(parts))
        if train:
            self.frozen = captured.frozen
        self.with_gradient = tuple(o.name for o in captured.outputs if o.kind == "gradient")
        self.left_out = captured.left_out
        result = without_counts(joined(results, scale), captured.aux is not None)
        self.offload.factor = float(result.factor) if self.offload.norms else 1.0
        return result

    @torch.no_grad()
    def _inputs(self, program: RankProgram) -> dict[str, Tensor]:
        """The parameters as the graphs of a program read them.

        They are stored as the first step reads them. One that an evaluation, or a later step, reads in another dtype is
        gathered for it from the parts that the optimizer has.
        """
        stored, first = self.rank_parameters.inputs, self.sharding.parameters
        others = {
            name: each.compute
            for name, each in program.sharding.parameters.items()
            if each.compute.dtype != first[name].compute.dtype
        }
        if away := sorted(others.keys() & self.sharding.away):
            raise PlanError(
                f"this step reads {away[0]} in {others[away[0]].dtype}, and the first one in"
                f" {first[away[0]].compute.dtype}, in which it is kept off the device; leave home.parameters out of the"
                " plan, or read it in one dtype"
            )
        wholes = {name: self.whole(name, self.local(name)) for name in others}
        read = {name: local_part(wholes[name], others[name], self.world) for name in others if name in stored}
        return stored | {name: part.to(dtype_named(others[name].dtype)) for name, part in read.items()}

    @torch.no_grad()
    def _follow_model(self) -> None:
        """Copy the values of tensors that the user has assigned to the model's buffers between steps.

        Raises PlanError if a parameter was replaced, or a buffer changed its shape or dtype.
        """
        for name, module, key, parameter in self._held:
            if module._parameters.get(key) is not parameter:
                raise PlanError(
                    f"the parameter {name} was exchanged for another after training began, and the optimizer has the"
                    f" one before; write into it, with torch.no_grad(): {name}.copy_(...), or make a new Trainer"
                )
        for name, module, key in self._places:
            now, mine = module._buffers.get(key), self.buffers[name]
            if now is None or now is mine:
                continue
            if (now.shape, now.dtype) != (mine.shape, mine.dtype):
                raise PlanError(
                    f"the buffer {name} was {mine.dtype} of shape {list(mine.shape)} when training began, and is"
                    f" {now.dtype} of shape {list(now.shape)} now; a buffer keeps its type and shape"
                )
            mine.copy_(now)
            module._buffers[key] = mine

    def _parts_of_evaluation(self, batch: Any) -> int:
        """The number of microbatches of an evaluation: as in training, or one if it does not divide the rows."""
        plan = self.compiler.plan
        if self.compiled.program.pipeline is None:
            return 1
        rows = num_rows(batch)
        return 1 if rows % (plan.micro * plan.num_batch_parts * plan.num_stage_parts) else plan.micro

    def _outside(self, captured: Captured) -> dict[str, Tensor]:
        """The current tensors outside the model that the step reads, by name; copies of those that it changes."""
        found = {}
        written = {output.name for output in captured.outputs if output.kind == "buffer"}
        for name in captured.outside:
            live = self.compiler.captures.tensor(captured, name).detach()
            if live.is_meta:
                raise PlanError(
                    f"the step reads {name}, which is on the meta device: a trainer has its weights by now; keep a copy"
                    " for this step, or train both under a plan that leaves weights whole, such as data=N"
                )
            found[name] = live.to(self.world.device, copy=name in written)
        return found

    @torch.no_grad()
    def _hand_out(self, captured: Captured, outside: Mapping[str, Tensor]) -> None:
        """Write the new values of tensors outside the model that the step has changed."""
        captures = self.compiler.captures
        for output in captured.outputs:
            if output.kind != "buffer" or output.name not in outside:
                continue
            new, live = outside[output.name], captures.tensor(captured, output.name)
            if output.name in captured.rebound:
                captures.watch.exchange(output.name, new.to(live.device))
            else:
                live.detach().copy_(new)

    def updated(self) -> None:
        """Make the graph read the parameters that the optimizer has changed."""
        self.rank_parameters.updated()

    def _leaves(self, batch: Any, program: RankProgram) -> dict[str, Tensor]:
        """This rank's part of every tensor of the batch, by name, on its device."""
        local = isinstance(batch, LocalBatch)
        tree = batch.tree if local else batch
        numbers = batch_numbers(tree)
        found = {name: fed.tensor(numbers) for name, fed in program.captured.numbers.items()}
        for name, leaf in batch_leaves(tree).items():
            layout = program.layouts.get(name)
            part = leaf if local or layout is None else local_part(leaf, layout, self.world)
            found[name] = part.to(self.world.device, non_blocking=True)
        return found

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Set the gradients of the parameters; those that are not named get None."""
        moved = False
        for name, parameter in self.parameters.items():
            gradient = gradients.get(name)
            if gradient is not None and gradient.stride() != parameter.stride():
                # Fused optimizers need equal strides, which autograd guarantees too.
                gradient = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
            if gradient is not None and gradient.device != parameter.device:
                gradient = self.offload.copies.host_like(gradient).copy_(gradient, non_blocking=True)
                moved = True
            parameter.grad = gradient
        if moved:  # to where the optimizer steps, which the host waits for once
            Event(self.world.device).synchronize()

    def without_gradient(self, left_out: Collection[str], all_time: Collection[str]) -> None:
        """Forget the gradients, away from the device, of parameters that the last batch has `left_out`. Those of
        `all_time` have none of earlier batches either."""
        for name in left_out:
            self.offload.norms.pop(name, None)
        self.with_gradient = tuple(name for name in self.with_gradient if name not in all_time)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by the factor, wherever they are stored."""
        scale_all([p.grad for p in self.parameters.values() if p.grad is not None], factor)
        if self.offload.norms:
            self.offload.factor *= float(factor)

    def gradient_norm(self) -> Tensor:
        """The 2-norm of all whole gradients together, equal on every rank."""
        by_axes: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
        axes = summed_square_axes(self.layouts)
        for name, parameter in self.parameters.items():
            if not counts_here(self.layouts[name], self.world):
                continue
            if parameter.grad is not None:
                by_axes[axes[name]].append(parameter.grad)
            elif name in self.offload.norms:
                by_axes[axes[name]].append(self.offload.norms[name] * self.offload.factor)
        groups = sorted(set(axes.values()))  # the same on every rank, also where a rank holds none of a group
        device = self.world.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for group in groups:
            norms = torch._foreach_norm(by_axes[group]) if by_axes[group] else []
            squares = torch.zeros_like(total)
            for norm in norms:
                squares = squares + norm.to(device, non_blocking=True).double().square()
            for axis in group:
                squares = self.world.comm(axis).all_reduce(squares.reshape(1)).wait()[0]
            total = total + squares
        return total.sqrt()

    def local(self, name: str) -> Tensor | None:
        """This rank's part of a parameter, wherever it is stored; None if another rank has it."""
        return self.rank_parameters.local(name)

    def set_local(self, name: str, part: Tensor) -> None:
        """Set this rank's part of a parameter. The graph reads it after `updated`."""
        self.rank_parameters.set_local(name, part)

    def set_whole(self, name: str, whole: Tensor) -> None:
        """Set a parameter from a whole tensor, by taking its memory if the graph reads the parameter there."""
        inputs, own = self.rank_parameters.inputs, self.parameters.get(name)
        alone = self.world.mesh.size == 1 and is_host(self.world.device) and is_whole(self.layouts[name])
        if alone and name in inputs and (inputs[name] is own or name in self._lent):
            self._lent.add(name)
            inputs[name] = whole
        elif own is not None:
            self.set_local(name, local_part(whole, self.layouts[name], self.world).to(self.world.device))

    def whole(self, name: str, local: Tensor | None) -> Tensor:
        """The whole tensor, of the parameter's shape, from the parts of all ranks. All ranks must call it."""
        return gather_whole(local, self.layouts[name], self.world, self.dtypes[name])

    def whole_gradients(self) -> dict[str, Tensor]:
        """The gradients of the last `run`, by name, as whole tensors in new memory. All ranks must call it."""
        found = {}
        for name in self.with_gradient:
            parameter = self.parameters.get(name)
            mine = None if parameter is None else parameter.grad
            if name in self.offload.norms:
                mine = self.offload.get(f"gradient/{name}").to(self.world.device) * self.offload.factor
            found[name] = self.whole(name, mine).clone()
        return found
