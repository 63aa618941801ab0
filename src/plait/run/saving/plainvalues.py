"""Values as JSON and back, bit for bit: what a checkpoint holds besides large tensors. No pickle.

Numbers, text, None, lists and dicts with text as keys stand for themselves. Others are marked with "$":

    (1, 2)         {"$": "tuple", "of": [1, 2]}
    {30: 0.1}      {"$": "dict", "of": [[30, 0.1]]}
    a tensor       {"$": "tensor", "name": "values/groups/0/lr"}   which lies in a file
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from plait.errors import CheckpointError

_MARK = "$"
_PAIRS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_LISTS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, path: str, put: Callable[[str, Any], None]) -> Any:
    """The value as JSON has it; `put(name, tensor)` gets each tensor. CheckpointError names what cannot be kept."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return _plain(value)
    if isinstance(value, bytes):
        return {_MARK: "bytes", "of": base64.b64encode(value).decode()}
    if type(value) is list:
        return [encode(item, f"{path}/{i}", put) for i, item in enumerate(value)]
    for mark, kind in _LISTS.items():
        if type(value) is kind:
            return {_MARK: mark, "of": [encode(item, f"{path}/{i}", put) for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        texts = all(isinstance(key, str) for key in value)
        if texts and _MARK not in value and not isinstance(value, (Counter, OrderedDict)):
            return {key: encode(item, f"{path}/{key}", put) for key, item in value.items()}
        mark = "counter" if isinstance(value, Counter) else "ordered" if isinstance(value, OrderedDict) else "dict"
        pairs = [
            [encode(key, f"{path}/{i}", put), encode(item, f"{path}/{key if isinstance(key, str) else i}", put)]
            for i, (key, item) in enumerate(value.items())
        ]
        return {_MARK: mark, "of": pairs}
    if hasattr(value, "data_ptr"):
        put(path, value)
        return {_MARK: "tensor", "name": path}
    if hasattr(value, "dtype") and getattr(value, "shape", None) == ():  # a number of numpy
        return _plain(value.item())
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint does not keep: it keeps"
        " numbers, text, None, tensors, and lists, tuples, sets and dicts of them"
    )


def decode(value: Any, get: Callable[[str], Any]) -> Any:
    """The inverse of `encode`; `get(name)` gives a tensor."""
    if isinstance(value, list):
        return [decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    mark = value.get(_MARK)
    if mark is None:
        return {key: decode(item, get) for key, item in value.items()}
    if mark == "tensor":
        return get(value["name"])
    if mark == "bytes":
        return base64.b64decode(value["of"])
    if mark in _PAIRS:
        return _PAIRS[mark]({decode(key, get): decode(item, get) for key, item in value["of"]})
    return _LISTS[mark]([decode(item, get) for item in value["of"]])


def tensor_names(value: Any) -> list[str]:
    """The tensors that `decode` would ask for."""
    if isinstance(value, list):
        return [name for item in value for name in tensor_names(item)]
    if not isinstance(value, dict):
        return []
    if value.get(_MARK) == "tensor":
        return [value["name"]]
    return [name for item in value.values() for name in tensor_names(item)]


def _plain(value: Any) -> Any:
    """Subclasses of numbers and text, such as numpy's float64, as what they are derived from."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
