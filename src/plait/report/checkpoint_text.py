"""The contents of a checkpoint as text."""

from __future__ import annotations

import datetime

from plait.engine.checkpoint.checkpoint_folders import INSIDE, checkpoints, damages, newest
from plait.engine.checkpoint.compatibility import MODEL, STATE
from plait.engine.checkpoint.manifest import Manifest
from plait.engine.checkpoint.storage import Folder, folder_of
from plait.errors import CheckpointError


def describe_checkpoint(path: str) -> str:
    """The newest checkpoint at `path` as text: step, plan, files, and each tensor's name, shape, dtype and bytes.

    Raises CheckpointError if there is none.
    """
    folder = newest(path)
    manifest = Manifest.read(folder)
    when = datetime.datetime.fromtimestamp(manifest.saved_at).astimezone().isoformat(" ", "seconds")
    lines = [
        str(folder),
        f"step {manifest.step}, saved {when} under the plan {manifest.plan or 'one device'}",
        f"{_size(sum(entry.bytes for entry in manifest.files.values()))} in {len(manifest.files)} files:",
        *(f"  {name}  {_size(entry.bytes)}  crc32 {entry.crc32:08x}" for name, entry in manifest.files.items()),
    ]
    for title, prefix in (("model", MODEL), ("optimizer", STATE)):
        names = sorted(name for name in manifest.tensors if name.startswith(prefix))
        total = sum(manifest.num_bytes(name) for name in names)
        kind = f" ({manifest.values['common'].get('optimizer', '')})" if prefix == STATE else ""
        lines += [f"{title}{kind}: {len(names)} tensors, {_size(total)}", *_table(manifest, names, prefix)]
    return "\n".join(lines)


def verify_checkpoints(path: str) -> list[str]:
    """Read every checkpoint at `path` whole. Returns a line for each; CheckpointError names all damaged files."""
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
        good.append(f"{one}: {len(files)} files, {_size(total)}, every checksum is right")
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


def _size(num_bytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"
