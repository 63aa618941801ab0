"""The recorder: a dispatch mode below autograd that writes every op it sees into a graph.

Tensors are fake: shapes are computed, and no memory is allocated. An op that changes a tensor in place is written in
its functional form if no other view of that tensor exists. Otherwise it is written as it is, `mutating` is set, and
`functionalise` (cleanup.py) makes the graph functional in a second pass.
"""

from __future__ import annotations

import bisect
import functools
import operator
import sys
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import Target, map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from plait.compile.capture.capture_errors import COLLECTIVES, communicates, source_line, users_frame
from plait.compile.capture.fake_parameters import is_real
from plait.compile.capture.late_values import known_value
from plait.compile.ir.calls import append_call
from plait.compile.ir.node_info import NodeInfo, describe
from plait.compile.ir.shapes import ShapeMemo, fake_of, spec_of, view_on_meta
from plait.compile.ops import op_spec
from plait.compile.ops.base import Args, Kwargs
from plait.compile.ops.draw import draw
from plait.compile.ops.random import check_random
from plait.errors import CaptureError

aten = torch.ops.aten
_PLAIN_ATTRIBUTE = (
    "the step changes in place a tensor that is neither parameter nor buffer; make it a buffer with register_buffer, so"
    " that its new value is kept"
)


class NodeLookup(Protocol):
    """Knows the tensors from outside the step (compile/capture/outside_tensors.py)."""

    def fake_of(self, real: Tensor) -> Tensor: ...
    def numbers(self, node: Node, with_buffers: bool) -> dict[str, Tensor]: ...


class GraphRecorder(TorchDispatchMode):
    """Write every op into `graph` while the mode is entered; only the fake mode is further inside.

    `module`, `phase` and `at`, which whoever drives the recorder sets, go into the NodeInfo of each node. `at` is the
    place in program order of a forward call, and for a backward call that of the forward call that it differentiates;
    if it is None, calls are counted. With `functionalised` only inputs may still change, at the end, when no view of
    their old values is read any more.
    """

    def __init__(self, fake_mode: FakeTensorMode, functionalised: bool = False) -> None:
        super().__init__()
        self._functionalised = functionalised
        self.graph = Graph()
        self.module = ""
        self.phase = "forward"
        self.at: int | None = None
        self._num_calls = 0
        self._numbers: list[int] = []  # autograd's sequence number after each forward call, and the call's place
        self._places: list[int] = []
        self.mutating = False
        self._writes: dict[Node, list[Node]] = {}  # the calls that changed a value in place, since it was computed
        self.scalar: Callable[[Tensor], Any] | None = None  # answers Python when it asks a fake tensor for its number
        self.constants: dict[str, Tensor] = {}
        self.constant_nodes: list[Node] = []
        self.key: Node | None = None
        self.outside: NodeLookup | None = None  # the tensors that are neither parameters, buffers nor the batch's
        self.kernels: Callable[[], AbstractContextManager[None]] = nullcontext  # in which results are as on a rank
        self._fake_mode = fake_mode
        self._memo = ShapeMemo()
        self._values: dict[Hashable, FakeTensor] = {}  # the `val` of nodes, by shape, strides and dtype
        self._draws = 0
        self.nodes: dict[int, Node] = {}
        self._kept: list[Tensor] = []  # ids stay unique while the tensors live
        self._group_of: dict[int, int] = {}  # by tensor id; tensors of one group are views of one another
        self._groups: list[list[Tensor]] = []
        self._written: set[int] = set()  # groups that an op has changed in place
        self._protected: dict[int, str] = {}  # groups that no op may change, with the reason
        self._lifted: dict[int, tuple[Tensor, Tensor]] = {}
        self._head: Node | None = None  # the last placeholder

    # what the driver calls

    def placeholder(self, name: str, value: object) -> Node:
        """Add an input. Placeholders come in the order of the calls, before all other nodes."""
        first = self._head.next if self._head is not None else next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first) if first is not None else self.graph.inserting_before():
            node = self.graph.placeholder(name)
        self._head = node
        node.target = node.name  # unique, as names of Python arguments must be
        self._describe(node, value)
        if isinstance(value, Tensor):
            self.bind(value, node)
        return node

    def protect(self, tensor: Tensor, reason: str) -> None:
        """Make ops that change the tensor in place raise CaptureError with this reason from now on."""
        self._protected[self._group_of[id(tensor)]] = reason

    def bind(self, tensor: Tensor, node: Node, group: int | None = None) -> None:
        """Make `tensor` the value of `node`; with `group`, it is a view of that group's tensors."""
        if id(tensor) not in self._group_of:
            self._kept.append(tensor)
            if group is None:
                group = len(self._groups)
                self._groups.append([])
            self._group_of[id(tensor)] = group
            self._groups[group].append(tensor)
        self.nodes[id(tensor)] = node

    def node_of(self, tensor: Tensor) -> Node:
        node = self.nodes.get(id(tensor))
        assert node is not None, f"a tensor of type {type(tensor).__name__} that no recorded op made"
        return node

    def tensor_of(self, node: Node) -> Tensor | None:
        """A tensor whose value is that of the node; None if there is none any more."""
        return next((one for one in reversed(self._kept) if self.nodes[id(one)] is node), None)

    def was_written(self, tensor: Tensor) -> bool:
        """Whether an op changed this tensor, or a view of it, in place."""
        return self._group_of[id(tensor)] in self._written

    def known_value(self, tensor: Tensor, with_buffers: bool = False) -> Tensor | None:
        """The value of a tensor that depends only on constants and tensors from outside, and `with_buffers` on buffers;
        None for others."""
        node = self.nodes.get(id(tensor))
        if node is None:
            return None
        constants = {n.name: self.constants[name] for n, name in zip(self.constant_nodes, self.constants, strict=True)}
        outside = {} if self.outside is None else self.outside.numbers(node, with_buffers)
        with _disable_current_modes(), torch.no_grad():
            return known_value(node, {**constants, **outside}, self._writes)

    def place_of(self, number: int) -> int:
        """The place of the forward call for which autograd made the node with this sequence number."""
        i = bisect.bisect_right(self._numbers, number)
        return self._places[min(i, len(self._places) - 1)]

    def call(self, target: Target, args: Args, kwargs: Kwargs, value: object) -> Node:
        """Append a call on nodes and constants whose result is `value`."""
        node = append_call(self.graph, target, args, kwargs)
        self._describe(node, value)
        return node

    def output(self, values: list[Tensor]) -> None:
        """End the graph, which returns the tuple of these values."""
        self.module = ""
        nodes = tuple(self.node_of(value) for value in values)
        self._describe(self.graph.output(nodes), tuple(values))

    def draw(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, kind: str, params: tuple[float, ...]
    ) -> Tensor:
        """Record random numbers as a call of `draw`; see ops/random.py. Raises CaptureError in the backward pass."""
        if self.phase == "backward":
            raise CaptureError(
                "the backward pass draws random numbers anew, as activation checkpointing inside the model does with"
                " dropout, and they would not be those of the forward pass; leave checkpointing to the plan, as in"
                " recompute=layer, or turn dropout off"
            )
        if self.key is None:
            self.key = self.placeholder("key", 0)
        shape = tuple(int(n) for n in shape)
        with self._fake_mode:
            value = torch.empty(shape, dtype=dtype, device=device)
        self.bind(value, self.call(draw, (self.key, self._draws, shape, dtype, device, kind, params, ()), {}, value))
        self._draws += 1
        return value

    # the mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing here is compiled, and torch's guard against that takes as long as the call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].device  # asked for several times by every call
        with torch._C.DisableTorchFunction():  # torch.vmap calls ops with the modes of functions in place
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        kwargs = kwargs or {}
        row = op_spec(func)
        if row.random is not None:
            with self:
                return row.random(self.draw, *args, **kwargs)
        check_random(func, args, kwargs)
        if row.instead is not None:
            with self:
                return row.instead(*args, **kwargs)
        if func is aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            return self._constant(args[0], func(*args))
        if func is aten._local_scalar_dense.default:
            if not isinstance(args[0], FakeTensor):
                with _disable_current_modes():
                    return args[0].item()
            if self.scalar is not None and args[0].constant is None:
                return self.scalar(args[0])
        if func.namespace == "prim":  # only asks for the device
            return func(*args, **kwargs)
        if func.namespace in COLLECTIVES:
            frame = users_frame(sys._getframe())
            raise communicates(func.name() if frame is None else source_line(frame))
        if _composite(func):
            with self:  # reached only where autograd is off altogether: in inference mode
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = map_aggregate((args, kwargs), self._lift)
        if func._schema.is_mutable:
            return self._mutate(func, args, kwargs)
        run = row.fake or func
        if all(r.alias_info is None for r in func._schema.returns):
            with self.kernels():
                result = self._memo.call(func, args, kwargs, run, self._fake_mode)
        else:
            found = view_on_meta(func, args, kwargs) if run is func else None
            result = run(*args, **kwargs) if found is None else found
        self._record(func, args, kwargs, result)
        return result

    def _record(self, func: OpOverload, args: Args, kwargs: Kwargs, result: Any) -> None:
        several = isinstance(result, (tuple, list))
        if not several and not isinstance(result, Tensor):
            return
        node_args, node_kwargs = map_aggregate((args, kwargs), self._node)
        node = self.call(func, node_args, node_kwargs, tuple(result) if several else result)
        group = self._viewed(func, args)
        if not several:
            self.bind(result, node, group)
            return
        for i, part in enumerate(result):
            if isinstance(part, Tensor):
                self.bind(part, self.call(operator.getitem, (node, i), {}, part), group)

    def _viewed(self, func: OpOverload, args: Args) -> int | None:
        """The group of the results of a view op; None for other ops."""
        returns = func._schema.returns
        if not returns or returns[0].alias_info is None:
            return None
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and isinstance(value, Tensor):
                return self._group_of[id(value)]
        return None

    def _mutate(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        written = [
            value
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in [args[position] if position < len(args) else kwargs.get(argument.name)]
        ]
        if func.namespace not in ("aten", "prims"):
            raise CaptureError(
                f"the op {func} writes to a tensor that it is given, and has no form that does not; let it return the"
                " new value, and write that with copy_"
            )
        functional = _functional_form(func)
        target = written[0] if len(written) == 1 and isinstance(written[0], Tensor) else None
        groups = {self._group_of[id(t)] for t in _tensors(written)}
        for group in groups & self._protected.keys():
            raise CaptureError(self._protected[group])
        self._written |= groups
        if functional is None or target is None or target is not args[0]:
            return self._as_it_is(func, args, kwargs, groups)
        if torch.Tag.inplace_view in func.tags:  # changes shape or strides only: unsqueeze_, t_
            node_args, node_kwargs = map_aggregate((args, kwargs), self._node)
            result = func(*args, **kwargs)
            self.bind(target, self.call(functional, node_args, node_kwargs, target))
            return result
        if target.is_conj() or target.is_neg():
            raise CaptureError(
                "a write to the conjugate of a tensor, which writes to the tensor, cannot be captured; write to the"
                " tensor itself, as x.mul_(2 - 1j) for x.conj().mul_(2 + 1j)"
            )
        peers = [target] if self._functionalised else self._groups[self._group_of[id(target)]]
        if any(_geometry(peer) != _geometry(target) for peer in peers):
            return self._as_it_is(func, args, kwargs, groups)
        with self:
            value = self._copied(target, args[1]) if func is aten.copy_.default else functional(*args, **kwargs)
            if value.dtype != target.dtype:
                value = value.to(target.dtype)
            if value.stride() != target.stride():
                value = aten.copy.default(target, value)
        func(*args, **kwargs)
        node = self.node_of(value)
        for peer in peers:
            self.nodes[id(peer)] = node
        return target

    def _copied(self, target: Tensor, source: Tensor) -> Tensor:
        value = aten._to_copy.default(source, dtype=target.dtype, device=target.device)
        return value.expand(target.shape) if value.shape != target.shape else value  # type: ignore[no-any-return]

    def _as_it_is(self, func: OpOverload, args: Args, kwargs: Kwargs, groups: Collection[int]) -> Any:
        self.mutating = True
        changed = {self.nodes[id(peer)] for group in groups for peer in self._groups[group]}
        node_args, node_kwargs = map_aggregate((args, kwargs), self._node)
        result = func(*args, **kwargs)
        node = self.call(func, node_args, node_kwargs, result)
        for value in changed:
            self._writes.setdefault(value, []).append(node)
        results = result if isinstance(result, (tuple, list)) else [result]
        for i, part in enumerate(results):
            if isinstance(part, Tensor):
                at = node if part is result else self.call(operator.getitem, (node, i), {}, part)
                self.bind(part, at)
        return result

    def _node(self, value: object) -> Any:
        return self.node_of(value) if isinstance(value, Tensor) else value

    def _lift(self, value: object) -> Any:
        """Make an input or a constant of a real tensor that the model's code holds."""
        if not isinstance(value, Tensor) or id(value) in self.nodes:
            return value
        if isinstance(value, FakeTensor):
            return value
        if self.outside is not None and is_real(value):
            return self.outside.fake_of(value)
        if id(value) not in self._lifted:
            fake = self._constant(value, self._fake_mode.from_tensor(value, static_shapes=True))
            self.protect(fake, _PLAIN_ATTRIBUTE)
            self._lifted[id(value)] = (value, fake)
        return self._lifted[id(value)][1]

    def _constant(self, real: Tensor, fake: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            real = real.detach().clone()
            number = real.item() if real.numel() == 1 else None
        if number is not None:
            options = {"dtype": real.dtype, "device": fake.device, "pin_memory": False}
            self.bind(fake, self.call(aten.full.default, (list(real.shape), number), options, fake))
            return fake
        name = f"constant_{len(self.constants)}"
        self.constants[name] = real
        self.constant_nodes.append(self.placeholder(name, fake))
        return fake

    def place_at(self, info: NodeInfo) -> None:
        """Give the next calls the module, phase and position of a node."""
        self.module, self.phase, self.at = info.module, info.phase, info.position

    def _describe(self, node: Node, value: Any) -> None:
        position = self._num_calls if self.at is None else self.at
        describe(
            node,
            NodeInfo(module=self.module, phase=self.phase, position=position),
            map_aggregate(value, self._copy),
        )
        self._num_calls += 1
        if self.phase == "forward":
            self._numbers.append(torch._C._autograd._get_sequence_nr())
            self._places.append(position)

    def _copy(self, value: object) -> Any:
        """A fake tensor like `value`, which itself may keep autograd's graph alive, or change in place."""
        if not isinstance(value, Tensor):
            return value
        spec = spec_of(value)
        if spec not in self._values:
            self._values[spec] = fake_of(spec, self._fake_mode)
        return self._values[spec]


@functools.cache
def _composite(func: OpOverload) -> bool:
    """Whether an op is only a composition of simpler ones.

    An op with a rule is not: it has kernels too, which round once (the backward of SiLU and of Mish).
    """
    return not op_spec(func).known and bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )


@functools.cache
def _functional_form(func: OpOverload) -> OpOverload | None:
    """aten.add.Tensor for aten.add_.Tensor; None if there is no functional form."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "aten" or not name.endswith("_") or name.startswith("__"):
        return None
    packet, takes = getattr(aten, name[:-1], None), _types(func)
    names = [] if packet is None else packet.overloads()
    # Most have the same overload's name, but the counterpart of pow_.Scalar is pow.Tensor_Scalar.
    found = (getattr(packet, one) for one in sorted(names, key=lambda one: one != func._overloadname))
    return next((one for one in found if _types(one) == takes), None)


def _types(func: OpOverload) -> list[str]:
    return [str(argument.type) for argument in func._schema.arguments]


def _geometry(tensor: Tensor) -> tuple[Hashable, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _tensors(values: list[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    map_aggregate(values, lambda v: found.append(v) if isinstance(v, Tensor) else None)
    return found
