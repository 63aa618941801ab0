"""Code that communicates with other processes by itself, which is refused: it is the code of one device."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from plait.errors import PlanError, Refusal

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")  # namespaces of ops
_ALONE = "model, loss and optimizer are those of one device, which is in no process group, and plait spreads the step"


@contextmanager
def not_communicating(where: Callable[[BaseException], str]) -> Iterator[None]:
    """Context that raises PlanError for code that needs a process group where there is none.

    `where` names the code that has raised an exception.
    """
    try:
        yield
    except ValueError as error:
        if (frames := traceback.extract_tb(error.__traceback__)) and frames[-1].name == "_get_default_group":
            raise communicates(where(error)) from error
        raise


def communicates(where: str) -> PlanError:
    """The error for code that asks for other processes, or exchanges values with them."""
    what = f"{where} communicates with other processes through torch.distributed"
    instead = 'leave it out, or put it under "if torch.distributed.is_initialized():"'
    return PlanError(Refusal(what, _ALONE, instead))
