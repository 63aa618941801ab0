"""Refusals of a plan with a model, its batch, its optimizer and the machines, all known before a rank starts.

Refusals of the keys of a plan alone are in plan/refused_keys.py. What only a pass can see, such as heads that an axis
does not divide, the pass refuses with a PlanError that has the Refusal, in the process that starts the ranks. Passes
use the functions of this file for what they know more of than was known before.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping

from plait.errors import Refusal
from plait.plan.axes import axis_kind, batch_axes, ddp_axis
from plait.plan.compression import NO_COMPRESSION
from plait.plan.key_values import Recompute
from plait.plan.plan import Plan
from plait.plan.refused_cuts import of_buckets
from plait.plan.sharding_plan import parameters_away, updates_on_host
from plait.plan.step_facts import OptimizerFacts, ParameterFacts, Place, StepFacts

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # names in torch of the words of a plan
_HALF = (DTYPE_NAMES["bf16"], DTYPE_NAMES["fp16"])

# Fields of a plan that PyTorch's DDP supports, or that change speed only.
_WITHOUT_GRAPH = (
    "home_optimizer", "batchnorm", "allreduce", "bucket_bytes", "sync", "outer", "outer_lr", "outer_momentum",
    "moments", "streaming", "overlap", "compress", "uncompressed", "shapes", "shapes_limit",
)  # fmt: skip


def refusals(plan: Plan, facts: StepFacts, place: Place | None = None) -> tuple[Refusal, ...]:
    """Every reason, known from these facts, why the plan cannot run; empty if there is none.

    Without a `place`, the plan may run on any machine.
    """
    found = [*_of_updates_within(plan, facts), *_of_relaxed(plan, facts), *of_modules(plan, facts)]
    found += of_buckets(plan)
    found += [] if facts.rows is None else of_rows(plan, facts.rows)
    found += of_graph(plan, facts.uncaptured, facts.nearest) if facts.uncaptured else ()
    found += of_changes(plan, facts)
    found += of_parts_left_out(plan, facts)
    found += of_optimizer(plan.inner_plan.mesh.size, facts.optimizer)
    found += of_wrappers(plan.inner_plan, facts.optimizer.wrappers)
    if plan.workers:
        found += _of_workers(plan, facts)
    if place is not None:
        found += _of_homes(plan.inner_plan, place)
        found += _of_common_memory(plan, place)
        found += _of_compiling(plan, place)
        found += _of_old_devices(plan, place)
    return tuple(found)


def no_common_memory(num_ranks: int) -> Refusal:
    """The refusal of central=host for data ranks that share no memory."""
    return Refusal(
        f"central=host keeps the parameters in memory that the ranks of data={num_ranks} share, but they share none",
        "they are on several hosts, or the system lets no process open another's memory file",
        "use replica=HOSTS with the data= ranks of one host, or zero=2, which needs no common memory",
    )


def _of_updates_within(plan: Plan, facts: StepFacts) -> Iterator[Refusal]:
    """Refusals of keys that need all gradients of a step at once, with a schedule that updates stages separately."""
    if not facts.updates_within or plan.workers:
        return
    what, instead = f"schedule={plan.schedule} updates each stage by itself", "or take schedule=1f1b"
    if facts.clip_norm is not None:
        why = f"clip_norm={facts.clip_norm} needs the norm of all gradients, which never exist at the same time"
        yield Refusal(what, why, f"leave it out, {instead}")
    if "fp16" in plan.precisions:
        yield Refusal(
            what, "the loss scale of fp16 needs all gradients at the same time", f"take precision=bf16, {instead}"
        )  # fmt: skip
    if plan.central != "none" or plan.home_parameters != "device":
        why = "older versions of the weights are kept on the device"
        yield Refusal(what, why, f"leave central= and home.parameters= out, {instead}")


def _of_relaxed(plan: Plan, facts: StepFacts) -> Iterator[Refusal]:
    """Refusals of what replicas that synchronise less often cannot exchange."""
    if plan.relaxed_axis and plan.sync == 1 and facts.updates_within:
        yield Refusal(
            f"compress={plan.compress} exchanges the gradients of a whole step, but schedule={plan.schedule} updates"
            " within it", "", "use schedule=1f1b, or sync=N with it",
        )  # fmt: skip
    if plan.moments != "kept" and plan.home_optimizer == "disk":
        yield Refusal(
            f"moments={plan.moments} needs the optimizer's state in memory", "", "use home.optimizer=host, or"
            " moments=kept",
        )  # fmt: skip
    if facts.parameters is None:
        return
    if plan.relaxed_axis or (plan.workers and plan.compress != NO_COMPRESSION):
        numbers = {n: each.dtype for n, each in facts.parameters.items() if each.trains}
        if (found := next((n for n, dtype in numbers.items() if dtype.startswith("complex")), None)) is not None:
            key = f"sync={plan.sync}" if plan.sync != 1 and not plan.workers else f"compress={plan.compress}"
            yield Refusal(
                key, f"{found} is {numbers[found]}, and replicas exchange real numbers only",
                "leave it out, or keep the parameter as its real and imaginary parts, of which the model makes"
                " torch.view_as_complex(parameter)",
            )  # fmt: skip
    for pattern in plan.exempt:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in facts.parameters):
            near = difflib.get_close_matches(pattern, facts.parameters, n=2, cutoff=0.3)
            what = f"compress.{pattern}=none"
            instead = f"did you mean {', '.join(near)}?" if near else "leave it out"
            yield Refusal(what, "no parameter has a name that matches", instead)


def _of_workers(plan: Plan, facts: StepFacts) -> Iterator[Refusal]:
    """Refusals of keys that do not work with parameter servers."""
    if plan.precision.startswith("fp16"):
        yield Refusal(
            f"precision={plan.precision} scales the loss by a factor that depends on all gradients of a step, for which"
            " workers do not wait", "",
            f"use precision={plan.precision.replace('fp16', 'bf16')} with workers=",
        )  # fmt: skip
    if facts.updates_within:
        yield Refusal(
            f"schedule={plan.schedule} updates weights within a step, but with workers={plan.workers} only servers"
            " update weights",
            "", "use schedule=1f1b",
        )  # fmt: skip


def _of_homes(plan: Plan, place: Place) -> Iterator[Refusal]:
    if parameters_away(plan, place.device) and place.device != "cpu" and not updates_on_host(plan, place.device):
        yield Refusal(
            f"home.parameters={plan.home_parameters} has parameters updated on the host, but home.optimizer=device"
            f" keeps the optimizer's state on {place.device}", "", f"add home.optimizer={plan.home_parameters}",
        )  # fmt: skip


def _of_common_memory(plan: Plan, place: Place) -> Iterator[Refusal]:
    if plan.central != "host" or plan.data == 1:
        return
    each = place.ranks_per_host or plan.inner_plan.mesh.size
    spans = any(group[0] // each != group[-1] // each for group in plan.mesh.groups("data"))
    if spans or not place.shares_memory:
        yield no_common_memory(plan.data)


def _of_compiling(plan: Plan, place: Place) -> Iterator[Refusal]:
    if plan.compile != "none" and place.lacks:
        yield no_compiler(plan, place.lacks)
    if plan.cudagraphs == "yes" and place.device != "cuda":
        why = f"it records kernels of CUDA devices, and the ranks are on {place.device}"
        yield Refusal(f"cudagraphs={plan.cudagraphs}", why, "leave cudagraphs= out")


def no_compiler(plan: Plan, lacks: str) -> Refusal:
    """The refusal of `compile=` at a place that lacks something it needs."""
    return Refusal(
        f"compile={plan.compile} needs a compiler", lacks,
        "install it (apt-get install g++, or the PyTorch for your GPUs), name another with CXX (CC for GPUs), or leave"
        " compile= out",
    )  # fmt: skip


def _of_old_devices(plan: Plan, place: Place) -> Iterator[Refusal]:
    asked = [("precision", plan.precision), *((f"precision.{name}", each) for name, each in plan.exceptions)]
    for key, precision in asked if place.without_bf16 else ():
        if precision.startswith("bf16"):
            yield Refusal(
                f"{key}={precision}", f"{place.without_bf16} has no units for bfloat16, which came with 8.0",
                f"use {key}=fp16, or fp32",
            )  # fmt: skip


def of_rows(plan: Plan, rows: int) -> Iterator[Refusal]:
    """Refusals of a global batch of so many rows: replicas, microbatches and ranks must each get the same number."""
    if plan.workers:
        num = plan.workers - plan.backup
        refusal = uneven_workers(plan, rows) or uneven_batch(
            plan.inner_plan, rows // num, f"a worker's part of the batch, {rows // num} rows,"
        )
        if refusal:
            yield refusal
        return
    if refusal := uneven_replicas(plan, rows):
        yield refusal
        return
    inner = rows // (plan.mesh.axis_size(plan.relaxed_axis) if plan.relaxed_axis else 1)
    refusal = uneven_micro(plan.micro, inner) or uneven_parts(plan.inner_plan, inner // plan.micro)
    if refusal:
        yield refusal


def of_fewer_rows(title: str, error: str) -> Refusal:
    """The refusal of a plan that has a model run on fewer rows at a time, which fails."""
    return Refusal(
        f"the plan {title!r}", f"it runs the model on fewer rows at a time, which fails ({error})",
        "take the number of rows from the batch, not from outside, and let no number of the batch count rows before it,"
        " as the edges of joined graphs and the offsets of bags do; or leave micro and sync out of the plan",
    )  # fmt: skip


def uneven_replicas(plan: Plan, rows: int) -> Refusal | None:
    """The refusal of a global batch that the replicas of `sync=` or `compress=` do not divide."""
    num = plan.mesh.axis_size(plan.relaxed_axis) if plan.relaxed_axis else 1
    if rows % num == 0:
        return None
    return Refusal(
        f"{num} replicas do not divide the batch of {rows} rows", "", f"give a multiple of {num * plan.micro}"
    )


def uneven_workers(plan: Plan, rows: int) -> Refusal | None:
    """The refusal of a global batch that the workers that a step waits for do not divide."""
    num = plan.workers - plan.backup
    if rows % num == 0:
        return None
    return Refusal(
        f"the global batch of {rows} does not split over the {num} workers that a step waits for", "",
        f"choose a multiple of {num}, such as {max(rows // num, 1) * num}",
    )  # fmt: skip


def uneven_batch(plan: Plan, rows: int, what: str) -> Refusal | None:
    """The refusal of a batch that ranks and microbatches do not divide; `what` names the batch."""
    num = plan.num_batch_parts * plan.micro
    if rows % num == 0:
        return None
    sizes = {axis: plan.mesh.axis_size(axis) for axis in batch_axes()} | {"micro": plan.micro}
    cuts = [f"{name}={n}" for name, n in sizes.items() if n > 1]
    total = f" ({num} parts)" if len(cuts) > 1 else ""
    return Refusal(
        f"{what} does not split over {' '.join(cuts)}{total}", "",
        f"choose a multiple of {num}, such as {max(rows // num, 1) * num}",
    )  # fmt: skip


def uneven_micro(num: int, rows: int, whose: str = "the batch") -> Refusal | None:
    """The refusal of rows that `num` microbatches do not divide; `whose` names the batch."""
    if rows % num == 0:
        return None
    near = max(rows // num, 1) * num
    return Refusal(
        f"micro={num} does not divide {whose} of {rows} rows", "", f"give a multiple of {num}, such as {near}"
    )


def uneven_parts(plan: Plan, rows: int, trains: bool = True) -> Refusal | None:
    """The refusal of a microbatch that the ranks do not divide.

    If the step does not train, such as for the short last batch of an evaluation, every rank may take all rows, except
    with `stages=`.
    """
    parts, inner = plan.num_batch_parts, plan.num_stage_parts
    if not (trains and rows % parts) and not (plan.stages and rows % (parts * inner)):
        return None
    if plan.stages:
        return Refusal(
            f"stages= cuts each microbatch of {rows} into {parts} x {inner} parts", "",
            f"give a batch size that is a multiple of {parts * inner * plan.micro}, or a smaller micro=",
        )  # fmt: skip
    axes = " x ".join(f"{axis}={n}" for axis, n in plan.mesh.axes if axis_kind(axis).cuts_rows and n > 1)
    return Refusal(
        f"{axes} does not divide {'the batch' if plan.micro == 1 else 'a microbatch'} of {rows}", "",
        f"give a batch size that is a multiple of {parts * plan.micro}, or a plan with"
        f" data={max(d for d in range(1, parts + 1) if rows % d == 0)}",
    )  # fmt: skip


def of_modules(plan: Plan, facts: StepFacts) -> Iterator[Refusal]:
    """Refusals of modules that the plan names."""
    if facts.modules is not None:
        for pattern, name in plan.exceptions:
            yield from of_exception(pattern, name, facts.modules, facts.parameters or {})
        for pattern, value in plan.uncompiled:
            if not any(fnmatch.fnmatchcase(path, pattern) for path in facts.modules):
                yield _no_module(f"compile.{pattern}={value}", facts.modules)
    if facts.called is None:
        return
    if plan.recompute.kind != "none" and (refusal := no_layer(plan.recompute, facts.called)):
        yield refusal
    if plan.cut and (refusal := wrong_number_of_cuts(plan, facts.num_stages)):
        yield refusal
        return
    for name in plan.cut:
        if refusal := no_module_to_cut(name, facts.called):
            yield refusal


def _no_module(what: str, modules: Iterable[str]) -> Refusal:
    some = ", ".join([path for path in modules if path][:5])
    return Refusal(f"{what} matches no module of the model", "", f"it has {some}, ...")


def of_exception(
    pattern: str, name: str, modules: Iterable[str], parameters: Mapping[str, ParameterFacts]
) -> Iterator[Refusal]:
    """Refusals of `precision.PATTERN=NAME`: no module matches, or its weights have another half precision.

    A plan does not change the dtype of weights.
    """
    fitting = [path for path in modules if fnmatch.fnmatchcase(path, pattern)]
    what = f"precision.{pattern}={name}"
    if not fitting:
        yield _no_module(what, modules)
    for path in fitting:
        for weight, facts in parameters.items():
            inside = f"{weight}.".startswith(f"{path}.") or not path
            if inside and facts.trains and facts.dtype in _HALF and facts.dtype != DTYPE_NAMES[name]:
                whole = f"model.get_submodule({path!r})" if path else "model"
                yield Refusal(
                    f"{what} says how products of float32 weights are computed, but {weight} is {facts.dtype}", "",
                    f"leave it out, or make the weights float32: {whole}.float()",
                )  # fmt: skip
                return


def no_layer(how: Recompute, called: Iterable[str]) -> Refusal | None:
    """The refusal of a `recompute=` that matches none of the called modules."""
    known = {*called} - {""}
    if how.kind == "budget" or any(layer_of(name, how) for name in known):
        return None
    some = ", ".join(sorted(known)[:5]) or "none"
    if how.kind == "pattern":
        near = difflib.get_close_matches(how.pattern, ("none", "layer", "gathers", "budget"), n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return Refusal(f"recompute={how.pattern} matches no module of the model", "", f"{hint}it has {some}, ...")
    return Refusal(
        f"recompute=layer needs numbered layers, such as those of a ModuleList, but this model has modules {some}, ...",
        "", "name them, as in recompute=*.mlp, or give recompute=budget=SIZE",
    )  # fmt: skip


def layer_of(module: str, how: Recompute) -> str:
    """The path of the outermost layer that the module is in, or '' if it is in none."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if fnmatch.fnmatchcase(path, how.pattern) if how.kind == "pattern" else re.fullmatch(r"\d+", parts[end - 1]):
            return path
    return ""


def wrong_number_of_cuts(plan: Plan, num_stages: int) -> Refusal | None:
    """The refusal of a `cut=` that does not name one module for each stage but the first."""
    num = len(plan.cut)
    if num == num_stages - 1:
        return None
    return Refusal(
        f"cut={','.join(plan.cut)} names {'1 module' if num == 1 else f'{num} modules'}, but {num_stages} stages begin"
        f" with {num_stages - 1} besides the first", "", f"name {num_stages - 1}",
    )  # fmt: skip


def no_module_to_cut(name: str, called: Iterable[str]) -> Refusal | None:
    """The refusal of a name in `cut=` that is not that of a called module."""
    known: set[str] = set()
    for module in called:
        parts = module.split(".")
        known |= {".".join(parts[: i + 1]) for i in range(len(parts))}
    known -= {""}
    if name in known:
        return None
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(sorted(known)[:8])}, ..."
    return Refusal(f"cut={name}", "the model calls no module of this name", hint)


def of_graph(plan: Plan, uncaptured: str, nearest: str) -> Iterator[Refusal]:
    """The refusal of keys that PyTorch's DDP does not support, for a step that cannot be captured as a graph."""
    rows = {row.name: row.default for row in dataclasses.fields(plan) if row.name not in (*_WITHOUT_GRAPH, ddp_axis())}
    needs = {name: getattr(plan, name) for name, default in rows.items() if getattr(plan, name) != default}
    if needs:
        yield Refusal(
            f"the plan {plan.title!r} needs the graph of the step for {Plan(**needs)}, but the step cannot be captured",
            uncaptured, f"the nearest plan that works is {nearest}",
        )  # fmt: skip


def of_changes(plan: Plan, facts: StepFacts) -> Iterator[Refusal]:
    """Refusals of changes that the step makes besides those of parameters and buffers of the model."""
    if facts.changed_outside and (plan.relaxed_axis or plan.workers):
        yield Refusal(
            f"the step changes {facts.changed_outside[0]}, a tensor outside the model, but with {plan.title} replicas"
            " only synchronise parameters and buffers, so each of them would keep its own", "",
            "make it a buffer of the model with register_buffer, or take a plan whose ranks agree at every step, such"
            f" as data={max(plan.num_processes, plan.workers)}",
        )  # fmt: skip
    if facts.unsteady and plan.micro > 1:
        yield Refusal(
            f"the step changes {facts.unsteady}, and needs another graph with the new value, but the microbatches of"
            f" micro={plan.micro} share one graph", "", "leave micro out, or set the value before the first step",
        )  # fmt: skip


def of_parts_left_out(plan: Plan, facts: StepFacts) -> Iterator[Refusal]:
    """Refusals of updates that would take a gradient of zero for the one that a parameter does not have, because the
    step has left out its part of the model."""
    if not facts.left_out:
        return
    what = (
        f"{facts.left_out[0]} has no gradient in a step that leaves out its part of the model, such as an expert"
        " without rows"
    )
    instead = "let that part run without rows too, as by leaving out `if token.numel() == 0: continue`"
    if plan.workers:
        yield Refusal(what, f"with workers={plan.workers} servers take the gradients of all parameters", instead)
    elif facts.updates_within:
        why = f"schedule={plan.schedule} updates weights before the whole step has run"
        yield Refusal(what, why, f"{instead}, or use schedule=1f1b")
    elif plan.backend == "xla":
        yield Refusal(what, "backend=xla updates all parameters in one program", f"{instead}, or leave backend= out")


def of_optimizer(num_ranks: int, facts: OptimizerFacts) -> Iterator[Refusal]:
    """Refusals of an optimizer that does not give the result of one device on `num_ranks` ranks."""
    if facts.scattered is not None:
        axis, size = facts.scattered
        for name, why in facts.together:
            yield Refusal(
                f"{name} {why}, and with {axis}={size} a rank has only some of them", "",
                f"use another optimizer, or the plan data={num_ranks}",
            )  # fmt: skip
    for trial in facts.apart:
        cut = f"so its result might change with the cut of {trial.parameter} ({trial.layout})"
        if trial.wraps:
            yield Refusal(
                f"{trial.name}, which steps several optimizers, {trial.why}, {cut}", "",
                "give a list of (name pattern, optimizer's function) pairs in its place, or use the plan"
                f" data={num_ranks}, which cuts no parameter",
            )  # fmt: skip
        else:
            yield Refusal(
                f"{trial.name} {trial.why}, {cut}", "",
                "use plait.optim.Lamb, Adafactor, Muon or an elementwise optimizer such as AdamW or SGD, give it a"
                f" method bind(parts) as plait.optim.Lamb has, or use the plan data={num_ranks}, which cuts no"
                " parameter",
            )  # fmt: skip


def of_wrappers(plan: Plan, wrappers: Iterable[str]) -> Iterator[Refusal]:
    """Refusals of objects that step all parameters at once, with a plan that steps some at a time."""
    if not plan.uses_disk:
        return
    where = "optimizer" if plan.home_optimizer == "disk" else "parameters"
    for name in wrappers:
        yield Refusal(
            f"{name} steps several optimizers for all parameters at once, but home.{where}=disk reads and steps some"
            " parameters at a time", "",
            "give a list of (name pattern, optimizer's function) pairs in its place, or keep them on the host",
        )  # fmt: skip
