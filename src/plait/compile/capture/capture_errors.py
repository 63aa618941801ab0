"""Errors of a capture: the line of the user's code that stopped it, and the reason in one sentence.

Code that communicates with other processes by itself is one reason: model and loss are the code of one device.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from plait.compile.ops import op_spec
from plait.errors import CaptureError, PlanError, Refusal

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PLAIT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_DISPATCH = tuple(
    _TORCH + name.replace("/", os.sep)
    for name in ("overrides.py", "_tensor.py", "_compile.py", "_ops.py", "_dynamo/", "_subclasses/", "utils/_")
)
_STANDARD = tuple(os.path.realpath(sysconfig.get_paths()[name]) + os.sep for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(
    {os.path.realpath(sysconfig.get_paths()[name]) + os.sep for name in ("purelib", "platlib")}
    | {os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep}
)
_MASK = "use a mask instead: (x * mask).sum() / mask.sum().clamp(min=1) works also without any rows"
_ALIKE = (
    "a loop over experts may only add its rows to what was there before it, as out.index_add_(0, token, rows) does, for"
    " all experts alike; what it leaves out where there are no rows may do nothing else"
)


def capture_error(
    error: Exception, model: nn.Module, loss_fn: Callable[..., Any], doing: str, in_expert_loop: bool = False
) -> CaptureError:
    """A CaptureError for `error`, raised while `doing` something, with file, line and source of the user's code."""
    asked: tuple[str, int] | None = getattr(error, "place", None)
    place = asked or _place(error.__traceback__, model) or _start(loss_fn)
    reason = _reason(error, in_expert_loop or asked is not None)
    if place is None:
        return CaptureError(f"cannot capture the training step {doing}: {reason}")
    file, line = place
    data_dependent = isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
    if data_dependent and not linecache.getline(file, line):
        reason += "; of most code that only prints or logs the number only its source tells that: put it in a file"
    found = CaptureError(f"cannot capture the training step: {_text(place)}: {reason}")
    found.file, found.line, found.data_dependent = file, line, data_dependent
    return found


def users_line(model: nn.Module, loss_fn: Callable[..., Any], error: BaseException) -> str:
    """`file:line: "source"` of the user's code that raised the error, or else of the loss function."""
    place = _place(error.__traceback__, model) or _start(loss_fn)
    return "the model" if place is None else _text(place)


def _text(place: tuple[str, int]) -> str:
    file, line = place
    source = linecache.getline(file, line).strip()
    return f'{file}:{line}: "{source}"' if source else f"{file}:{line} (its source is not available)"


def has_source(frame: FrameType) -> bool:
    """Whether the source of a frame's code is known, as that of a file is, and that of what `exec` ran is not."""
    return bool(linecache.getlines(frame.f_code.co_filename))


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from `frame` outwards, that is not part of the dispatch of a call in torch or plait."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((_PLAIT, *_DISPATCH)) and code.co_name != "__torch_function__":
            return frame
        frame = frame.f_back
    return None


def source_line(frame: FrameType) -> str:
    """`file:line: "source"` of a frame, or of the code outside torch that called it."""
    at: FrameType | None = frame
    while at is not None and at.f_code.co_filename.startswith((_TORCH, _PLAIT)):
        at = at.f_back
    at = at or frame
    return _text((at.f_code.co_filename, at.f_lineno))


def _place(trace: TracebackType | None, model: nn.Module) -> tuple[str, int] | None:
    """The innermost frame of the user's own code, or else of the library that the model comes from."""
    every = traceback.extract_tb(trace)
    frames = [(f.filename if _is_run(f) else os.path.abspath(f.filename), f.lineno or 0) for f in every]
    exist = [_is_run(frame) or os.path.exists(file) for frame, (file, _) in zip(every, frames, strict=True)]
    frames = [f for f, exists in zip(frames, exist, strict=True) if exists and not f[0].startswith((_TORCH, _PLAIT))]
    home = _home(model)
    own = [f for f in frames if not _library(f[0]) or f[0] in home]
    return own[-1] if own else frames[-1] if frames else None


def _is_run(frame: traceback.FrameSummary) -> bool:
    """Whether a function is of code without a file that the user ran: of `exec`, `python -c` or a console. Those that
    libraries make, such as the __init__ of a dataclass, have names like that."""
    return frame.filename in ("<string>", "<stdin>") and not frame.name.startswith("__")


def _home(model: nn.Module) -> set[str]:
    """The files that define the classes of the model's modules."""
    found = set()
    for kind in {type(module) for module in model.modules()}:
        try:
            found.add(os.path.abspath(inspect.getfile(kind)))
        except (TypeError, OSError):
            continue
    return {f for f in found if not f.startswith(_TORCH)}


def is_library(file: str) -> bool:
    """Whether a Python file belongs to torch, plait, another library or Python itself, and not to the user."""
    return file.startswith((_TORCH, _PLAIT)) or _library(file)


def _library(file: str) -> bool:
    return any(part in file for part in _PACKAGES) or file.startswith(_STANDARD)


def _start(loss_fn: Callable[..., Any]) -> tuple[str, int] | None:
    code = getattr(inspect.unwrap(loss_fn), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else None


def _reason(error: Exception, in_expert_loop: bool) -> str:
    if isinstance(error, CaptureError):
        return str(error)
    if isinstance(error, DataDependentOutputException):
        return (
            f"Python needs the number in a tensor ({error.func}), but the graph must be the same for every batch; of a"
            " branch compute both sides and take torch.where(condition, a, b), or leave it out if both give the same"
            " numbers; x.item() prints or keeps the number; a tensor that is the same for every batch is known if it"
            " does not come with the batch"
        )
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"the shape of a result depends on the numbers in a tensor ({error.func}), but a graph has fixed shapes;"
            f" {getattr(error, 'why', '') or op_spec(error.func).advice or (_ALIKE if in_expert_loop else _MASK)}"
        )
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


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
