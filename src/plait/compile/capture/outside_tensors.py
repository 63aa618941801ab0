"""Tensors from outside: those that a step reads besides parameters, buffers and batch, in closures or attributes.

Each becomes an input of the graph, named by its place.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from plait.compile.capture.capture_errors import source_line, users_frame
from plait.compile.capture.fake_parameters import FakeParameters, MadeBuffer, fake_like, is_real
from plait.compile.capture.graph_recorder import GraphRecorder
from plait.compile.capture.masked_rows import is_whole
from plait.compile.capture.module_hooks import autograd_nodes
from plait.compile.capture.reachable import Reached
from plait.compile.ir.dtypes import not_dense, other_format
from plait.errors import CaptureError, PlanError

_MOST_COMPARED = 1 << 16  # elements of a tensor whose numbers Python may read
_NOWHERE = (
    "the step changes in place a tensor that is neither parameter nor buffer and that plait cannot find again; make it"
    " a buffer with register_buffer, so that its new value is kept"
)


class Outside:
    """The tensors from outside that a capture has met so far."""

    def __init__(
        self,
        reached: Reached,
        model_fakes: FakeParameters,
        recorder: GraphRecorder,
        fake_mode: FakeTensorMode,
        device: torch.device,
        move: bool,
    ) -> None:
        self._reached = reached
        self._model_fakes = model_fakes
        self._recorder = recorder
        self._fake_mode = fake_mode
        self._device = device
        self._move = move
        self.nodes: dict[Node, str] = {}
        self.reals: dict[str, Tensor] = {}
        self.fakes: dict[str, Tensor] = {}
        self.compared: set[str] = set()  # places of tensors whose numbers Python has read
        self.differentiable: list[str] = []  # places of tensors to which autograd would give gradients
        self._by_id: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []  # ids stay unique while these live
        self._buffers = {recorder.node_of(fake): name for name, fake in model_fakes.buffers.items()}
        self._held: dict[str, str] = {}  # buffers whose numbers Python has read, with the first line that did
        self._storages: dict[int, str] = {}
        for real_id, name in model_fakes.names.items():
            real = reached.own.get(real_id)
            if real is not None and not real.is_meta:
                self._storages[_storage(real)] = name

    def fake_of(self, real: Tensor) -> Tensor:
        """The fake tensor for a real tensor that the step reads. Raises CaptureError for a view of a parameter."""
        known = self._model_fakes.made.get(id(real), self._by_id.get(id(real)))
        if known is None and id(real) in self._reached.earlier:
            own = self._reached.earlier[id(real)]
            known = self._model_fakes.parameters.get(own, self._model_fakes.buffers.get(own))
        if known is not None:
            return known
        name = self._reached.places.get(id(real))
        if other_format(real):
            raise CaptureError(not_dense(name or f"a tensor of shape {list(real.shape)}", real))
        with _disable_current_modes():
            shared = None if real.is_meta or not real.numel() else self._storages.get(_storage(real))
        if shared is not None and shared in self._model_fakes.parameters | self._model_fakes.buffers:
            mine = (self._model_fakes.parameters | self._model_fakes.buffers)[shared]
            if (mine.shape, mine.stride(), mine.dtype) == (real.shape, real.stride(), real.dtype):
                self._by_id[id(real)] = found = mine.detach()
                self._kept.append(real)
                return found
            raise CaptureError(
                f"the step reads {name or 'a tensor'}, a part or view of {shared} that was made outside of it; make the"
                f" view in the forward, or where loss_fn reads it"
            )
        place = name or f"tensor {len(self.fakes)}"
        with _disable_current_modes():
            fake = fake_like(real, self._fake_mode, self._device if self._move or real.is_meta else real.device)
            if real.requires_grad and not fake.requires_grad:
                fake.requires_grad_()
        node = self._recorder.placeholder("outside_" + "".join(c if c.isalnum() else "_" for c in place), fake)
        self.nodes[node] = place
        self.reals[place], self.fakes[place] = real, fake
        self._by_id[id(real)] = fake
        if name is None:
            self._recorder.protect(fake, _NOWHERE)
        elif shared is not None:
            reason = f"the step changes {place} in place, which shares memory with {shared}; give each its own"
            self._recorder.protect(fake, reason)
        elif real.numel() and not real.is_meta:
            self._storages[_storage(real)] = place
        return fake

    def name_of(self, real: object) -> str | None:
        """The name of a parameter or buffer, or the place of another tensor."""
        return self._model_fakes.names.get(id(real)) or self._reached.places.get(id(real))

    def written(self) -> dict[str, Tensor]:
        """The tensors that the step has changed in place, with their new values."""
        return {name: fake for name, fake in self.fakes.items() if self._recorder.was_written(fake)}

    def numbers(self, node: Node, with_buffers: bool) -> dict[str, Tensor]:
        """The tensors from outside that a node depends on, and `with_buffers` the buffers, by the names of their nodes;
        {} if it depends on others too.

        Python will read the node's value, so tensors from outside are compared at every step.
        """
        own = self._buffers if with_buffers else {}
        roots = [root for root in _roots(node) if root not in self._recorder.constant_nodes]
        if any(root not in self.nodes and root not in own for root in roots):
            return {}
        reals = {root: self._real(root) for root in roots}
        if any(real is None or real.numel() > _MOST_COMPARED or real.is_meta for real in reals.values()):
            return {}
        self.compared |= {self.nodes[root] for root in roots if root in self.nodes}
        if held := {own[root] for root in roots if root in own}:
            frame = users_frame(sys._getframe(1))
            line = "" if frame is None else source_line(frame)
            self._held = dict.fromkeys(held, line) | self._held
        return {root.name: real for root, real in reals.items() if real is not None}

    def _real(self, root: Node) -> Tensor | None:
        """The real tensor of an input."""
        if root in self.nodes:
            return self.reals[self.nodes[root]]
        names = self._model_fakes.names
        return next((t for real_id, t in self._reached.own.items() if names.get(real_id) == self._buffers[root]), None)

    def check_made(self, made: Sequence[MadeBuffer], written: Collection[str]) -> None:
        """Raise CaptureError for a buffer that the step makes from more than constants and unchanged buffers: the next
        step would read the value that this step has left in it."""
        steady = {node for node, name in self._buffers.items() if name not in written} | {
            *self._recorder.constant_nodes
        }
        for each in made:
            if not is_whole(each.value):
                raise CaptureError(
                    f"the step makes the buffer {each.name} of rows that a mask selects: its shape would depend on the"
                    " numbers in the mask; keep all rows, and the mask"
                )
            node = self._recorder.nodes.get(id(each.value))
            if node is not None and not steady.issuperset(_roots(node)):
                raise CaptureError(hands_on(each.name))

    def check_held(self, written: Collection[str]) -> None:
        """Raise CaptureError if Python has read numbers of one of the `written` buffers, which the step changes."""
        for name in sorted(self._held.keys() & {*written}):
            raise CaptureError(
                f"the step changes the buffer {name}, and Python needs a number in it, so that each step would be"
                f" another graph ({self._held[name]}); use torch.where instead, and x.item() to print or"
                " keep the number"
            )


def hands_on(name: str) -> str:
    """The error message for a buffer that a step makes and the next step reads."""
    return (
        f"the step makes the buffer {name}, and the next step goes on from it; register it in __init__, with its shape"
        " and first value, or run the model once on a batch, model(x), before you hand it over"
    )


def _roots(node: Node) -> list[Node]:
    """The placeholders that a node depends on."""
    seen, stack = {node}, [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return [each for each in seen if each.op == "placeholder"]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def check_leaves(loss: Tensor, outside: Outside) -> None:
    """Raise CaptureError for a real tensor to which autograd would give a gradient, because a graph cannot, and
    PlanError for an embedding with sparse gradients. Record the tensors from outside to which it would give one."""
    names = {id(fake): name for name, fake in outside.fakes.items()}
    for node in autograd_nodes(loss):
        if getattr(node, "_saved_sparse", False):  # with a padding_idx its backward looks for rows to leave out
            weights = [outside.name_of(getattr(source, "variable", source)) for source, _ in node.next_functions]
            raise sparse_gradient(next(filter(None, weights), "an embedding"))
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


def sparse_gradient(name: str) -> PlanError:
    """The error for a parameter whose gradient is sparse. It is no CaptureError, after which the model would run
    uncaptured: fused optimizers refuse such gradients too."""
    return PlanError(
        f"the gradient of {name} is sparse, and plait's are dense under every plan; build its module without"
        " sparse=True, and train it with an optimizer for dense gradients"
    )
