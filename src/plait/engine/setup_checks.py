"""Checks of a trainer's arguments before anything starts, and that all ranks were given the same."""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from plait.backends.inductor.toolchain import broken_compiler, missing_compiler
from plait.comm.agree import agree
from plait.comm.device import default_kind, without_bf16
from plait.comm.protocol import World
from plait.comm.sharing import can_share
from plait.compile.capture.captured import Captured
from plait.compile.capture.fake_parameters import refuse_odd_tensors
from plait.compile.capture.precision import model_facts
from plait.compile.compiled import Compiled
from plait.compile.ir.node_info import info_of, is_forward
from plait.compile.stages.split import num_stages, updates_within
from plait.engine.arguments import check_arguments
from plait.engine.compiler import Compiler
from plait.engine.local_batch import batch_of_replica, microbatches, num_rows
from plait.engine.rank_optimizers import OptimizerFactory, check_patterns, facts_of_optimizer
from plait.errors import CaptureError, PlaitError, PlanError, UnevenBatchError
from plait.plan.legality import no_compiler, of_fewer_rows, of_rows, refusals
from plait.plan.plan import Plan
from plait.plan.step_facts import Place, StepFacts


def check_model(model: Any, loss_fn: object) -> None:
    """Raise PlanError for an argument that is not a model, or not a loss function."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"the model is a {type(model).__name__}, not a torch.nn.Module")
    refuse_odd_tensors(model)
    if not callable(loss_fn):
        raise PlanError(f"loss_fn is a {type(loss_fn).__name__}; give a function of (model, batch)")


def check_given(model: Any, loss_fn: Any, optimizer: Any, clip_norm: float | None = None) -> None:
    """Raise PlanError for an argument that is not a model, a loss function, an optimizer's factory, or a positive
    clip_norm."""
    check_model(model, loss_fn)
    check_patterns(optimizer)
    check_arguments(clip_norm=clip_norm)
    if clip_norm is not None and not clip_norm > 0:
        raise PlanError(f"clip_norm={clip_norm}: a norm to clip to is more than 0; leave it out not to clip")


def known_facts(plan: Plan, model: nn.Module, clip_norm: float | None = None) -> StepFacts:
    """The facts about a run that are known before its step is captured."""
    facts = replace(model_facts(model), clip_norm=clip_norm, updates_within=updates_within(plan))
    return replace(facts, num_stages=num_stages(plan))


def check_plan(plan: Plan, model: nn.Module, clip_norm: float | None, place: Place | None = None) -> None:
    """Raise PlanError if the plan cannot run with this clip_norm, with this model, or at this place. Called before
    ranks start."""
    refuse(plan, known_facts(plan, model, clip_norm), place)
    if place is not None and plan.compile != "none" and (lacks := broken_compiler(place.device)):
        refusal = no_compiler(plan, lacks)
        raise PlanError(refusal)


def check_captured(compiler: Compiler, plan: Plan, captured: Captured, clip_norm: float | None = None) -> StepFacts:
    """The facts that are known once the step of the first microbatch is captured.

    Raises PlanError, equally on every rank, if the plan cannot run this step.
    """
    facts = captured_facts(known_facts(plan, compiler.model, clip_norm), captured)
    changes = compiler.captures.changes.get(id(captured))
    if changes is not None and not changes.steady:
        facts = replace(facts, unsteady=changes.effects[0].place)
    refuse(plan, facts)
    return facts


def check_step(
    compiler: Compiler,
    batch: Any,
    plan: Plan,
    clip_norm: float | None = None,
    optimizer: OptimizerFactory | None = None,
) -> Compiled:
    """The step of a plan on a global batch, compiled, before there are ranks that might find it refused. `compiler` is
    of the plan's inner plan; of a plan with servers the batch is one worker's.

    PlanError, with its Refusal, for a plan that this step cannot have; BatchError, LayoutError and CaptureError as the
    Trainer raises them.
    """
    first = microbatches(batch_of_replica(batch, plan), plan.micro)[0]
    if not plan.workers:
        for refusal in of_rows(plan, num_rows(batch)):
            raise UnevenBatchError(refusal)
    if plan.shapes:
        first = microbatches(batch_of_replica(compiler.padded(batch), plan), plan.micro)[0]
    try:
        captured = compiler.captured(first)
    except CaptureError as error:
        if error.data_dependent or not _is_captured(compiler, batch, plan):
            raise
        raise PlanError(of_fewer_rows(plan.title, str(error))) from error
    facts = check_captured(compiler, plan, captured, clip_norm)
    compiled = compiler.compiled_from(captured)
    if optimizer is not None:
        sharding = compiled.program.sharding
        trials = facts_of_optimizer(optimizer, compiler.model, sharding.states, sharding.mesh)
        refuse(plan, replace(facts, optimizer=trials))
    return compiled


def _is_captured(compiler: Compiler, batch: Any, plan: Plan) -> bool:
    """Whether the step of the whole batch is captured, of a plan that has the model run on fewer rows at a time."""
    if plan.micro == 1 and not plan.relaxed_axis:
        return False
    try:
        compiler.captured(batch)
    except PlaitError:
        return False
    return True


def refuse(plan: Plan, facts: StepFacts, place: Place | None = None) -> None:
    """Raise PlanError with the first refusal, if there is any."""
    for refusal in refusals(plan, facts, place):
        raise PlanError(refusal)


def place_of_threads() -> Place:
    """Where ranks run that are threads of this process."""
    return Place("cpu", lacks=missing_compiler("cpu"))


def place_here(world: World | None = None) -> Place:
    """Where the ranks run: those that this process will start, or those of `world`.

    The ranks of a given world are assumed to share what they need.
    """
    if world is not None:
        kind = world.device.type
        return Place(kind, lacks=missing_compiler(kind), without_bf16=without_bf16(world.device))
    each, kind = os.environ.get("LOCAL_WORLD_SIZE", ""), default_kind()
    num = int(each) if each.isdecimal() and int(each) else None
    return Place(kind, num, can_share(), missing_compiler(kind), without_bf16(torch.device(kind)))


def agree_on_setup(world: World, plan: Plan, model: nn.Module, seed: int, clip_norm: float | None, on_nan: str) -> None:
    """Compare the arguments of all ranks' trainers. Raises WorldError, which names the ranks that differ."""
    if world.mesh.size > 1:
        text = f"plan {plan.title}, {_described(model)}, seed={seed}, clip_norm={clip_norm}, on_nan={on_nan}"
        agree(world, text, "trainer", remedy="give it the same arguments on every rank")


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """The properties of an optimizer that must be equal on all ranks, as text."""
    if hasattr(optimizer, "members"):  # ranks with other parameters may have other members
        return "several optimizers"
    plain = (bool, int, float, str, tuple, list, type(None))
    defaults = getattr(optimizer, "defaults", {})  # a wrapper may have none
    options = {key: value.tolist() if torch.is_tensor(value) else value for key, value in defaults.items()}
    shown = ", ".join(f"{key}={value}" for key, value in sorted(options.items()) if isinstance(value, plain))
    return f"{type(optimizer).__name__}({shown})"


def _described(model: nn.Module) -> str:
    """The names, shapes and modes of a model's parts, as text with a checksum."""
    found = [f"{n} {p.dtype} {p.requires_grad} {() if is_lazy(p) else tuple(p.shape)}" for n, p in named(model)]
    found += [f"{name} {module.training}" for name, module in model.named_modules()]
    num = sum(0 if is_lazy(p) else p.numel() for _, p in named(model))
    return f"model {type(model).__name__} of {num:,} numbers (checksum {zlib.crc32(repr(found).encode()):08x})"


def named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers by name."""
    return [*model.named_parameters(), *model.named_buffers()]


def captured_facts(facts: StepFacts, captured: Captured) -> StepFacts:
    """The facts of a model with those of its captured step added."""
    forward = [node for node in captured.graph.nodes if node.op == "call_function" and is_forward(node)]
    changed = sorted(o.name for o in captured.outputs if o.kind == "buffer" and o.name in captured.outside)
    return replace(
        facts,
        called=tuple(dict.fromkeys(info_of(node).module for node in forward)),
        changed_outside=tuple(changed),
        left_out=captured.left_out.names,
    )
