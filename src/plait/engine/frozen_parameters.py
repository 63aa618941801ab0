"""Parameters that start or stop training midway: the optimizer follows `requires_grad`, as in a plain training loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn

from plait.errors import PlanError
from plait.plan.plan import Plan


def follow_frozen(
    optimizer: torch.optim.Optimizer,
    make: Callable[[], torch.optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
    absent: Mapping[str, nn.Parameter],
    frozen: Collection[str],
    trained: Collection[str],
    plan: Plan,
) -> bool:
    """Train all parameters except the `frozen` ones. Returns whether the optimizer has taken over new parameters.

    make        builds an optimizer of the parameters that train
    parameters  this rank's parts, by name
    absent      meta tensors for the parameters of other ranks
    frozen      the names of parameters that do not train now
    trained     the names of parameters that the optimizer has so far

    A parameter that stops training stays in the optimizer, with its state and without a gradient. One that starts is
    put into the group in which `make` puts it. Options of groups and the state of other parameters stay. Raises
    PlanError if the groups would change in number, or if the plan cannot take over parameters.
    """
    every = {**parameters, **absent}
    new = [name for name in every if name not in frozen and name not in trained]
    if new:
        _refuse(new[0], plan)
    floats = {name: p for name, p in every.items() if p.is_floating_point() or p.is_complex()}
    for name, parameter in floats.items():
        parameter.requires_grad_(name in trained or name not in frozen)
    try:
        if not new:
            return False
        made = make()
        if len(made.param_groups) != len(optimizer.param_groups):
            raise PlanError(
                f"{new[0]} begins to train, and with it the optimizer has {len(made.param_groups)} parameter groups"
                f" after {len(optimizer.param_groups)}, for which its schedule has no learning rate; make as many"
                " groups from the start, empty ones among them, or let the parameter train from the first step on"
            )
        for group, other in zip(optimizer.param_groups, made.param_groups, strict=True):
            for key in ("params", "param_names"):
                if key in other:
                    group[key] = other[key]
            lacking = any(name in parameters and any(p is parameters[name] for p in group["params"]) for name in new)
            if lacking and group.get("momentum") and group.get("fused"):
                group["fused"] = None  # fused SGD needs momentum for all parameters or for none
        return True
    finally:
        for name, parameter in floats.items():
            parameter.requires_grad_(name not in frozen)


def _refuse(name: str, plan: Plan) -> None:
    """Raise PlanError if the plan cannot start to train the parameter midway."""
    why = {
        "central=host keeps what does not train in memory that no rank updates": plan.shares_parameters,
        "room on disk is set aside when training begins": plan.uses_disk,
        f"replicas that agree under sync={plan.sync} exchange what trained when training began": bool(
            plan.relaxed_axis
        ),
    }
    for reason, applies in why.items():
        if applies:
            raise PlanError(
                f"{name} begins to train, and {reason}; let it train from the first step on, or save a checkpoint and"
                " go on from it in a new Trainer"
            )
