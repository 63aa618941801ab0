"""Strict reading of JSON from untrusted files; errors name the place of an invalid value.

A checkpoint, or weights from elsewhere, is not trusted: it says which bytes of which files are read into which tensors.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from plait.engine.checkpoint.storage import is_plain_name
from plait.errors import CheckpointError

Form = TypeVar("Form")

_LARGEST = 1 << 62  # limit of counts of bytes, which torch stores in signed 64-bit integers


def _plain_name(text: str) -> str:
    if not is_plain_name(text):
        raise ValueError("it is not the plain name of a file in the folder")
    return text


Text = Annotated[str, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, lt=_LARGEST)]
Whole = Annotated[int, Field(strict=True, ge=-_LARGEST, lt=_LARGEST)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
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


def checked(form: TypeAdapter[Form], value: Any, where: str) -> Form:
    """Validate the value. Raises CheckpointError, which names the first invalid field."""
    try:
        return form.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(each) for each in first["loc"]) or "it"
        raise CheckpointError(f"{where} is not as plait reads it: {place[:200]}: {first['msg']}") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:200]!r} is there twice")
    return found
