"""What a plan cannot have with a model, on the machines that there are: every refusal that is known before a rank
starts. Those of the plan alone are in plan/refusals.py. What only a pass can see, such as heads that an axis does not
divide, the pass refuses: with a PlanError that has the Refusal, in the process that starts the ranks."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator

from plait.errors import Refusal
from plait.plan.plan import Plan
from plait.plan.sharding_plan import parameters_away, updates_on_host
from plait.plan.step_facts import Place, StepFacts
from plait.plan.step_refusals import of_changes, of_graph, of_modules, of_optimizer, of_rows, of_wrappers


def refusals(plan: Plan, facts: StepFacts, place: Place | None = None) -> tuple[Refusal, ...]:
    """Why the plan cannot be had; empty where nothing is known against it. Without a `place` it may run anywhere."""
    found = [*_of_updates_within(plan, facts), *_of_agreement(plan, facts), *of_modules(plan, facts)]
    found += [] if facts.rows is None else of_rows(plan, facts.rows)
    found += of_graph(plan, facts.uncaptured, facts.nearest) if facts.uncaptured else ()
    found += of_changes(plan, facts)
    found += of_optimizer(plan.inner_plan.mesh.size, facts.optimizer)
    found += of_wrappers(plan.inner_plan, facts.optimizer.wrappers)
    if plan.workers:
        found += _of_workers(plan, facts)
    if place is not None:
        found += _of_homes(plan.inner_plan, place)
        found += _of_common_memory(plan, place)
    return tuple(found)


def no_common_memory(num_ranks: int) -> Refusal:
    """Of central=host, whose so many data ranks have none."""
    return Refusal(
        f"central=host keeps the parameters in memory that the ranks of data={num_ranks} share, and they have none in"
        " common",
        "they are on several hosts, or the system lets no process open another's memory file",
        "use replica=HOSTS with the data= ranks of one host, or zero=2, which needs no common memory",
    )


def _of_updates_within(plan: Plan, facts: StepFacts) -> Iterator[Refusal]:
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


def _of_agreement(plan: Plan, facts: StepFacts) -> Iterator[Refusal]:
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


def _of_workers(plan: Plan, facts: StepFacts) -> Iterator[Refusal]:
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
