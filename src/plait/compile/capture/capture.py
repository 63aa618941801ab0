"""Capture: the training step of an unmodified model as one graph of ATen ops on global shapes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from plait.compile.capture.batch import (
    batch_leaves,
    batch_numbers,
    count_rows,
    map_batch,
    row_dims,
    row_sizes,
    sequence_dims,
)  # fmt: skip
from plait.compile.capture.batch_numbers import BatchNumber, BatchNumbers, Fed, NumberAsked, plain_numbers
from plait.compile.capture.capture_errors import capture_error, users_line
from plait.compile.capture.cleanup import clean, copy_inputs, functionalise
from plait.compile.capture.expert_modules import ExpertModules
from plait.compile.capture.fake_parameters import (
    Exchange,
    FakeParameters,
    MadeBuffer,
    device_of,
    fake_leaf,
    fake_parameters,
    refuse_scripted,
)
from plait.compile.capture.graph_recorder import GraphRecorder
from plait.compile.capture.late_values import LateValues
from plait.compile.capture.loss_values import RATIO, Loss, read_loss, sum_alone
from plait.compile.capture.masked_indexing import Selections
from plait.compile.capture.module_hooks import BackwardModules, ForwardModules, modules_stay, plain_kernels
from plait.compile.capture.other_processes import not_communicating
from plait.compile.capture.outside_tensors import Outside, check_leaves, sparse_gradient
from plait.compile.capture.parameter_precision import changes_copy, place_casts
from plait.compile.capture.parts_left_out import COUNTS, NOTHING, LeftOut
from plait.compile.capture.precision import FULL, Precision
from plait.compile.capture.python_state import MISSING, Holder
from plait.compile.capture.random_sources import nothing_drawn
from plait.compile.capture.reachable import PLAIN, Reached
from plait.compile.capture.reentrant_checkpoint import without_reentrance
from plait.compile.ir.gc_paused import collection_paused
from plait.compile.ir.shapes import StepMode
from plait.compile.ops.higher_order import WrittenOut
from plait.compile.ops.sdpa_with_dropout import DrawnDropout
from plait.errors import BatchError, CaptureError, LossError, PlanError

LossFn = Callable[[Any, Any], Any]
one_at_a_time = threading.RLock()  # a capture puts fake tensors into the model


@dataclass(frozen=True)
class Input:
    """A placeholder of the graph.

    Attributes:
        kind: parameter, buffer, batch, constant, key (an int that changes at every step) or scale (a scalar tensor by
            which the loss is multiplied before it is differentiated). A buffer is a buffer of the model, a parameter
            that does not train and that the step changes, or a tensor from outside the model.
        name: of a parameter, buffer or batch leaf its name; of a tensor from outside its place.
        node: the placeholder's name.
    """

    kind: str
    name: str
    node: str


@dataclass(frozen=True)
class Output:
    """An element of the graph's output.

    `kind` is loss, sum, weight, gradient, buffer (its new value), or for what the loss function returned beside the
    loss aux, and for a ratio also aux_weight.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Effect:
    """An assignment in Python that the step made, and that the capture has undone.

    Attributes:
        holder: the object in which the value was assigned.
        key: where in it.
        before: the value before the step.
        now: the value after the step.
        derived: whether it is a tensor that depends on the graph's inputs or on random numbers.
    """

    holder: Holder
    key: Any
    before: Any
    now: Any
    derived: bool = False

    @property
    def place(self) -> str:
        return self.holder.place_of(self.key)


@dataclass(frozen=True)
class Captured:
    """A step as a graph. Each node has a NodeInfo, and `val` (a fake tensor, or a tuple of them) in its meta.

    Attributes:
        graph: the graph, on global shapes.
        inputs: its placeholders, in order.
        outputs: the elements of the tuple that it returns.
        constants: values of inputs of kind constant, by name.
        tied: from a further name of a parameter or buffer to its first name.
        unused: parameters that train but do not reach the loss.
        frozen: parameters with requires_grad=False.
        checks: source lines with a condition that must hold when the step runs, or else the loss is NaN.
        rows: the number of rows of the batch.
        row_dims: for each tensor of the batch that has rows, their dim.
        sequence_dims: for each tensor of the batch that has a sequence of positions, their dim.
        aux: kinds (LossPart.kind) of the outputs beside the loss, by name; None if there were none.
        changing: frozen parameters that the step changes; their inputs are of kind buffer.
        outside: tensors from outside the model, by place.
        rebound: places of these where the step assigns another tensor.
        compared: places of these whose numbers Python has read.
        differentiable: places of these that autograd would give gradients.
        effects: assignments in Python that the step makes, other than of tensors in `rebound`.
        numbers: inputs of kind batch that are computed from the batch's numbers, by name.
        asked: conditions on the batch's numbers under which the graph is valid.
        fixed: numbers of the batch that are not inputs.
        made: buffers that the step makes, and that the capture has undone.
        unmerged: the line of a loop over experts whose rounds are not computed together, and the line that is why.
        left_out: parameters that the step may leave without a gradient; the output COUNTS then says which.
    """

    graph: Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    constants: dict[str, Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    rows: int = 0
    row_dims: Mapping[str, int] = field(default_factory=dict)
    sequence_dims: Mapping[str, int] = field(default_factory=dict)
    aux: Mapping[str, str] | None = None
    changing: frozenset[str] = frozenset()
    outside: dict[str, Tensor] = field(default_factory=dict)
    rebound: frozenset[str] = frozenset()
    compared: frozenset[str] = frozenset()
    differentiable: tuple[str, ...] = ()
    effects: tuple[Effect, ...] = ()
    numbers: dict[str, Fed] = field(default_factory=dict)
    asked: NumberAsked = field(default_factory=NumberAsked)
    fixed: frozenset[str] = frozenset()
    made: tuple[MadeBuffer, ...] = ()
    unmerged: str = ""
    left_out: LeftOut = NOTHING


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
        raise BatchError(f"the batch holds no tensor: it is {_brief(batch)}")
    if empty := [name for name, num in row_sizes(batch) if num == 0]:
        raise BatchError(f"the batch has 0 rows: {empty[0]} has shape {list(leaves[empty[0]].shape)}")
    with one_at_a_time, _quiet_log(), collection_paused():
        refuse_scripted(model)
        found = reached or Reached(model, loss_fn)

        def with_inputs(numbers: Collection[str], merges: bool = True) -> Captured:
            with nothing_drawn(found.sources, found.iterators):
                try:
                    return _capture(
                        model, loss_fn, batch, leaves, train, differentiate, device, precision, normalised, changing,
                        found, numbers, merges,
                    )  # fmt: skip
                except CaptureError as error:
                    if not error.in_merged_loop:
                        raise
                    first = error
                finally:
                    found.put_back()
            try:
                return replace(with_inputs(numbers, merges=False), unmerged=first.loop)
            except CaptureError as second:
                raise (first if first.line else second) from None

        numbers = batch_numbers(batch).keys() - {*fixed}
        choices = [numbers, *(numbers - {one} for one in sorted(numbers) if len(numbers) > 1)] if numbers else []
        for choice in choices:
            with suppress(CaptureError, LossError):
                return with_inputs(choice)
        return with_inputs(())


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Silence torch's log of its own traceback; what stops a capture is raised."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def _capture(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    leaves: dict[str, Tensor],
    train: bool,
    differentiate: bool,
    device: torch.device | None,
    precision: Precision,
    normalised: bool,
    changing: frozenset[str],
    reached: Reached,
    inputs_of: Collection[str],
    merges: bool,
) -> Captured:
    fake_mode = StepMode()
    recorder = GraphRecorder(fake_mode)
    rows = count_rows(batch)
    where = device or device_of(leaves)
    with ExitStack() as stack:
        model_fakes = stack.enter_context(fake_parameters(model, fake_mode, where, train, move=device is not None))
        fake_leaves = {name: fake_leaf(leaf, fake_mode, device) for name, leaf in leaves.items()}
        nodes: dict[Node, tuple[str, str]] = {}
        kinds_of = (("parameter", model_fakes.parameters), ("buffer", model_fakes.buffers), ("batch", fake_leaves))
        for kind, values in kinds_of:
            for name, value in values.items():
                nodes[recorder.placeholder(f"{kind}_{_identifier(name)}", value)] = (kind, name)
        for name, parameter in model_fakes.parameters.items():
            if parameter.requires_grad:
                recorder.protect(
                    parameter,
                    f"the step changes the parameter {name} in place, and trains it; only buffers and parameters with"
                    " requires_grad=False may change so",
                )
        outside = Outside(reached, model_fakes, recorder, fake_mode, where, move=device is not None)
        recorder.outside = outside
        stack.enter_context(plain_kernels())
        stack.enter_context(without_reentrance())
        stack.enter_context(modules_stay())
        stack.enter_context(fake_mode)
        stack.enter_context(recorder)
        stack.enter_context(Exchange(model_fakes.made, outside.fake_of))
        stack.enter_context(DrawnDropout())
        stack.enter_context(WrittenOut())
        late = stack.enter_context(LateValues(recorder.known_value, lambda: recorder.phase == "forward"))
        recorder.scalar = late.scalar
        selections = stack.enter_context(Selections(late, recorder, ExpertModules(model), merges))
        forward = stack.enter_context(ForwardModules(model, recorder))
        given = batch_numbers(batch)
        numbers = BatchNumbers(given, late, recorder, fake_mode, inputs_of)
        if given:
            stack.enter_context(numbers.seen_by_math())
        fake_batch = map_batch(lambda name, leaf: fake_leaves.get(name, numbers.in_place_of(name, leaf)), batch)
        stack.enter_context(torch.set_grad_enabled(differentiate))
        for name, copy in stack.enter_context(precision.casting(model, model_fakes.made)).items():
            recorder.protect(copy, changes_copy(name, precision.name))
        try:
            with precision.computing(model, where.type), not_communicating(partial(users_line, model, loss_fn)):
                found = read_loss(loss_fn(model, fake_batch), rows)
                selections.finish()
                found = replace(found, total=late.checked(found.total))
                left_out, counts = selections.left_out.finish(model_fakes.parameters if train and differentiate else {})
                results = [*_results(found), *((Output("aux", COUNTS), each) for each in counts)]
        except (LossError, PlanError):
            raise
        except Exception as error:
            refusal = precision.refusal(error, forward.module_of(error))
            failed = capture_error(error, model, loss_fn, "in the forward pass", selections.in_expert_loop)
            failed.in_merged_loop = bool(selections.unrolled)
            if selections.has_finished:  # no line of the model was running any more
                failed.line = 0
            failed.loop = selections.loop_and_line(failed)
            raise refusal or failed from error
        gradients: dict[str, Tensor] = {}
        if differentiate:
            loss = found.mean if normalised else sum_alone(found)
            if precision.scaled:
                scale = torch.empty((), device=where)
                nodes[recorder.placeholder("scale", scale)] = ("scale", "scale")
                loss = loss.float() * scale
            gradients = _differentiate(loss, model_fakes, recorder, forward, model, loss_fn, precision, outside)
        results += [(Output("gradient", name), g) for name, g in gradients.items()]
        written = {name: b for name, b in model_fakes.buffers.items() if recorder.was_written(b)}
        written |= model_fakes.replaced_buffers()
        moving = {name: p for name, p in model_fakes.parameters.items() if recorder.was_written(p)}
        rebound, effects = _effects(reached, outside, recorder)
        outside.check_held(written)
        outside.check_made(made := model_fakes.made_buffers(), written)
        written |= moving | outside.written() | rebound
        results += [(Output("buffer", name), b) for name, b in written.items()]
        recorder.output([value for _, value in results])
    late.warn()
    graph = recorder.graph
    changing |= moving.keys()
    kinds = {node.name: ("buffer" if kind[1] in changing else kind[0], kind[1]) for node, kind in nodes.items()}
    kinds |= {node.name: ("buffer", place) for node, place in outside.nodes.items()}
    kinds |= {node.name: ("batch", name) for name, node in numbers.nodes.items()}
    kinds |= {
        node.name: ("constant", name) for node, name in zip(recorder.constant_nodes, recorder.constants, strict=True)
    }
    if recorder.key is not None:
        kinds[recorder.key.name] = ("key", "key")
    if recorder.mutating:
        graph = functionalise(graph, fake_mode)
    graph = clean(graph)
    if precision.of_parameters is not None:
        place_casts(graph, {name for name, (kind, _) in kinds.items() if kind == "parameter"})
    copy_inputs(graph, [i for i, (output, _) in enumerate(results) if output.kind in ("aux", "aux_weight")])
    inputs = tuple(Input(*kinds[n.name], n.name) for n in graph.nodes if n.op == "placeholder")
    trained = [name for name, p in model_fakes.parameters.items() if p.requires_grad]
    return Captured(
        graph=graph,
        inputs=inputs,
        outputs=tuple(output for output, _ in results),
        constants=recorder.constants,
        tied=model_fakes.tied,
        unused=tuple(name for name in trained if name not in gradients) if differentiate else (),
        frozen=tuple(name for name, p in model_fakes.parameters.items() if not p.requires_grad),
        checks=tuple(check.place for check in late.checks),
        rows=rows,
        row_dims=row_dims(batch, rows),
        sequence_dims=sequence_dims(batch),
        aux=None if found.outputs is None else {name: part.kind for name, part in found.outputs.items()},
        changing=changing,
        outside=outside.reals,
        rebound=frozenset(rebound),
        compared=frozenset(outside.compared),
        differentiable=tuple(outside.differentiable),
        effects=tuple(effects),
        numbers=numbers.fed,
        asked=numbers.asked,
        fixed=frozenset(given.keys() - {*inputs_of}),
        made=tuple(made),
        left_out=left_out,
    )


def _effects(reached: Reached, outside: Outside, recorder: GraphRecorder) -> tuple[dict[str, Tensor], list[Effect]]:
    """The Python values that the step has assigned: new values of tensors that it also reads, by place, and all
    others."""
    rebound: dict[str, Tensor] = {}
    effects: list[Effect] = []
    for holder, key, before, now in reached.changes():
        now = plain_numbers(now) if isinstance(now, BatchNumber) else now
        place = holder.place_of(key)
        old = outside.fakes.get(place)
        if old is None or now is old:
            node = recorder.nodes.get(id(now)) if isinstance(now, Tensor) else None
            effects.append(Effect(holder, key, before, now, node is not None and _varies(node)))
        elif not isinstance(now, Tensor) or (now.shape, now.dtype) != (old.shape, old.dtype):
            what = f"{now.dtype} of shape {list(now.shape)}" if isinstance(now, Tensor) else type(now).__name__
            raise CaptureError(
                f"the step reads {place}, {old.dtype} of shape {list(old.shape)}, and puts {what} in its place; a value"
                " that the step hands on to the next keeps its type and shape"
            )
        elif id(now) in recorder.nodes:
            rebound[place] = now
    if _prepares(reached, effects):  # a flag for "is prepared" is undone with the preparation
        effects = [e for e in effects if not (e.before is MISSING and isinstance(e.now, bool))]
    return rebound, effects


def _prepares(reached: Reached, effects: Sequence[Effect]) -> bool:
    """Whether the step has created an object that is neither a plain value nor a tensor, such as a hook, which is
    undone."""
    made = (e for e in effects if e.before is MISSING and not isinstance(e.now, (*PLAIN, Tensor)))
    return any(reached.empty) or any(made)


def _varies(node: Node) -> bool:
    """Whether a value depends on an input of the graph that is not a constant, or on random numbers."""
    seen, stack = {node}, [node]
    while stack:
        one = stack.pop()
        if one.op == "placeholder" and not one.name.startswith("constant_"):
            return True
        stack += [source for source in one.all_input_nodes if source not in seen]
        seen.update(one.all_input_nodes)
    return False


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


def _differentiate(
    loss: Tensor,
    model_fakes: FakeParameters,
    recorder: GraphRecorder,
    forward: ForwardModules,
    model: nn.Module,
    loss_fn: LossFn,
    precision: Precision,
    outside: Outside,
) -> dict[str, Tensor]:
    """Capture the gradients of the parameters that reach the loss."""
    wanted = {name: p for name, p in model_fakes.parameters.items() if p.requires_grad}
    if not loss.requires_grad or not wanted:
        raise LossError(
            "the loss does not depend on any parameter with requires_grad=True, so there is nothing to train; check"
            " for .detach(), .item() or torch.no_grad() between the model and the loss"
        )
    check_leaves(loss, outside)
    recorder.phase = "backward"
    try:
        with (
            BackwardModules(loss, forward, recorder),
            torch.autograd.set_multithreading_enabled(False),
            not_communicating(partial(users_line, model, loss_fn)),
        ):
            found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    except PlanError:
        raise
    except Exception as error:
        refusal = precision.refusal(error, recorder.module)
        raise refusal or capture_error(error, model, loss_fn, "in the backward pass") from error
    recorder.module = ""
    gradients = {name: g for name, g in zip(wanted, found, strict=True) if g is not None}
    if sparse := [name for name, g in gradients.items() if g.layout != torch.strided]:
        raise sparse_gradient(sparse[0])
    return gradients


def _brief(batch: Any) -> str:
    text = repr(batch)
    return text if len(text) <= 60 else f"a {type(batch).__name__}"


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
