"""Records what an optimizer's step does to each element of a parameter, as a program of ATen ops.

The optimizer itself steps small tensors, one for each kind of parameter, while every op on them is written down. The
numbers in those ops (a learning rate, a bias correction, a decay that a scheduler moves) come apart from the program,
so that it is the same at each step and a backend compiles it once, for parameters of any shape. What the optimizer
counts in Python or in 0-d tensors stays with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from plait.backends.xla.element_update import GRADIENT, PARAMETER, ElementProgram, ProgramValue, StepNumber, UpdateCall
from plait.compile.ops import View, op_spec
from plait.compile.ops.dims import pointwise_factors
from plait.engine.optimizer_trials import schedulers_restored, small_shape, without_hooks
from plait.errors import PlanError, Refusal

aten = torch.ops.aten


@dataclass(frozen=True)
class KindOfParameter:
    """Parameters that an optimizer updates alike: members of one group, with tensors of these dtypes in their state.

    counts  the state that is no tensor with the parameter's elements, such as the number of steps, by key
    """

    group: int
    ndim: int
    dtype: torch.dtype
    gradient: torch.dtype
    state: tuple[tuple[str, torch.dtype], ...]
    counts: tuple[tuple[str, object], ...]


@dataclass
class RecordedKind:
    """The record of one kind.

    program  the ops; inputs for state that the optimizer has only made in this step are there too
    numbers  the program's numbers in this step
    initial  the value of every element, and the dtype, of state that the optimizer has made in this step, by key
    counts   what the optimizer counts, after the step, by key
    """

    program: ElementProgram
    numbers: tuple[float, ...]
    initial: dict[str, tuple[float, torch.dtype]]
    counts: dict[str, object]


@dataclass(frozen=True)
class RecordedStep:
    """The record of an optimizer's step, with one of each kind of parameter."""

    kinds: tuple[RecordedKind, ...]
    _optimizer: torch.optim.Optimizer
    _twin: torch.optim.Optimizer

    def advance(self) -> None:
        """Take over what the step has counted in the optimizer's groups and attributes. Changes the optimizer."""
        for group, stepped in zip(self._optimizer.param_groups, self._twin.param_groups, strict=True):
            for key, value in stepped.items():
                if key not in ("params", *_plain(group)) and isinstance(value, (int, float)):
                    group[key] = value
        for key, value in self._twin.__dict__.items():
            if isinstance(value, (bool, int, float)) and not key.startswith("_"):
                self._optimizer.__dict__[key] = value


@dataclass
class _Kind:
    """What is written down for one kind so far."""

    inputs: list[str] = field(default_factory=list)
    calls: list[UpdateCall] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)


class _Recorder(TorchDispatchMode):
    """Writes down the ops on some tensors.

    `known` has, by id of a tensor, its kind and the value that it has now; `first` the value that it had at first.
    `made` has, by kind and value, what every element of a tensor is that was made without looking at another's values.
    """

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.kinds: list[_Kind] = []
        self.known: dict[int, tuple[int, int]] = {}
        self.first: dict[int, int] = {}
        self.made: dict[tuple[int, int], float] = {}
        self._alive: list[Tensor] = []
        self._optimizer = optimizer

    def begin(self) -> int:
        """Begin another kind. Returns its number."""
        self.kinds.append(_Kind())
        return len(self.kinds) - 1

    def input(self, kind: int, name: str, tensor: Tensor) -> None:
        """Make the tensor the next input of a kind."""
        record = self.kinds[kind]
        self._note(tensor, kind, len(record.inputs))
        record.inputs.append(name)

    def _note(self, tensor: Tensor, kind: int, index: int) -> None:
        self.known[id(tensor)] = (kind, index)
        self.first.setdefault(id(tensor), index)
        self._alive.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        involved = [self.known[id(x)] for x in tensors if id(x) in self.known]
        result = func(*args, **kwargs)
        if not involved:
            return result
        if op_spec(func).view is View.ALIAS:
            self._note(result, *involved[0])
            return result
        op, kinds = _functional(func), {kind for kind, _ in involved}
        if not _is_by_element(op) or len(kinds) > 1 or not isinstance(result, Tensor):
            what = str(func) if len(kinds) == 1 else f"{func} of several parameters"
            refusal = _not_by_element(self._optimizer, what)
            raise PlanError(refusal)
        (kind,) = kinds
        if op._schema.is_mutable:
            refusal = _not_by_element(self._optimizer, str(func))
            raise PlanError(refusal)
        record, arguments = self.kinds[kind], func._schema.arguments
        index = len(record.inputs) + len(record.calls)
        if op_spec(op).reads == "shape":
            self.made[kind, index] = float(result.flatten()[0])
        written = [self._argument(record, a, value) for a, value in zip(arguments, args, strict=False)]
        by_name = {a.name: a for a in arguments}
        named = [(k, self._argument(record, by_name[k], v)) for k, v in kwargs.items() if k not in _ELSEWHERE]
        record.calls.append(UpdateCall(op, tuple(written), tuple(named), result.dtype))
        self._note(kwargs.get("out", args[0]) if func._schema.is_mutable else result, kind, index)
        return result

    def _argument(self, record: _Kind, argument: torch.Argument, value: object) -> object:
        if isinstance(value, Tensor):
            if id(value) in self.known:
                return ProgramValue(self.known[id(value)][1])
            if value.numel() > 1 and not bool((value == value.flatten()[0]).all()):
                refusal = _not_by_element(self._optimizer, "a tensor that it has made itself")
                raise PlanError(refusal)
            value = value.flatten()[0].item() if value.numel() else 0.0
        elif not isinstance(value, (int, float)) or str(argument.type) in ("int", "bool", "Optional[int]"):
            return tuple(value) if isinstance(value, list) else value
        if isinstance(value, bool) or argument.name == "exponent":
            return value
        record.numbers.append(float(value))
        return StepNumber(len(record.numbers) - 1)


_ELSEWHERE = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "out")  # arguments about memory


def _functional(op: OpOverload) -> OpOverload:
    """The op that returns what `op` would write into an argument; `op` itself if it writes nothing."""
    if not op._schema.is_mutable:
        return op
    packet = getattr(aten, op._schema.name.removeprefix("aten::").removesuffix("_"), None)
    kinds = [str(a.type) for a in op._schema.arguments if a.name != "out"]
    for name in () if packet is None else packet.overloads():
        other: OpOverload = getattr(packet, name)
        if not other._schema.is_mutable and [str(a.type) for a in other._schema.arguments] == kinds:
            return other
    return op


def _is_by_element(op: OpOverload) -> bool:
    """Whether each element of the result is made of elements at the same place."""
    row = op_spec(op)
    return row.factors is pointwise_factors or row.reads == "shape" or torch.Tag.pointwise in op.tags


def _not_by_element(optimizer: str, what: str) -> Refusal:
    return Refusal(
        f"backend=xla compiles an optimizer's step for each element by itself, and {optimizer} uses {what}", "",
        "use SGD, Adam, AdamW or another optimizer that works element by element, or leave backend=xla out",
    )  # fmt: skip


def record_step(optimizer: torch.optim.Optimizer, kinds: Sequence[KindOfParameter]) -> RecordedStep:
    """Record the optimizer's next step for these kinds of parameters; `group` counts its `param_groups`.

    The optimizer stays as it is until `advance`. Raises PlanError for one that does not work element by element, or
    that cannot be stepped on small tensors.
    """
    name = type(optimizer).__name__
    recorder = _Recorder(name)
    toys: list[nn.Parameter] = []
    twin = object.__new__(type(optimizer))
    twin.__dict__ = without_hooks(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, **_plain(group), "params": []} for group in optimizer.param_groups]
    if hasattr(twin, "bind"):
        refusal = _not_by_element(name, "other elements of the tensor")
        raise PlanError(refusal)
    for kind in kinds:
        shape, number = small_shape(max(kind.ndim, 1)), recorder.begin()
        toy = nn.Parameter(torch.ones(shape, dtype=kind.dtype))
        toy.grad = torch.ones(shape, dtype=kind.gradient)
        toys.append(toy)
        twin.param_groups[kind.group]["params"].append(toy)
        recorder.input(number, PARAMETER, toy)
        recorder.input(number, GRADIENT, toy.grad)
        for key, dtype in kind.state:
            twin.state[toy][key] = made = torch.ones(shape, dtype=dtype)
            recorder.input(number, key, made)
        for key, value in kind.counts:
            twin.state[toy][key] = value.clone() if isinstance(value, Tensor) else value
    try:
        with schedulers_restored([optimizer]), recorder, torch.no_grad():
            twin.step()
    except PlanError:
        raise
    except Exception as error:
        why = f"what small tensors do not have ({type(error).__name__}: {error})"
        refusal = _not_by_element(name, why)
        raise PlanError(refusal) from error
    recorded = tuple(_recorded(recorder, number, toy, twin.state[toy]) for number, toy in enumerate(toys))
    return RecordedStep(recorded, optimizer, twin)


def _plain(group: Mapping[str, object]) -> dict[str, bool]:
    """Options that choose the implementation with one ATen op for each operation of each tensor."""
    return {key: False for key in ("foreach", "fused", "capturable") if key in group}


def _recorded(recorder: _Recorder, number: int, toy: nn.Parameter, state: Mapping[str, object]) -> RecordedKind:
    kind = recorder.kinds[number]
    num = len(kind.inputs)
    outputs = {PARAMETER: recorder.known[id(toy)][1]}
    counts: dict[str, object] = {}
    made: dict[int, str] = {}  # keys of state that a call has made, by the call's value
    for key, value in state.items():
        if not isinstance(value, Tensor) or (id(value) not in recorder.known and value.shape != toy.shape):
            counts[key] = value
        elif id(value) in recorder.known:
            outputs[key] = recorder.known[id(value)][1]
            first = recorder.first[id(value)]
            if (number, first) in recorder.made:
                made[first] = key
        else:  # made without regard to the parameter
            outputs[key] = num + len(kind.calls)
            filled = (ProgramValue(0), float(value.detach().flatten()[0]))
            kind.calls.append(UpdateCall(aten.full_like.default, filled, (), value.dtype))
    # State that this step has made becomes an input, so that later steps have the same program.
    inputs = (*kind.inputs, *made.values())
    kept = [num + i for i in range(len(kind.calls)) if num + i not in made]
    moved = {old: new for new, old in enumerate((*range(num), *made, *kept))}

    def renumbered(argument: object) -> object:
        return ProgramValue(moved[argument.index]) if isinstance(argument, ProgramValue) else argument

    calls = []
    for call in (kind.calls[i - num] for i in kept):
        args, kwargs = tree_map(renumbered, (call.args, call.kwargs))
        calls.append(UpdateCall(call.op, args, kwargs, call.dtype))
    program = ElementProgram(inputs, tuple(calls), tuple((key, moved[index]) for key, index in outputs.items()))
    initial = {key: (recorder.made[number, first], kind.calls[first - num].dtype) for first, key in made.items()}
    return RecordedKind(program, tuple(kind.numbers), initial, counts)
