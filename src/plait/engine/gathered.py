"""The user's own model with whole weights for a while: to generate, evaluate by hand, clamp or export.

at once   every parameter is gathered into the model; what is written to it is taken over at the end
op by op  each op that reads a parameter gets the whole tensor, which is freed after it: for models that do not fit
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from plait.comm.agree import agree
from plait.comm.protocol import World
from plait.engine.local_tensors import lies_here, local_part
from plait.engine.model_weights import placeholders, put_back, refuse_away, replace_parameters
from plait.errors import ModelError, PlanError

if TYPE_CHECKING:
    from plait.engine.train_state import TrainState

_gathered_models: WeakSet[nn.Module] = WeakSet()
_lock = threading.Lock()


@contextmanager
def gathered(run: TrainState, rank: int | None, write: bool, at_once: bool) -> Iterator[nn.Module]:
    """The model with whole weights, on all ranks or only on `rank`; see Trainer.gathered.

    Raises PlanError for a rank that the plan does not have, or for one rank with `at_once=False`.
    """
    _check_rank(run.world, rank)
    if not at_once and rank is not None:
        raise PlanError(f"rank={rank} alone cannot put weights together op by op: all ranks use the model alike")
    model = run.held.model
    with ExitStack() as stack:
        stack.enter_context(_alone(model))
        if run.replicas is not None:
            stack.enter_context(run.replicas.aggregated(run.step_number))
        lending = _Lending(run, model, rank, write and at_once)
        stack.enter_context(lending.at_once() if at_once else lending.op_by_op())
        yield model
    if lending.changed and run.replicas is not None:
        lending.take_over_in_replicas()


@contextmanager
def not_started(world: World, model: nn.Module, rank: int | None, write: bool) -> Iterator[nn.Module]:
    """The model before the first batch, when it still has all its weights; see Trainer.gathered.

    Raises ModelError for a model on the meta device.
    """
    _check_rank(world, rank)
    refuse_away(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if away := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ModelError(
            f"{away[0]} is on the meta device, and gets its first values when training begins; call prepare(batch)"
        )
    with _alone(model):
        before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        done = False
        try:
            yield model
            done = True
        finally:
            if not (done and write):
                for name, tensor in tensors.items():
                    tensor.detach().copy_(before[name])
    if not write or world.mesh.size == 1:
        return
    if rank is None:
        _check_same(world, tensors)
        return
    for tensor in tensors.values():
        sent = tensor.detach().to(world.device).contiguous()
        tensor.detach().copy_(world.everyone().broadcast(sent, rank).wait())


def _check_rank(world: World, rank: int | None) -> None:
    if rank is not None and not 0 <= rank < world.mesh.size:
        raise PlanError(f"rank={rank}: the plan has ranks 0 to {world.mesh.size - 1}")


def _check_same(world: World, values: Mapping[str, Tensor]) -> None:
    agree(
        world, _digest(values), "weights after gathered()",
        remedy="change them alike on every rank, or give gathered(rank=0) to have those of one rank",
    )  # fmt: skip


class _Lending:
    """Puts the weights of a run into the model and takes them back."""

    def __init__(self, run: TrainState, model: nn.Module, rank: int | None, write: bool) -> None:
        self._run, self._model, self._rank, self._write = run, model, rank, write
        self._parts = run.held
        own = dict(model.named_parameters())
        # Parameters that are in the model already, whole. None with replicas, which must see what changes.
        mine = self._parts.parameters if run.replicas is None else {}
        shared = run.plan.shares_parameters  # several ranks would write to one tensor
        self._live = {name for name in self._parts.layouts if mine.get(name) is own[name] and not shared}
        self.changed: dict[str, Tensor] = {}

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Gather all parameters into the model."""
        own = dict(self._model.named_parameters())
        wholes: dict[str, nn.Parameter] = {}
        for name in self._parts.layouts:
            whole = self._whole(name)
            if self._rank in (None, self._run.world.rank):
                wholes[name] = nn.Parameter(_copied(whole, own[name]), own[name].requires_grad)
        # Live parameters stay in the model with copied data, so that an exception can drop what was written.
        live = [(own[name], own[name].data, own[name].grad) for name in self._live & set(wholes)]
        for name in self._live & set(wholes):
            own[name].data, own[name].grad = wholes[name].data, None
            wholes[name] = own[name]
        buffers = {name: b.clone() for name, b in self._parts.buffers.items()}
        before = replace_parameters(self._model, {n: p for n, p in wholes.items() if n not in self._live})
        lent = self._lend_buffers()
        done = False
        try:
            yield
            done = True
        finally:
            put_back(before)
            written = {name: p.detach() for name, p in wholes.items()}  # taken before the data is swapped back
            for parameter, data, gradient in live:
                parameter.data, parameter.grad = data, gradient
            self._take_buffers(lent, buffers, done and self._write)
            if done and self._write:
                self._take_over(written)

    @contextmanager
    def op_by_op(self) -> Iterator[None]:
        """Put placeholders into the model that fetch the whole tensor for each op."""
        inside = placeholders(self._model, set(self._parts.layouts) - self._live, "")
        for each in inside.values():
            each.fetch = self._whole
        buffers = {name: b.clone() for name, b in self._parts.buffers.items()}
        before = replace_parameters(self._model, inside)
        lent = self._lend_buffers()
        try:
            yield
        finally:
            put_back(before)
            self._take_buffers(lent, buffers, False)

    def _whole(self, name: str) -> Tensor:
        part = self._parts.local(name)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            part = None if part is None else part.to(self._run.world.device)
            whole: Tensor = self._parts.whole(name, part).detach()
        return whole

    def _lend_buffers(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Put the run's buffers into the model, and frozen parameters that the step changes. Returns what was there."""
        found = []
        names = {id(t): name for name, t in [*self._model.named_buffers(), *self._model.named_parameters()]}
        owns: list[dict[str, Any]] = [d for m in self._model.modules() for d in (m._buffers, m._parameters)]
        for own in owns:
            for key, tensor in own.items():
                now = self._parts.buffers.get(names.get(id(tensor), ""))
                if now is None or tensor is None or now is tensor:
                    continue
                found.append((own, key, tensor))
                own[key] = nn.Parameter(now, requires_grad=False) if isinstance(tensor, nn.Parameter) else now
        return found

    def _take_buffers(
        self, lent: list[tuple[dict[str, object], str, Tensor]], before: Mapping[str, Tensor], keep: bool
    ) -> None:
        """Put the model's own buffers back. With `keep`, what was written to the run's buffers stays, on all ranks."""
        for name, buffer in self._parts.buffers.items():
            if not keep:
                buffer.copy_(before[name])
            elif self._rank is not None and self._run.world.mesh.size > 1:
                buffer.copy_(self._run.world.everyone().broadcast(buffer.contiguous(), self._rank).wait())
        for own, key, tensor in lent:
            own[key] = tensor

    def _take_over(self, values: Mapping[str, Tensor]) -> None:
        """Set every rank's parts from what is in the model now."""
        world, parts = self._run.world, self._parts
        if self._rank is None and world.mesh.size > 1:
            _check_same(world, {**values, **parts.buffers})
        replicas = self._run.replicas
        for name, layout in parts.layouts.items():
            whole = values.get(name)
            if self._rank is not None and world.mesh.size > 1:
                device = world.device
                sent = torch.empty(layout.shape, dtype=parts.dtypes[name], device=device) if whole is None else whole
                whole = world.everyone().broadcast(sent.contiguous(), self._rank).wait()
            assert whole is not None
            if not lies_here(layout, world):
                continue
            part = local_part(whole, layout, world)
            mine = parts.local(name)
            assert mine is not None  # because this rank has a part of it
            if replicas is not None and not torch.equal(part, mine):
                self.changed[name] = part.clone()
            parts.set_local(name, part)
        parts.updated()

    def take_over_in_replicas(self) -> None:
        """Set the changed parameters in every replica, after replicas have got their own weights back."""
        for name, part in self.changed.items():
            self._parts.set_local(name, part)
            local = self._run.replicas.local if self._run.replicas is not None else None
            if local is not None and name in local.outer:
                local.outer[name].copy_(part)
        self._parts.updated()


@contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    """Context that refuses to gather a model twice at the same time, with ModelError."""
    with _lock:
        if model in _gathered_models:
            raise ModelError(
                "the model is gathered already: do not nest trainer.gathered(), and where ranks are threads of one"
                " process give each rank a model of its own"
            )
        _gathered_models.add(model)
    try:
        yield
    finally:
        _gathered_models.discard(model)


def _copied(whole: Tensor, own: Any) -> Tensor:
    """A copy of the tensor with the strides of the model's own parameter."""
    made = torch.empty_strided(own.shape, own.stride(), dtype=whole.dtype, device=whole.device)
    return made.copy_(whole)


def _digest(values: Mapping[str, Tensor]) -> str:
    found = 0
    for name in sorted(values):
        flat = values[name].detach().contiguous().view(-1).view(torch.uint8).cpu()
        found = zlib.crc32(flat.numpy().tobytes(), found)
    return f"checksum {found:08x}"
