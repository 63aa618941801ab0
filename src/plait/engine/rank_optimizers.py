"""The user's optimizers and scheduler, on this rank's parts of the parameters.

Most optimizers work element by element, and give the same result on parts of a tensor as on the whole. One that does
not is found by trying it on a small tensor (engine/optimizer_trials.py). It is replaced by a version that knows the
whole (EXACT there), or knows how to work on parts (`bind`, optim/sharded_parts.py), or is refused. Several optimizers,
in a list or a wrapper, are tried one by one, and then the wrapper itself.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.comm.hidden_group import without_process_group
from plait.comm.protocol import World
from plait.engine.cpu_settings import not_capturable, prefer_fused
from plait.engine.local_tensors import LaidOutParts
from plait.engine.optimizer_trials import (
    EXACT,
    depends_on_others,
    depends_on_the_cut,
    note_absent,
    note_constructed,
    wrapper_depends_on_the_cut,
)
from plait.errors import PlanError, Refusal
from plait.optim.combined import CombinedOptimizer, optimizers_within, title_of
from plait.plan.legality import of_optimizer, of_wrappers
from plait.plan.plan import Plan
from plait.plan.step_facts import CutTrial, OptimizerFacts
from plait.spec.layout import Layout, Only, Shard
from plait.spec.mesh import Mesh

_WELL_KNOWN = ("torch.optim", "plait.optim")  # modules whose optimizers update each tensor independently

# parameters -> an optimizer, an object that holds several, or a list of these; or (name pattern, such a function) pairs
OptimizerFactory = Callable[..., Any] | Sequence[tuple[str, Callable[..., Any]]]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]


def make_optimizer(
    factory: OptimizerFactory, named: Sequence[tuple[str, nn.Parameter]], *, known: Sequence[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """The optimizer that `factory` makes of the trained parameters, as one optimizer of whole tensors.

    `known` are further parameters that it may have. Raises PlanError if the result is no optimizer, or an optimizer
    that needs what a training step does not provide.
    """
    given = _called(factory, list(named)) if callable(factory) else _by_pattern(factory, list(named))
    members = optimizers_within(given)
    if not members or not _can_step(given):
        raise PlanError(
            f"the optimizer's function returned a {type(given).__name__}, not a torch.optim.Optimizer, nor a list of"
            " optimizers, nor an object that holds some and has a method step()"
        )
    for each in (*members.values(), *([] if isinstance(given, (list, tuple)) else [given])):
        _refuse_what_cannot_step(each)
    alone = len(members) == 1 and next(iter(members.values())) is given
    optimizer: Any = given if alone else CombinedOptimizer(given, members)
    mine = {id(p) for _, p in named} | {id(p) for p in known}
    for path, member in members.items():
        not_capturable(member)
        note_constructed(member)
        strangers = [p for group in member.param_groups for p in group["params"] if id(p) not in mine]
        if strangers:
            where = "" if alone else f" ({path or 'the outermost'} of {title_of(optimizer)})"
            raise PlanError(
                f"{type(member).__name__}{where} has a parameter of shape {list(strangers[0].shape)} that it was not"
                " given: make it from what the optimizer's function is called with, which are the parts that this rank"
                " holds"
            )
    return optimizer  # type: ignore[no-any-return]


def build_optimizer(
    factory: OptimizerFactory,
    parameters: Mapping[str, nn.Parameter],
    layouts: Mapping[str, Layout],
    world: World,
    absent: Mapping[str, nn.Parameter] = MappingProxyType({}),
) -> torch.optim.Optimizer:
    """The optimizer that `factory` makes of the trained `parameters`, with the same result as on one device.

    layouts  the layouts of all parameters, by name
    absent   meta tensors for the parameters that this rank lacks, so that all ranks make the same parameter groups

    Raises PlanError if the result is no optimizer, or one that cannot work on parts as on the whole.
    """
    every = {**parameters, **absent}
    every = {
        name: every[name] for name in (*(n for n in layouts if n in every), *(n for n in every if n not in layouts))
    }
    optimizer = make_optimizer(
        factory, [(name, p) for name, p in every.items() if p.requires_grad], known=list(every.values())
    )
    note_absent(optimizer, absent)
    members = _members(optimizer)
    for member in members:
        prefer_fused(member)
    names = {p: name for name, p in every.items()}
    if not check_exact(optimizer, names, layouts, world.mesh):
        return optimizer
    own: dict[Tensor, Layout] = {p: layouts[name] for p, name in names.items()}
    for member in members:
        if type(member) in EXACT:
            _become(member, EXACT[type(member)])
        if hasattr(member, "bind"):
            member.bind(LaidOutParts(own, world))
    return optimizer


def check_exact(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], layouts: Mapping[str, Layout], mesh: Mesh
) -> bool:
    """Whether any of the parameters is cut. Raises PlanError for an optimizer whose result depends on the cut, or on
    which parameters are on other ranks."""
    for refusal in of_optimizer(mesh.size, optimizer_facts(optimizer, names, layouts, mesh)):
        raise PlanError(refusal)
    return any(_is_cut(layouts[name], mesh) for name in names.values())


def optimizer_facts(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], layouts: Mapping[str, Layout], mesh: Mesh
) -> OptimizerFacts:
    """The facts of an optimizer for the legality checks, given the layouts of its parameters."""
    wrappers = _wrappers(optimizer)
    scattered = _scattered(layouts, mesh)
    return OptimizerFacts(
        apart=tuple(_apart(optimizer, names, layouts, mesh)),
        together=tuple(_together(optimizer)) if scattered is not None else (),
        scattered=scattered,
        wrappers=tuple(type(each).__name__ for each in wrappers),
    )


def _apart(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], layouts: Mapping[str, Layout], mesh: Mesh
) -> Iterator[CutTrial]:
    """Trials of optimizers and wrappers that do not work on parts as on the whole."""
    cut = {p: name for p, name in names.items() if _is_cut(layouts[name], mesh)}
    if not cut:
        return
    wrappers = _wrappers(optimizer)
    for member in _members(optimizer):
        if type(member) in EXACT or hasattr(member, "bind") or any(member is each for each in wrappers):
            continue
        for group in member.param_groups:
            for ndim, example in {p.ndim: p for p in group["params"] if p in cut}.items():
                if why := depends_on_the_cut(member, group, ndim):
                    yield CutTrial(type(member).__name__, why, cut[example], str(layouts[cut[example]]))
    for wrapper in wrappers:
        if why := wrapper_depends_on_the_cut(wrapper, optimizers_within(wrapper)):
            example = next(iter(cut))
            yield CutTrial(type(wrapper).__name__, why, cut[example], str(layouts[cut[example]]), wraps=True)


def _scattered(layouts: Mapping[str, Layout], mesh: Mesh) -> tuple[str, int] | None:
    """The axis, with its size, along which ranks have different parameters; None if there is none."""
    only = {axis for layout in layouts.values() for axis, p in layout.placements if isinstance(p, Only)}
    axis = min((axis for axis in only if mesh.axis_size(axis) > 1), default="")
    return (axis, mesh.axis_size(axis)) if axis else None


def _together(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str]]:
    """The type names of user-defined optimizers that need all parameters together, with the reasons."""
    wrappers = _wrappers(optimizer)
    inside = {id(each) for wrapper in wrappers for each in optimizers_within(wrapper).values()}
    alone = [each for each in _members(optimizer) if id(each) not in inside]
    for given in (*wrappers, *(each for each in alone if not type(each).__module__.startswith(_WELL_KNOWN))):
        if why := depends_on_others(given, optimizers_within(given)):
            yield type(given).__name__, why


def _wrappers(optimizer: torch.optim.Optimizer) -> Sequence[Any]:
    """The objects that step several optimizers at once."""
    return optimizer.wrappers if isinstance(optimizer, CombinedOptimizer) else []


def facts_of_optimizer(
    factory: OptimizerFactory, model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh
) -> OptimizerFacts:
    """The facts of the optimizer that `factory` makes of a model's parameters, before any rank starts.

    Raises PlanError as `make_optimizer` does.
    """
    named = {name: p for name, p in model.named_parameters() if name in layouts}
    optimizer = make_optimizer(
        factory, [(n, p) for n, p in named.items() if p.requires_grad], known=list(named.values())
    )
    return optimizer_facts(optimizer, {p: name for name, p in named.items()}, layouts, mesh)


def refuse_some_at_a_time(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Raise PlanError for a wrapper that steps all parameters at once, if the plan steps them in chunks."""
    for refusal in of_wrappers(plan, [type(each).__name__ for each in _wrappers(optimizer)]):
        raise PlanError(refusal)


class HeldParameters(Protocol):
    """The parameters of a model on one rank, captured or not."""

    @property
    def layouts(self) -> Mapping[str, Layout]: ...

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]: ...

    @property
    def absent(self) -> Mapping[str, nn.Parameter]: ...


def build_both(
    make_optimizer: OptimizerFactory,
    make_scheduler: SchedulerFactory | None,
    held: HeldParameters,
    world: World,
) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer of this rank's parameters, and its scheduler."""
    optimizer = build_optimizer(make_optimizer, held.parameters, held.layouts, world, held.absent)
    return optimizer, build_scheduler(make_scheduler, optimizer)


def build_scheduler(factory: SchedulerFactory | None, optimizer: torch.optim.Optimizer) -> Any:
    """The learning-rate scheduler that `factory` makes.

    The factory is called with the object that the optimizer's function returned; if that is a list, with all optimizers
    as one. Raises PlanError for a scheduler that needs what a training step does not provide.
    """
    if factory is None:
        return None
    alone = isinstance(optimizer, CombinedOptimizer) and not isinstance(optimizer.given, (list, tuple))
    scheduler = factory(optimizer.given if alone else optimizer)  # type: ignore[attr-defined]
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise PlanError(
            "ReduceLROnPlateau steps by a metric, which a training step does not have; leave scheduler out, make it"
            " from trainer.optimizer after prepare(batch), and step it yourself with what evaluate() returns"
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise PlanError(
            f"the scheduler's function returned a {type(scheduler).__name__}, which has no method step(); let it return"
            " a torch.optim.lr_scheduler.LRScheduler"
        )
    return scheduler


def check_patterns(factory: object) -> None:
    """Raise PlanError for what is neither a function nor a list of (name pattern, function) pairs."""
    if callable(factory) and not isinstance(factory, torch.optim.Optimizer):
        return
    if isinstance(factory, (list, tuple)) and factory:
        bad = [it for it in factory if not (isinstance(it, (list, tuple)) and len(it) == 2 and isinstance(it[0], str))]
        bad += [it for it in factory if it not in bad and (not callable(it[1]) or _is_optimizer(it[1]))]
        if not bad:
            return
        raise PlanError(
            f"of the list of optimizers {bad[0]!r} is no pair of a name pattern and a function of parameters, such as"
            " ('*.weight', functools.partial(torch.optim.Muon, lr=0.02))"
        )
    raise PlanError(
        f"the optimizer is a {type(factory).__name__}, but the trainer makes its own from the parameters that a"
        " rank holds: give a function of them, such as functools.partial(torch.optim.AdamW, lr=3e-4)"
    )


def _called(factory: Callable[..., Any], named: list[tuple[str, nn.Parameter]]) -> Any:
    """The function's result; an empty list of parameters, which torch refuses, is replaced by an empty tensor."""
    named = named or [("nothing", nn.Parameter(torch.empty(0)))]
    try:
        first = next(iter(inspect.signature(factory).parameters), "")
    except (TypeError, ValueError):
        first = ""
    with without_process_group(lambda _: "the optimizer's function"):
        return factory(named if first == "named_parameters" else [p for _, p in named])


def _by_pattern(pairs: Sequence[tuple[str, Callable[..., Any]]], named: list[tuple[str, nn.Parameter]]) -> list[Any]:
    """The result of each function for the parameters whose first matching pattern is its own."""
    shares: list[list[tuple[str, nn.Parameter]]] = [[] for _ in pairs]
    for name, parameter in named:
        index = next((i for i, (pattern, _) in enumerate(pairs) if fnmatch.fnmatchcase(name, pattern)), None)
        if index is None:
            patterns = ", ".join(repr(pattern) for pattern, _ in pairs)
            raise PlanError(
                f"no optimizer is for {name}: it fits none of the patterns {patterns}; add a pair for the rest, such as"
                " ('*', torch.optim.AdamW)"
            )
        shares[index].append((name, parameter))
    for (pattern, _), share in zip(pairs, shares, strict=True):
        if not share:
            earlier = [other for other, _ in pairs if any(fnmatch.fnmatchcase(n, pattern) for n, _ in named)]
            why = "earlier patterns take all that it fits" if earlier else "no parameter has such a name"
            raise PlanError(f"the optimizer of {pattern!r} has nothing to train: {why}; leave it out, or mend it")
    return [_called(make, share) for (_, make), share in zip(pairs, shares, strict=True)]


def _members(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    return list(optimizer.members.values()) if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def _can_step(given: object) -> bool:
    units = given if isinstance(given, (list, tuple)) else [given]
    return bool(units) and all(callable(getattr(unit, "step", None)) and optimizers_within(unit) for unit in units)


def _is_optimizer(value: object) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def _refuse_what_cannot_step(optimizer: Any) -> None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        what = "SparseAdam takes only sparse gradients, and those of a training step are dense"
        raise PlanError(Refusal(what, "", "use Adam, which moves every row at each step"))
    # Of the class: a scheduler puts a wrapper in the place of the instance's own, whose first argument is self.
    closure = next(iter([*inspect.signature(type(optimizer).step).parameters.values()][1:]), None)
    if closure is not None and closure.default is closure.empty and closure.kind is closure.POSITIONAL_OR_KEYWORD:
        what = f"{kind} runs the model several times a step, from a closure, and a training step runs it once"
        instead = "use AdamW, SGD or another optimizer whose step() needs no closure"
        raise PlanError(Refusal(what, "", instead))


def _is_cut(layout: Layout, mesh: Mesh) -> bool:
    return any(isinstance(p, Shard) and mesh.axis_size(axis) > 1 for axis, p in layout.placements)


def _become(optimizer: torch.optim.Optimizer, kind: type) -> None:
    """Change the optimizer's class in place, so that wrappers and schedulers that refer to it stay valid."""
    optimizer.__class__ = kind
    optimizer._patch_step_function()  # as its own constructor would, for hooks
    if "step" not in optimizer.__dict__:
        return
    step = kind.step.__get__(optimizer, kind)  # type: ignore[attr-defined]

    @functools.wraps(kind.step)  # type: ignore[attr-defined]
    def counted(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = counted  # type: ignore[method-assign]
