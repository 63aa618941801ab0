"""The state of replicas that synchronise less often than every step, beside their means, so that the same plan
resumes exactly.

replicas/model/NAME           each replica's own weights, [replicas, *shape]
replicas/optimizer/NAME/KEY   each replica's optimizer state, [replicas, *shape]
replicas/buffers/NAME         each replica's buffers, [replicas, *shape]
replicas/left_out/NAME        each replica's compression errors, [replicas, *shape]
outer/weights/NAME            the weights as last synchronised
outer/momentum/NAME           the momentum of the outer optimizer
outer/mean/NAME               the result of an exchange in flight
factors/RANK/NAME             PowerSGD's factor for the part of a tensor that a rank within its replica has

Another plan reads only the means, which have the names of any checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait.engine.checkpoint.local_shards import LocalShard
from plait.engine.checkpoint.manifest import Manifest
from plait.engine.checkpoint.snapshot import state_layout
from plait.engine.checkpoint.source import Source, Wanted, whole_of
from plait.engine.local_sgd.exchange import Pending
from plait.engine.slices import fragments
from plait.engine.train_state import TrainState
from plait.spec.layout import Layout, Placement, Shard

if TYPE_CHECKING:
    from plait.engine.local_sgd.replicas import Replicas

_MODEL, _STATE, _BUFFERS, _ERRORS = (f"replicas/{each}/" for each in ("model", "optimizer", "buffers", "left_out"))
_WEIGHTS, _MOMENTUM, _MEAN = (f"outer/{each}/" for each in ("weights", "momentum", "mean"))


def values(run: TrainState) -> dict[str, Any] | None:
    """The replicas' entry among a checkpoint's values; None without replicas."""
    replicas = run.replicas
    if replicas is None:
        return None
    return {"num": replicas.num, "agreed_at": replicas.agreed_at, "begun": _begun(replicas)}


def local_shards(run: TrainState) -> dict[str, LocalShard]:
    """The tensors above, as far as this rank has them. Waits for exchanges in flight; their results are applied when
    due."""
    replicas = run.replicas
    if replicas is None:
        return {}
    found = {name: LocalShard.laid_out(tensor, layout, run.world) for name, tensor, layout in _tensors(run, replicas)}
    if replicas.index == 0:
        prefix = f"factors/{_rank_within(run, replicas)}/"
        found |= {prefix + name: LocalShard.whole(factor) for name, factor in replicas.exchange.factors.items()}
    return found


def restore(run: TrainState, source: Source, manifest: Manifest) -> None:
    """Load the replicas' own state, after the means are loaded. If it is from another plan, replicas begin with the
    means."""
    replicas = run.replicas
    if replicas is None:
        return
    replicas.begin(run.step_number)
    saved = manifest.values["common"].get("replicas")
    if not saved or saved["num"] != replicas.num:
        return
    exchange, local = replicas.exchange, replicas.local
    for full, (shape, _) in manifest.tensors.items():
        name = full.removeprefix(_ERRORS)
        if name != full and name in replicas.trained:
            exchange.errors[name] = torch.zeros_like(replicas.trained[name], dtype=torch.float32, requires_grad=False)
        prefix = f"factors/{_rank_within(run, replicas)}/"
        name = full.removeprefix(prefix)
        if name != full and name in replicas.trained:
            exchange.factors[name] = torch.zeros(shape, device=run.world.device)
            source.fill({full: whole_of(exchange.factors[name])})
    if local is not None:
        for part in saved["begun"]:
            local.expect(part)
    here = {full: (tensor, layout) for full, tensor, layout in _tensors(run, replicas) if full in manifest.tensors}
    mesh = run.world.mesh
    coordinates = mesh.coordinates(run.world.rank)
    source.fill({full: Wanted(fragments(layout, mesh, coordinates), t) for full, (t, layout) in here.items()})
    replicas.agreed_at = saved["agreed_at"]
    run.held.updated()


def _begun(replicas: Replicas) -> list[int]:
    """The parts of the model whose exchange is in flight."""
    return sorted(replicas.local.pending) if replicas.local is not None else []


def _rank_within(run: TrainState, replicas: Replicas) -> int:
    """This rank's number within its replica."""
    mesh = run.plan.inner_plan.mesh
    return mesh.rank({**run.world.mesh.coordinates(run.world.rank), replicas.axis: 0})


def _tensors(run: TrainState, replicas: Replicas) -> Iterator[tuple[str, Tensor, Layout]]:
    """(name, this rank's part, layout) of each tensor."""
    layouts, local, optimizer = run.held.layouts, replicas.local, run.optimizer
    assert optimizer is not None

    def stacked(layout: Layout) -> Layout:
        moved: list[tuple[str, Placement]] = [
            (axis, Shard(p.dim + 1, p.blocks) if isinstance(p, Shard) else p) for axis, p in layout.placements
        ]
        return Layout(layout.dtype, (replicas.num, *layout.shape), ((replicas.axis, Shard(0)), *moved))

    for name, error in replicas.exchange.errors.items():
        yield _ERRORS + name, error[None], stacked(layouts[name])
    for name, buffer in replicas.float_buffers().items():
        yield _BUFFERS + name, buffer[None], stacked(Layout("f32", tuple(buffer.shape)))
    if local is None:
        return
    for name, parameter in replicas.trained.items():
        yield _MODEL + name, parameter.detach()[None], stacked(layouts[name])
        for key, value in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(value):
                yield f"{_STATE}{name}/{key}", value[None], stacked(state_layout(run, name, key, tuple(value.shape)))
    for prefix, tensors in ((_WEIGHTS, local.outer), (_MOMENTUM, local.momentum)):
        for name, tensor in tensors.items():
            yield prefix + name, tensor, layouts[name]
    for part in sorted(local.pending):
        means = local.pending[part].wait()
        local.pending[part] = Pending.completed(means)
        for name, mean in means.items():
            yield _MEAN + name, mean, layouts[name]
