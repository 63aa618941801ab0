"""A captured step: its graph, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Graph

from plait.compile.capture.batch_numbers import Fed, NumberAsked
from plait.compile.capture.fake_parameters import MadeBuffer
from plait.compile.capture.parts_left_out import NOTHING, LeftOut
from plait.compile.capture.python_state import Holder


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
