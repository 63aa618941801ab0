"""JSON that somebody else may have written: read strictly, with the place of what is wrong.

A checkpoint, or weights from elsewhere, is data and is not to be trusted: it says which bytes of which files are read
into which tensors.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from plait.engine.checkpoint.storage import is_plain_name
from plait.errors import CheckpointError

Form = TypeVar("Form")

_LARGEST = 1 << 62  # of what is counted in bytes; torch counts them in signed words of 64 bits


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
    """A table of exactly these keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def read_json(text: bytes | str, where: str) -> Any:
    """The value that the text is; CheckpointError where it is none, or gives a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else f"{error}"
        raise CheckpointError(f"{where} cannot be read: {why}") from None


def checked(form: TypeAdapter[Form], value: Any, where: str) -> Form:
    """The value in its form; CheckpointError names the first field that is wrong."""
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
