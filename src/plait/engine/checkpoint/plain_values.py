"""Whether the options of an optimizer and the state of a scheduler that were saved are of the kind of the run's own.

They are compared with the live objects before anything is changed: torch takes whatever it is given, and fails at the
next step. Numbers may differ, and so may the length of a list that a scheduler keeps; their kind may not.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Set
from numbers import Real
from types import SimpleNamespace
from typing import Any

import torch

from plait.errors import CheckpointError

# Options of a parameter group that choose an implementation, which depends on plan and device.
IMPLEMENTATION = ("foreach", "fused", "capturable")
_OF_EACH_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")  # lists of a scheduler with an entry for each parameter group
_OF_EVERY = (*_OF_EACH_GROUP, "last_epoch", "_step_count")  # what torch's base class of schedulers computes with
_TOO_LARGE = 2**63


def check_groups(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Raise CheckpointError for another number of parameter groups, or for an option of another kind."""
    if len(saved) != len(groups):
        raise CheckpointError(f"groups: the state has {len(saved)} parameter groups and this optimizer {len(groups)}")
    for i, (group, options) in enumerate(zip(groups, saved, strict=True)):
        for key, value in options.items():
            here = group.get(key)
            if key != "params" and key not in IMPLEMENTATION and not _alike(value, here):
                raise CheckpointError(
                    f"groups.{i}.{key}: the state has {key} = {_shown(value)} and this optimizer {_shown(here)}"
                )


def check_scheduler(scheduler: Any, saved: Any) -> None:
    """Raise CheckpointError for a state that the scheduler would take over, and could not step with."""
    here = scheduler.state_dict() if hasattr(scheduler, "state_dict") else None
    if not isinstance(here, Mapping):
        return
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"scheduler cannot be taken over: it is a {type(saved).__name__}, not a mapping")
    name, of_torch = type(scheduler).__name__, type(scheduler).__module__ == torch.optim.lr_scheduler.__name__
    for key, value in saved.items():
        if key not in here:
            if hasattr(scheduler if of_torch else type(scheduler), str(key)):
                raise CheckpointError(f"scheduler.{key} cannot be taken over: it is no value of {name}")
            continue
        mine = here[key]
        fits = _follows(value, mine, key in _OF_EACH_GROUP)
        if of_torch or key in _OF_EVERY:  # one of the user's may have None until it has a number
            fits = fits and (not isinstance(mine, (list, tuple)) or _texts(value) <= _texts(mine))
        elif value is None:
            fits = True
        if not fits:
            raise CheckpointError(
                f"scheduler.{key} cannot be taken over: it is {_shown(value)} there and {_shown(mine)} here"
            )
    if of_torch and (failed := _fails(scheduler, saved)):
        raise CheckpointError(f"scheduler cannot be taken over: with it {name} fails: {failed}")


def _fails(scheduler: Any, saved: Mapping[str, Any]) -> str:
    """How a step of the scheduler fails after it has taken over a state; empty if it does not, or cannot be tried.

    That is tried on a copy, whose optimizer has options alone. What may end by an error is not: OneCycleLR after its
    last step, and functions of the user's."""
    if {"total_steps", "lr_lambdas"} & _keys(scheduler.state_dict()):
        return ""
    try:
        now, then = _copied(scheduler), _copied(scheduler)
        now.step()
    except Exception:
        return ""
    try:
        then.load_state_dict(copy.deepcopy(saved))
        then.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _copied(scheduler: Any) -> Any:
    def step() -> None:
        pass

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler warns of an optimizer without steps
    groups = scheduler.optimizer.param_groups
    options = [{key: copy.deepcopy(value) for key, value in each.items() if key != "params"} for each in groups]
    optimizer = SimpleNamespace(param_groups=options, step=step, _opt_called=True)
    return copy.deepcopy(scheduler, {id(scheduler.optimizer): optimizer})


def _keys(value: Any) -> set[Any]:
    """The keys of a mapping, and of those in it."""
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return set[Any](value if isinstance(value, Mapping) else ()).union(*map(_keys, inside))


def _texts(value: Any) -> set[str]:
    """The texts in a list, such as the names of options that a scheduler sets."""
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return {value} if isinstance(value, str) else set[str]().union(*map(_texts, inside))


def _alike(saved: Any, here: Any) -> bool:
    """Whether a saved value is of the kind of the one here: a number for a number, a pair for a pair."""
    if here is None or (saved is None and not _is_number(here)):
        return True
    if isinstance(here, bool) or isinstance(saved, bool):
        return type(saved) is type(here)
    if _is_number(here) or _is_number(saved):
        return _is_number(here) and _is_number(saved)
    if torch.is_tensor(here):
        return torch.is_tensor(saved) and saved.shape == here.shape
    if isinstance(here, (tuple, list)):
        return isinstance(saved, (tuple, list)) and len(saved) == len(here) and all(map(_alike, saved, here))
    return type(saved) is type(here)


def _follows(saved: Any, here: Any, of_each_group: bool = False) -> bool:
    """Whether a scheduler whose value is `here` can have the saved one at another step."""
    if isinstance(here, Mapping):
        if type(saved) is not type(here):
            return False
        kinds = {*map(type, here)}
        values = list(here.values())
        return all(
            _follows(value, here[key]) if key in here else type(key) in kinds and _any_follows(value, values)
            for key, value in (saved.items() if here else ())
        )
    if isinstance(here, (list, tuple)):
        if not isinstance(saved, (list, tuple)) or (of_each_group and len(saved) != len(here)):
            return False
        if len(saved) == len(here):
            return all(map(_follows, saved, here))
        return not here or all(_any_follows(value, here) for value in saved)
    if isinstance(here, Set):
        return type(saved) is type(here)
    return _alike(saved, here)


def _any_follows(value: Any, kinds: Sequence[Any]) -> bool:
    return any(_follows(value, each) for each in kinds)


def _is_number(value: Any) -> bool:
    """Whether a value counts as a number: not a bool, nor one that no tensor holds."""
    if torch.is_tensor(value):
        return bool(value.numel() == 1)
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and not (isinstance(value, int) and abs(value) >= _TOO_LARGE)


def _shown(value: Any) -> str:
    return f"{value!r:.80}"
