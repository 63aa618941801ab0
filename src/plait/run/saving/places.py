"""Where checkpoints are: the folders of a run, oldest first. Needs no torch."""

from __future__ import annotations

import re

from plait.errors import CheckpointError
from plait.run.saving.manifest import NAME, saved_at
from plait.run.saving.storage import Folder, Location, folder_of

_NAMED = re.compile(r"step-\d{8,}")
INSIDE = "checkpoints"  # where `plait train` keeps them within train.out


def newest(path: Location) -> Folder:
    """`path` if it is a checkpoint, or else the last one that was saved into it, or into its folder `checkpoints`."""
    folder = folder_of(path)
    if NAME in folder.names():
        return folder
    if _NAMED.fullmatch(folder.name):
        what = f"it has no {NAME}, so it was not finished, or is damaged" if folder.names() else "there is nothing"
        raise CheckpointError(f"there is no checkpoint {folder}: {what}")
    found = checkpoints(folder) or checkpoints(folder.child(INSIDE))
    if not found:
        started = folders(folder) or folders(folder.child(INSIDE))
        why = f"it has no {NAME}, so it was not finished, or is damaged"
        more = f", and {started[-1].name} is none: {why}" if started else ""
        raise CheckpointError(f"there is no checkpoint in {folder}; one is a folder named step-NUMBER{more}")
    return found[-1]


def has_checkpoints(path: Location) -> bool:
    """Whether `newest` finds something there, be it damaged."""
    folder = folder_of(path)
    return NAME in folder.names() or bool(
        _NAMED.fullmatch(folder.name) or folders(folder) or folders(folder.child(INSIDE))
    )


def checkpoints(path: Location | Folder) -> list[Folder]:
    """The checkpoints in a folder, in the order in which they were saved; a damaged one counts as the newest."""
    ages = []
    for folder in folders(path):
        if folder.size(NAME) is not None:
            saved = saved_at(folder)
            ages.append((float("inf") if saved is None else saved, folder.name, folder))
    return [folder for _, _, folder in sorted(ages, key=lambda age: age[:2])]


def own_folders(path: Location | Folder) -> list[Folder]:
    """Those that lie there themselves: one that is only linked from there is for reading."""
    return [folder for folder in folders(path) if not folder.is_link()]


def folders(path: Location | Folder) -> list[Folder]:
    """All that are named like a checkpoint, whether or not they are one."""
    folder = folder_of(path) if isinstance(path, str) or hasattr(path, "__fspath__") else path
    return [folder.child(name) for name in folder.names() if _NAMED.fullmatch(name)]


def older_than(folder: Folder) -> str:
    """What to do about a checkpoint that does not load, as the end of a sentence."""
    parent = str(folder).rpartition("/")[0]
    others = [one for one in checkpoints(parent) if one.name != folder.name] if parent else []
    return f"; load an older one, {others[-1]}" if others else ""
