"""Several optimizers that update one model together, presented as one to code that saves, moves or schedules them.

Examples are Muon for matrices with AdamW for the rest, Lookahead around SGD, and a list of two. The user's object
decides what a step does, and the optimizers within it hold the state. A CombinedOptimizer has the groups and the state
of all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

_Optimizer = torch.optim.Optimizer


class CombinedOptimizer(torch.optim.Optimizer):
    """One optimizer, made of the user's object and the optimizers within it.

    Args:
        given: the user's optimizer, another object with a step(), or a list of these. `step` calls their step().
        members: all optimizers within `given`, by their paths; those that hold no others come first.

    If two members have state of one parameter, keys of the second begin with its path: "slow" of a wrapper becomes
    ":slow".
    """

    def __init__(self, given: Any, members: Mapping[str, torch.optim.Optimizer]) -> None:
        super().__init__([torch.empty(0)], {})
        self.given = given
        self.members = dict(members)
        groups = {id(group): group for member in self.members.values() for group in member.param_groups}
        self.param_groups = list(groups.values())
        self._every_group = set(groups)
        self.state = _States(self.members)  # type: ignore[assignment]

    @property
    def title(self) -> str:
        """The classes of the wrapper and its members, such as Two(Muon, AdamW)."""
        inner = ", ".join(type(each).__name__ for each in self.members.values() if each is not self.given)
        return f"{'' if isinstance(self.given, (list, tuple)) else type(self.given).__name__}({inner})"

    @property
    def wrappers(self) -> list[object]:
        """The objects in `given` whose step() calls those of other optimizers."""
        units = self.given if isinstance(self.given, (list, tuple)) else [self.given]
        return [unit for unit in units if held_optimizers(unit)]

    def member_of(self, group: Mapping[str, Any]) -> torch.optim.Optimizer:
        """The first member that has the group."""
        return next(m for m in self.members.values() if any(own is group for own in m.param_groups))

    def step(self, closure: Callable[[], object] | None = None) -> None:  # type: ignore[override]
        """One step of every member, for only the groups that are in `param_groups` now."""
        left_out = self._every_group - {id(group) for group in self.param_groups}
        before = [(member, member.param_groups) for member in self.members.values()]
        for member, groups in before if left_out else ():
            member.param_groups = [group for group in groups if id(group) not in left_out]
        try:
            for unit in self.given if isinstance(self.given, (list, tuple)) else [self.given]:
                unit.step()
        finally:
            for member, groups in before if left_out else ():
                member.param_groups = groups


class _States(MutableMapping[Tensor, Any]):
    """The members' state by parameter, as one mapping."""

    def __init__(self, members: Mapping[str, torch.optim.Optimizer]) -> None:
        self._members = members
        self._holders: dict[Tensor, list[tuple[str, _Optimizer]]] = {}
        states: list[Any] = []
        for path, member in members.items():
            if any(member.state is each for each in states):
                continue  # a wrapper that exposes the state of the optimizer it wraps
            states.append(member.state)
            for parameter in (p for group in member.param_groups for p in group["params"]):
                holders = self._holders.setdefault(parameter, [])
                if not any(member is each for _, each in holders):
                    holders.append((f"{path}:" if holders else "", member))

    def __getitem__(self, parameter: Tensor) -> MutableMapping[str, Any]:
        return _State(self._holders_of(parameter), parameter)

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        if parameter not in self:
            return default
        return self[parameter]

    def __setitem__(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        self.pop(parameter, None)
        self[parameter].update(state)

    def __delitem__(self, parameter: Tensor) -> None:
        for _, member in self._holders_of(parameter):
            member.state.pop(parameter, None)

    def pop(self, parameter: Tensor, default: Any = None) -> Any:
        found = dict(self[parameter])
        if not found:
            return default
        del self[parameter]
        return found

    def __contains__(self, parameter: object) -> bool:
        return any(member.state.get(parameter) for _, member in self._holders_of(parameter))  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[Tensor]:
        kept = {p: None for member in self._members.values() for p in member.state if isinstance(p, Tensor)}
        return iter([p for p in kept if p in self])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _holders_of(self, parameter: Any) -> list[tuple[str, _Optimizer]]:
        return self._holders.get(parameter) or [("", next(iter(self._members.values())))]


class _State(MutableMapping[str, object]):
    """The members' state of one parameter. Reading it adds nothing to a member's state."""

    def __init__(self, holders: list[tuple[str, _Optimizer]], parameter: Tensor) -> None:
        self._holders = holders
        self._parameter = parameter

    def __getitem__(self, key: str) -> Any:
        member, own = self._at(key)
        return member.state.get(self._parameter, {})[own]

    def __setitem__(self, key: str, value: object) -> None:
        member, own = self._at(key)
        member.state[self._parameter][own] = value

    def __delitem__(self, key: str) -> None:
        member, own = self._at(key)
        del member.state[self._parameter][own]

    def __iter__(self) -> Iterator[str]:
        return iter([f"{at}{key}" for at, member in self._holders for key in member.state.get(self._parameter, {})])

    def __len__(self) -> int:
        return sum(len(member.state.get(self._parameter, {})) for _, member in self._holders)

    def _at(self, key: str) -> tuple[_Optimizer, str]:
        for prefix, member in reversed(self._holders):
            if prefix and key.startswith(prefix):
                return member, key.removeprefix(prefix)
        return self._holders[0][1], key


def held_optimizers(holder: Any) -> dict[str, object]:
    """The optimizers that an object has as attributes, or in lists, tuples and dicts among its attributes, by name."""
    found: dict[str, Any] = {}
    for name, value in getattr(holder, "__dict__", {}).items():
        inner = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
        )
        if isinstance(value, torch.optim.Optimizer):
            found[name] = value
        elif name not in ("state", "param_groups"):
            found |= {f"{name}.{key}": each for key, each in inner if isinstance(each, torch.optim.Optimizer)}
    return found


def optimizers_within(given: Any) -> dict[str, torch.optim.Optimizer]:
    """The optimizers that the user's function returned and those within them, by path; wrappers come last."""
    found: dict[str, torch.optim.Optimizer] = {}

    def visit(path: str, it: object, around: tuple[object, ...]) -> None:
        if any(it is each for each in (*around, *found.values())):
            return
        for name, inner in held_optimizers(it).items():
            visit(f"{path}.{name}" if path else name, inner, (*around, it))
        if isinstance(it, torch.optim.Optimizer):
            found[path] = it

    for index, unit in enumerate(given) if isinstance(given, (list, tuple)) else [("", given)]:
        visit(str(index), unit, ())
    return found


def each_parameter(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], Any]]:
    """Every parameter once, with the first group that has it; wrappers repeat the groups that they wrap."""
    seen: set[int] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield group, parameter


def title_of(optimizer: torch.optim.Optimizer) -> str:
    """The class of an optimizer, or the title of several."""
    return optimizer.title if isinstance(optimizer, CombinedOptimizer) else type(optimizer).__name__


def own_values(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The numbers, such as a count of steps, that the user's optimizers and wrappers have as attributes, by path."""
    found = {
        path: {k: v for k, v in it.__dict__.items() if _is_number(k, v)} for path, it in _custom(optimizer).items()
    }
    return {path: values for path, values in found.items() if values}


def set_own_values(optimizer: torch.optim.Optimizer, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore numbers that `own_values` returned. Changes the optimizers."""
    for path, it in _custom(optimizer).items():
        it.__dict__.update({k: v for k, v in values.get(path, {}).items() if k in it.__dict__})


def tensors_outside_state(optimizer: torch.optim.Optimizer) -> str:
    """The attribute in which a user's optimizer or wrapper keeps tensors that it writes to; "" if there is none."""
    known = {id(p) for _, p in each_parameter(optimizer)}
    for path, it in _custom(optimizer).items():
        for name, value in it.__dict__.items():
            if name in ("state", "param_groups", "members", "given"):
                continue
            inner = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            for each in inner:
                if isinstance(each, Tensor) and each.ndim and each._version and id(each) not in known:
                    return f"{path}.{name}" if path else name
    return ""


@functools.cache
def _of_torch() -> frozenset[str]:
    """The attributes that torch gives every optimizer. The first optimizer of a process takes more than a second."""
    return frozenset(vars(torch.optim.SGD([torch.empty(0)]))) | {"_opt_called", "_step_supports_amp_scaling"}


def _is_number(name: str, value: object) -> bool:
    return isinstance(value, (bool, int, float)) and name not in _of_torch()


def _custom(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizers and wrappers whose class is neither torch's nor plait's, by path."""
    found: dict[str, Any] = {"": optimizer}
    if isinstance(optimizer, CombinedOptimizer):
        units = optimizer.given if isinstance(optimizer.given, (list, tuple)) else [optimizer.given]
        many = isinstance(optimizer.given, (list, tuple))
        found = {**{str(i) if many else "": unit for i, unit in enumerate(units)}, **optimizer.members}
    return {k: v for k, v in found.items() if not type(v).__module__.startswith(("torch.optim", "plait.optim"))}
