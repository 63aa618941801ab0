"""Capture: the training step of an unmodified model as one graph of ATen ops on global shapes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from plait.compile.capture.assignments import assigned
from plait.compile.capture.batch import (
    batch_leaves,
    batch_numbers,
    count_rows,
    map_batch,
    no_tensor,
    row_dims,
    row_sizes,
    sequence_dims,
)  # fmt: skip
from plait.compile.capture.batch_numbers import BatchNumbers
from plait.compile.capture.capture_errors import capture_error, not_communicating, users_line
from plait.compile.capture.captured import Captured, Input, Output
from plait.compile.capture.cleanup import clean, copy_inputs, functionalise
from plait.compile.capture.expert_modules import ExpertModules
from plait.compile.capture.fake_parameters import (
    Exchange,
    device_of,
    fake_leaf,
    fake_parameters,
    refuse_scripted,
)
from plait.compile.capture.graph_recorder import GraphRecorder
from plait.compile.capture.late_values import LateValues
from plait.compile.capture.loss_values import RATIO, Loss, read_loss, sum_alone
from plait.compile.capture.masked_indexing import Selections
from plait.compile.capture.masked_rows import functions_take_whole_rows
from plait.compile.capture.module_hooks import BackwardModules, ForwardModules, modules_stay, plain_kernels
from plait.compile.capture.outside_tensors import Outside, check_leaves, sparse_gradient
from plait.compile.capture.parts_left_out import COUNTS
from plait.compile.capture.precision import FULL, Precision, changes_copy, place_casts
from plait.compile.capture.python_state import nothing_drawn
from plait.compile.capture.reachable import Reached
from plait.compile.capture.reentrant_checkpoint import without_reentrance
from plait.compile.ir.rewriting import collection_paused
from plait.compile.ir.shapes import StepMode
from plait.compile.ops.dropped_attention import DrawnDropout
from plait.compile.ops.higher_order import WrittenOut
from plait.errors import BatchError, CaptureError, LossError, PlanError

LossFn = Callable[[Any, Any], Any]
one_at_a_time = threading.RLock()  # a capture puts fake tensors into the model


def capture(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    *,
    train: bool = True,
    differentiate: bool = True,
    device: torch.device | None = None,
    precision: Precision = FULL,
    normalised: bool = True,
    changing: frozenset[str] = frozenset(),
    reached: Reached | None = None,
    fixed: Collection[str] = (),
) -> Captured:
    """Capture the step `loss_fn(model, batch)`, with its gradients, as a graph on the global batch.

    Args:
        model: the model, which may be on the meta device; it is left as it was.
        loss_fn: returns one of the forms of a loss in compile/capture/loss_values.py.
        batch: a global batch.
        train: whether the model runs in training mode.
        differentiate: whether to capture gradients too.
        device: where the graph runs; by default where model and batch are.
        precision: the precision of the step. If gradients could underflow, the loss is multiplied by an input.
        normalised: whether the gradients of a plait.Weighted are those of sum / weight, or else of the sum.
        changing: frozen parameters that change in other captures of this model.
        reached: what model and loss function can read in Python, if the caller knows it.
        fixed: numbers of the batch that must not become inputs.

    A tensor that the step reads and that belongs neither to the model nor to the batch becomes an input, and an output
    too if the step changes it. So does a frozen parameter that the step changes. Python numbers of the batch become
    inputs (see batch_numbers.py), except those with which the capture fails.

    Raises CaptureError, with the line of the model that stopped the capture; LossError for another form of loss;
    BatchError for a batch without tensors or rows, or with leaves that are neither tensors nor constants.
    """
    leaves = batch_leaves(batch)
    if not leaves:
        raise no_tensor(batch)
    if empty := [name for name, num in row_sizes(batch) if num == 0]:
        raise BatchError(f"the batch has 0 rows: {empty[0]} has shape {list(leaves[empty[0]].shape)}")
    with one_at_a_time, _quiet_log(), collection_paused():
        refuse_scripted(model)
        found = reached or Reached(model, loss_fn)
        step = _Step(
            model, loss_fn, batch, leaves, train, differentiate, device, precision, normalised, changing, found
        )  # fmt: skip
        numbers = batch_numbers(batch).keys() - {*fixed}
        choices = [numbers, *(numbers - {one} for one in sorted(numbers) if len(numbers) > 1)] if numbers else []
        for choice in choices:
            with suppress(CaptureError, LossError):
                return _with_inputs(step, choice)
        return _with_inputs(step, ())


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Silence torch's log of its own traceback; what stops a capture is raised."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


@dataclass(frozen=True)
class _Step:
    """A step to capture: the arguments of `capture`, and the tensors of the batch by name."""

    model: nn.Module
    loss_fn: LossFn
    batch: Any
    leaves: dict[str, Tensor]
    train: bool
    differentiate: bool
    device: torch.device | None
    precision: Precision
    normalised: bool
    changing: frozenset[str]
    reached: Reached


def _with_inputs(step: _Step, numbers: Collection[str]) -> Captured:
    """The step with these numbers of the batch as inputs.

    Rounds of a loop over experts are computed together, or one by one where the step cannot be captured so.
    """
    try:
        return _capture(step, numbers, merges=True)
    except CaptureError as error:
        if not error.in_merged_loop:
            raise
        first = error
    try:
        return replace(_capture(step, numbers, merges=False), unmerged=first.loop)
    except CaptureError as second:
        raise (first if first.line else second) from None


def _capture(step: _Step, numbers: Collection[str], merges: bool) -> Captured:
    with nothing_drawn(step.reached.sources, step.reached.iterators):
        try:
            with torch.inference_mode(False), ExitStack() as stack:
                run = _FakeRun(step, numbers, merges, stack)
                loss = run.forward()
                gradients = run.backward(loss) if step.differentiate else {}
                run.end(gradients)
            run.late.warn()
            return run.captured(loss, gradients)
        finally:
            step.reached.put_back()


class _FakeRun:
    """A run of a step with fake tensors, whose ops are recorded as a graph.

    `numbers` of the batch are inputs; `merges` says whether rounds of loops over experts are computed together. `stack`
    holds the contexts in which the step runs.
    """

    def __init__(self, step: _Step, numbers: Collection[str], merges: bool, stack: ExitStack) -> None:
        self.step = step
        self.mode = StepMode()
        self.recorder = recorder = GraphRecorder(self.mode)
        self.rows = count_rows(step.batch)
        self.where = step.device or device_of(step.leaves)
        move = step.device is not None
        self.fakes = stack.enter_context(fake_parameters(step.model, self.mode, self.where, step.train, move=move))
        leaves = {name: fake_leaf(leaf, self.mode, step.device) for name, leaf in step.leaves.items()}
        self.kinds: dict[Node, tuple[str, str]] = {}
        kinds_of = (("parameter", self.fakes.parameters), ("buffer", self.fakes.buffers), ("batch", leaves))
        for kind, values in kinds_of:
            for name, value in values.items():
                self._input(f"{kind}_{_identifier(name)}", kind, name, value)
        for name, parameter in self.fakes.parameters.items():
            if parameter.requires_grad:
                recorder.protect(
                    parameter,
                    f"the step changes the parameter {name} in place, and trains it; only buffers and parameters with"
                    " requires_grad=False may change so",
                )
        self.outside = recorder.outside = Outside(step.reached, self.fakes, recorder, self.mode, self.where, move=move)
        recorder.kernels = stack.enter_context(plain_kernels())
        stack.enter_context(without_reentrance())
        stack.enter_context(functions_take_whole_rows())
        stack.enter_context(modules_stay())
        stack.enter_context(self.mode)
        stack.enter_context(recorder)
        stack.enter_context(Exchange(self.fakes.made, self.outside.fake_of))
        stack.enter_context(DrawnDropout())
        stack.enter_context(WrittenOut())
        self.late = stack.enter_context(LateValues(recorder.known_value, lambda: recorder.phase == "forward"))
        recorder.scalar = self.late.scalar
        self.selections = stack.enter_context(Selections(self.late, recorder, ExpertModules(step.model), merges))
        self.modules = stack.enter_context(ForwardModules(step.model, recorder))
        given = batch_numbers(step.batch)
        self.numbers = BatchNumbers(given, self.late, recorder, self.mode, numbers)
        self.fixed = frozenset(given.keys() - {*numbers})
        if given:
            stack.enter_context(self.numbers.seen_by_math())
        self.batch = map_batch(
            lambda name, leaf: leaves.get(name, self.numbers.in_place_of(name, leaf)), step.batch
        )  # fmt: skip
        stack.enter_context(torch.autograd.set_detect_anomaly(False))  # it reads numbers, and fake tensors have none
        stack.enter_context(torch.set_grad_enabled(step.differentiate))
        casts = stack.enter_context(step.precision.casting(step.model, self.fakes.made))
        for name, copy in casts.items():
            recorder.protect(copy, changes_copy(name, step.precision.name))

    def _input(self, node: str, kind: str, name: str, value: Tensor) -> None:
        self.kinds[self.recorder.placeholder(node, value)] = (kind, name)

    def forward(self) -> Loss:
        """Run the forward pass."""
        step = self.step
        self.fakes.begin_forward()
        try:
            with step.precision.computing(step.model, self.where.type), self._alone():
                found = read_loss(step.loss_fn(step.model, self.batch), self.rows)
                self.selections.finish()
                found = replace(found, total=self.late.checked(found.total))
                trained = self.fakes.parameters if step.train and step.differentiate else {}
                self.left_out, counts = self.selections.left_out.finish(trained)
                self.results = [*_results(found), *((Output("aux", COUNTS), each) for each in counts)]
        except (LossError, PlanError):
            raise
        except Exception as error:
            raise self._stopped_forward(error) from error
        return found

    def _alone(self) -> AbstractContextManager[None]:
        return not_communicating(partial(users_line, self.step.model, self.step.loss_fn))

    def _stopped_forward(self, error: Exception) -> Exception:
        selections = self.selections
        refusal = self.step.precision.refusal(error, self.modules.module_of(error))
        failed = self._error(error, "in the forward pass", selections.in_expert_loop)
        failed.in_merged_loop = bool(selections.unrolled)
        if selections.has_finished:  # no line of the model was running any more
            failed.line = 0
        failed.loop = selections.loop_and_line(failed)
        return refusal or failed

    def backward(self, loss: Loss) -> dict[str, Tensor]:
        """Run the backward pass. Returns the gradients of the parameters that reach the loss."""
        step, recorder = self.step, self.recorder
        total = loss.mean if step.normalised else sum_alone(loss)
        if step.precision.scaled:
            scale = torch.empty((), device=self.where)
            self._input("scale", "scale", "scale", scale)
            total = total.float() * scale
        wanted = {name: p for name, p in self.fakes.parameters.items() if p.requires_grad}
        if not total.requires_grad or not wanted:
            raise LossError(
                "the loss does not depend on any parameter with requires_grad=True, so there is nothing to train; check"
                " for .detach(), .item() or torch.no_grad() between the model and the loss"
            )
        check_leaves(total, self.outside)
        recorder.phase = "backward"
        try:
            with (
                BackwardModules(total, self.modules, recorder),
                torch.autograd.set_multithreading_enabled(False),
                self._alone(),
            ):
                found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
        except PlanError:
            raise
        except Exception as error:
            refusal = step.precision.refusal(error, recorder.module)
            raise refusal or self._error(error, "in the backward pass") from error
        recorder.module = ""
        gradients = {name: g for name, g in zip(wanted, found, strict=True) if g is not None}
        if sparse := [name for name, g in gradients.items() if g.layout != torch.strided]:
            raise sparse_gradient(sparse[0])
        return gradients

    def end(self, gradients: Mapping[str, Tensor]) -> None:
        """Record the outputs of the graph: the loss, gradients, and new values of what the step has changed."""
        fakes, recorder, outside = self.fakes, self.recorder, self.outside
        written = {name: b for name, b in fakes.buffers.items() if recorder.was_written(b)}
        fakes.check_parts()
        written |= fakes.replaced_buffers()
        moving: dict[str, Tensor] = {name: p for name, p in fakes.parameters.items() if recorder.was_written(p)}
        moving |= fakes.replaced_parameters()
        self.rebound, self.effects = assigned(self.step.reached, outside, recorder)
        outside.check_held(written)
        outside.check_made(made := fakes.made_buffers(), written)
        self.made = tuple(made)
        self.changing = self.step.changing | moving.keys()
        self.results += [(Output("gradient", name), g) for name, g in gradients.items()]
        changed = written | moving | outside.written() | self.rebound
        self.results += [(Output("buffer", name), b) for name, b in changed.items()]
        recorder.output([value for _, value in self.results])

    def captured(self, loss: Loss, gradients: Collection[str]) -> Captured:
        """The step, of which all is recorded."""
        step, fakes, outside = self.step, self.fakes, self.outside
        kinds = self._kinds_of_inputs()
        graph = self._clean_graph(kinds)
        trained = [name for name, p in fakes.parameters.items() if p.requires_grad]
        return Captured(
            graph=graph,
            inputs=tuple(Input(*kinds[n.name], n.name) for n in graph.nodes if n.op == "placeholder"),
            outputs=tuple(output for output, _ in self.results),
            constants=self.recorder.constants,
            tied=fakes.tied,
            unused=tuple(name for name in trained if name not in gradients) if step.differentiate else (),
            frozen=tuple(name for name, p in fakes.parameters.items() if not p.requires_grad),
            checks=tuple(check.place for check in self.late.checks),
            rows=self.rows,
            row_dims=row_dims(step.batch, self.rows),
            sequence_dims=sequence_dims(step.batch),
            aux=None if loss.outputs is None else {name: part.kind for name, part in loss.outputs.items()},
            changing=self.changing,
            outside=outside.reals,
            rebound=frozenset(self.rebound),
            compared=frozenset(outside.compared),
            differentiable=tuple(outside.differentiable),
            effects=tuple(self.effects),
            numbers=self.numbers.fed,
            asked=self.numbers.asked,
            fixed=self.fixed,
            made=self.made,
            left_out=self.left_out,
        )

    def _kinds_of_inputs(self) -> dict[str, tuple[str, str]]:
        """Kind and name of each input, by the placeholder's name: in a graph that is made anew, nodes are others."""
        recorder = self.recorder
        kinds = {n.name: ("buffer" if name in self.changing else kind, name) for n, (kind, name) in self.kinds.items()}
        kinds |= {node.name: ("buffer", place) for node, place in self.outside.nodes.items()}
        kinds |= {node.name: ("batch", name) for name, node in self.numbers.nodes.items()}
        constants = zip(recorder.constant_nodes, recorder.constants, strict=True)
        kinds |= {node.name: ("constant", name) for node, name in constants}
        if recorder.key is not None:
            kinds[recorder.key.name] = ("key", "key")
        return kinds

    def _clean_graph(self, kinds: Mapping[str, tuple[str, str]]) -> Graph:
        """The recorded graph, without calls that change a tensor in place and without those that nobody reads."""
        graph = functionalise(self.recorder.graph, self.mode) if self.recorder.mutating else self.recorder.graph
        graph = clean(graph)
        if self.step.precision.of_parameters is not None:
            place_casts(graph, {name for name, (kind, _) in kinds.items() if kind == "parameter"})
        own = {name: node for node, (kind, name) in kinds.items() if kind == "buffer"}
        changing = ("aux", "aux_weight", "buffer")
        copy_inputs(
            graph, {i: own.get(out.name, "") for i, (out, _) in enumerate(self.results) if out.kind in changing}
        )
        return graph

    def _error(self, error: Exception, where: str, *details: Any) -> CaptureError:
        return capture_error(error, self.step.model, self.step.loss_fn, where, *details)


def _results(loss: Loss) -> list[tuple[Output, Tensor]]:
    """The outputs for the loss (the loss, or loss, sum and weight), and the auxiliary outputs."""
    found = [(Output("loss", "loss"), loss.mean)]
    if loss.weight is not None:
        found += [(Output("sum", "sum"), loss.total), (Output("weight", "weight"), loss.weight)]
    for name, part in (loss.outputs or {}).items():
        found.append((Output("aux", name), part.value))
        if part.kind == RATIO:
            found.append((Output("aux_weight", name), torch.as_tensor(part.weight)))
    return found


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
