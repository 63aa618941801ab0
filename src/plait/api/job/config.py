"""The configuration of a training job: a TOML file that is checked before anything starts."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from plait.errors import ConfigError
from plait.spec.text_files import SETTINGS, read_bounded
from plait.spec.toml_text import parse_toml


class Section(BaseModel):
    """A table of the file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OpenSection(Section):
    """A table whose further keys are arguments of what it names, checked against the signature (job/from_config.py)."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class ModelSection(OpenSection):
    """[model]: `bytes_gpt`, or `module:function` that returns (model, loss_fn). Further keys are its arguments."""

    name: str = "bytes_gpt"


class DataSection(OpenSection):
    """[data]: "python", a text file, a folder, or `module:function` that returns a Dataset or a pair (train,
    held-out)."""

    source: str = "python"
    held_out: float = Field(default=0.05, ge=0, le=0.5)  # fraction of a text to evaluate on
    workers: int = Field(default=0, ge=0)  # processes per rank that read data; 0 is a thread of the rank
    prefetch: int = Field(default=2, ge=0)  # batches that are read ahead of the step


class OptimizerSection(OpenSection):
    """[optimizer]: the name of a class in torch.optim or plait.optim; further keys are its arguments."""

    name: str = "AdamW"
    lr: float = Field(default=1e-3, gt=0)


class SchedulerSection(Section):
    """[scheduler]: the learning rate rises over `warmup` steps, then falls along a cosine to `final` of its peak."""

    name: Literal["cosine", "constant"] = "cosine"
    warmup: int = Field(default=0, ge=0)
    final: float = Field(default=0.1, ge=0, le=1)


class SampleSection(Section):
    """[sample]: text to draw from a bytes_gpt after training; `length` is in bytes, 0 for none."""

    prompt: str = "The "
    length: int = Field(default=400, ge=0)
    temperature: float = Field(default=0.8, gt=0)


class TrainSection(Section):
    """[train]: the loop. `batch_size` is that of the global batch; an interval of 0 means never."""

    steps: int = Field(default=1000, ge=1)
    batch_size: int = Field(default=8, ge=1)
    clip_norm: float | None = Field(default=None, gt=0)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    save_every: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=1)  # checkpoints to keep
    checkpoints: str | None = Field(default=None, min_length=1)  # a folder or a URL; by default a folder in `out`
    evaluate_every: int = Field(default=0, ge=0)
    evaluate_batches: int = Field(default=8, ge=1)
    out: str = Field(default="runs/plait", min_length=1)
    on_nan: Literal["raise", "warn"] = "raise"
    scratch: str | None = Field(default=None, min_length=1)  # the folder for what the plan offloads to disk
    tensorboard: bool = False
    noise_every: int = Field(default=0, ge=0)  # steps from one measurement of the gradient noise scale to the next
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # seconds that a rank may be late


class Config(Section):
    """A whole file. `layouts` are annotations of parameters by name pattern, as the Trainer takes them."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    scheduler: SchedulerSection | None = None
    sample: SampleSection = SampleSection()
    train: TrainSection = TrainSection()
    layouts: dict[str, str] = {}


def load_config(path: str | Path, changes: Sequence[str] = ()) -> Config:
    """Read a file and apply changes like `train.steps=10`. ConfigError names file, key, value and remedy."""
    path = Path(path)
    try:
        raw = parse_toml(read_bounded(path, SETTINGS))
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {str(path)!r} (looked for {path.absolute()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {str(path)!r}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    if not raw and not changes:
        raise ConfigError(
            f"{path} has no tables; a job has [model], [data], [optimizer] or [train], as examples/bytes_gpt.toml has,"
            " and one that has [train] alone has the defaults of docs/job.md"
        )
    set_here = {name for change in changes for name in _change(raw, change)}
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(problem, path, set_here) for problem in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def _change(raw: dict[str, Any], change: str) -> list[str]:
    """Apply `key.path=value` to the raw tables, which are changed. Returns the path of the key, and of each table that
    it has made."""
    name, equals, text = change.partition("=")
    *tables, key = (part.strip() for part in name.split("."))
    if not equals or not tables or not key:
        raise ConfigError(f"cannot read --set {change!r}; write it as --set train.steps=10")
    node, made = raw, []
    for i, table in enumerate(tables):
        if table not in node:
            made.append(".".join(tables[: i + 1]))
        node = node.setdefault(table, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {change!r}: {table} is a value, not a table")
    try:
        node[key] = parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        node[key] = text  # a bare word is a string
    return [*made, ".".join([*tables, key])]


_TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text in quotes",
    "string_too_short": "text that is not empty",
    "bool_type": "true or false",
    "dict_type": "a table",
    "model_type": "a table",
}


def _explain(problem: Any, path: Path, set_here: set[str]) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    source = "--set" if where in set_here else str(path)
    value = problem["input"]
    if problem["type"] == "extra_forbidden":
        return f"{source}: unknown key {where}; {_near(problem['loc'])}"
    expected = _TYPES.get(problem["type"]) or problem["msg"].removeprefix("Input should be ")
    shown = f"{value!r}" if not isinstance(value, Mapping) else "a table"
    return f"{source}: {where} = {shown}; it should be {expected}"


def _near(loc: Sequence[str | int]) -> str:
    """A hint with keys like the last of `loc`, and a list of all keys of its table."""
    tables: dict[str, type[BaseModel]] = {
        "model": ModelSection,
        "data": DataSection,
        "optimizer": OptimizerSection,
        "scheduler": SchedulerSection,
        "sample": SampleSection,
        "train": TrainSection,
    }
    table = tables.get(str(loc[0]), Config) if len(loc) > 1 else Config
    keys = list(table.model_fields)
    name = f"[{loc[0]}]" if len(loc) > 1 else "the file"
    found = difflib.get_close_matches(str(loc[-1]), keys, n=2)
    elsewhere = [f"{other}.{loc[-1]}" for other, section in tables.items() if loc[-1] in section.model_fields]
    hint = " or ".join(found or elsewhere)
    return (f"did you mean {hint}? " if hint else "") + f"{name} has {', '.join(keys)}"
