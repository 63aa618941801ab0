"""The state of a run as one nested dict of tensors that does not depend on the plan, and back.

    {"model": {name: tensor}, "optimizer": {"state": {name: {key: tensor}}, "groups": [...]}, "scheduler": {...},
     "loss_scale": {...}, "ema": {name: tensor}, "step": int}

Optimizer state of its parameter's shape has the parameter's layout. Checkpoints do not use this dict: see
engine/checkpoint/saved_state.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from plait.engine.checkpoint.plain_values import IMPLEMENTATION, check_groups, check_scheduler
from plait.engine.executor import ModelParts
from plait.engine.local_tensors import gather_whole
from plait.engine.optimizer_trials import kept_of, parameters_of, state_layouts
from plait.engine.train_state import TrainState
from plait.errors import CheckpointError
from plait.optim.combined import own_values, set_own_values
from plait.spec.layout import Layout, Only

_layouts: WeakKeyDictionary[torch.optim.Optimizer, dict[str, dict[str, Layout | None]]] = WeakKeyDictionary()


def take(run: TrainState) -> dict[str, Any]:
    """The state with DTensors, or whole tensors if ranks are threads. All ranks must call it."""
    from plait.engine.dtensors import to_boundary

    held, world, optimizer = run.held, run.world, run.optimizer
    assert optimizer is not None
    model: dict[str, Tensor] = {
        name: to_boundary(held.local(name), layout, world, held.dtypes[name]) for name, layout in held.layouts.items()
    }
    persistent = persistent_of(held)
    model |= {name: buffer for name, buffer in held.buffers.items() if name in persistent}
    state: dict[str, Any] = {
        "model": model,
        "optimizer": {"state": _optimizer_state(run), "groups": group_options(run), "own": own_values(optimizer)},
        "step": run.step_number,
    }
    if run.scheduler is not None:
        state["scheduler"] = run.scheduler.state_dict()
    if run.loss_scale is not None:
        state["loss_scale"] = run.loss_scale.state_dict()
    if run.average is not None:
        state["ema"] = {
            name: to_boundary(run.average.tensors.get(name), layout, world, run.average.dtype_of(held.dtypes[name]))
            for name, layout in held.layouts.items()
        }
    return state


def restore(run: TrainState, state: Mapping[str, Any]) -> None:
    """Load a state that was made under any plan. Raises CheckpointError for other names or shapes, before anything
    is changed."""
    from plait.engine.dtensors import from_boundary

    held, world = run.held, run.world
    model = state["model"]
    check_model(held, model)
    if "optimizer" in state and run.optimizer is not None:
        check_groups(run.optimizer.param_groups, state["optimizer"]["groups"])
    if run.scheduler is not None and "scheduler" in state:
        check_scheduler(run.scheduler, state["scheduler"])
    for name, layout in held.layouts.items():
        local = from_boundary(model[name], layout, world)
        if name in held.parameters:
            held.set_local(name, local)
    for name, buffer in held.buffers.items():
        if name in model:
            buffer.copy_(model[name])
    if "optimizer" in state:
        _restore_optimizer(run, state["optimizer"])
    if run.scheduler is not None and "scheduler" in state:
        run.scheduler.load_state_dict(state["scheduler"])
    if run.loss_scale is not None and "loss_scale" in state:
        run.loss_scale.load_state_dict(state["loss_scale"])
    run.step_number = int(state["step"])
    if run.average is not None:
        run.average.begin(run.held)
        for name, layout in held.layouts.items() if "ema" in state else ():
            local = from_boundary(state["ema"][name], layout, world)
            if name in run.average.tensors:
                run.average.tensors[name].copy_(local)
    if run.replicas is not None:
        run.replicas.begin(run.step_number)
    held.updated()


def full_model(held: ModelParts) -> dict[str, Tensor]:
    """Every parameter and persistent buffer as a whole tensor on the CPU, tied parameters under each of their names.
    All ranks must call it."""
    found = {name: held.whole(name, held.local(name)).detach().cpu().clone() for name in held.layouts}
    persistent = persistent_of(held)
    found |= {name: b.detach().cpu().clone() for name, b in held.buffers.items() if name in persistent}
    first: dict[int, str] = {}
    for name, parameter in held.model.named_parameters(remove_duplicate=False):
        found[name] = found[first.setdefault(id(parameter), name)]
    return found


def check_model(held: ModelParts, model: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if the state's names or shapes differ from the model's."""
    mine = held.layouts
    missing = sorted(set(mine) - set(model))
    if missing:
        raise CheckpointError(f"the state was made by another model: it lacks {', '.join(missing[:5])}")
    known = {name for name, _ in held.model.named_parameters(remove_duplicate=False)} | set(held.buffers)
    extra = sorted(set(model) - known)
    if extra:
        raise CheckpointError(f"the state was made by another model: this one has no {', '.join(extra[:5])}")
    for name, layout in mine.items():
        if tuple(model[name].shape) != layout.shape:
            raise CheckpointError(
                f"the state was made by another model: {name} has shape {list(model[name].shape)} there and"
                f" {list(layout.shape)} here"
            )


def persistent_of(held: ModelParts) -> set[str]:
    """The names of everything that a checkpoint has of the model beside its trained parameters."""
    return persistent_buffers(held.model) | held.changing


def persistent_buffers(model: nn.Module) -> set[str]:
    """The names of the buffers that are part of the model's state_dict."""
    found: set[str] = set()
    for path, module in model.named_modules():
        keys = set(module._buffers) - module._non_persistent_buffers_set
        found |= {f"{path}.{key}" if path else key for key in keys}
    return found


def _optimizer_state(run: TrainState) -> dict[str, dict[str, Any]]:
    """The optimizer state by parameter name. A rank that lacks a parameter finds the keys by trying the optimizer."""
    from plait.engine.dtensors import to_boundary

    held, world, optimizer = run.held, run.world, run.optimizer
    assert optimizer is not None
    found: dict[str, dict[str, Any]] = {}
    with_state = _with_state(run)
    try:
        expected = state_layouts(optimizer, held.parameters, held.layouts) if with_state else {}
    except Exception:  # an optimizer of the user's that works on real parameters only
        expected = {}
    for name, layout in held.layouts.items():
        parameter = held.parameters.get(name)
        if name not in with_state:
            continue
        if parameter is not None:
            mine = run.update.state_of(parameter)
        else:
            mine = kept_of(optimizer, name, len(layout.shape), run.step_number)
        found[name] = {}
        for key, value in sorted(mine.items()):
            form = expected.get(name, {}).get(key, layout)
            if torch.is_tensor(value) and not value.ndim and _is_of_one_rank(layout):
                # A count of steps, which an expert without rows does not take part in.
                only = tuple((axis, p) for axis, p in layout.placements if isinstance(p, Only))
                mine_now = value.to(world.device) if parameter is not None else None
                value = gather_whole(mine_now, Layout(layout.dtype, (), only), world, value.dtype).to(value.device)
            elif not torch.is_tensor(value) or not value.ndim or form is None:
                pass
            elif form == layout:
                if parameter is None or value.shape == parameter.shape:
                    value = to_boundary(value if parameter is not None else None, layout, world, value.dtype)
            elif _is_of_one_rank(form):
                value = gather_whole(value if parameter is not None else None, form, world, value.dtype)
            found[name][key] = value
    return found


def _is_of_one_rank(layout: Layout) -> bool:
    return any(isinstance(p, Only) for _, p in layout.placements)


def _with_state(run: TrainState) -> set[str]:
    """The names of parameters for which any rank's optimizer has state."""
    held, optimizer = run.held, run.optimizer
    assert optimizer is not None
    kept = [name in held.parameters and bool(optimizer.state.get(held.parameters[name])) for name in held.layouts]
    if any(map(_is_of_one_rank, held.layouts.values())):
        flags = torch.tensor([float(each) for each in kept], device=run.world.device)
        kept = [bool(each) for each in run.world.everyone().all_reduce(flags, "max").wait()]
    return {name for name, each in zip(held.layouts, kept, strict=True) if each}


def group_options(run: TrainState) -> list[dict[str, object]]:
    """The parameter groups with names in place of tensors, with the parameters of all ranks."""
    assert run.optimizer is not None
    names = {id(p): name for name, p in parameters_of(run.optimizer, run.held.parameters).items()}
    found = []
    for group in run.optimizer.param_groups:
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        members = [names[id(p)] for p in group["params"] if id(p) in names]
        found.append({**options, "params": members})
    return found


def set_group_options(run: TrainState, saved: Sequence[Mapping[str, object]]) -> None:
    """Set the options of the parameter groups to the saved ones. Tensors among them are written in place.

    Raises CheckpointError for another number of groups, or for an option of another kind.
    """
    assert run.optimizer is not None
    check_groups(run.optimizer.param_groups, saved)
    for group, options in zip(run.optimizer.param_groups, saved, strict=True):
        for key, value in options.items():
            if key == "params" or key in IMPLEMENTATION:
                continue
            if torch.is_tensor(value) and torch.is_tensor(group.get(key)):
                group[key].copy_(value)
            else:
                group[key] = value


def _own(value: object, parameter: nn.Parameter) -> Any:
    """A copy with the parameter's strides, because fused optimizers need equal strides."""
    if not torch.is_tensor(value):
        return value
    if value.shape != parameter.shape or not value.ndim:
        return value.clone()
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _restore_optimizer(run: TrainState, saved: Mapping[str, Any]) -> None:
    from plait.engine.dtensors import from_boundary

    held, world, optimizer = run.held, run.world, run.optimizer
    assert optimizer is not None
    for name, values in saved["state"].items():
        layout, parameter = held.layouts[name], held.parameters.get(name)
        for key, value in values.items():
            if torch.is_tensor(value) and value.ndim and tuple(value.shape) == layout.shape:
                value = from_boundary(value, layout, world)
            if parameter is not None:
                optimizer.state[parameter][key] = _own(value, parameter)
        if parameter is not None:
            run.update.settle(parameter)
    set_group_options(run, saved["groups"])
    set_own_values(optimizer, saved.get("own", {}))


def state_layout(run: TrainState, name: str, key: str, shape: tuple[int, ...], whole: bool = False) -> Layout:
    """The layout of a parameter's state tensor. `shape` is that of this rank's part, or with `whole` of the whole
    tensor.

    Scalars, and values that are reduced over the parameter, are whole on every rank that has the parameter.
    """
    world, layout = run.world, run.held.layouts[name]
    here = world.mesh.coordinates(world.rank)
    for known in (expected_state(run).get(name, {}).get(key), layout):
        if known is not None and shape and shape == (known.shape if whole else known.local_shape(world.mesh, here)):
            return known
    return Layout(layout.dtype, shape, tuple((axis, p) for axis, p in layout.placements if isinstance(p, Only)))


def expected_state(run: TrainState) -> dict[str, dict[str, Layout | None]]:
    """The layouts of the optimizer's state by parameter and key; empty for an optimizer that cannot be tried."""
    optimizer = run.optimizer
    assert optimizer is not None
    if optimizer not in _layouts:
        try:
            _layouts[optimizer] = state_layouts(optimizer, run.held.parameters, run.held.layouts)
        except Exception:  # the user's optimizer only works on the real parameters
            _layouts[optimizer] = {}
    return _layouts[optimizer]
