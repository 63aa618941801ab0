"""Exports a checkpoint's weights as safetensors files in the layout of Hugging Face, for other tools to load.

The result is one file, or a folder with model.safetensors, or with model-00001-of-00003.safetensors and so on and an
index. A tied tensor is stored once, under its first name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

import torch

from plait.engine.checkpoint.checkpoint_folders import check_files, newest
from plait.engine.checkpoint.manifest import MODEL, Manifest, saved_model
from plait.engine.checkpoint.safetensor import write_header
from plait.engine.checkpoint.source import INDEX, SINGLE, Source, Wanted
from plait.engine.checkpoint.storage import Folder, Location, folder_of
from plait.engine.slices import Fragment, TensorSlice
from plait.errors import CheckpointError

SHARD_BYTES = 5 << 30
CONFIG = "config.json"


def export_weights(path: Location, out: Location, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Write the weights of a checkpoint to `out`, a file name that ends in .safetensors or a folder. Returns the
    files' names.

    In a folder, no file is larger than `shard_bytes`, except one that holds a single tensor; the model's config.json is
    written too, if the checkpoint has one. Needs memory for one tensor. Raises CheckpointError, which names a file that
    is damaged or cannot be written.
    """
    folder = newest(path)
    manifest = check_files(folder)
    source = Source.checkpoint(folder, manifest)
    source.check({MODEL + name: _all_of(shape) for name, (shape, _) in saved_model(manifest).items()})
    text = os.fspath(out)
    if text.endswith(".safetensors"):
        parent, slash, name = text.rpartition("/")
        return _written(folder_of(parent or slash or "."), {name: list(saved_model(manifest))}, manifest, source)
    shards = _shards(manifest, shard_bytes)
    target = folder_of(out)
    written = _written(target, shards, manifest, source)
    if len(shards) > 1:
        total = sum(manifest.num_bytes(MODEL + name) for name in saved_model(manifest))
        names = {name: file for file, members in shards.items() for name in members}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        _put(target, INDEX, lambda: iter([json.dumps(index, indent=2).encode()]))
        written.append(f"{target}/{INDEX}")
    config = manifest.values["common"].get("model_config")
    if isinstance(config, str):
        _put(target, CONFIG, lambda: iter([config.encode()]))
        written.append(f"{target}/{CONFIG}")
    return written


def _shards(manifest: Manifest, shard_bytes: int) -> dict[str, list[str]]:
    """The names of the tensors in each file, in order."""
    groups: list[list[str]] = []
    room = 0
    for name in saved_model(manifest):
        size = manifest.num_bytes(MODEL + name)
        if not groups or size > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(name)
        room -= size
    if len(groups) <= 1:
        return {SINGLE: [name for group in groups for name in group]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def _written(target: Folder, files: dict[str, list[str]], manifest: Manifest, source: Source) -> list[str]:
    for file, names in files.items():
        _put(target, file, lambda names=names: _bytes(names, manifest, source))  # type: ignore[misc]
    return [f"{target}/{file}" for file in files]


def _bytes(names: list[str], manifest: Manifest, source: Source) -> Iterator[bytes | memoryview]:
    found = {name: manifest.tensors[MODEL + name] for name in names}
    ordered = sorted(found, key=lambda name: -getattr(torch, found[name][1]).itemsize)
    yield write_header([(name, found[name][1], found[name][0], (0,) * len(found[name][0])) for name in ordered])[0]
    for name in ordered:
        shape, dtype = found[name]
        whole = torch.empty(shape, dtype=getattr(torch, dtype))
        source.fill({MODEL + name: Wanted(_all_of(shape), whole)})
        yield whole.view(-1).view(torch.uint8).numpy().data


def _all_of(shape: tuple[int, ...]) -> tuple[Fragment, ...]:
    """The fragment that is the whole tensor; none for an empty tensor."""
    block = TensorSlice.whole(shape)
    return (Fragment(block, block.start),) if block.num_elements else ()


def _put(target: Folder, name: str, parts: Callable[[], Iterator[bytes | memoryview]]) -> None:
    try:
        target.make()
        target.put(name, parts())
    except OSError as error:
        raise CheckpointError(f"{target}/{name} was not written: {error.strerror or error}") from None
