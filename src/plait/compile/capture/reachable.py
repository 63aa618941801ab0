"""The Python values that a step can read besides parameters, buffers and batch: all that loss_fn and the model reach.

The search goes through closures, defaults, globals that the user's code names, arguments of partials, bound objects,
attributes of modules, objects and classes, and the containers in them. Every value that can change has a place, such as
`loss_fn:state['w']`. A `Holder` is an object whose values can be replaced.
"""

from __future__ import annotations

import array
import collections
import contextvars
import enum
import functools
import os
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.compile.capture.capture_errors import is_library
from plait.compile.capture.masked_rows import is_whole
from plait.compile.capture.python_state import (
    MISSING,
    AttributesHolder,
    Buffer,
    ContextHolder,
    DictHolder,
    Holder,
    ListHolder,
    NamesHolder,
    ProxyHolder,
    SetHolder,
    is_source,
    put_bytes_back,
)  # fmt: skip
from plait.compile.ir.dtypes import other_format

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.layout,
    torch.memory_format, range, slice, np.generic,
)  # fmt: skip
_MOST_ELEMENTS = 4096  # larger containers are not searched
_MOST_BYTES = 1 << 16  # values of larger arrays are not compared
_MOST_VALUES = 1 << 18  # values at which the search ends
_OF_COLLECTIONS = (collections.UserDict, collections.UserList, collections.ChainMap)
_BY_KEYS = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__qualname__", "__firstlineno__")
_CLOSED = {"torch", "plait", "numpy", "builtins", *sys.stdlib_module_names} - {"__main__", "argparse", "types"}

_KEEPING = ("torch.distributions.", "torch.amp.")  # classes whose objects keep tensors that they compute on first use


class Reached:
    """All that a step can read: `holders`, and by their places plain `values` and `tensors` outside the model."""

    def __init__(self, model: nn.Module, loss_fn: object, earlier: Mapping[int, str] | None = None) -> None:
        self.earlier = dict(earlier or {})  # names of the model's former parameters and buffers, by id
        self.values: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self.places: dict[int, str] = {}  # of tensors, by id
        self.slots: dict[str, tuple[Holder, Any]] = {}  # holder and key of a value that a holder has, by place
        self.structure: dict[str, object] = {}  # what must not change of values that are neither plain nor tensors
        self.holders: list[Holder] = []
        self.empty: list[Any] = []  # containers that are empty
        self.empty_places: list[str] = []
        self.arrays: list[tuple[str, Any, bytes]] = []  # numpy arrays and Buffers, with place and content
        self.sources: list[tuple[str, Any]] = []  # random number generators, with place
        self.iterators: list[tuple[str, Any]] = []
        self.parameters: list[tuple[str, dict[str, nn.Parameter | None], str]] = []  # of the model
        self._kept: list[Any] = []  # ids stay unique while these live
        self._seen: set[int] = set()
        self.own = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
        self._modules = {id(module) for module in model.modules()}
        self._seen_names: set[tuple[int, str]] = set()
        self._waiting: deque[tuple[str, Any]] = deque([("model:", model), ("loss_fn:", loss_fn)])
        while self._waiting and len(self._seen) < _MOST_VALUES:
            self._visit(*self._waiting.popleft())

    def _visit(self, place: str, value: object) -> None:
        if isinstance(value, PLAIN):
            self.values[place] = value
            if not isinstance(value, enum.Enum) or not _is_open(type(value)):
                return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        for visit, kinds in _VISITS_OF_CONTENT:
            if issubclass(type(value), kinds):  # a selection says that it is a tensor
                visit(self, place, value)
                return
        self.structure[place] = _kind(value)
        for visit, kinds in _VISITS:
            if isinstance(value, kinds):
                visit(self, place, value)
                return
        if is_source(value):
            self.sources.append((place, value))
        elif isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            self.iterators.append((place, value))
        elif _is_open(type(value)):  # type: ignore[arg-type]
            self._object(place, value)

    def _later(self, place: str, value: object) -> None:
        if not is_whole(value) or id(value) not in self.own:
            self._waiting.append((place, value))

    def _hold(self, holder: Holder, skip: tuple[str, ...] = ()) -> None:
        self.holders.append(holder)
        for key, value in holder.before.items():
            if key in skip or value is MISSING:
                continue
            place = holder.place_of(key)
            self.slots[place] = (holder, key)
            self._later(place, value)

    def _hold_nothing(self, place: str, value: object) -> None:
        self.empty.append(value)
        self.empty_places.append(place)

    # kinds of values

    def _tensor(self, place: str, tensor: Tensor) -> None:
        if id(tensor) not in self.own and id(tensor) not in self.earlier:
            self.places[id(tensor)] = place
            if not other_format(tensor):  # no step reads one that is not dense
                self.tensors[place] = tensor

    def _elements(self, place: str, value: Collection[object]) -> None:
        if len(value) <= _MOST_ELEMENTS:
            for key, one in enumerate(value):
                self._later(f"{place}[{key}]", one)

    def _array(self, place: str, value: np.ndarray) -> None:
        if value.nbytes <= _MOST_BYTES and value.dtype != object:
            self.arrays.append((place, value, value.tobytes()))

    def _buffer(self, place: str, value: bytearray | memoryview | array.array[Any]) -> None:
        buffer = Buffer(value)
        if len(content := buffer.tobytes()) <= _MOST_BYTES:
            self.arrays.append((place, buffer, content))

    def _module(self, place: str, module: nn.Module) -> None:
        own = id(module) in self._modules
        self._hold(AttributesHolder(place, module.__dict__), ("_parameters", "_buffers", "_modules"))
        children = module.__dict__.get("_modules") or {}
        if children:
            self._hold(AttributesHolder(place, children))
        tensors = module.__dict__.get("_parameters"), module.__dict__.get("_buffers")
        for kind, named in zip(("parameter", "buffer"), tensors, strict=True):
            if not named:
                continue
            if not own:
                self._hold(AttributesHolder(place, named))
            elif kind == "parameter":
                prefix = place.removeprefix("model:")
                self.parameters += [(f"{prefix}.{key}" if prefix else key, named, key) for key in named]
        self._class(place, type(module))

    def _dict(self, place: str, value: dict[Hashable, object]) -> None:
        if value is sys.modules:  # what the step has imported stays so
            return
        if not value:
            self._hold_nothing(place, value)
        elif len(value) <= _MOST_ELEMENTS:
            self._hold(DictHolder(place, value))

    def _list(self, place: str, value: Any) -> None:
        if not value:
            self._hold_nothing(place, value)
        elif len(value) <= _MOST_ELEMENTS:
            self._hold(ListHolder(place, value))

    def _set(self, place: str, value: set[object]) -> None:
        if not value:
            self._hold_nothing(place, value)
        elif len(value) <= _MOST_ELEMENTS:
            self._hold(SetHolder(place, value))

    def _function(self, place: str, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._kept.append(cell)
                self._hold(NamesHolder(_root(place), cell, [name]))
        for name, value in (function.__kwdefaults__ or {}).items():
            self._later(f"{_root(place)}{name}", value)
        for name, value in zip(
            reversed(function.__code__.co_varnames), reversed(function.__defaults__ or ()), strict=False
        ):
            self._later(f"{_root(place)}{name}", value)
        if function.__dict__:
            self._hold(AttributesHolder(place, function.__dict__))
        if not is_library(function.__code__.co_filename):
            self._globals(place, function.__code__, function.__globals__)

    def _globals(self, place: str, code: types.CodeType, found: dict[str, Any]) -> None:
        known = _names(code)
        if known & {"globals", "getattr"}:
            known |= _strings(code)
        if known & {"environ", "getenv"}:
            self._environment(place, code)
        names = [name for name in sorted(known) if name in found]
        plain = [name for name in names if not isinstance(found[name], types.ModuleType)]
        modules = {name: found[name] for name in names if name not in plain}
        # Modules that the function imports itself.
        modules |= {n: m for n in known - {*names} if isinstance(m := sys.modules.get(n), types.ModuleType)}
        for name, module in modules.items():
            if _is_users(module):
                inner = [n for n in sorted(known) if n in module.__dict__]
                inner = [n for n in inner if not isinstance(module.__dict__[n], types.ModuleType)]
                self._some(f"{_root(place)}{name}.", module.__dict__, inner)
        self._some(_root(place), found, plain)

    def _some(self, place: str, names: dict[str, object], keys: list[str]) -> None:
        keys = [key for key in keys if (id(names), key) not in self._seen_names]
        self._seen_names |= {(id(names), key) for key in keys}
        if keys:
            self._hold(NamesHolder(place, names, keys))

    def _partial(self, place: str, value: functools.partial[Any]) -> None:
        self._later(place, value.func)
        for key, one in enumerate(value.args):
            self._later(f"{place}[{key}]", one)
        for name, one in value.keywords.items():
            self._later(f"{_root(place)}{name}", one)

    def _method(self, place: str, value: types.MethodType) -> None:
        self._later(place if place.endswith(":") else f"{place}.__self__", value.__self__)
        self._later(place, value.__func__)

    def _type(self, place: str, value: type) -> None:
        self._seen.discard(id(value))
        self._class(place, value)
        self._class(place, type(value))

    def _proxy(self, place: str, value: types.MappingProxyType[Hashable, object]) -> None:
        self._hold(ProxyHolder(place, value))

    def _context(self, place: str, value: contextvars.ContextVar[object]) -> None:
        self._hold(ContextHolder(place, value))

    def _reference(self, place: str, value: weakref.ref[object]) -> None:
        self._later(place, value())

    def _builtin(self, place: str, value: types.BuiltinMethodType) -> None:
        """The object of a bound method (of a dict, list, ContextVar...), unless it is a module or a class."""
        if not isinstance(value.__self__, (types.ModuleType, type)):
            self._later(place, value.__self__)

    def _environment(self, place: str, code: types.CodeType) -> None:
        """The environment variables whose names are string constants of a function that reads the environment."""
        variables: Any = os.environ
        keys = [variables.encodekey(one) for one in sorted(_strings(code))]
        self._some(f"{_root(place)}os.environ.", variables._data, keys)

    def _object(self, place: str, value: object) -> None:
        if isinstance(getattr(value, "__dict__", None), dict):
            self._hold(AttributesHolder(place, value.__dict__))
        slots = [n for kind in type(value).__mro__ for n in _slots(kind) if n not in _BY_KEYS]
        if slots:
            self._hold(NamesHolder(place, value, slots))
        self._class(place, type(value))

    def _class(self, place: str, kind: type) -> None:
        for each in kind.__mro__:
            if id(each) in self._seen or not _is_open(each):
                continue
            self._seen.add(id(each))
            members = dict(each.__dict__)
            keys = [k for k, v in members.items() if not k.startswith("__") and not _is_code(v)]
            if not is_library(_file(each)):  # methods of the user's own classes may be replaced
                keys += [k for k, v in members.items() if isinstance(v, types.FunctionType)]
            if keys:
                self._hold(NamesHolder(f"{_root(place)}{each.__qualname__}", each, keys))
            for key, member in members.items() if not is_library(_file(each)) else ():
                function: object = member
                if isinstance(member, (staticmethod, classmethod)):
                    function = member.__func__
                elif isinstance(member, property):
                    function = member.fget
                if isinstance(function, types.FunctionType):
                    self._later(f"{_root(place)}{each.__qualname__}.{key}", function)

    # later queries

    def filled(self) -> list[str]:
        """Places of containers that were empty and no longer are."""
        return (
            [place for place, one in zip(self.empty_places, self.empty, strict=True) if one] if any(self.empty) else []
        )

    def moved(self, place: str, tensor: Tensor) -> None:
        """Record that another tensor is at this place now."""
        self.tensors[place] = tensor
        self.places[id(tensor)] = place

    def is_same(self) -> bool:
        """Whether every holder holds the same objects, and arrays have the same content."""
        return (
            all(holder.is_same() for holder in self.holders)
            and not any(self.empty)
            and all(values.tobytes() == before for _, values, before in self.arrays)
        )

    def _optimizer(self, place: str, optimizer: torch.optim.Optimizer) -> None:
        """Its options, such as the learning rate, without its state."""
        for number, group in enumerate(optimizer.param_groups):
            self._later(f"{place}.param_groups[{number}]", group)

    def changes(self) -> Iterator[tuple[Holder, Any, Any, Any]]:
        """(holder, key, before, now) for every value that is now another object, and for tensors in containers that
        were empty."""
        for holder in self.holders:
            if not holder.is_same():
                now = holder.now()
                for key in [*holder.before, *(key for key in now if key not in holder.before)]:
                    pair = holder.before.get(key, MISSING), now.get(key, MISSING)
                    if pair[0] is not pair[1]:
                        yield holder, key, *pair
        for place, container in zip(self.empty_places, self.empty, strict=True):
            if container and isinstance(container, (dict, list, deque)) and self._is_at(place, container):
                filled = DictHolder(place, container) if isinstance(container, dict) else ListHolder(place, container)
                now, filled.before = filled.before, {}
                yield from ((filled, key, MISSING, value) for key, value in now.items() if is_whole(value))

    def _is_at(self, place: str, container: object) -> bool:
        """Whether a container is still where it was found; another may have taken its place."""
        holder, key = self.slots.get(place, (None, None))
        return holder is None or holder.now().get(key) is container

    def put_back(self) -> None:
        """Restore what every holder, container and array held."""
        for holder in self.holders:
            if not holder.is_same():
                holder.put_back()
        for container in self.empty:
            if container:
                container.clear()
        for _, values, before in self.arrays:
            put_bytes_back(values, before)


_Visits = list[tuple[Callable[[Reached, str, Any], None], Any]]

_VISITS_OF_CONTENT: _Visits = [
    (Reached._tensor, Tensor),
    (Reached._elements, (tuple, frozenset)),
    (Reached._array, np.ndarray),
    (Reached._buffer, (bytearray, memoryview, array.array)),
]

# Of objects whose kind must stay too:
_VISITS: _Visits = [
    (Reached._module, nn.Module),
    (Reached._dict, dict),
    (Reached._list, (list, deque)),
    (Reached._set, set),
    (Reached._function, types.FunctionType),
    (Reached._partial, functools.partial),
    (Reached._method, types.MethodType),
    (Reached._type, type),
    (Reached._proxy, types.MappingProxyType),
    (Reached._context, contextvars.ContextVar),
    (Reached._reference, weakref.ref),
    (Reached._builtin, types.BuiltinMethodType),
    (Reached._optimizer, torch.optim.Optimizer),
    (Reached._object, (torch.optim.lr_scheduler.LRScheduler, threading.local, *_OF_COLLECTIONS)),
]


def _root(place: str) -> str:
    """`loss_fn:` for `loss_fn:outer.inner`, because names that a function reads are written without its own name."""
    return place.partition(":")[0] + ":"


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return frozenset(code.co_names).union(*map(_names, inner))


@functools.cache
def _strings(code: types.CodeType) -> frozenset[str]:
    """The string constants of a function and of those inside it."""
    inner = [_strings(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return frozenset(one for one in code.co_consts if isinstance(one, str)).union(*inner)


@functools.cache
def _is_open(kind: type) -> bool:
    """Whether attributes of the class's objects are searched: those of the user's code and of most libraries are."""
    return kind.__module__.partition(".")[0] not in _CLOSED or kind.__module__.startswith(_KEEPING)


def is_searched(value: Any) -> bool:
    """Whether a walk goes through the attributes of an object as values that a step may replace. It is no module, no
    class and no function, which stay what they are."""
    kind: Any = type(value)
    if issubclass(kind, (nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType, *PLAIN)):
        return False
    return _is_open(kind) and isinstance(getattr(value, "__dict__", None), dict)


@functools.cache
def _file(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def _is_users(module: types.ModuleType) -> bool:
    """Whether a module is the user's own. One without a file is if it is not of Python itself, as sys is."""
    file = getattr(module, "__file__", None)
    return not is_library(file) if file else module.__name__.partition(".")[0] not in _CLOSED


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)


def _is_code(value: object) -> bool:
    kinds = (
        types.FunctionType,
        staticmethod,
        classmethod,
        property,
        types.GetSetDescriptorType,
        types.MemberDescriptorType,
    )
    return isinstance(value, kinds) or callable(value)


def _kind(value: object) -> object:
    """The facts of a value, neither plain nor a tensor, that must stay the same."""
    if isinstance(value, types.FunctionType):
        return value.__code__
    if isinstance(value, types.BuiltinFunctionType):
        return type(value), value.__qualname__
    return type(value)
