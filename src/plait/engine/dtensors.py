"""The boundary to PyTorch's ecosystem: conversion between a rank's local tensors and DTensors.

If ranks are threads, or there is one process, whole tensors take the place of DTensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from plait.comm.process_world import device_mesh, has_process_group
from plait.comm.protocol import World
from plait.engine.local_tensors import gather_whole, local_part
from plait.spec.layout import Layout, Only, Shard


def plain_layout(layout: Layout) -> Layout:
    """The nearest layout that a DTensor can express: without blocks, and replicated where only some ranks have the
    tensor."""
    kept = tuple((axis, Shard(p.dim) if isinstance(p, Shard) else p) for axis, p in layout.placements)
    return Layout(layout.dtype, layout.shape, tuple((a, p) for a, p in kept if not isinstance(p, Only)))


def to_boundary(local: Tensor | None, layout: Layout, world: World, dtype: torch.dtype) -> Tensor:
    """A DTensor of the global tensor, or the whole tensor without a process group. All ranks must call it."""
    if not has_process_group(world):
        return gather_whole(local, layout, world, dtype)
    plain = plain_layout(layout)
    if local is None or plain != layout:
        local = local_part(gather_whole(local, layout, world, dtype), plain, world)
    mesh, placements = device_mesh(world), torch_placements(plain, world)
    stride = torch.empty(layout.shape, device="meta").stride()  # given, because parts may be uneven
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(layout.shape), stride=stride)


def from_boundary(value: Tensor, layout: Layout, world: World) -> Tensor:
    """This rank's local tensor, from a whole tensor or a DTensor on any mesh. All ranks must call it."""
    if isinstance(value, DTensor):
        same_mesh = has_process_group(world) and value.device_mesh == device_mesh(world)
        same = same_mesh and list(value.placements) == torch_placements(layout, world)
        if same and plain_layout(layout) == layout:
            return value.to_local()
        value = value.full_tensor()
    return local_part(value, layout, world)


def torch_placements(layout: Layout, world: World) -> list[TorchShard | TorchReplicate]:
    """The layout's placements as DTensor has them, one per axis of the mesh."""
    on: Mapping[str, object] = dict(layout.placements)
    return [
        TorchShard(p.dim) if isinstance(p := on.get(axis), Shard) else TorchReplicate() for axis in world.mesh.names
    ]
