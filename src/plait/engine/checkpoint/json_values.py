"""JSON in checkpoints: exact conversion of values to JSON and back, without pickle, and strict reading of JSON.

A checkpoint, or weights from elsewhere, is not trusted: it says which bytes of which files are read into which tensors.
Errors name the place of an invalid value.

Numbers, text, None, lists, and dicts with text keys are JSON values. Other values are marked with "$":

    (1, 2)         {"$": "tuple", "of": [1, 2]}
    {30: 0.1}      {"$": "dict", "of": [[30, 0.1]]}
    a tensor       {"$": "tensor", "name": "values/groups/0/lr"}, stored in a file
"""

from __future__ import annotations

import base64
import functools
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from plait.engine.checkpoint.storage import is_plain_name
from plait.errors import CheckpointError

_MARK = "$"
_TENSOR = "tensor"
_DEEPEST = 100  # limit of nesting
_PAIRS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_LISTS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, path: str, put: Callable[[str, Any], None], depth: int = 0) -> Any:
    """The value as JSON. `put(name, tensor)` is called for each tensor.

    Raises CheckpointError, which names a value that cannot be converted.
    """
    if depth > _DEEPEST:
        raise CheckpointError(f"{path[:200]} is nested more than {_DEEPEST} deep, which a checkpoint does not keep")
    deeper = functools.partial(encode, put=put, depth=depth + 1)
    if value is None or isinstance(value, (bool, int, float, str)):
        return _plain(value)
    if isinstance(value, bytes):
        return {_MARK: "bytes", "of": base64.b64encode(value).decode()}
    if type(value) is list:
        return [deeper(item, f"{path}/{i}") for i, item in enumerate(value)]
    for mark, kind in _LISTS.items():
        if type(value) is kind:
            return {_MARK: mark, "of": [deeper(item, f"{path}/{i}") for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        texts = all(isinstance(key, str) for key in value)
        if texts and _MARK not in value and not isinstance(value, (Counter, OrderedDict)):
            return {key: deeper(item, f"{path}/{key}") for key, item in value.items()}
        mark = "counter" if isinstance(value, Counter) else "ordered" if isinstance(value, OrderedDict) else "dict"
        pairs = [
            [deeper(key, f"{path}/{i}"), deeper(item, f"{path}/{key if isinstance(key, str) else i}")]
            for i, (key, item) in enumerate(value.items())
        ]
        return {_MARK: mark, "of": pairs}
    if hasattr(value, "data_ptr"):
        put(path, value)
        return {_MARK: _TENSOR, "name": path}
    if hasattr(value, "dtype") and getattr(value, "shape", None) == ():  # a numpy scalar
        return _plain(value.item())
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint does not keep: it keeps"
        " numbers, text, None, tensors, and lists, tuples, sets and dicts of them"
    )


def decode(value: object, get: Callable[[str], Any]) -> Any:
    """The inverse of `encode`; `get(name)` returns a tensor."""
    if isinstance(value, list):
        return [decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    mark = value.get(_MARK)
    if mark is None:
        return {key: decode(item, get) for key, item in value.items()}
    if mark == _TENSOR:
        return get(value["name"])
    if mark == "bytes":
        return base64.b64decode(value["of"], validate=True)
    if mark in _PAIRS:
        return _PAIRS[mark]({decode(key, get): decode(item, get) for key, item in value["of"]})
    return _LISTS[mark]([decode(item, get) for item in value["of"]])


def check_values(value: object, path: str, tensors: Container[str], where: str, depth: int = 0) -> None:
    """Raise CheckpointError, which names the place, for a value that `encode` cannot have made of these tensors."""
    if depth > 3 * _DEEPEST:
        raise CheckpointError(f"{where}: {path[:200]}: it is nested too deeply")
    deeper = functools.partial(check_values, tensors=tensors, where=where, depth=depth + 1)
    if isinstance(value, list):
        for i, item in enumerate(value):
            deeper(item, f"{path}.{i}")
    if not isinstance(value, dict):
        return
    if _MARK not in value:
        for key, item in value.items():
            deeper(item, f"{path}.{key}")
        return
    mark = value[_MARK]
    if mark == _TENSOR:
        name = value.get("name")
        if set(value) != {_MARK, "name"} or not isinstance(name, str) or name not in tensors:
            raise CheckpointError(f"{where}: {path}: the checkpoint has no such tensor")
        return
    of = value.get("of")
    marked = isinstance(mark, str) and set(value) == {_MARK, "of"}
    pairs = isinstance(of, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in of)
    if marked and ((isinstance(of, list) and mark in _LISTS) or (pairs and mark in _PAIRS)):
        deeper(of, path)
    elif not (marked and mark == "bytes" and isinstance(of, str)):
        raise CheckpointError(f"{where}: {path}: it is marked as {str(mark)[:40]!r}, but is not of that form")
    try:
        decode(value, lambda name: object())
    except (TypeError, ValueError):  # a list as a key, or invalid base64
        raise CheckpointError(f"{where}: {path}: it is no {mark}") from None


def tensor_names(value: object) -> list[str]:
    """The names for which `decode` would call `get`."""
    if isinstance(value, list):
        return [name for item in value for name in tensor_names(item)]
    if not isinstance(value, dict):
        return []
    if value.get(_MARK) == _TENSOR:
        return [value["name"]]
    return [name for item in value.values() for name in tensor_names(item)]


def _plain(value: object) -> Any:
    """A number or text as its built-in type, for subclasses such as numpy.float64."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))


Form = TypeVar("Form")

_LARGEST = 1 << 62  # limit of counts of bytes, which torch stores in signed 64-bit integers


def _plain_name(text: str) -> str:
    if not is_plain_name(text):
        raise ValueError("it is not the plain name of a file in the folder")
    return text


Text = Annotated[str, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, lt=_LARGEST)]
Whole = Annotated[int, Field(strict=True, ge=-_LARGEST, lt=_LARGEST)]
FiniteFloat = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Extents = Annotated[tuple[Count, ...], Field(max_length=64)]
FileName = Annotated[Text, AfterValidator(_plain_name)]


class Strict(BaseModel):
    """A JSON object with exactly these keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def read_json(text: bytes | str, where: str) -> Any:
    """Parse JSON. Raises CheckpointError for invalid JSON, or for a key that occurs twice."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else f"{error}"
        raise CheckpointError(f"{where} cannot be read: {why}") from None


def checked(form: TypeAdapter[Form], value: object, where: str) -> Form:
    """Validate the value. Raises CheckpointError, which names the first invalid field."""
    try:
        return form.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(each) for each in first["loc"]) or "it"
        raise CheckpointError(f"{where} is not as plait reads it: {place[:200]}: {first['msg']}") from None


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:200]!r} is there twice")
    return found
