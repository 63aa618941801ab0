"""Makes what a config names: model, loss, data, optimizer, scheduler; and checks a job without training.

A config names functions of the user's as `module:function`, with a table of arguments. The author of a job file decides
what code runs: see docs/security.md. What is refused here, such as `os:system`, is a mistake, or a file that nobody
read before starting it. The check does not make an untrusted file safe.
"""

from __future__ import annotations

import difflib
import fcntl
import functools
import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from plait import optim
from plait.api.job.config import Config, SchedulerSection
from plait.api.job.gpt import ByteText, bytes_gpt, read_text, split_text
from plait.backends.eager.offload.disk import scratch_folder
from plait.comm.thread_world import alone
from plait.compile.capture.capture import LossFn
from plait.engine.checkpoint.checkpoint_folders import (
    INSIDE,
    check_files,
    checkpoint_of,
    checkpoints,
    newest,
    older_than,
)
from plait.engine.checkpoint.manifest import refuse_tables
from plait.engine.compiler import Captures, Compiler
from plait.engine.data.sample_order import check_batch_size
from plait.engine.ddp_fallback import refuse_unless_data_only
from plait.engine.environment import under_launcher
from plait.engine.gradient_noise import check_noise_every
from plait.engine.local_batch import batch_of_replica, microbatches
from plait.engine.rank_optimizers import SchedulerFactory, make_optimizer
from plait.engine.setup_checks import check_captured, check_plan, check_step, place_here
from plait.errors import (
    BatchError,
    CaptureError,
    CheckpointError,
    ConfigError,
    DataError,
    LossError,
    PlaitError,
    PlanError,
)
from plait.plan.annotation import resolve_annotations
from plait.plan.axes import axis_kind
from plait.plan.key_values import NO_RECOMPUTE
from plait.plan.legality import of_graph
from plait.plan.plan import Plan

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


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, object], table: str, skip: int = 0) -> None:
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


def call(function: Callable[..., Any], arguments: Mapping[str, object], table: str, *first: object) -> Any:
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


_MODELS = {"bytes_gpt": bytes_gpt}


@dataclass(frozen=True)
class Data:
    """Map-style datasets; `held_out` is None if there is nothing to evaluate on."""

    train: Any
    held_out: Any


def make_model(config: Config) -> tuple[nn.Module, LossFn]:
    """The model, initialized from `train.seed`, and its loss function. Raises ConfigError for a bad name or
    argument."""
    name = config.model.name
    function: Callable[..., Any]
    if name in _MODELS:
        function = _MODELS[name]
    elif is_reference(name):
        function = import_reference(name, "model.name")
    else:
        raise ConfigError(f"model.name = {name!r}; it should be {', '.join(_MODELS)} or 'module:function'")
    torch.manual_seed(config.train.seed)
    found = call(function, config.model.arguments, "model")
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], nn.Module) or not callable(found[1]):
        raise ConfigError(f"model.name = {name!r} returned {type(found).__name__}; it should return (model, loss_fn)")
    return found


def make_data(config: Config) -> Data:
    """The datasets that [data] names. Raises ConfigError or DataError for a source that gives none."""
    section = config.data
    if is_reference(section.source) and not Path(section.source).exists():
        found = call(import_reference(section.source, "data.source"), section.arguments, "data")
        train, held_out = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    else:
        if section.arguments:
            keys = ", ".join(f"data.{key}" for key in section.arguments)
            raise ConfigError(f"unknown key {keys}; a text takes source, held_out, workers and prefetch")
        if config.model.name != "bytes_gpt":
            raise ConfigError(
                f"data.source = {section.source!r} is text, which is for the bytes_gpt model; give {config.model.name}"
                " its data as 'module:function', a function that returns a Dataset"
            )
        sequence = config.model.arguments.get("sequence", 128)
        train_text, held_out_text = split_text(read_text(section.source), section.held_out)
        train, held_out = ByteText(train_text, sequence), ByteText(held_out_text, sequence)
    size = config.train.batch_size
    for dataset, name in ((train, "training"), (held_out, "held-out")):
        if dataset is None:
            continue
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise DataError(
                f"data.source = {section.source!r} gave {type(dataset).__name__}, which is no map-style Dataset"
            )
        if len(dataset) < size and name == "training":
            raise DataError(
                f"data.source = {section.source!r} has {len(dataset)} items to train on, fewer than train.batch_size ="
                f" {size}"
            )
    return Data(train, held_out if held_out is not None and len(held_out) >= size else None)


def first_batch(config: Config, data: Data) -> Any:
    """A global batch of the first items of the training data."""
    return default_collate([data.train[index] for index in range(config.train.batch_size)])


def optimizer_factory(config: Config) -> Callable[..., torch.optim.Optimizer]:
    """A function from parameters to the optimizer that [optimizer] names. Raises ConfigError for bad arguments."""
    section = config.optimizer
    found = getattr(optim, section.name, None) or getattr(torch.optim, section.name, None)
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
        names = [n for n, o in vars(torch.optim).items() if isinstance(o, type) and n != "Optimizer"]
        known = ", ".join(sorted([*names, *optim.__all__]))
        raise ConfigError(f"optimizer.name = {section.name!r}; torch.optim and plait.optim have {known}")
    arguments = {"lr": section.lr, **section.arguments}
    check_arguments(found, arguments, "optimizer", skip=1)
    try:
        found([nn.Parameter(torch.zeros(1))], **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[optimizer] {section.name}: {error}") from None
    return functools.partial(found, **arguments)


def scheduler_factory(config: Config) -> SchedulerFactory | None:
    """A function from an optimizer to the scheduler that [scheduler] names; None without that table."""
    section = config.scheduler
    if section is None:
        return None
    rate = functools.partial(learning_rate, section=section, steps=config.train.steps)
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def learning_rate(step: int, section: SchedulerSection, steps: int) -> float:
    """The learning rate of a step, counted from 0, as a fraction of its peak."""
    if step < section.warmup:
        return (step + 1) / section.warmup
    if section.name == "constant":
        return 1.0
    done = min((step - section.warmup) / max(steps - section.warmup, 1), 1.0)
    return section.final + (1 - section.final) * (1 + math.cos(math.pi * done)) / 2


def checkpoint_folder(config: Config) -> str:
    """The folder or URL of the run's checkpoints."""
    return config.train.checkpoints or str(Path(config.train.out) / INSIDE)


def make_out(config: Config) -> Path:
    """The folder of the run, which is created if it does not exist. Raises ConfigError if it cannot be."""
    out = Path(config.train.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"train.out = {str(out)!r}: the folder cannot be made: {error.strerror}") from None
    return out


def hold_out(config: Config) -> int | None:
    """Lock the folder of the run until the returned file descriptor is closed; None where the file system has no locks.

    Raises CheckpointError if another run has it, whose saves this one would take for those of a killed run.
    """
    try:
        handle = os.open(make_out(config), os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if not isinstance(error, BlockingIOError):
            return None
        raise CheckpointError(
            f"train.out = {config.train.out!r}: another run writes into this folder now; stop that one, or name another"
            " folder"
        ) from None
    return handle


@dataclass(frozen=True)
class Resume:
    """The start of a job: anew; from a checkpoint; or, with `auto`, from the newest checkpoint if there is one.

    `checkpoint` names one, such as step-120; by default it is the newest. Raises ConfigError for both of them together.
    """

    wanted: bool = False
    auto: bool = False
    checkpoint: str = ""

    def __post_init__(self) -> None:
        if self.auto and self.checkpoint:
            raise ConfigError(
                f"--checkpoint {self.checkpoint} and --resume=auto exclude each other; leave one of them out"
            )

    def settled(self, folder: str) -> Resume:
        """This choice without `auto`, which depends on whether `folder` has a checkpoint."""
        return Resume(bool(checkpoints(folder))) if self.auto else self

    def place(self, folder: str) -> str:
        """The checkpoint to load, or the folder whose newest checkpoint to load."""
        return str(checkpoint_of(folder, self.checkpoint)) if self.checkpoint else folder


ANEW, GO_ON, AUTO = Resume(), Resume(True), Resume(True, True)


def check_job(config: Config, plan: Plan, resume: Resume = ANEW, writes: bool = True) -> None:
    """Check all of a job that can be checked before a process starts. Raises the PlaitError of what is wrong.

    The model is built on the meta device, which takes no memory, and nothing is written. With `writes` false the job
    itself will write nothing, and its folder is not checked.
    """
    check_batch_size(config.train.batch_size, plan, f"train.batch_size = {config.train.batch_size}")
    if plan.uses_disk:
        scratch_folder(config.train.scratch)
    if config.train.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "train.tensorboard = true, but TensorBoard is not installed: pip install 'plait[tensorboard]'"
        )
    model = _on_meta(config)
    data = make_data(config)
    if config.train.evaluate_every and data.held_out is None:
        raise ConfigError(
            f"train.evaluate_every = {config.train.evaluate_every}, but no held-out data of at least one batch;"
            " set it to 0, raise data.held_out, or return (train, held-out) from the data function"
        )
    if config.train.noise_every:
        check_noise_every(config.train.noise_every, plan, config.train.batch_size)
    named = dict(model.named_parameters())
    resolve_annotations(config.layouts, {name: tuple(p.shape) for name, p in named.items()}, plan.mesh)
    check_plan(plan, model, config.train.clip_norm, place_here() if writes else None)
    make_optimizer(optimizer_factory(config), [(name, p) for name, p in named.items() if p.requires_grad])
    if writes and not plan.workers and not under_launcher() and (_asks_the_passes(plan) or _asks_the_graph(plan)):
        _check_step(config, plan, data)
    if writes:
        _check_out(config, plan, resume)


def _asks_the_passes(plan: Plan) -> bool:
    """Whether only the compiled step tells if the plan fits the model."""
    more_than_rows = any(size > 1 and not axis_kind(axis).cuts_rows for axis, size in plan.mesh.axes)
    norms = plan.batchnorm == "local"
    return more_than_rows or norms or bool(plan.exceptions) or plan.recompute != NO_RECOMPUTE


def _asks_the_graph(plan: Plan) -> bool:
    """Whether the plan, on several processes, needs a step that can be captured."""
    return plan.num_processes > 1 and (bool(plan.relaxed_axis) or any(of_graph(plan, "", "")))


def _check_step(config: Config, plan: Plan, data: Data) -> None:
    """Raise PlanError or LayoutError if this model's step or optimizer does not support the plan.

    The model is built without values. If its step cannot be captured so, it is built again with them.
    """
    batch = first_batch(config, data)
    first = microbatches(batch_of_replica(batch, plan), plan.micro)[0]
    for device in ("meta", "cpu"):
        try:
            with torch.device(device):
                model, loss_fn = make_model(config)
        except Exception:  # a constructor that needs values
            continue
        compiler = Compiler(Captures(model, loss_fn, torch.device("cpu")), plan.inner_plan, config.layouts)
        try:
            captured = compiler.captured(first)
        except (PlanError, BatchError, LossError):
            raise
        except CaptureError as error:
            if device == "cpu":
                refuse_unless_data_only(error, plan, alone(Plan().mesh), compiler, batch)
            continue
        except Exception:
            return
        if _asks_the_passes(plan):
            check_step(compiler, batch, plan, config.train.clip_norm, optimizer_factory(config))
        else:
            check_captured(compiler, plan, captured, config.train.clip_norm)
        return


def _on_meta(config: Config) -> nn.Module:
    try:
        with torch.device("meta"):
            return make_model(config)[0]
    except Exception:  # a constructor that needs values; on a real device it may work
        return make_model(config)[0]


def _check_out(config: Config, plan: Plan, resume: Resume) -> None:
    out, folder = Path(config.train.out), checkpoint_folder(config)
    try:
        if "\0" in str(out):
            raise ValueError("embedded null byte")
        there = next((place for place in (out, *out.parents) if place.exists()), out)
    except (OSError, ValueError) as error:  # such as a name that is too long
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"train.out = {config.train.out!r} cannot be a folder: {why}; name another") from None
    if not there.is_dir():
        what = "is a file" if there == out else f"lies below {there}, which is a file"
        raise ConfigError(f"train.out = {config.train.out!r} {what}; name a folder")
    if not os.access(there, os.W_OK):
        raise ConfigError(
            f"train.out = {config.train.out!r} cannot be written: {there} is read-only; name another folder"
        )
    if out.is_dir() and not under_launcher() and (held := hold_out(config)) is not None:
        os.close(held)  # rank 0 takes it
    resume = resume.settled(folder)
    if resume.wanted:
        try:
            place = newest(resume.place(folder))
        except CheckpointError as error:
            more = "" if resume.checkpoint else "; --resume=auto begins anew where there is none"
            raise CheckpointError(f"{error}{more}") from None
        try:
            found = check_files(place)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{older_than(place)}") from None
        if not plan.workers:
            refuse_tables(f"the checkpoint {place}", found)
        step = found.step
        if step >= config.train.steps:
            raise ConfigError(
                f"the run in {config.train.out} has done {step} steps and train.steps = {config.train.steps};"
                " raise train.steps to go on"
            )
    elif whole := checkpoints(folder):
        key = "train.checkpoints" if config.train.checkpoints else "train.out"
        raise CheckpointError(
            f"{folder} holds checkpoints of an earlier run ({whole[-1].name}); go on with --resume, name another"
            f" {key}, or remove the folder"
        )
