"""Refusals of a plan with a step: with its batch, its modules and its optimizer. Each is a function of plain values,
which `refusals` in plan/legality.py asks before there are ranks, and a pass that sees more than was known then."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping

from plait.errors import Refusal
from plait.plan.axes import axis_kind, batch_axes, ddp_axis
from plait.plan.plan import Plan
from plait.plan.recompute import Recompute
from plait.plan.step_facts import OptimizerFacts, ParameterFacts, StepFacts

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # torch's, of the words of a plan
_HALF = (DTYPE_NAMES["bf16"], DTYPE_NAMES["fp16"])


# Fields of a plan that DDP on the model as it is can do, or that only say how fast.
_WITHOUT_GRAPH = (
    "home_optimizer", "batchnorm", "allreduce", "bucket_bytes", "sync", "outer", "outer_lr", "outer_momentum",
    "moments", "streaming", "overlap", "compress", "uncompressed",
)  # fmt: skip


def of_rows(plan: Plan, rows: int) -> Iterator[Refusal]:
    """Of the rows of a global batch: replicas, microbatches and ranks each take an equal number."""
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


def uneven_replicas(plan: Plan, rows: int) -> Refusal | None:
    """Where the replicas of a plan that agree later do not divide the rows of a global batch."""
    num = plan.mesh.axis_size(plan.relaxed_axis) if plan.relaxed_axis else 1
    if rows % num == 0:
        return None
    return Refusal(
        f"{num} replicas do not divide the batch of {rows} rows", "", f"give a multiple of {num * plan.micro}"
    )


def uneven_workers(plan: Plan, rows: int) -> Refusal | None:
    """Where the workers that a step waits for do not divide the rows of a global batch."""
    num = plan.workers - plan.backup
    if rows % num == 0:
        return None
    return Refusal(
        f"the global batch of {rows} does not split over the {num} workers that a step waits for", "",
        f"choose a multiple of {num}, such as {max(rows // num, 1) * num}",
    )  # fmt: skip


def uneven_batch(plan: Plan, rows: int, what: str) -> Refusal | None:
    """Where the ranks and microbatches do not divide the rows of a batch, which is named as `what`."""
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
    """Where so many microbatches do not divide rows."""
    if rows % num == 0:
        return None
    near = max(rows // num, 1) * num
    return Refusal(
        f"micro={num} does not divide {whose} of {rows} rows", "", f"give a multiple of {num}, such as {near}"
    )


def uneven_parts(plan: Plan, rows: int, trains: bool = True) -> Refusal | None:
    """Where the ranks do not divide the rows of a microbatch. Of the short last batch of an evaluation every rank has
    all of it, but where stages are spread differently."""
    parts, inner = plan.num_batch_parts, plan.num_stage_parts
    if not (trains and rows % parts) and not (plan.stages and rows % (parts * inner)):
        return None
    if plan.stages:
        return Refusal(
            f"stages= cuts each microbatch of {rows} into {parts} x {inner} parts", "",
            f"give a batch size that is a multiple of {parts * inner * plan.micro}, or less of micro",
        )  # fmt: skip
    axes = " x ".join(f"{axis}={n}" for axis, n in plan.mesh.axes if axis_kind(axis).cuts_rows and n > 1)
    return Refusal(
        f"{axes} does not divide {'the batch' if plan.micro == 1 else 'a microbatch'} of {rows}", "",
        f"give a batch size that is a multiple of {parts * plan.micro}, or a plan with"
        f" data={max(d for d in range(1, parts + 1) if rows % d == 0)}",
    )  # fmt: skip


def of_modules(plan: Plan, facts: StepFacts) -> Iterator[Refusal]:
    """Of the modules that the plan names."""
    if facts.modules is not None:
        for pattern, name in plan.exceptions:
            yield from of_exception(pattern, name, facts.modules, facts.parameters or {})
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


def of_exception(
    pattern: str, name: str, modules: Iterable[str], parameters: Mapping[str, ParameterFacts]
) -> Iterator[Refusal]:
    """Of `precision.PATTERN=NAME`: a pattern of no module, and weights that train in a half precision of their own, as
    a plan leaves weights as they are."""
    fitting = [path for path in modules if fnmatch.fnmatchcase(path, pattern)]
    what = f"precision.{pattern}={name}"
    if not fitting:
        some = ", ".join([path for path in modules if path][:5])
        yield Refusal(f"{what} fits no module of the model", "", f"it has {some}, ...")
    for path in fitting:
        for weight, facts in parameters.items():
            inside = f"{weight}.".startswith(f"{path}.") or not path
            if inside and facts.trains and facts.dtype in _HALF and facts.dtype != DTYPE_NAMES[name]:
                whole = f"model.get_submodule({path!r})" if path else "model"
                yield Refusal(
                    f"{what} says how products of float32 weights are computed, and {weight} is {facts.dtype}", "",
                    f"leave it out, or make the weights float32: {whole}.float()",
                )  # fmt: skip
                return


def no_layer(how: Recompute, called: Iterable[str]) -> Refusal | None:
    """Where nothing of what modules compute is in a layer that `recompute=` means."""
    known = {*called} - {""}
    if how.kind == "budget" or any(layer_of(name, how) for name in known):
        return None
    some = ", ".join(sorted(known)[:5]) or "none"
    if how.kind == "pattern":
        return Refusal(f"recompute={how.pattern} matches no module of the model", "", f"it has {some}, ...")
    return Refusal(
        f"recompute=layer needs numbered layers, such as those of a ModuleList, and this model has modules {some}, ...",
        "", "name them, as in recompute=*.mlp, or give recompute=budget=SIZE",
    )  # fmt: skip


def layer_of(module: str, how: Recompute) -> str:
    """The outermost part of a module's path that is a layer, or ''."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if fnmatch.fnmatchcase(path, how.pattern) if how.kind == "pattern" else re.fullmatch(r"\d+", parts[end - 1]):
            return path
    return ""


def wrong_number_of_cuts(plan: Plan, num_stages: int) -> Refusal | None:
    """Where `cut=` does not name a module for each stage but the first."""
    num = len(plan.cut)
    if num == num_stages - 1:
        return None
    return Refusal(
        f"cut={','.join(plan.cut)} names {'1 module' if num == 1 else f'{num} modules'}, but {num_stages} stages begin"
        f" with {num_stages - 1} besides the first", "", "name as many",
    )  # fmt: skip


def no_module_to_cut(name: str, called: Iterable[str]) -> Refusal | None:
    """Where no stage can begin with a module, because the step calls none of that name."""
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
    """Of a step that cannot be captured: keys of the plan that need its graph. PyTorch's DDP takes the others."""
    rows = {row.name: row.default for row in dataclasses.fields(plan) if row.name not in (*_WITHOUT_GRAPH, ddp_axis())}
    needs = {name: getattr(plan, name) for name, default in rows.items() if getattr(plan, name) != default}
    if needs:
        yield Refusal(
            f"the plan {plan.title!r} needs the graph of the step for {Plan(**needs)}, and it could not be captured",
            uncaptured, f"the nearest plan that works is {nearest}",
        )  # fmt: skip


def of_changes(plan: Plan, facts: StepFacts) -> Iterator[Refusal]:
    """Of what the step changes beside parameters and buffers of the model."""
    if facts.changed_outside and (plan.relaxed_axis or plan.workers):
        yield Refusal(
            f"the step changes {facts.changed_outside[0]}, a tensor outside the model, and with {plan.title} every"
            " replica would have its own for ever, as replicas agree on parameters and buffers alone", "",
            "make it a buffer of the model with register_buffer, or take a plan whose ranks agree at every step, such"
            f" as data={max(plan.num_processes, plan.workers)}",
        )  # fmt: skip
    if facts.unsteady and plan.micro > 1:
        yield Refusal(
            f"the step changes {facts.unsteady}, with which it is another step, and the microbatches of"
            f" micro={plan.micro} share one", "", "leave micro out, or set the value before the first step",
        )  # fmt: skip


def of_optimizer(num_ranks: int, facts: OptimizerFacts) -> Iterator[Refusal]:
    """Of an optimizer on so many ranks: it is to give the result of one device."""
    if facts.scattered is not None:
        axis, size = facts.scattered
        for name, why in facts.together:
            yield Refusal(
                f"{name} {why}, and with {axis}={size} a rank has some of them only", "",
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
    """Of objects whose step is of all parameters at once, where these are stepped some at a time."""
    if not plan.uses_disk:
        return
    where = "optimizer" if plan.home_optimizer == "disk" else "parameters"
    for name in wrappers:
        yield Refusal(
            f"{name} steps several optimizers for all parameters at once, and home.{where}=disk has them read and"
            " stepped some at a time", "",
            "give a list of (name pattern, optimizer's function) pairs in its place, or keep them on the host",
        )  # fmt: skip
