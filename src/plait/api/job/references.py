"""`module:function` in a config, and the arguments that a table gives to the function.

The author of a job file decides what code runs: see docs/security.md. What is refused here, such as `os:system`, is a
mistake, or a file that nobody read before starting it. The check does not make an untrusted file safe.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
import typing
from collections.abc import Callable, Mapping
from typing import Any

from plait.errors import ConfigError, PlaitError

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}


def is_reference(text: str) -> bool:
    """Whether the text is of the form `module:function`."""
    module, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def import_reference(text: str, key: str) -> Callable[..., Any]:
    """The function that `module:function` names; modules are looked for in the working directory too.

    Raises ConfigError, which names the config's `key`, if it cannot be imported.
    """
    module_name, _, name = text.partition(":")
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(
            f"{key} = {text!r}: {module_name} is a module of Python itself, which has no models, data or optimizers;"
            " name a module of your own or of a library"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise ConfigError(f"{key} = {text!r}: importing {module_name} failed: {error}") from error
        raise ConfigError(
            f"{key} = {text!r}: there is no module {module_name} (looked in {os.getcwd()} and the installed ones)"
        ) from None
    except Exception as error:
        raise ConfigError(f"{key} = {text!r}: importing {module_name} failed: {error!r}") from error
    found = getattr(module, name, None)
    if not callable(found):
        near = difflib.get_close_matches(name, dir(module), n=2)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"{key} = {text!r}: {module_name} has no function {name}{hint}")
    return typing.cast(Callable[..., Any], found)


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], table: str, skip: int = 0) -> None:
    """Raise ConfigError for an argument that `function` does not take, or takes in another plain type.

    The first `skip` parameters do not come from the config.
    """
    try:
        parameters = dict(list(inspect.signature(function).parameters.items())[skip:])
    except (TypeError, ValueError):
        return
    try:
        types = typing.get_type_hints(function)
    except Exception:  # annotations that cannot be resolved are not checked
        types = {}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [name for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    for name, value in arguments.items():
        if name not in known and not takes_any:
            near = difflib.get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise ConfigError(f"unknown key {table}.{name}; {hint}it takes {', '.join(known) or 'no arguments'}")
        wanted = types.get(name)
        fits = type(value) is wanted or (wanted is float and type(value) is int)
        if wanted in _WORDS and not fits:
            raise ConfigError(f"{table}.{name} = {value!r}; it should be {_WORDS[wanted]}")
    missing = [name for name in known if parameters[name].default is inspect.Parameter.empty and name not in arguments]
    if missing:
        raise ConfigError(f"[{table}] lacks {', '.join(missing)}")


def call(function: Callable[..., Any], arguments: Mapping[str, Any], table: str, *first: Any) -> Any:
    """Check a table's arguments and call the function with them, after `first`. Its exceptions become ConfigErrors."""
    check_arguments(function, arguments, table, skip=len(first))
    try:
        return function(*first, **arguments)
    except PlaitError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[{table}]: {error}") from error
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"[{table}]: {function.__name__} raised {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        ) from error
