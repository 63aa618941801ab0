"""The contents of a checkpoint as text."""

from __future__ import annotations

import datetime

from plait.cost.memory_model import human_bytes
from plait.engine.checkpoint.checkpoint_folders import INSIDE, checkpoints, damages, newest
from plait.engine.checkpoint.manifest import MODEL, STATE, Manifest
from plait.engine.checkpoint.storage import Folder, folder_of
from plait.errors import CheckpointError


def describe_checkpoint(path: str) -> str:
    """The newest checkpoint at `path` as text: step, plan, files, and the name, shape, dtype and bytes of each tensor.

    Raises CheckpointError if there is no checkpoint.
    """
    folder = newest(path)
    manifest = Manifest.read(folder)
    when = datetime.datetime.fromtimestamp(manifest.saved_at).astimezone().isoformat(" ", "seconds")
    lines = [
        str(folder),
        f"step {manifest.step}, saved {when} under the plan {manifest.plan or 'one device'}",
        f"{human_bytes(sum(entry.bytes for entry in manifest.files.values()))} in {len(manifest.files)} files:",
        *(f"  {name}  {human_bytes(entry.bytes)}  crc32 {entry.crc32:08x}" for name, entry in manifest.files.items()),
    ]
    for title, prefix in (("model", MODEL), ("optimizer", STATE)):
        names = sorted(name for name in manifest.tensors if name.startswith(prefix))
        total = sum(manifest.num_bytes(name) for name in names)
        kind = f" ({manifest.values['common'].get('optimizer', '')})" if prefix == STATE else ""
        lines += [f"{title}{kind}: {len(names)} tensors, {human_bytes(total)}", *_table(manifest, names, prefix)]
    return "\n".join(lines)


def verify_checkpoints(path: str) -> list[str]:
    """Read every checkpoint at `path` whole. Returns a line of text for each. Raises CheckpointError, which names all
    damaged files, if there are any."""
    folder = folder_of(path)
    found: list[Folder] = checkpoints(folder) or checkpoints(folder.child(INSIDE)) or [newest(path)]
    good: list[str] = []
    bad: list[str] = []
    for one in found:
        if wrong := damages(one):
            bad += wrong
            continue
        files = Manifest.read(one).files
        total = sum(entry.bytes for entry in files.values())
        good.append(f"{one}: {len(files)} files, {human_bytes(total)}, every checksum is right")
    if bad:
        raise CheckpointError("\n".join([*bad, *good]))
    return good


def _table(manifest: Manifest, names: list[str], prefix: str) -> list[str]:
    rows = []
    for name in names:
        shape, dtype = manifest.tensors[name]
        rows.append((name.removeprefix(prefix), str(list(shape)), dtype, f"{manifest.num_bytes(name):,}"))
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    return [
        f"  {name:<{widths[0]}}  {shape:<{widths[1]}}  {dtype:<{widths[2]}}  {size:>{widths[3]}}"
        for name, shape, dtype, size in rows
    ]
