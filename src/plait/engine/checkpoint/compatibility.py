"""Checks that a checkpoint fits a run, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Set

from plait.engine.checkpoint.manifest import Manifest
from plait.errors import CheckpointError

Shapes = Mapping[str, tuple[tuple[int, ...], str]]  # (shape, dtype) by name

MODEL = "model/"
STATE = "optimizer/state/"
EMA = "ema/"


def saved_model(manifest: Manifest) -> Shapes:
    """The parameters and buffers of a checkpoint."""
    return {name.removeprefix(MODEL): it for name, it in manifest.tensors.items() if name.startswith(MODEL)}


def saved_state(manifest: Manifest) -> dict[str, set[str]]:
    """The keys of the saved optimizer state, by parameter."""
    found: dict[str, set[str]] = {}
    for full in (*manifest.tensors, *manifest.values["own"]):
        if full.startswith(STATE):
            name, _, key = full.removeprefix(STATE).rpartition("/")
            found.setdefault(name, set()).add(key)
    return found


def check_model(what: str, there: Shapes, here: Shapes, *, dtypes: bool = True) -> None:
    """Raise CheckpointError unless `what` has exactly the tensors `here`, with their shapes and, with `dtypes`,
    their dtypes."""
    differences = []
    if missing := sorted(set(here) - set(there)):
        differences.append(f"it lacks {_few(missing)}")
    if extra := sorted(set(there) - set(here)):
        differences.append(f"it has {_few(extra)}, which this model lacks")
    shared = sorted(set(here) & set(there))
    shapes = [name for name in shared if there[name][0] != here[name][0]]
    differences += [f"{n} has shape {list(there[n][0])} there and {list(here[n][0])} here" for n in shapes[:5]]
    kinds = [name for name in shared if there[name][1] != here[name][1] and name not in shapes] if dtypes else []
    differences += [f"{name} is {there[name][1]} there and {here[name][1]} here" for name in kinds[:5]]
    if (more := len(shapes[5:]) + len(kinds[5:])) > 0:
        differences.append(f"{more} more differ in shape or type")
    if differences:
        raise CheckpointError(f"{what} was made by another model: {'; '.join(differences)}")


def refuse_tables(what: str, manifest: Manifest, here: Shapes | None = None) -> None:
    """Raise CheckpointError if the checkpoint has rows of sparse tables, which only a plan with servers can load.

    On such a plan, the tables have no rows `here`.
    """
    extra = manifest.values["common"]["extra"]
    tables = extra.get("tables") if isinstance(extra, Mapping) else None
    tables = tables if isinstance(tables, Mapping) else {}
    if tables and any(here is None or here.get(f"{name}.weight", ((0,), ""))[0][0] for name in tables):
        raise CheckpointError(
            f"{what} has the rows of the tables {', '.join(tables)} as servers hold them; go on under a plan with"
            " workers=N servers=M"
        )


def check_optimizer(what: str, manifest: Manifest, kind: str, here: Mapping[str, Set[str]], num_groups: int) -> None:
    """Raise CheckpointError unless the checkpoint's optimizer state has the keys `here`, by parameter, and as many
    groups."""
    common = manifest.values["common"]
    made = f"{what} was made with another optimizer"
    remedy = "use the optimizer of the saved run, or take its weights alone with Trainer.load_weights"
    there = saved_state(manifest)
    named = f"{kind} here" if kind != common["optimizer"] else "the one here, with its options,"
    for name, keys in here.items():
        if name in there and there[name] != keys:
            raise CheckpointError(
                f"{made}: of {name} {common['optimizer']} keeps {_names(there[name])} there, and {named} keeps"
                f" {_names(keys)}; {remedy}"
            )
    keeps = next((name for name, keys in here.items() if keys), None)
    if keeps is not None and manifest.step > 0 and not set(here) & set(there):
        raise CheckpointError(
            f"{made}: {common['optimizer']} keeps nothing there, and {named} keeps {_names(here[keeps])} of {keeps};"
            f" {remedy}"
        )
    if len(common["groups"]) != num_groups:
        raise CheckpointError(
            f"{made}: it has {len(common['groups'])} parameter groups there and {num_groups} here; {remedy}"
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _names(keys: Set[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"
