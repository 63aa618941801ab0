"""What a plan cannot have with a model, on the machines that there are: every refusal that is known before a rank
starts. Those of the plan alone are in plan/refusals.py, those of the step's graph are found where it is laid out."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from plait.plan.plan import Plan
from plait.plan.refusals import Refusal


@dataclass(frozen=True)
class Facts:
    """What is known of a run beside its plan.

    parameters      their names; None where they are not known yet
    updates_within  whether the plan's schedule updates weights within a step
    """

    parameters: Collection[str] | None = None
    clip_norm: float | None = None
    updates_within: bool = False


@dataclass(frozen=True)
class Place:
    """Where ranks are to run: the type of their device, how many of them a host has, and whether the processes of a
    host may open each other's memory."""

    device: str = "cpu"
    ranks_per_host: int | None = None  # all
    shares_memory: bool = True


def refusals(plan: Plan, facts: Facts, place: Place | None = None) -> tuple[Refusal, ...]:
    """Why the plan cannot be had; empty where nothing is known against it. Without a `place` it may run anywhere."""
    found = [*_of_updates_within(plan, facts), *_of_agreement(plan, facts)]
    if plan.workers:
        found += _of_workers(plan, facts)
    if place is not None:
        found += _of_homes(plan.inner_plan, place)
        found += _of_common_memory(plan, place)
    return tuple(found)


def parameters_away(plan: Plan, device: str) -> bool:
    """Whether parameters are fetched for each use, on a type of device."""
    return plan.home_parameters == "disk" or (device != "cpu" and plan.home_parameters == "host")


def gradients_away(plan: Plan, device: str) -> bool:
    """Whether gradients leave the device, because they are read elsewhere."""
    return parameters_away(plan, device) or updates_on_host(plan, device)


def updates_on_host(plan: Plan, device: str) -> bool:
    """Whether the optimizer's step runs on the host beside a device that computes."""
    return device != "cpu" and (plan.home_optimizer != "device" or plan.central == "host")


def activations_away(plan: Plan, device: str) -> bool:
    """Whether values of the forward pass leave the device until the backward pass."""
    return plan.home_activations == "disk" or (device != "cpu" and plan.home_activations == "host")


def no_common_memory(num_ranks: int) -> Refusal:
    """Of central=host, whose so many data ranks have none."""
    return Refusal(
        f"central=host keeps the parameters in memory that the ranks of data={num_ranks} share, and they have none in"
        " common",
        "they are on several hosts, or the system lets no process open another's memory file",
        "use replica=HOSTS with the data= ranks of one host, or zero=2, which needs no common memory",
    )


def _of_updates_within(plan: Plan, facts: Facts) -> Iterator[Refusal]:
    """What needs all ranks at each update, where the plan's schedule lets each go its own way."""
    if not facts.updates_within or plan.workers:
        return
    what, instead = f"schedule={plan.schedule} updates each stage by itself", "or take schedule=1f1b"
    if facts.clip_norm is not None:
        why = f"clip_norm={facts.clip_norm} needs the norm of all gradients, which are never there together"
        yield Refusal(what, why, f"leave it out, {instead}")
    if "fp16" in (plan.precision, *dict(plan.exceptions).values()):
        yield Refusal(
            what, "the loss scale of fp16 needs all gradients together", f"take precision=bf16, {instead}"
        )  # fmt: skip
    if plan.central != "none" or plan.home_parameters != "device":
        why = "older versions of the weights are kept on the device"
        yield Refusal(what, why, f"leave central= and home.parameters= out, {instead}")


def _of_agreement(plan: Plan, facts: Facts) -> Iterator[Refusal]:
    """What replicas cannot exchange."""
    if plan.relaxed_axis and plan.sync == 1 and facts.updates_within:
        yield Refusal(
            f"compress={plan.compress} exchanges the gradients of a step, and schedule={plan.schedule} updates within"
            " it", "", "use schedule=1f1b, or sync=N with it",
        )  # fmt: skip
    if plan.moments != "kept" and plan.home_optimizer == "disk":
        yield Refusal(
            f"moments={plan.moments} needs the optimizer's state in memory", "", "use home.optimizer=host, or"
            " moments=kept",
        )  # fmt: skip
    if facts.parameters is None:
        return
    for pattern in plan.exempt:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in facts.parameters):
            near = difflib.get_close_matches(pattern, facts.parameters, n=2, cutoff=0.3)
            what = f"compress.{pattern}=none"
            instead = f"near it is {', '.join(near)}" if near else "leave it out"
            yield Refusal(what, "no parameter has such a name", instead)


def _of_workers(plan: Plan, facts: Facts) -> Iterator[Refusal]:
    """What does not go with parameter servers."""
    if plan.precision == "fp16":
        yield Refusal(
            "precision=fp16 scales the loss by what all gradients of a step are, which workers do not wait for", "",
            "use precision=bf16 with workers=",
        )  # fmt: skip
    if facts.updates_within:
        yield Refusal(
            f"schedule={plan.schedule} updates weights within a step, and with workers={plan.workers} servers do that",
            "", "use schedule=1f1b",
        )  # fmt: skip


def _of_homes(plan: Plan, place: Place) -> Iterator[Refusal]:
    if parameters_away(plan, place.device) and place.device != "cpu" and not updates_on_host(plan, place.device):
        yield Refusal(
            f"home.parameters={plan.home_parameters} has parameters updated on the host, and home.optimizer=device"
            f" keeps the optimizer's state on {place.device}", "", f"add home.optimizer={plan.home_parameters}",
        )  # fmt: skip


def _of_common_memory(plan: Plan, place: Place) -> Iterator[Refusal]:
    if plan.central != "host" or plan.data == 1:
        return
    each = place.ranks_per_host or plan.inner_plan.mesh.size
    spans = any(group[0] // each != group[-1] // each for group in plan.mesh.groups("data"))
    if spans or not place.shares_memory:
        yield no_common_memory(plan.data)
