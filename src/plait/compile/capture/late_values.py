"""Values that Python reads from tensors during a capture, before the tensors have values.

A value that depends on constants only is computed at once, as is one of buffers, which is checked when the step runs.
Otherwise `loss.item()` returns a `LateNumber`, which computes as tensors do and prints as a question mark. A branch of
which one side only raises (an assertion, the argument checks of torch.distributions) takes the other side, and the
condition is checked when the step runs: if it does not hold, the loss is NaN, and the error for that names the line.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from plait.compile.capture.branches import Part, forced_branch, instruction_of, part_left_out, past_what_is_shown
from plait.compile.capture.capture_errors import has_source, source_line, users_frame
from plait.compile.capture.log_only import branch_without_output, is_shown
from plait.compile.ops.index import by_lookup
from plait.compile.ops.loss import with_lengths

UNKNOWN = "?"  # how a number prints that is known only when the step runs
_MAX_STEPS = 400  # calls to run in order to know a value


@dataclass(frozen=True)
class LateCheck:
    """What Python was told of a tensor: when the step runs, the 0-d `tensor` must be `expected`, a number or a truth
    value."""

    tensor: Tensor
    expected: float
    place: str  # file:line: "source"


class PartsLeftOut(Protocol):
    """Runs parts of a model that the model skips if there are no rows (compile/capture/empty_rounds.py)."""

    def asks_for_rows(self, condition: Tensor, part: Part) -> bool: ...
    def begin(self, frame: FrameType, part: Part, error: Exception, condition: Tensor | None = None) -> None: ...
    def note_reduction(self) -> None: ...


class LateValues(TorchFunctionMode):
    """While entered, answers what Python asks of tensors without values.

    `known` returns the value of a tensor that depends on constants only, or with True on constants and buffers, and
    None for others. `forward` says whether the forward pass is running.
    """

    def __init__(self, known: Callable[[Tensor, bool], Tensor | None], forward: Callable[[], bool]) -> None:
        super().__init__()
        self.checks: list[LateCheck] = []
        self._known = known
        self._forward = forward
        self._shown: dict[str, None] = {}  # places where a late number was read to be printed or kept, in order
        self._numbers: list[LateNumber] = []
        self._open = True
        self.parts: PartsLeftOut | None = None

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._open = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.item and isinstance(args[0], FakeTensor):
            return self._item(args[0])
        if func in _PRINTED:
            return self._printed(func, args)
        if func is Tensor.numpy and isinstance(args[0], FakeTensor):
            return self._array(args[0])
        if func in _EQUAL and isinstance(args[0], FakeTensor) and args[0].shape == args[1].shape:
            return bool(torch.eq(args[0], args[1]).all())
        if func in _ALL:
            return _ALL[func](*args, **kwargs)
        if func in _BY_OTHERS and (found := _BY_OTHERS[func](*args, **kwargs)) is not NotImplemented:
            return found
        if func in (torch.tensor, torch.as_tensor) and _holds_late(args[0]):
            return _built(args[0], kwargs)
        return func(*args, **kwargs)

    def checked(self, loss: Tensor) -> Tensor:
        """The loss, or NaN if one of the checks fails when the step runs."""
        if not self.checks:
            return loss
        with torch.no_grad():
            holds = [_as_expected(check).reshape(()) for check in self.checks]
            every = functools.reduce(torch.logical_and, holds).to(loss.device)
        return torch.where(every, loss, torch.full_like(loss, float("nan")))

    def warn(self) -> None:
        """Warn once about numbers of tensors that the step reads only to show them."""
        for number in self._numbers:
            if not number.computes and number.place:
                self._shown[number.place] = None
        if self._shown:
            places = "; ".join(list(self._shown)[:3])
            warnings.warn(
                f"the step reads the number of a tensor at {places}. The number is known only on the device while the"
                f" step runs, so it is {UNKNOWN!r} there, and this line runs only when the step is captured; to have"
                ' the number at every step let loss_fn return (loss, {"name": tensor})',
                stacklevel=2,
            )

    def truth(self, tensor: Tensor, error: Exception) -> bool:
        """The truth value that a condition is assumed to have; it is checked when the step runs.

        Raises `error` if no branch can be assumed.
        """
        frame = users_frame(sys._getframe(1))
        if frame is None or not self._forward() or not self._open:
            raise error
        expected = forced_branch(frame)
        if expected is None:
            past = branch_without_output(frame) if has_source(frame) else past_what_is_shown(frame)
            if past is None:
                return self._runs_part(frame, tensor, error)
            self._shown[source_line(frame)] = None
            return past
        self.checks.append(LateCheck(tensor, expected, source_line(frame)))
        return expected

    def _runs_part(self, frame: FrameType, condition: Tensor, error: Exception) -> bool:
        """The value of a condition with which what it leaves out runs, if that makes no difference."""
        part = part_left_out(frame)
        if part is None or self.parts is None or not self.parts.asks_for_rows(condition, part):
            raise error
        self.parts.begin(frame, part, error, condition)
        return part.runs

    def number(self, tensor: Tensor, *sources: LateNumber) -> LateNumber:
        """The number of a 0-d tensor, computed from `sources` or asked for by Python."""
        frame = None if sources else users_frame(sys._getframe(1))
        made = LateNumber(tensor, self, sources, "" if frame is None else source_line(frame))
        self._numbers.append(made)
        return made

    def scalar(self, tensor: Tensor) -> Any:
        """The number that Python asks of a fake tensor. Raises torch's own error if it cannot be known."""
        known = self._known(tensor, False)
        if known is None:
            return self._of_buffers(tensor)
        with _disable_current_modes():
            return known.item()

    def _of_buffers(self, tensor: Tensor) -> Any:
        """The number of a fake tensor that is computed from buffers which the step leaves as they are. That they have
        these values is checked when the step runs, as a checkpoint or the user may give them others."""
        frame = users_frame(sys._getframe(1))
        known = self._known(tensor, True) if frame is not None and self._forward() and self._open else None
        with _disable_current_modes():
            found = None if known is None else known.item()
        if frame is None or found is None or found != found:
            return self.truth(tensor, _needed())
        self.checks.append(LateCheck(tensor, found, source_line(frame)))
        return found

    def _item(self, tensor: Tensor) -> Any:
        try:
            return Tensor.item(tensor)
        except DataDependentOutputException:
            if not self._forward():
                raise
            return self.number(tensor.detach().reshape(()))

    def _printed(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """`f"{loss:.3f}"`, `"%.3f" % loss`."""
        tensor = args[0]
        if not isinstance(tensor, FakeTensor):
            return func(*args)
        if func is Tensor.__format__ and tensor.ndim == 0:
            return format(self._item(tensor), args[1])
        try:
            return func(tensor.detach(), *args[1:])
        except DataDependentOutputException:
            frame = users_frame(sys._getframe(1))
            if frame is None or not (_formats(frame) or is_shown(frame)):
                raise
            self._shown[source_line(frame)] = None
            return _IN_PRINT.get(func, math.nan)

    def _array(self, tensor: Tensor) -> np.ndarray | LateArray:
        known = self._known(tensor, False)
        if known is not None:
            with _disable_current_modes():
                return known.numpy()
        frame = users_frame(sys._getframe(1))
        if frame is not None:
            self._shown[source_line(frame)] = None
        return LateArray(tensor)


_PRINTED = frozenset({Tensor.__float__, Tensor.__int__, Tensor.__format__, Tensor.tolist})
_IN_PRINT: dict[Hashable, object] = {Tensor.__int__: 0, Tensor.tolist: UNKNOWN}
_ALL = {torch._is_all_true: torch.all, torch._is_any_true: torch.any}  # in argument checks of distributions
_BY_OTHERS: dict[Hashable, Callable[..., Any]] = {
    F.ctc_loss: with_lengths,
    torch.ctc_loss: with_lengths,
    F.embedding_bag: by_lookup,
}
_EQUAL = frozenset({torch.equal, Tensor.equal})


class LateNumber:
    """The number that a 0-d tensor will hold when the step runs.

    Arithmetic returns late numbers, or tensors where the other operand is a tensor; it prints as a question mark. What
    needs the number itself raises the error that `item()` would have raised.
    """

    def __init__(self, tensor: Tensor, owner: LateValues, sources: tuple[LateNumber, ...], place: str) -> None:
        # The types of Python's numbers: an int, a bool or a double.
        self._held = tensor.double() if tensor.dtype.is_floating_point else tensor
        self._owner = owner
        self._sources = sources
        self.place = place  # where Python asked for it; '' if it was computed from others
        self.computes = False  # whether a tensor or a condition of the step was computed from it

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """In a torch function it is a 0-d tensor that affects the dtype of the result as a Python number would."""
        tensors: list[Tensor] = []
        both = (args, kwargs or {})
        map_aggregate(both, lambda v: tensors.append(v) if isinstance(v, Tensor) else None)
        args, kwargs = map_aggregate(both, lambda v: v._beside(tensors) if isinstance(v, LateNumber) else v)
        try:
            return func(*args, **kwargs)
        except TypeError:
            raise _needed() from None

    def _beside(self, tensors: list[Tensor]) -> Tensor:
        """The tensor as an operand of `tensors`."""
        self._mark()
        if self._owner.parts is not None:
            self._owner.parts.note_reduction()
        dtype = self._dtype_beside(tensors, 1.0 if self._floating else 1)
        return self._tensor if dtype is None else self._tensor.to(dtype)

    def _dtype_beside(self, tensors: list[Tensor], kind: float) -> torch.dtype | None:
        """The dtype that an operand of this kind needs in order to affect the result's dtype as a number would; None if
        a double, or an integer, does so."""
        if not tensors or any(t.ndim for t in tensors if t.dtype.is_floating_point or not self._floating):
            return None
        dtype = torch.result_type(tensors[0], kind)
        for tensor in tensors[1:]:
            dtype = torch.promote_types(dtype, torch.result_type(tensor, kind))
        return dtype

    @property
    def _tensor(self) -> Tensor:
        return self._held

    @property
    def _floating(self) -> bool:
        return self._tensor.dtype.is_floating_point

    def tensor(self) -> Tensor:
        """The 0-d tensor: a double, an integer or a bool."""
        return self._beside([])

    def _mark(self) -> None:
        self.computes = True
        for source in self._sources:
            source._mark()

    def _with(self, other: object, compute: Callable[[Any, Any], Any]) -> Any:
        if isinstance(other, Tensor):
            return compute(self._beside([other]), other)
        sources = (self, other) if isinstance(other, LateNumber) else (self,)
        if isinstance(other, LateNumber):
            other = other._tensor
        if not isinstance(other, (bool, int, float, Tensor)):
            return NotImplemented
        mine = self._tensor
        if isinstance(other, float) and not self._floating:
            mine = mine.double()
        return self._owner.number(compute(mine, other), *sources)

    def __bool__(self) -> bool:
        self._mark()
        return self._owner.truth(self._tensor, _needed())

    def __float__(self) -> float:
        frame = users_frame(sys._getframe(1))
        if frame is None or not (_formats(frame) or is_shown(frame)):
            raise _needed()
        return math.nan

    def __int__(self) -> int:
        if not is_shown():
            raise _needed()
        return 0

    __index__ = __int__
    __trunc__ = __floor__ = __ceil__ = __int__

    def __format__(self, spec: str) -> str:
        return UNKNOWN

    def __repr__(self) -> str:
        return UNKNOWN

    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> LateNumber:
        return self._owner.number(-self._tensor, self)

    def __pos__(self) -> LateNumber:
        return self

    def __abs__(self) -> LateNumber:
        return self._owner.number(self._tensor.abs(), self)

    def __round__(self, digits: int | None = None) -> LateNumber:
        if not self._floating:
            return self
        if digits is None:
            return self._owner.number(self._tensor.round().long(), self)
        return self._owner.number(self._tensor.round(decimals=digits), self)

    def item(self) -> LateNumber:
        """Returns itself, as a numpy number does."""
        return self


def _python_divide(a: object, b: object) -> Any:
    return operator.truediv(a.double() if isinstance(a, Tensor) and not a.dtype.is_floating_point else a, b)


def _operator(compute: Callable[[Any, Any], Any], swapped: bool) -> Callable[[LateNumber, Any], Any]:
    def method(self: LateNumber, other: object) -> Any:
        return self._with(other, (lambda a, b: compute(b, a)) if swapped else compute)

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(LateNumber, f"__{_name}__", _operator(getattr(operator, _name), False))
for _name in ("add", "sub", "mul", "floordiv", "mod", "pow"):
    setattr(LateNumber, f"__r{_name}__", _operator(getattr(operator, _name), True))
setattr(LateNumber, "__truediv__", _operator(_python_divide, False))  # noqa: B010
setattr(LateNumber, "__rtruediv__", _operator(lambda a, b: operator.truediv(a, b), True))  # noqa: B010


class LateArray:
    """The result of `tensor.numpy()` before the step runs: it has a shape, and prints as a question mark."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.ndim = tensor.ndim
        self.size = tensor.numel()

    def __repr__(self) -> str:
        return UNKNOWN

    def __format__(self, spec: str) -> str:
        return UNKNOWN

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__array__":
            raise AttributeError(name)
        raise _needed()

    def _number(self, *others: object) -> NoReturn:
        raise _needed()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _number
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __getitem__ = __iter__ = _number
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __float__ = _number


def _as_expected(check: LateCheck) -> Tensor:
    if isinstance(check.expected, bool):
        return check.tensor != 0 if check.expected else check.tensor == 0
    return check.tensor == check.expected


def _needed() -> DataDependentOutputException:
    return DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)


def _holds_late(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_late(v) for v in value)
    return isinstance(value, LateNumber)


def _built(value: object, kwargs: dict[str, Any]) -> Tensor:
    """torch.tensor of a nesting of late numbers."""
    if isinstance(value, (list, tuple)):
        return torch.stack([_built(v, kwargs) for v in value])
    if not isinstance(value, LateNumber):
        return torch.tensor(value, **kwargs)
    default = torch.get_default_dtype() if value._floating else value._tensor.dtype
    made = value._tensor.to(kwargs.get("device"), kwargs.get("dtype") or default)
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def _formats(frame: FrameType) -> bool:
    """Whether the frame is evaluating `"..." % value`."""
    now = instruction_of(frame)
    return now is not None and now.opname == "BINARY_OP" and now.argrepr in ("%", "%=")


def _ancestors(node: Node, writes: Mapping[Node, Sequence[Node]]) -> Iterator[Node]:
    todo, seen = [node], {node}
    while todo:
        one = todo.pop()
        yield one
        for source in (*one.all_input_nodes, *writes.get(one, ())):
            if source not in seen:
                seen.add(source)
                todo.append(source)


def known_value(node: Node, constants: dict[str, Tensor], writes: Mapping[Node, Sequence[Node]]) -> Tensor | None:
    """The value of a node that depends on constants only, else None.

    `constants` are values of placeholders by the names of their nodes, `writes` the calls that have changed the value
    of a node in place since it was computed.
    """
    needed = set()
    for one in _ancestors(node, writes):
        if one.op == "placeholder" and one.name not in constants:
            return None
        if one.op == "call_function" and not (isinstance(one.target, OpOverload) or one.target is operator.getitem):
            return None
        needed.add(one)
        if len(needed) > _MAX_STEPS:
            return None
    env: dict[Node, Any] = {}
    for one in (each for each in node.graph.nodes if each in needed):
        if one.op == "placeholder":
            env[one] = constants[one.name].clone()
        else:
            args, kwargs = map_arg((one.args, one.kwargs), env.__getitem__)
            env[one] = one.target(*args, **kwargs)
    found = env[node]
    return found if isinstance(found, Tensor) else None
