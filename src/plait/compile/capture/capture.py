"""Capture: the training step of an unmodified model as one graph of ATen ops on global shapes."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from plait.compile.capture.batch import batch_leaves, batch_numbers, count_rows, map_batch, row_dims, row_sizes
from plait.compile.capture.capture_errors import capture_error
from plait.compile.capture.cleanup import clean
from plait.compile.capture.eager_random import VisibleDropout
from plait.compile.capture.fake_parameters import Exchange, StandIns, is_real, refuse_scripted, standing_in
from plait.compile.capture.functional import functionalise
from plait.compile.capture.holders import MISSING, Holder
from plait.compile.capture.late import LateValues
from plait.compile.capture.loss_values import RATIO, Loss, read_loss
from plait.compile.capture.modules import BackwardModules, ForwardModules
from plait.compile.capture.numbers import BatchNumber, BatchNumbers, Fed, NumberAsked, plain_numbers
from plait.compile.capture.outside import Outside
from plait.compile.capture.precision import FULL, Precision
from plait.compile.capture.reach import PLAIN, Reached
from plait.compile.capture.record import GraphRecorder
from plait.compile.capture.selection import Selections
from plait.compile.capture.sources import nothing_drawn
from plait.compile.ir.calls import output_node
from plait.compile.ir.gc_paused import collection_paused
from plait.compile.ir.views import is_view
from plait.errors import BatchError, CaptureError, LossError, PlanError

LossFn = Callable[[Any, Any], Any]
one_at_a_time = threading.RLock()  # a capture puts stand-ins into the model


@dataclass(frozen=True)
class Input:
    """A placeholder of the graph.

    kind: parameter, buffer, batch, constant, key (an int that changes every step) or scale (a scalar tensor, by which
    the loss is multiplied before it is differentiated). A buffer is one of the model, a parameter that does not train
    and that the step changes, or a tensor from outside the model, under the name of its place.
    """

    kind: str
    name: str
    node: str


@dataclass(frozen=True)
class Output:
    """An element of the graph's output.

    kind: loss, sum, weight, gradient, buffer (its new value), or what the loss function returned beside the loss: aux,
    and of a ratio also aux_weight.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Effect:
    """A Python value that the step has put in the place of another, which has been put back.

    derived: whether it is a tensor that follows from what is not the same at every step
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
    """A step as a graph: `inputs` are its placeholders in order, `outputs` the elements of the tuple it returns.

    Each node's meta has `val` (a fake tensor, or a tuple of them), `module` (name of the module whose forward made it,
    or '') and `phase` (forward or backward).
    """

    graph: GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    constants: dict[str, Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)  # further name of a parameter or buffer -> its first name
    unused: tuple[str, ...] = ()  # parameters that train but do not reach the loss
    frozen: tuple[str, ...] = ()  # parameters with requires_grad=False
    checks: tuple[str, ...] = ()  # lines of which a condition must hold when the step runs, or else the loss is NaN
    rows: int = 0  # of the batch
    row_dims: Mapping[str, int] = field(default_factory=dict)  # of its tensors that have them, which dim they are
    aux: Mapping[str, str] | None = None  # kinds (graph.loss.Part) of the outputs beside the loss, if it came with some
    changing: frozenset[str] = frozenset()  # of these, those that the step changes: inputs of the kind buffer
    outside: dict[str, Tensor] = field(default_factory=dict)  # tensors from outside the model, by place
    rebound: frozenset[str] = frozenset()  # of these, those in whose place the step puts another tensor
    compared: frozenset[str] = frozenset()  # and those of which Python has read numbers
    differentiable: tuple[str, ...] = ()  # and those that a plain loop would give gradients
    effects: tuple[Effect, ...] = ()  # what the step changes beside tensors
    numbers: dict[str, Fed] = field(default_factory=dict)  # inputs of the kind batch that numbers of the batch give
    asked: NumberAsked = field(default_factory=NumberAsked)  # what must be so of these numbers
    fixed: frozenset[str] = frozenset()  # those that are no inputs


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
    """The step `loss_fn(model, batch)`, and with `differentiate` its gradients, as a graph on the global batch.

    The model may be on the meta device; it is as before afterwards. The graph runs on `device`, wherever model and
    batch are now (by default: where they are), in that precision; where gradients could underflow, of the loss times a
    scale. Of a plait.Weighted the gradients are those of sum / weight, or, not `normalised`, of the sum.

    A tensor that the step reads and that is none of the model's or the batch's becomes an input too, and an output if
    the step changes it; so does a parameter that does not train but changes in this step, or is among those `changing`
    in others. `reached` is what model and loss reach, if the caller knows. So do the Python numbers of the batch but
    those that are `fixed`, and those with which the capture fails (see numbers.py).

    Raises CaptureError, with the line of the model that stopped the capture, LossError for a loss of none of the forms
    in compile/capture/loss_values.py, BatchError for a batch that holds something else than tensors and constants.
    """
    leaves = batch_leaves(batch)
    if not leaves:
        raise BatchError(f"the batch holds no tensor: it is {_brief(batch)}")
    if empty := [name for name, num in row_sizes(batch) if num == 0]:
        raise BatchError(f"the batch has 0 rows: {empty[0]} has shape {list(leaves[empty[0]].shape)}")
    with one_at_a_time, _quiet_log(), collection_paused():
        refuse_scripted(model)
        found = reached or Reached(model, loss_fn)

        def with_inputs(numbers: Collection[str]) -> Captured:
            with nothing_drawn(found.sources, found.iterators):
                try:
                    return _capture(
                        model, loss_fn, batch, leaves, train, differentiate, device, precision, normalised, changing,
                        found, numbers,
                    )  # fmt: skip
                finally:
                    found.put_back()

        numbers = batch_numbers(batch).keys() - {*fixed}
        choices = [numbers, *(numbers - {one} for one in sorted(numbers) if len(numbers) > 1)] if numbers else []
        for choice in choices:
            with suppress(CaptureError, LossError):
                return with_inputs(choice)
        return with_inputs(())


@contextmanager
def _quiet_log() -> Iterator[None]:
    """What stops a capture is raised; torch also logs a traceback of its own internals."""
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
) -> Captured:
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = GraphRecorder(fake_mode)
    rows = count_rows(batch)
    where = device or _device(leaves)
    with ExitStack() as stack:
        stand = stack.enter_context(standing_in(model, fake_mode, where, train, move=device is not None))
        fake_leaves = {name: _fake_leaf(leaf, fake_mode, device) for name, leaf in leaves.items()}
        nodes: dict[Node, tuple[str, str]] = {}
        for kind, values in (("parameter", stand.parameters), ("buffer", stand.buffers), ("batch", fake_leaves)):
            for name, value in values.items():
                nodes[recorder.placeholder(f"{kind}_{_identifier(name)}", value)] = (kind, name)
        for name, parameter in stand.parameters.items():
            if parameter.requires_grad:
                recorder.protect(
                    parameter,
                    f"the step changes the parameter {name} in place, and trains it; only buffers and parameters with"
                    " requires_grad=False may change so",
                )
        outside = Outside(reached, stand, recorder, fake_mode, where, move=device is not None)
        recorder.outside = outside
        stack.enter_context(_plain_kernels())
        if "torch._dynamo" in sys.modules:  # what torch.compile has made runs as it was written
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        stack.enter_context(fake_mode)
        stack.enter_context(recorder)
        stack.enter_context(Exchange(stand.made, outside.stand_in))
        stack.enter_context(VisibleDropout())
        late = stack.enter_context(LateValues(recorder.known_value, lambda: recorder.phase == "forward"))
        recorder.scalar = late.scalar
        stack.enter_context(Selections(late, recorder.node_of))
        forward = stack.enter_context(ForwardModules(model, recorder))
        given = batch_numbers(batch)
        numbers = BatchNumbers(given, late, recorder, fake_mode, inputs_of)
        if given:
            stack.enter_context(numbers.seen_by_math())
        fake_batch = map_batch(lambda name, leaf: fake_leaves.get(name, numbers.stand_in(name, leaf)), batch)
        stack.enter_context(torch.set_grad_enabled(differentiate))
        try:
            with precision.computing(model, where.type):
                found = read_loss(loss_fn(model, fake_batch), rows)
                found = replace(found, total=late.checked(found.total))
                results = _results(found)
        except (LossError, PlanError):
            raise
        except Exception as error:
            refusal = precision.refusal(error, recorder.module)
            raise refusal or capture_error(error, model, loss_fn, "in the forward pass") from error
        gradients: dict[str, Tensor] = {}
        if differentiate:
            loss = found.mean if normalised else _sum_alone(found)
            if precision.scaled:
                scale = torch.empty((), device=where)
                nodes[recorder.placeholder("scale", scale)] = ("scale", "scale")
                loss = loss.float() * scale
            gradients = _differentiate(loss, stand, recorder, forward, model, loss_fn, precision, outside)
        results += [(Output("gradient", name), g) for name, g in gradients.items()]
        written = {name: b for name, b in stand.buffers.items() if recorder.was_written(b)}
        written |= _replaced_buffers(stand)
        moving = {name: p for name, p in stand.parameters.items() if recorder.was_written(p)}
        rebound, effects = _effects(reached, outside, recorder)
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
    _copy_inputs(graph, [i for i, (output, _) in enumerate(results) if output.kind in ("aux", "aux_weight")])
    inputs = tuple(Input(*kinds[n.name], n.name) for n in graph.nodes if n.op == "placeholder")
    trained = [name for name, p in stand.parameters.items() if p.requires_grad]
    return Captured(
        graph=GraphModule({}, graph),
        inputs=inputs,
        outputs=tuple(output for output, _ in results),
        constants=recorder.constants,
        tied=stand.tied,
        unused=tuple(name for name in trained if name not in gradients) if differentiate else (),
        frozen=tuple(name for name, p in stand.parameters.items() if not p.requires_grad),
        checks=tuple(check.place for check in late.checks),
        rows=rows,
        row_dims=row_dims(batch, rows),
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
    )


def _replaced_buffers(stand: StandIns) -> dict[str, Tensor]:
    found = stand.replaced_buffers()
    for name, new in found.items():
        old = stand.buffers[name]
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise CaptureError(
                f"the step replaces the buffer {name}, {old.dtype} of shape {list(old.shape)}, by a tensor of"
                f" {new.dtype} and shape {list(new.shape)}; a buffer keeps its type and shape"
            )
    return found


def _effects(reached: Reached, outside: Outside, recorder: GraphRecorder) -> tuple[dict[str, Tensor], list[Effect]]:
    """What the step has assigned in Python: the new values of tensors that it also reads, by place, and all else."""
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
    if _prepares(reached, effects):  # a flag that says that this is done goes with it
        effects = [e for e in effects if not (e.before is MISSING and isinstance(e.now, bool))]
    return rebound, effects


def _prepares(reached: Reached, effects: Sequence[Effect]) -> bool:
    """Whether the step has made what is no plain value and no tensor, such as hooks: all of that is undone."""
    made = (e for e in effects if e.before is MISSING and not isinstance(e.now, (*PLAIN, Tensor)))
    return any(reached.empty) or any(made)


def _varies(node: Node) -> bool:
    """Whether a value depends on an input of the graph or on random numbers."""
    seen, stack = {node}, [node]
    while stack:
        one = stack.pop()
        if one.op == "placeholder" and not one.name.startswith("constant_"):
            return True
        stack += [source for source in one.all_input_nodes if source not in seen]
        seen.update(one.all_input_nodes)
    return False


def _results(loss: Loss) -> list[tuple[Output, Tensor]]:
    """The outputs loss, or loss, sum and weight, and those beside the loss."""
    found = [(Output("loss", "loss"), loss.mean)]
    if loss.weight is not None:
        found += [(Output("sum", "sum"), loss.total), (Output("weight", "weight"), loss.weight)]
    for name, part in (loss.outputs or {}).items():
        found.append((Output("aux", name), part.value))
        if part.kind == RATIO:
            found.append((Output("aux_weight", name), torch.as_tensor(part.weight)))
    return found


def _copy_inputs(graph: Graph, indices: Collection[int]) -> None:
    """Let these outputs have memory of their own where they are views of inputs, which may change. Changes `graph`."""
    end = output_node(graph)
    outputs = list(end.args[0])  # type: ignore[arg-type]
    for index in indices:
        base = node = outputs[index]
        while base.op == "call_function" and is_view(base):
            base = base.all_input_nodes[0]
        if base.op == "placeholder":
            with graph.inserting_before(end):
                outputs[index] = graph.call_function(torch.ops.aten.clone.default, (node,))
            outputs[index].meta = {"val": node.meta["val"].clone(), "module": "", "phase": "forward"}
    end.args = (tuple(outputs),)


def _sum_alone(loss: Loss) -> Tensor:
    if loss.weight is not None and loss.weight.requires_grad:
        raise LossError(
            "the weight of plait.Weighted(sum, weight) depends on parameters, so microbatches cannot be added up;"
            " detach it, or leave micro out of the plan"
        )
    return loss.total


def _differentiate(
    loss: Tensor,
    stand: StandIns,
    recorder: GraphRecorder,
    forward: ForwardModules,
    model: nn.Module,
    loss_fn: LossFn,
    precision: Precision,
    outside: Outside,
) -> dict[str, Tensor]:
    """Gradients of the parameters that reach the loss."""
    wanted = {name: p for name, p in stand.parameters.items() if p.requires_grad}
    if not loss.requires_grad or not wanted:
        raise LossError(
            "the loss does not depend on any parameter with requires_grad=True, so there is nothing to train; check"
            " for .detach(), .item() or torch.no_grad() between the model and the loss"
        )
    _check_leaves(loss, outside)
    recorder.phase = "backward"
    try:
        with BackwardModules(loss, forward, recorder), torch.autograd.set_multithreading_enabled(False):
            found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    except Exception as error:
        refusal = precision.refusal(error, recorder.module)
        raise refusal or capture_error(error, model, loss_fn, "in the backward pass") from error
    recorder.module = ""
    gradients = {name: g for name, g in zip(wanted, found, strict=True) if g is not None}
    if sparse := [name for name, g in gradients.items() if g.layout != torch.strided]:
        raise PlanError(  # no CaptureError, after which the model would run as it is: fused optimizers know none either
            f"the gradient of {sparse[0]} is sparse, and plait's are dense under every plan; build its module without"
            " sparse=True, and train it with an optimizer for dense gradients"
        )
    return gradients


def _check_leaves(loss: Tensor, outside: Outside) -> None:
    """Raise CaptureError for a real tensor that autograd would give a gradient, which no graph could; note tensors from
    outside that it would give one."""
    names = {id(fake): name for name, fake in outside.fakes.items()}
    seen, stack = set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if leaf is None:
            continue
        if is_real(leaf):
            place = outside.name_of(leaf) or f"of shape {list(leaf.shape)}"
            raise CaptureError(
                f"the tensor {place} reaches an autograd.Function from a closure or attribute, past what a capture"
                " sees, and would lose its gradient; read it from the module that has it, as self.weight"
            )
        if id(leaf) in names:
            outside.differentiable.append(names[id(leaf)])


def _device(leaves: dict[str, Tensor]) -> torch.device:
    """Where stand-ins for tensors on the meta device are: with the batch."""
    return next((leaf.device for leaf in leaves.values() if not leaf.is_meta), torch.device("cpu"))


def _fake_leaf(leaf: Tensor, fake_mode: FakeTensorMode, device: torch.device | None) -> Tensor:
    """Contiguous, so that batches which share shapes share the graph."""
    with fake_mode:
        where = device or (torch.device("cpu") if leaf.is_meta else leaf.device)
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=where)


def _brief(batch: Any) -> str:
    text = repr(batch)
    return text if len(text) <= 60 else f"a {type(batch).__name__}"


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in name)


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """No kernels that fuse a recurrent or transformer layer, or hide batch-norm state: these come as plain ops."""
    mkldnn, fast = torch._C._get_mkldnn_enabled(), torch.backends.mha.get_fastpath_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch._C._set_mkldnn_enabled(mkldnn)
        torch.backends.mha.set_fastpath_enabled(fast)
