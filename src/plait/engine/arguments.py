"""What the arguments of the public functions may be: one row each, checked before anything starts.

A row is about the kind of a value. What a plan, a model or a batch makes of it is checked where that is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from plait.errors import CheckpointError, ConfigError, LayoutError, PlaitError, PlanError
from plait.spec.cluster import Cluster


@dataclass(frozen=True)
class Argument:
    """fits    whether a value can be taken
    give    what to give instead, for the message
    error   the exception for one that cannot
    """

    fits: Callable[[Any], bool]
    give: str
    error: type[PlaitError] = PlanError


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike)) and isinstance(os.fspath(value), str)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _texts_by_pattern(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_text(each) for pair in value.items() for each in pair)


def _functions(value: Any) -> bool:
    return isinstance(value, Collection) and all(map(callable, value))


def _names(value: Any) -> bool:
    return _text(value) or (isinstance(value, Collection) and all(map(_text, value)))


def _world(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("mesh", "rank", "device", "comm", "everyone"))


def _optional(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


ARGUMENTS = {
    "layouts": Argument(
        _optional(_texts_by_pattern),
        "give a mapping of name patterns to texts, such as {'*.q_proj.weight': 'tensor, -'}",
        LayoutError,
    ),
    "seed": Argument(_whole, "give a whole number"),
    "clip_norm": Argument(_optional(_number), "give a number above 0, or leave it out not to clip"),
    "scheduler": Argument(
        _optional(callable), "give a function from an optimizer to a torch.optim.lr_scheduler.LRScheduler"
    ),
    "callbacks": Argument(_functions, "give a list of functions of a StepEnd, or leave it out for none"),
    "on_nan": Argument(
        lambda value: _text(value) and value in ("raise", "warn"),
        "give 'raise', which stops at a loss that is not finite, or 'warn', which goes on",
    ),
    "scratch": Argument(_optional(_path), "give the path of a folder, or leave it out for TMPDIR"),
    "trace": Argument(_optional(_path), "give the path of a folder, or leave it out for no recording"),
    "allow": Argument(_names, "give 'local_loss', or leave it out to allow nothing"),
    "noise_every": Argument(_whole, "give a whole number of steps, or 0 not to measure"),
    "world": Argument(_optional(_world), "give the World that plait.run_ranks hands a rank, or leave it out"),
    "steps": Argument(_whole, "give a whole number, 1 or more"),
    "tolerance": Argument(
        lambda value: _number(value) and value >= 0, "give a number above 0, such as 1e-4, or 0 for equal bits"
    ),
    "cluster": Argument(
        lambda value: isinstance(value, Cluster) or _path(value),
        "give a Cluster, a name such as 'h100x64', or a TOML file",
        ConfigError,
    ),
    "limits": Argument(_text, "give text, such as 'tensor=1..8 zero=1,3', or leave it out for none"),
    "decay": Argument(_number, "give a number from 0 to below 1, such as 0.999"),
    "path": Argument(_path, "give the path of a folder, or a URL such as s3://bucket/run", CheckpointError),
    "extra": Argument(
        _optional(lambda value: isinstance(value, Mapping)),
        "give a mapping, such as {'data': loader.state_dict()}",
        CheckpointError,
    ),
    "keep": Argument(_whole, "give the number of checkpoints to keep, 1 or more", CheckpointError),
    "state": Argument(
        lambda value: isinstance(value, Mapping), "give what a trainer's state_dict() returned", CheckpointError
    ),
    "num_rows": Argument(lambda value: _whole(value) and value >= 1, "a table has a whole number of rows, 1 or more"),
    "dim": Argument(_whole, "a row has a whole number of numbers, 1 or more"),
    "ids": Argument(_text, "give the key of the batch under which the ids are"),
}


def check_arguments(**given: Any) -> None:
    """Raise the error of the first of these arguments, by name, that cannot be taken."""
    for name, value in given.items():
        if not (row := ARGUMENTS[name]).fits(value):
            raise row.error(f"{name}={_shown(value)}: {row.give}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
