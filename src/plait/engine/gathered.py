"""The user's own model with whole weights, for a while: to generate, evaluate by hand, clamp, export.

at once      every parameter is put together and lies in the model; what is written to it is taken over at the end
op by op     each op that reads a parameter gets it whole, and it is let go after: for models that do not fit
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
from plait.engine.model_weights import put_back, refuse_away, stand_in, stand_ins
from plait.engine.state import lies_here, local_part
from plait.errors import ModelError, PlanError

if TYPE_CHECKING:
    from plait.engine.train_state import TrainState

_lent: WeakSet[nn.Module] = WeakSet()
_lock = threading.Lock()


@contextmanager
def gathered(run: TrainState, rank: int | None, write: bool, at_once: bool) -> Iterator[nn.Module]:
    """The model with whole weights on all ranks, or on that `rank` alone; see Trainer.gathered."""
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
    """The model before the first batch, which has all of its weights still; see Trainer.gathered."""
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
        _alike(world, tensors)
        return
    for tensor in tensors.values():
        sent = tensor.detach().to(world.device).contiguous()
        tensor.detach().copy_(world.everyone().broadcast(sent, rank).wait())


def _check_rank(world: World, rank: int | None) -> None:
    if rank is not None and not 0 <= rank < world.mesh.size:
        raise PlanError(f"rank={rank}: the plan has ranks 0 to {world.mesh.size - 1}")


def _alike(world: World, values: Mapping[str, Tensor]) -> None:
    agree(
        world, _digest(values), "weights after gathered()",
        remedy="change them alike on every rank, or give gathered(rank=0) to have those of one rank",
    )  # fmt: skip


class _Lending:
    def __init__(self, run: TrainState, model: nn.Module, rank: int | None, write: bool) -> None:
        self._run, self._model, self._rank, self._write = run, model, rank, write
        self._replica = run.held
        own = dict(model.named_parameters())
        # What trains is in the model already, where a rank has all of it to itself; replicas want to know what changes.
        mine = self._replica.parameters if run.replicas is None else {}
        shared = run.plan.sharding.shares_parameters  # by ranks that would each write to it
        self._live = {name for name in self._replica.layouts if mine.get(name) is own[name] and not shared}
        self.changed: dict[str, Tensor] = {}

    @contextmanager
    def at_once(self) -> Iterator[None]:
        own = dict(self._model.named_parameters())
        wholes: dict[str, nn.Parameter] = {}
        for name in self._replica.layouts:
            whole = self._whole(name)
            if self._rank in (None, self._run.world.rank):
                wholes[name] = nn.Parameter(_apart(whole, own[name]), own[name].requires_grad)
        # Those that train keep their place: what is written is to a copy, which an exception drops.
        live = [(own[name], own[name].data, own[name].grad) for name in self._live & set(wholes)]
        for name in self._live & set(wholes):
            own[name].data, own[name].grad = wholes[name].data, None
            wholes[name] = own[name]
        buffers = {name: b.clone() for name, b in self._replica.buffers.items()}
        before = stand_in(self._model, {n: p for n, p in wholes.items() if n not in self._live})
        lent = self._lend_buffers()
        done = False
        try:
            yield
            done = True
        finally:
            put_back(before)
            written = {name: p.detach() for name, p in wholes.items()}  # which are other tensors when data is swapped
            for parameter, data, gradient in live:
                parameter.data, parameter.grad = data, gradient
            self._take_buffers(lent, buffers, done and self._write)
            if done and self._write:
                self._take_over(written)

    @contextmanager
    def op_by_op(self) -> Iterator[None]:
        inside = stand_ins(self._model, set(self._replica.layouts) - self._live, "")
        for each in inside.values():
            each.fetch = self._whole
        buffers = {name: b.clone() for name, b in self._replica.buffers.items()}
        before = stand_in(self._model, inside)
        lent = self._lend_buffers()
        try:
            yield
        finally:
            put_back(before)
            self._take_buffers(lent, buffers, False)

    def _whole(self, name: str) -> Tensor:
        part = self._replica.local(name)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            part = None if part is None else part.to(self._run.world.device)
            whole: Tensor = self._replica.whole(name, part).detach()
        return whole

    def _lend_buffers(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Put what the step reads and writes into the model; returns what was there in its place."""
        found = []
        names = {id(b): name for name, b in self._model.named_buffers()}
        for module in self._model.modules():
            for key, buffer in module._buffers.items():
                now = self._replica.buffers.get(names.get(id(buffer), ""))
                if now is not None and now is not buffer and buffer is not None:
                    found.append((module, key, buffer))
                    module._buffers[key] = now
        return found

    def _take_buffers(
        self, lent: list[tuple[nn.Module, str, Tensor]], before: Mapping[str, Tensor], keep: bool
    ) -> None:
        """Put the model's own buffers back; with `keep` what was written to those lent stays, on all ranks."""
        for name, buffer in self._replica.buffers.items():
            if not keep:
                buffer.copy_(before[name])
            elif self._rank is not None and self._run.world.mesh.size > 1:
                buffer.copy_(self._run.world.everyone().broadcast(buffer.contiguous(), self._rank).wait())
        for module, key, buffer in lent:
            module._buffers[key] = buffer

    def _take_over(self, values: Mapping[str, Tensor]) -> None:
        """Give every rank its part of what is in the model now."""
        world, replica = self._run.world, self._replica
        if self._rank is None and world.mesh.size > 1:
            _alike(world, {**values, **replica.buffers})
        replicas = self._run.replicas
        for name, layout in replica.layouts.items():
            whole = values.get(name)
            if self._rank is not None and world.mesh.size > 1:
                device = world.device
                sent = torch.empty(layout.shape, dtype=replica.dtypes[name], device=device) if whole is None else whole
                whole = world.everyone().broadcast(sent.contiguous(), self._rank).wait()
            assert whole is not None
            if not lies_here(layout, world):
                continue
            part = local_part(whole, layout, world)
            mine = replica.local(name)
            assert mine is not None  # as it lies here
            if replicas is not None and not torch.equal(part, mine):
                self.changed[name] = part.clone()
            replica.set_local(name, part)
        replica.updated()

    def take_over_in_replicas(self) -> None:
        """Replicas have their own weights again: those that were changed begin anew from what they were changed to."""
        for name, part in self.changed.items():
            self._replica.set_local(name, part)
            local = self._run.replicas.local if self._run.replicas is not None else None
            if local is not None and name in local.outer:
                local.outer[name].copy_(part)
        self._replica.updated()


@contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    with _lock:
        if model in _lent:
            raise ModelError(
                "the model is gathered already: do not nest trainer.gathered(), and where ranks are threads of one"
                " process give each rank a model of its own"
            )
        _lent.add(model)
    try:
        yield
    finally:
        _lent.discard(model)


def _apart(whole: Tensor, own: Any) -> Tensor:
    """In memory that nobody else has, of the form that the model's own tensor had."""
    made = torch.empty_strided(own.shape, own.stride(), dtype=whole.dtype, device=whole.device)
    return made.copy_(whole)


def _digest(values: Mapping[str, Tensor]) -> str:
    found = 0
    for name in sorted(values):
        flat = values[name].detach().contiguous().view(-1).view(torch.uint8).cpu()
        found = zlib.crc32(flat.numpy().tobytes(), found)
    return f"checksum {found:08x}"
