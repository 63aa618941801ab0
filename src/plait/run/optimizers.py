"""The user's optimizer and scheduler on this rank's parts of the parameters.

Most optimizers work element by element, and then have the same result on the parts of a tensor as on the whole. Of one
that does not, found by trying it on a small tensor, there is a version here that knows of the whole (EXACT), or it says
itself how it does that (`bind`, optim/parts.py), or it is refused.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.protocol import World
from plait.errors import PlanError
from plait.optim.adafactor import Adafactor
from plait.optim.muon import Muon
from plait.optim.parts import Whole
from plait.run.parts import LaidOutParts
from plait.run.tuning import prefer_fused
from plait.spec.layout import Layout, Shard

OptimizerFactory = Callable[..., torch.optim.Optimizer]
EXACT: dict[type, type] = {torch.optim.Adafactor: Adafactor, torch.optim.Muon: Muon}

_TRIED = (4, 6, 2, 2, 2, 2)  # of a tensor that an optimizer is tried on: as many of these as it has dims
_SCALES = (1.0, 100.0, 0.01)  # of its gradients: limits on the length of an update bind at one of them


def build_optimizer(
    factory: OptimizerFactory, parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, Layout], world: World
) -> torch.optim.Optimizer:
    """The optimizer that `factory` makes of those `parameters` that are trained, with the result of one device.

    `layouts` are of all parameters by name. PlanError where this cannot be had: what the factory returns is no
    optimizer, or one that works in another way on parts than on the whole.
    """
    trainable = [(name, p) for name, p in parameters.items() if p.requires_grad]
    nothing = nn.Parameter(torch.empty(0)) if not trainable else None  # a stage without weights: torch wants a list
    if nothing is not None:
        trainable = [("nothing", nothing)]
    try:
        first = next(iter(inspect.signature(factory).parameters), "")
    except (TypeError, ValueError):
        first = ""
    optimizer = factory(trainable if first == "named_parameters" else [p for _, p in trainable])
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(f"the optimizer's function returned a {kind}, not a torch.optim.Optimizer")
    _refuse_what_cannot_step(optimizer, kind)
    prefer_fused(optimizer)
    names = {p: name for name, p in parameters.items()}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if p not in names and p is not nothing]
    if strangers:
        raise PlanError(
            f"{kind} has a parameter of shape {list(strangers[0].shape)} that it was not given: make it from what the"
            " optimizer's function is called with, which are the parts that this rank holds"
        )
    own: dict[Tensor, Layout] = {p: layouts[name] for p, name in names.items()}
    cut = {p for p, layout in own.items() if _is_cut(layout, world)}
    if not cut:
        return optimizer
    if type(optimizer) in EXACT:
        optimizer = _taken_over(optimizer, EXACT[type(optimizer)])
    if hasattr(optimizer, "bind"):
        optimizer.bind(LaidOutParts(own, world))
        return optimizer
    for group in optimizer.param_groups:
        for ndim, example in {p.ndim: p for p in group["params"] if p in cut}.items():
            if why := depends_on_the_cut(optimizer, group, ndim):
                raise PlanError(
                    f"{kind} {why}, so its result might change with the cut of {names[example]} ({own[example]}); use"
                    " plait.optim.Lamb, Adafactor, Muon or an elementwise optimizer such as AdamW or SGD, give it a"
                    f" method bind(parts) as plait.optim.Lamb has, or use the plan data={world.mesh.size}, which cuts"
                    " no parameter"
                )
    return optimizer


def build_scheduler(factory: Callable[[torch.optim.Optimizer], Any] | None, optimizer: torch.optim.Optimizer) -> Any:
    """The learning rate scheduler that `factory` makes; PlanError for one that needs what a step does not have."""
    scheduler = factory(optimizer) if factory is not None else None
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise PlanError(
            "ReduceLROnPlateau steps by a metric, which a training step does not have; leave scheduler out, make it"
            " from trainer.optimizer after prepare(batch), and step it yourself with what evaluate() returns"
        )
    return scheduler


def state_layouts(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, Layout]
) -> dict[str, dict[str, Layout | None]]:
    """How each rank holds what the optimizer keeps of every parameter: its keys, and the layout of each.

    None stands for a number, which is the same on all ranks. Also of parameters that this rank lacks, which are taken
    to be in the first group. Nothing is exchanged.
    """
    found: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {}
    result: dict[str, dict[str, Layout | None]] = {}
    groups = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    frozen = {name for name, p in parameters.items() if p not in groups}
    for name, layout in layouts.items():
        if name in frozen:
            continue
        index, ndim = groups.get(parameters.get(name), 0), len(layout.shape)
        if (index, ndim) not in found:
            toy = torch.ones(_TRIED[:ndim])
            state = tried(optimizer, optimizer.param_groups[index], [toy])[toy]
            found[index, ndim] = {k: tuple(v.shape) if torch.is_tensor(v) else () for k, v in state.items()}
        result[name] = {key: _like(shape, layout) for key, shape in found[index, ndim].items()}
    return result


def _like(tried: tuple[int, ...], layout: Layout) -> Layout | None:
    """The layout of a state, of which the shape is known where the parameter is one of `_TRIED`."""
    if not tried:
        return None
    if tried == _TRIED[: len(layout.shape)]:
        return layout
    shape = tuple(1 if small == 1 else n for small, n in zip(tried, layout.shape, strict=True))
    return Layout(layout.dtype, shape, tuple((a, p) for a, p in layout.placements if not isinstance(p, Shard)))


def _refuse_what_cannot_step(optimizer: torch.optim.Optimizer, kind: str) -> None:
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise PlanError(
            "SparseAdam takes only sparse gradients, and those of a training step are dense; use Adam, which moves"
            " every row at each step"
        )
    closure = next(iter(inspect.signature(optimizer.step).parameters.values()), None)
    if closure is not None and closure.default is closure.empty and closure.kind is closure.POSITIONAL_OR_KEYWORD:
        raise PlanError(
            f"{kind} runs the model several times a step, from a closure, and a training step runs it once; use AdamW,"
            " SGD or another optimizer whose step() needs no closure"
        )


def _is_cut(layout: Layout, world: World) -> bool:
    return any(isinstance(p, Shard) and world.mesh.axis_size(axis) > 1 for axis, p in layout.placements)


def _taken_over(optimizer: torch.optim.Optimizer, kind: type) -> torch.optim.Optimizer:
    """An optimizer of another kind over the same groups."""
    names = [group.pop("param_names", None) for group in optimizer.param_groups]
    made: torch.optim.Optimizer = kind(optimizer.param_groups)
    for group, found in zip(made.param_groups, names, strict=True):
        if found is not None:
            group["param_names"] = found
    return made


def depends_on_the_cut(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], ndim: int) -> str:
    """Why the optimizer may move a tensor in another way than its halves; nothing where it was tried and does not."""
    generator = torch.Generator().manual_seed(0)
    like = group["params"][0]
    start, *gradients = (
        torch.randn(_TRIED[:ndim], generator=generator).to(like.device, like.dtype) for _ in range(1 + len(_SCALES))
    )
    gradients = [g * scale for g, scale in zip(gradients, _SCALES, strict=True)]
    whole = start.clone()
    try:
        tried(optimizer, group, [whole], [[g] for g in gradients])
        for dim in range(ndim):
            halves = [half.clone() for half in start.chunk(2, dim)]
            tried(optimizer, group, halves, [list(g.chunk(2, dim)) for g in gradients])
            if not (torch.cat(halves, dim) - whole).abs().max() <= 1e-2 * (whole - start).abs().max():
                return "updates an element by what others of its tensor are"
    except Exception as error:
        return f"cannot be tried on a small tensor ({type(error).__name__}: {error})"
    return ""


def tried(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    tensors: list[Tensor],
    gradients: list[list[Tensor]] | None = None,
) -> Mapping[Tensor, Any]:
    """Step with each of the gradients on tensors of our own, as the optimizer does in this group; returns its state."""
    twin = object.__new__(type(optimizer))
    twin.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k != "step"}  # a scheduler's wrapper calls ours
    for name, value in optimizer.__dict__.items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            twin.__dict__[name] = type(value)()  # hooks are for the user's steps
    twin.state = defaultdict(dict)
    rate = group.get("lr")  # which may be 0 now
    rates = {} if rate is None else {"lr": torch.full_like(rate, 0.01) if torch.is_tensor(rate) else 0.01}
    twin.param_groups = [{**group, **rates, "params": tensors}]
    if hasattr(twin, "bind"):
        twin.bind(Whole())
    for some in gradients or [[torch.zeros_like(t) for t in tensors]]:
        for tensor, gradient in zip(tensors, some, strict=True):
            tensor.grad = gradient.contiguous()
        twin.step()
    return twin.state
