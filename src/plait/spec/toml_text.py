"""Parses TOML. Errors that Python's parser raises as something else are raised as TOMLDecodeError too."""

from __future__ import annotations

import sys
import tomllib
from typing import Any


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a text. Raises tomllib.TOMLDecodeError for every text that cannot be read, also for values that
    are nested too deep, and for numbers with more digits than Python reads."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("its tables or arrays are nested too deep") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # of int()
        raise tomllib.TOMLDecodeError(f"a number has more than {sys.get_int_max_str_digits()} digits") from None
