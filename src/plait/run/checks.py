"""What a trainer is given, checked before anything starts; and whether all ranks were given the same data."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn

from plait.comm.agree import agree
from plait.comm.protocol import World
from plait.errors import PlanError
from plait.graph.batch import batch_leaves, batch_signature
from plait.run.local_batch import LocalBatch
from plait.run.optimizers import check_patterns

_MOST_BYTES = 1 << 20  # of each tensor that a fingerprint reads


def check_given(model: Any, loss_fn: Any, optimizer: Any, clip_norm: float | None) -> None:
    """Raise PlanError for what is not a model, a loss function, an optimizer's factory, or a norm to clip to."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"the model is a {type(model).__name__}, not a torch.nn.Module")
    if not callable(loss_fn):
        raise PlanError(f"loss_fn is a {type(loss_fn).__name__}; give a function of (model, batch)")
    check_patterns(optimizer)
    if clip_norm is not None and not clip_norm > 0:
        raise PlanError(f"clip_norm={clip_norm}: a norm to clip to is more than 0; leave it out not to clip")


def agree_on_data(world: World, batch: Any, num_taken: int) -> None:
    """Compare what the ranks were given, at steps 0, 1, 2, 4, 8...: ranks out of step with each other stay so.

    Of a loader's batches the place in the data, of global batches the numbers. WorldError names the ranks.
    """
    if world.mesh.size == 1 or num_taken & (num_taken - 1):
        return
    if isinstance(batch, LocalBatch):
        remedy = "give plait.loader the same arguments on every rank, and take the same number of batches from it"
        agree(world, batch.place, "place in the data", remedy=remedy)
        return
    remedy = "a plain batch is the global one, the same on every rank: seed its loader alike, or use plait.loader"
    agree(world, _fingerprint(batch), "numbers of the global batch", remedy=remedy)


def _fingerprint(batch: Any) -> str:
    found = 0
    for leaf in batch_leaves(batch).values():
        flat = leaf.detach().contiguous().view(-1)
        flat = flat[: _MOST_BYTES // max(flat.element_size(), 1)].cpu()
        found = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), found)
    return f"{batch_signature(batch)}, checksum {found:08x}"
