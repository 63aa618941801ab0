"""Finds out how an optimizer works by trying it on small tensors: what state it keeps, and whether it may work on
parts."""

from __future__ import annotations

import copy
import functools
import math
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from plait.comm.device import is_host
from plait.comm.hidden_group import without_process_group
from plait.compile.capture.fake_parameters import is_real
from plait.compile.ir.shapes import frozen
from plait.engine.local_tensors import LaidOutParts
from plait.optim.adafactor import Adafactor
from plait.optim.combined import CombinedOptimizer, each_parameter, optimizers_within
from plait.optim.muon import Muon
from plait.optim.sharded_parts import WholeTensor
from plait.spec.layout import Layout, Shard

EXACT: dict[type, type] = {torch.optim.Adafactor: Adafactor, torch.optim.Muon: Muon}

# By key of a parameter's state: the function that makes its value for a given parameter.
_Constructed = dict[str, Callable[[Tensor], object]]

_filtering = threading.RLock()  # warning filters are global to the process
_TRIED = (4, 6, 2, 2, 2, 2)  # shape of the tensors that an optimizer is tried on, up to the number of dims
# Scales of their gradients, step by step: at some of them a limit on updates takes effect, or what earlier steps left.
_SCALES = (1.0, 1.0, 100.0, 1.0, 0.01, 1.0, 1.0, 1.0)
_APART = "updates an element by the values of other elements, or of other tensors"

_shared: dict[Hashable, str] = {}  # the results of trials, by all that they depend on

# By optimizer: the meta tensors, by name, that it was given for the parameters of other ranks.
_absent: WeakKeyDictionary[torch.optim.Optimizer, dict[str, nn.Parameter]] = WeakKeyDictionary()

# By optimizer whose constructor makes state, as that of Adagrad does: what it makes, for each of its groups.
_constructed: WeakKeyDictionary[torch.optim.Optimizer, list[_Constructed]] = WeakKeyDictionary()


def note_constructed(optimizer: torch.optim.Optimizer) -> None:
    """Record what state the constructor of a new optimizer has made."""
    if optimizer.state:
        _constructed[optimizer] = [_constructed_state(group["params"], optimizer) for group in optimizer.param_groups]


def note_absent(optimizer: torch.optim.Optimizer, absent: Mapping[str, nn.Parameter]) -> None:
    """Record the meta tensors that the optimizer was given for the parameters of other ranks."""
    _absent[optimizer] = dict(absent)


def parameters_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """All parameters that the optimizer was given, by name: this rank's, and the meta tensors for those of other
    ranks."""
    return {**_absent.get(optimizer, {}), **parameters}


def state_layouts(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, Layout]
) -> dict[str, dict[str, Layout | None]]:
    """The layouts of the optimizer's state, by parameter name and key. None stands for a number, equal on all ranks.

    Covers also the parameters that this rank lacks; one that the optimizer has no meta tensor for counts as a member of
    the first group. No communication is involved.
    """
    found: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {}
    together = _kept_by_wrappers(optimizer)
    result: dict[str, dict[str, Layout | None]] = {}
    groups = {p: group for group, p in each_parameter(optimizer)}
    known = parameters_of(optimizer, parameters)
    for name, layout in layouts.items():
        if name in known and known[name] not in groups:
            continue  # frozen
        group, ndim = groups.get(known.get(name), optimizer.param_groups[0]), len(layout.shape)
        key = (id(group), ndim)
        if id(known.get(name)) in together:
            found[key] = _shapes(together[id(known[name])])
        if key not in found:
            toy = torch.ones(_TRIED[:ndim])
            found[key] = _shapes(tried(optimizer, group, [toy])[toy])
        result[name] = {key: _like(shape, layout) for key, shape in found[key].items()}
    return result


def kept_of(optimizer: torch.optim.Optimizer, name: str, ndim: int, step: int) -> dict[str, object]:
    """The state that the optimizer keeps, after `step` steps, for a parameter of another rank: keys, and values of
    the right kind but with the shapes of a small tensor."""
    absent = _absent.get(optimizer, {}).get(name)
    found: Mapping[str, Any] | None = _kept_by_wrappers(optimizer).get(id(absent))
    if found is None:
        groups = (group for group, p in each_parameter(optimizer) if p is absent)
        toy = torch.ones(_TRIED[:ndim], dtype=torch.float32 if absent is None else absent.dtype)
        found = tried(optimizer, next(groups, optimizer.param_groups[0]), [toy])[toy]
    counts = {key for key, value in found.items() if key.rpartition(":")[2] == "step" and torch.is_tensor(value)}
    return {key: torch.full_like(value, step) if key in counts else value for key, value in found.items()}


def _kept_by_wrappers(optimizer: torch.optim.Optimizer) -> dict[int, Mapping[str, Any]]:
    """The state that wrappers and their members keep for a small tensor, by id of the parameter."""
    found: dict[int, Mapping[str, object]] = {}
    if not isinstance(optimizer, CombinedOptimizer):
        return found
    real = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for wrapper in optimizer.wrappers:
        toys = {key: nn.Parameter(torch.ones(_TRIED[: p.ndim], dtype=p.dtype)) for key, p in real.items()}
        twin = _twin_of(wrapper, optimizers_within(wrapper), toys, simple=False)
        for toy in toys.values():
            toy.grad = torch.zeros_like(toy)
        twin.step()
        state = CombinedOptimizer(twin, optimizers_within(twin)).state
        found |= {key: dict(state[toy]) for key, toy in toys.items() if toy in state}
    return found


def _shapes(state: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) if torch.is_tensor(value) else () for key, value in state.items()}


def _like(tried: tuple[int, ...], layout: Layout) -> Layout | None:
    """The layout of a state tensor that has the shape `tried` for a parameter of shape `_TRIED`."""
    if not tried:
        return None
    if tried == _TRIED[: len(layout.shape)]:
        return layout
    shape = tuple(1 if small == 1 else n for small, n in zip(tried, layout.shape, strict=True))
    return Layout(layout.dtype, shape, tuple((a, p) for a, p in layout.placements if not isinstance(p, Shard)))


def depends_on_the_cut(optimizer: torch.optim.Optimizer, group: Mapping[str, object], ndim: int) -> str:
    """Why the optimizer may update a tensor differently from its halves; empty if a trial shows that it does not.

    Ranks and trainers share the trials of torch's own optimizers with the same options."""
    key = _shared_trial(optimizer, group, ndim)
    if key is None:
        return _try_halves(optimizer, group, ndim)
    if key not in _shared:
        _shared[key] = _try_halves(optimizer, group, ndim)
    return _shared[key]


def _shared_trial(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], ndim: int) -> Any:
    """All that the trial depends on, of an optimizer of torch; None for others, and for options that are tensors."""
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind or optimizer in _constructed:
        return None
    options = {key: value for key, value in group.items() if key != "params"}
    numbers = (each for value in options.values() for each in (value if isinstance(value, tuple) else (value,)))
    if not all(isinstance(each, (int, float, str, type(None))) for each in numbers):
        return None
    return (kind, group["params"][0].device, ndim, frozen(options, id))


def _try_halves(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], ndim: int) -> str:
    """The trial of `depends_on_the_cut`."""

    def trial(dtype: torch.dtype) -> _Trial:
        start, gradients = _samples(group["params"][0], ndim, dtype)

        def moved(tensors: Sequence[Tensor], dim: int, half: int) -> _Result:
            mine = [_half(t, dim, half).clone() for t in tensors]
            paths = _Paths(mine)
            twin = _stepped(optimizer, group, mine, paths.along([_half(g, dim, half) for _ in mine] for g in gradients))
            return paths.found(), _numbers(twin)

        return [start], moved

    return _compared(trial, _cut)


def wrapper_depends_on_the_cut(wrapper: object, members: Mapping[str, torch.optim.Optimizer]) -> str:
    """The same for an object that steps several optimizers: whether its own work beside their steps depends on the
    cut.

    During the trial, members that work on parts correctly (with `bind`, or in EXACT) have a simple step instead.
    """
    return _compared(lambda dtype: _trial(wrapper, members, dtype), _cut)


def depends_on_others(given: object, members: Mapping[str, torch.optim.Optimizer]) -> str:
    """Why an optimizer may update some tensors differently if others are on other ranks, as in a pipeline; empty if
    not."""
    return _compared(lambda dtype: _trial(given, members, dtype), _scattered)


def small_shape(ndim: int) -> tuple[int, ...]:
    """The shape of the tensors of `ndim` dims that an optimizer is tried on."""
    return _TRIED[:ndim]


_Result = tuple[list[Tensor], dict[str, float]]  # the paths of tensors, and the numbers that the optimizer then has
_Moved = Callable[[Sequence[Tensor], int, int], _Result]
_Trial = tuple[list[Tensor], _Moved]


class _Paths:
    """Where tensors are before and after each step."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._paths: list[list[Tensor]] = []

    def note(self) -> None:
        self._paths.append([t.detach().clone() for t in self._tensors])

    def along(self, gradients: Iterable[list[Tensor]]) -> Iterator[list[Tensor]]:
        """The gradients of one step after the other."""
        for some in gradients:
            self.note()
            yield some

    def found(self) -> list[Tensor]:
        """The path of each tensor, along a new first dim."""
        self.note()
        return [torch.stack(each) for each in zip(*self._paths, strict=True)]


def _trial(given: object, members: Mapping[str, torch.optim.Optimizer], dtype: torch.dtype) -> _Trial:
    """Small tensors in place of all parameters, and a function that steps them.

    The function takes (tensors, dim, half) and steps one half of each along dim. With dim -1 it steps every second
    tensor only, starting with the first (half 0) or the second (half 1), and the others are on the meta device.
    """
    found = {id(p): p for member in members.values() for group in member.param_groups for p in group["params"]}
    samples = {key: _samples(p, p.ndim, dtype, index) for index, (key, p) in enumerate(found.items())}

    def moved(tensors: Sequence[Tensor], dim: int, half: int) -> _Result:
        here = [dim >= 0 or index % 2 == half for index in range(len(found))]
        toys = {
            key: nn.Parameter(
                _half(t, dim, half).clone() if mine else t.to("meta"), requires_grad=found[key].requires_grad
            )
            for key, t, mine in zip(found, tensors, here, strict=True)
        }
        twin = _twin_of(given, members, toys)
        paths = _Paths(list(toys.values()))
        with schedulers_restored([given, *members.values()]), without_process_group(lambda _: type(given).__name__):
            for number in range(len(_SCALES)):
                for (key, toy), mine in zip(toys.items(), here, strict=True):
                    gradient = _half(samples[key][1][number], dim, half)
                    toy.grad = gradient.clone(memory_format=torch.contiguous_format) if mine else None
                paths.note()
                twin.step()
        return paths.found(), _numbers(*optimizers_within(twin).values())

    return [start for start, _ in samples.values()], moved


def _compared(trial: Callable[[torch.dtype], _Trial], differ: Callable[[_Trial, float], str]) -> str:
    """Why steps differ in the trial; empty if they do not.

    It is in float64, where rounding is no excuse, or else, for an optimizer that cannot step it, in float32.
    """
    try:
        return differ(trial(torch.float64), 1e-5)
    except Exception:
        pass
    try:
        return differ(trial(torch.float32), 1e-2)
    except Exception as error:
        return f"cannot be tried on a small tensor ({type(error).__name__}: {error})"


def _cut(trial: _Trial, tolerance: float) -> str:
    """Why stepping the tensors and stepping their halves differ. Half -1 stands for the whole."""
    starts, moved = trial
    wholes, numbers = moved(starts, 0, -1)
    for dim in range(max((start.ndim for start in starts), default=0)):
        halves = [moved(starts, dim, half) for half in (0, 1)]
        if any(_others(found, numbers, tolerance) for _, found in halves):
            return _APART
        for start, whole, *parts in zip(starts, wholes, *(found for found, _ in halves), strict=True):
            if _apart(torch.cat(parts, dim + 1) if dim < start.ndim else parts[0], whole, tolerance):
                return _APART
    return ""


def _scattered(trial: _Trial, tolerance: float) -> str:
    """Why stepping all tensors and stepping every second one differ."""
    starts, moved = trial
    wholes, numbers = moved(starts, 0, -1)
    some = [moved(starts, -1, half) for half in (0, 1)]
    if any(_others(found, numbers, tolerance) for _, found in some) or any(
        _apart(some[index % 2][0][index], whole, tolerance) for index, whole in enumerate(wholes)
    ):
        return "updates a tensor by the values of other tensors"
    return ""


def _numbers(*optimizers: torch.optim.Optimizer) -> dict[str, float]:
    """The numbers in the groups of optimizers, such as an estimate of the learning rate."""
    found: dict[str, float] = {}
    for place, one in enumerate(optimizers):
        for number, group in enumerate(one.param_groups):
            for key, value in group.items():
                if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
                    found[f"{place}/{number}/{key}"] = float(value)
    return found


def _others(found: Mapping[str, float], whole: Mapping[str, float], tolerance: float) -> bool:
    """Whether numbers are others than those of the whole."""
    return found.keys() != whole.keys() or any(
        not math.isclose(value, whole[key], rel_tol=tolerance) for key, value in found.items()
    )


def _apart(path: Tensor, whole: Tensor, tolerance: float) -> bool:
    """Whether two paths differ after any step, by more than this part of the step."""
    steps = whole.diff(dim=0).abs().flatten(1).amax(1)
    apart = (path - whole)[1:].abs().flatten(1).amax(1)
    return not bool((apart <= tolerance * steps.clamp(min=1e-3 * float(steps.max()))).all())


def _half(tensor: Tensor, dim: int, half: int) -> Tensor:
    return tensor if half < 0 or not 0 <= dim < tensor.ndim else tensor.chunk(2, dim)[half]


def _samples(like: Tensor, ndim: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """A small tensor and gradients for it, on the device of `like`.

    Gradients have a direction in common, by which some optimizers find a learning rate, and their elements differ by
    orders of magnitude, so that a mean or a maximum of some is not that of others.
    """
    generator = torch.Generator().manual_seed(seed)
    device = torch.device("cpu") if like.is_meta else like.device

    def drawn() -> Tensor:
        return torch.randn(_TRIED[:ndim], generator=generator, dtype=torch.float64)

    start, common = drawn(), drawn()
    gradients = [scale * (common + drawn()) * 10 ** drawn() for scale in _SCALES]
    return start.to(device, dtype), [gradient.to(device, dtype) for gradient in gradients]


def tried(optimizer: torch.optim.Optimizer, group: Mapping[str, object], tensors: list[Tensor]) -> Mapping[Tensor, Any]:
    """The state of a copy of the optimizer after a step on our own tensors, with the options of the group.

    For several optimizers this is the first that has the group; a wrapper's own state is not included.
    """
    return _stepped(optimizer, group, tensors, [[torch.zeros_like(t) for t in tensors]]).state


def _stepped(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, object],
    tensors: list[Tensor],
    gradients: Iterable[list[Tensor]],
) -> torch.optim.Optimizer:
    """A copy of the optimizer, with this group alone, after a step for each of the gradients."""
    if isinstance(optimizer, CombinedOptimizer):
        optimizer = optimizer.member_of(group)
    twin = object.__new__(type(optimizer))
    twin.__dict__ = without_hooks(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, **_options(group, tensors), "params": tensors}]
    number = next((at for at, each in enumerate(optimizer.param_groups) if each is group), 0)
    _construct_state(optimizer, twin, number, tensors)
    if hasattr(twin, "bind"):
        twin.bind(WholeTensor())
    with schedulers_restored([optimizer]), without_process_group(lambda _: type(optimizer).__name__):
        for some in gradients:
            for tensor, gradient in zip(tensors, some, strict=True):
                tensor.grad = gradient.clone(memory_format=torch.contiguous_format)
            twin.step()
    return twin


def _constructed_state(parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> _Constructed:
    """The state that the constructor made for the first of the parameters.

    It leaves out tensors that are neither 0-d, nor filled with one number, nor a copy of the parameter. Of a tensor
    without values only the shape counts."""
    found: _Constructed = {}
    for parameter in [p for p in parameters if not p.is_meta][:1]:
        for key, value in optimizer.state.get(parameter, {}).items():
            if not torch.is_tensor(value) or value.ndim == 0:
                found[key] = functools.partial(_copy_of, value)
            elif value.shape == parameter.shape and value.numel():
                dtype = None if value.dtype == parameter.dtype else value.dtype
                if not is_real(value):
                    found[key] = functools.partial(torch.zeros_like, dtype=dtype)
                elif bool((value == (first := value.flatten()[0])).all()):
                    found[key] = functools.partial(torch.full_like, fill_value=first.item(), dtype=dtype)
                elif torch.equal(value, parameter):
                    found[key] = torch.clone
    return found


def _copy_of(value: object, _parameter: Tensor) -> Any:
    return copy.deepcopy(value)


def _construct_state(optimizer: object, twin: torch.optim.Optimizer, number: int, parameters: Sequence[Tensor]) -> None:
    """Give a twin of the optimizer the state that its constructor makes for these parameters of a group."""
    made = _constructed.get(optimizer, [])[number : number + 1] if isinstance(optimizer, torch.optim.Optimizer) else []
    for each in made:
        for parameter in parameters:
            twin.state[parameter] |= {key: make(parameter.detach()) for key, make in each.items()}


@contextmanager
def schedulers_restored(owners: Iterable[object]) -> Iterator[None]:
    """Context that restores the learning-rate schedulers which the owners hold, and may step themselves."""
    held = [value for owner in owners for value in vars(owner).values()]
    schedulers = [value for value in held if isinstance(value, torch.optim.lr_scheduler.LRScheduler)]
    groups = [group for scheduler in schedulers for group in scheduler.optimizer.param_groups]
    before = [(each, copy.copy(each)) for each in (*(vars(scheduler) for scheduler in schedulers), *groups)]
    lists = [(v, list(v)) for each, _ in before for k, v in each.items() if isinstance(v, list) and k != "params"]
    try:
        with _filtering, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            yield
    finally:
        for each, content in before:
            each.clear()
            each.update(content)
        for values, items in lists:
            values[:] = items


def without_hooks(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's attributes without its step hooks, which are for the user's steps, and without a scheduler's
    wrapper."""
    found = {k: v for k, v in optimizer.__dict__.items() if k != "step"}
    for name, value in found.items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            found[name] = type(value)()
    return found


def _options(group: Mapping[str, Any], tensors: Iterable[Tensor]) -> dict[str, object]:
    """Options for a trial on these tensors: a learning rate that moves them, as that of the group may be 0 at the
    moment, and on the host none that torch's optimizers have for accelerators alone."""
    found: dict[str, object] = {}
    rate = group.get("lr")
    on_host = bool(group.get("capturable")) and not group.get("fused") and all(is_host(t.device) for t in tensors)
    if on_host:
        found["capturable"] = False
    if rate is not None:
        most = max(0.01, float(rate), float(group.get("initial_lr", 0.0)))
        found["lr"] = torch.full_like(rate, most) if torch.is_tensor(rate) and not on_host else most
    return found


def _twin_of(
    wrapper: object, members: Mapping[str, torch.optim.Optimizer], toys: Mapping[int, nn.Parameter], simple: bool = True
) -> Any:
    """A copy of a wrapper and its members over `toys`, by the id of the parameter that each replaces. With `simple`,
    members that work on parts have a simple elementwise step."""
    memo: dict[int, Any] = dict(toys)
    objects = {id(each): each for each in (*members.values(), wrapper)}
    twins: dict[int, Any] = {
        key: object.__new__(_simple(type(it)) if simple and _knows_parts(it) else type(it))
        for key, it in objects.items()
    }
    memo |= twins
    memo |= {id(v): v for it in objects.values() for v in it.__dict__.values() if isinstance(v, LaidOutParts)}
    for key, it in objects.items():
        own = without_hooks(it) if isinstance(it, torch.optim.Optimizer) else dict(it.__dict__)
        state = own.pop("state", None)
        if isinstance(it, torch.optim.Optimizer) and id(state) not in memo:
            memo[id(state)] = defaultdict(dict)
        twins[key].__dict__ = {k: copy.deepcopy(v, memo) for k, v in own.items()}
        if state is not None:
            twins[key].state = copy.deepcopy(state, memo)
        for number, group in enumerate(twins[key].__dict__.get("param_groups", ())):
            group.update(_options(group, group["params"]))
            _construct_state(it, twins[key], number, group["params"])
        if hasattr(twins[key], "bind"):
            twins[key].bind(WholeTensor())
    return twins[id(wrapper)]


def _knows_parts(optimizer: object) -> bool:
    return hasattr(optimizer, "bind") or type(optimizer) in EXACT


def _simple(kind: type) -> type:
    """A subclass of the optimizer's class with an elementwise step."""

    def step(self: torch.optim.Optimizer, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                parameter.add_(parameter.grad, alpha=-0.01)

    return type(kind.__name__, (kind,), {"step": step})
