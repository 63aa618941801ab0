"""What a trainer is given, checked before anything starts; and whether all ranks were given the same."""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from plait.comm.agree import agree
from plait.comm.device import default_kind
from plait.comm.protocol import World
from plait.comm.sharing import can_share
from plait.compile.capture.fake_parameters import refuse_without_shape
from plait.compile.stages.split import updates_within
from plait.engine.optimizers import check_patterns
from plait.errors import PlanError
from plait.plan.legality import Facts, Place, refusals
from plait.plan.plan import Plan


def check_given(model: Any, loss_fn: Any, optimizer: Any, clip_norm: float | None) -> None:
    """Raise PlanError for what is not a model, a loss function, an optimizer's factory, or a norm to clip to."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"the model is a {type(model).__name__}, not a torch.nn.Module")
    refuse_without_shape(model)
    if not callable(loss_fn):
        raise PlanError(f"loss_fn is a {type(loss_fn).__name__}; give a function of (model, batch)")
    check_patterns(optimizer)
    if clip_norm is not None and not clip_norm > 0:
        raise PlanError(f"clip_norm={clip_norm}: a norm to clip to is more than 0; leave it out not to clip")


def check_plan(plan: Plan, names: Collection[str] | None, clip_norm: float | None, place: Place | None = None) -> None:
    """Raise PlanError for what a plan cannot do with a clip_norm, with a model of parameters of these names, or at a
    place, whoever runs it: before any rank does."""
    for refusal in refusals(plan, Facts(names, clip_norm, updates_within(plan)), place):
        raise PlanError(str(refusal))


def place_here(world: World | None = None) -> Place:
    """Where the ranks that this process starts will run, or the ranks run of which it is one; those of a world that is
    there already are taken to have what they need in common."""
    if world is not None:
        return Place(world.device.type)
    each = os.environ.get("LOCAL_WORLD_SIZE", "")
    return Place(default_kind(), int(each) if each.isdecimal() and int(each) else None, can_share())


def agree_on_setup(world: World, plan: Plan, model: nn.Module, seed: int, clip_norm: float | None, on_nan: str) -> None:
    """Compare what the ranks made their trainers of; WorldError names the ranks that differ."""
    if world.mesh.size > 1:
        text = f"plan {plan.title}, {_described(model)}, seed={seed}, clip_norm={clip_norm}, on_nan={on_nan}"
        agree(world, text, "trainer", remedy="give it the same arguments on every rank")


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """What optimizers of several ranks must have alike."""
    if hasattr(optimizer, "members"):  # of which ranks that hold other parameters may have others
        return "several optimizers"
    plain = (bool, int, float, str, tuple, list, type(None))
    defaults = getattr(optimizer, "defaults", {})  # which one that wraps others may lack
    options = {key: value.tolist() if torch.is_tensor(value) else value for key, value in defaults.items()}
    shown = ", ".join(f"{key}={value}" for key, value in sorted(options.items()) if isinstance(value, plain))
    return f"{type(optimizer).__name__}({shown})"


def _described(model: nn.Module) -> str:
    """A model by the names, shapes and modes of its parts."""
    found = [f"{n} {p.dtype} {p.requires_grad} {() if is_lazy(p) else tuple(p.shape)}" for n, p in named(model)]
    found += [f"{name} {module.training}" for name, module in model.named_modules()]
    num = sum(0 if is_lazy(p) else p.numel() for _, p in named(model))
    return f"model {type(model).__name__} of {num:,} numbers (checksum {zlib.crc32(repr(found).encode()):08x})"


def named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name."""
    return [*model.named_parameters(), *model.named_buffers()]
