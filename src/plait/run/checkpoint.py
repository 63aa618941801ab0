"""Checkpoints: a folder of the last two, each written aside and then renamed, so that a killed save hides nothing.

    runs/gpt/checkpoints/step-00000200/{manifest.json, rest.pt, .metadata, __0_0.distcp, __1_0.distcp}

Tensors are written by torch.distributed.checkpoint, each rank its own part, and read back under any plan; everything
else is in rest.pt. On several machines the folder must be one that all of them see.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.comm.protocol import World
from plait.errors import CheckpointError
from plait.run.manifest import NAME, Manifest, file_entry

# torch.distributed.checkpoint takes a second to import, which a look at the manifests should not cost: it is imported
# where tensors are moved.
KEEP = 2
_PREFIX = "step-"


def save(
    path: str | Path, state: Mapping[str, Any], *, world: World, plan: str, extra: Mapping[str, Any] | None = None
) -> Path:
    """Write `state` (nested dicts; `state["step"]` is the step) as the newest checkpoint of the folder `path`.

    Every rank calls it with the same structure. `extra` is JSON-like. Older checkpoints but the last one are removed.
    Returns the new checkpoint's folder. CheckpointError says what kept it from being written.
    """
    tensors, rest = _split(state)
    step = int(state["step"])
    final = Path(path) / f"{_PREFIX}{step:08d}"
    aside = final.with_name(f".saving-{final.name}")

    def start() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    def finish() -> None:
        torch.save(rest, aside / "rest.pt")
        files = {file.name: file_entry(file) for file in sorted(aside.iterdir())}
        shapes = {name: (list(t.shape), _dtype(t)) for name, t in tensors.items()}
        Manifest(step, plan, time.time(), files, shapes, dict(extra or {})).write(aside)
        _replace(aside, final)
        for old in checkpoints(path)[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)

    what = f"the checkpoint {final} was not written"
    _on_first_rank(world, start, what)
    if _in_parts(tensors):
        _together(world, lambda: _write(tensors, aside, alone=False), what)
    else:
        _on_first_rank(world, lambda: _write(tensors, aside, alone=True), what)
    _on_first_rank(world, finish, what)
    return final


def load(path: str | Path, state: dict[str, Any], *, world: World) -> dict[str, Any]:
    """Read the newest checkpoint of the folder `path`, or the checkpoint `path` itself, into `state`; returns `extra`.

    `state` is changed in place: its tensors are filled, of whatever plan they are, and its other values replaced.
    Every file is checked before anything is read, and names and shapes before anything is changed.
    """
    _on_first_rank(world, lambda: check(path), "")
    folder = newest(path)
    manifest = Manifest.read(folder)
    tensors, _ = _split(state)
    _check_same(tensors, manifest, folder)
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as read

    reader = FileSystemReader(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read(tensors, storage_reader=reader, no_dist=not _in_parts(tensors))
    rest = torch.load(folder / "rest.pt", weights_only=True)
    _fill(state, tensors, rest)
    return manifest.extra


def check(path: str | Path) -> Manifest:
    """The manifest of the checkpoint that `load` would read, after checking every file of it; needs no model."""
    folder = newest(path)
    manifest = Manifest.read(folder)
    manifest.check_files(folder)
    return manifest


def newest(path: str | Path) -> Path:
    """`path` if it is a checkpoint, or else the last one that was saved into it."""
    path = Path(path)
    if (path / NAME).exists() or path.name.startswith(_PREFIX):
        if not path.is_dir():
            raise CheckpointError(f"there is no checkpoint {path}")
        return path
    found = checkpoints(path)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {path}; one is a folder named {_PREFIX}NUMBER")
    return found[-1]


def checkpoints(path: str | Path) -> list[Path]:
    """The checkpoints in the folder `path`, in the order in which they were saved."""

    def age(folder: Path) -> tuple[float, str]:
        manifest = folder / NAME
        return (manifest.stat().st_mtime if manifest.exists() else folder.stat().st_mtime, folder.name)

    path = Path(path)
    return sorted((p for p in path.glob(f"{_PREFIX}*") if p.is_dir()), key=age) if path.is_dir() else []


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested dicts by its path; a dict is gone into only if all its keys are text."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value and all(isinstance(k, str) for k in value):
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _split(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    leaves = dict(_leaves(state))
    tensors = {name: value for name, value in leaves.items() if torch.is_tensor(value)}
    return tensors, {name: value for name, value in leaves.items() if name not in tensors}


def _fill(tree: dict[str, Any], tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
    for name, value in [*tensors.items(), *rest.items()]:
        node = tree
        *path, key = name.split("/")
        for part in path:
            node = node.setdefault(part, {})
        node[key] = value


def _check_same(tensors: Mapping[str, Tensor], manifest: Manifest, folder: Path) -> None:
    made = f"the checkpoint {folder} was made by another model or optimizer"
    if missing := sorted(set(tensors) - set(manifest.tensors)):
        raise CheckpointError(f"{made}: it lacks {_few(missing)}")
    if extra := sorted(name for name in set(manifest.tensors) - set(tensors) if name.startswith("model/")):
        raise CheckpointError(f"{made}: it has {_few(extra)}, which this model has not")
    for name, tensor in tensors.items():
        shape, dtype = manifest.tensors[name]
        if list(tensor.shape) != shape:
            raise CheckpointError(f"{made}: {_plain(name)} has shape {shape} there and {list(tensor.shape)} here")
        if _dtype(tensor) != dtype:
            raise CheckpointError(f"{made}: {_plain(name)} is {dtype} there and {_dtype(tensor)} here")


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(_plain(name) for name in names[:3]) + more


def _plain(name: str) -> str:
    return name.removeprefix("model/")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _write(tensors: dict[str, Tensor], folder: Path, alone: bool) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as write

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write(tensors, storage_writer=FileSystemWriter(folder), no_dist=alone)


def _replace(aside: Path, final: Path) -> None:
    """Give the folder its name; one of that name from before is out of the way only for the rename."""
    old = final.with_name(f".old-{final.name}")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    aside.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _in_parts(tensors: Mapping[str, Tensor]) -> bool:
    """Whether each rank writes its own part; where ranks are threads the tensors are whole and rank 0 writes them."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def _on_first_rank(world: World, work: Callable[[], object], what: str) -> None:
    """Do `work` on rank 0; every rank goes on after it, or raises what it raised."""
    _together(world, work if world.rank == 0 else lambda: None, what)


def _together(world: World, work: Callable[[], object], what: str) -> None:
    """Do `work` on every rank; if any fails, every rank raises CheckpointError with the message of the first."""
    message = b""
    try:
        work()
    except Exception as error:
        plain = isinstance(error, CheckpointError)
        message = (str(error) if plain else f"{what}: {type(error).__name__}: {error}").encode()[:1000]
    sent = torch.zeros(1000, dtype=torch.uint8, device=world.device)
    sent[: len(message)] = torch.tensor(list(message), dtype=torch.uint8)
    for row in world.everyone().all_gather(sent).wait().cpu():
        if text := bytes(row.tolist()).rstrip(b"\0").decode(errors="replace"):
            raise CheckpointError(text)
