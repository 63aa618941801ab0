"""The rows of the global batch that a replica trains on, and the key of its random draws."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from plait.comm.protocol import World
from plait.compile.capture.batch import at_rows, map_rows, take_rows
from plait.engine.local_batch import LocalBatch, num_rows
from plait.errors import Refusal, UnevenBatchError
from plait.plan.legality import uneven_replicas
from plait.plan.plan import Plan


def rows_of_replica(batch: Any, plan: Plan, world: World) -> LocalBatch:
    """This rank's rows of a global batch, as a part of its replica's batch, microbatch after microbatch as in the
    loader.

    Raises BatchError if the ranks do not divide the batch.
    """
    num = plan.mesh.axis_size(plan.relaxed_axis)
    if isinstance(batch, LocalBatch):
        return dataclasses.replace(batch, global_size=batch.global_size // num)
    rows, parts, micro = num_rows(batch), plan.num_batch_parts, plan.micro
    if rows % (parts * micro):
        what = f"{parts} parts of {micro} microbatches do not divide the batch of {rows} rows (plan {plan.title})"
        raise UnevenBatchError(Refusal(what, "", f"give a multiple of {parts * micro}"))
    each = rows // (parts * micro)
    part = plan.batch_part(world.mesh.coordinates(world.rank))
    places = torch.arange(rows).view(micro, parts, each)[:, part].reshape(-1)
    tree = map_rows(lambda leaf, dim: at_rows(leaf, dim, places.to(leaf.device)), batch, rows)
    return LocalBatch(tree, each * micro, rows // num)


def batch_of_replica(batch: Any, plan: Plan) -> Any:
    """A batch of the shapes that one replica trains on: the first rows of the global batch, or all of it without
    replicas.

    Raises BatchError if the replicas do not divide the batch.
    """
    if not plan.relaxed_axis:
        return batch
    num, rows = plan.mesh.axis_size(plan.relaxed_axis), num_rows(batch)
    if refusal := uneven_replicas(plan, rows):
        raise UnevenBatchError(refusal)
    return take_rows(batch, rows, 0, rows // num)


def replica_key(key: int, index: int) -> int:
    """The key of a replica's random draws. The first replica's key is the step's."""
    return (key + index * 0xD1B54A32D192ED03) & ((1 << 62) - 1)
