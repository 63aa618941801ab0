"""The manifest of a checkpoint: what it holds, where each part of a tensor is stored, and the checksums of every
file.

It is written last, so a folder with a manifest is a complete checkpoint. Whether the checkpoint fits a run is checked
before anything is changed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from plait.engine.checkpoint.json_values import (
    Count,
    Extents,
    FileName,
    FiniteFloat,
    Strict,
    Text,
    check_values,
    checked,
    read_json,
)
from plait.engine.checkpoint.safetensor import Dtype, first_overlap, fits_memory, item_bytes
from plait.engine.checkpoint.storage import Folder
from plait.engine.slices import TensorSlice
from plait.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 2
BLOCK = 8 << 20  # bytes per checksum, so that a rank can verify only what it reads

_POLYNOMIAL = 0xEDB88320  # of CRC-32
_ONE = 1 << 31  # the polynomial 1


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint.

    bytes    its size
    blocks   the CRC-32 of each block
    tensors  {name: (start in the whole tensor, shape, first byte)} of the parts in it
    """

    bytes: int
    blocks: tuple[int, ...]
    tensors: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]]

    @property
    def crc32(self) -> int:
        """The CRC-32 of the whole file, as any tool computes it."""
        return combine_crcs(self.blocks, BLOCK, self.bytes)

    def plain(self) -> dict[str, object]:
        """The entry as JSON values."""
        return {"bytes": self.bytes, "crc32": "".join(f"{crc:08x}" for crc in self.blocks), "tensors": self.tensors}

    @classmethod
    def of(cls, plain: Mapping[str, object]) -> FileEntry:
        """The inverse of `plain`. Raises CheckpointError for an invalid entry."""
        return checked(_FILE, plain, "the record of a file").entry()


class _File(Strict):
    bytes: Count
    crc32: Annotated[Text, Field(pattern=r"^([0-9a-f]{8})*$")]
    tensors: dict[Text, tuple[Extents, Extents, Count]]

    def entry(self) -> FileEntry:
        crcs = tuple(int(self.crc32[i : i + 8], 16) for i in range(0, len(self.crc32), 8))
        return FileEntry(self.bytes, crcs, self.tensors)


class _Values(Strict):
    common: dict[Text, Any]
    own: dict[Text, Any]


class _Manifest(Strict):
    format: Count
    step: Count
    plan: Text
    saved_at: FiniteFloat
    tensors: dict[Text, tuple[Extents, Dtype]]
    files: dict[FileName, _File]
    values: _Values


_FILE, _MANIFEST = TypeAdapter(_File), TypeAdapter(_Manifest)


@dataclass(frozen=True)
class StoredPart:
    """Where a part of a tensor is stored: the file, the first byte in it, and the block of the tensor."""

    file: str
    offset: int
    block: TensorSlice


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint.

    saved_at  seconds since 1970
    tensors   (shape, dtype) by name
    files     the entry of each file
    values    everything that is not a tensor
    """

    step: int
    plan: str
    saved_at: float
    tensors: dict[str, tuple[tuple[int, ...], str]]
    files: dict[str, FileEntry]
    values: dict[str, Any]
    format: int = FORMAT

    def num_bytes(self, name: str) -> int:
        """The size of a tensor in bytes."""
        shape, dtype = self.tensors[name]
        return math.prod(shape) * item_bytes(dtype)

    def parts(self) -> dict[str, list[StoredPart]]:
        """The stored parts of each tensor, which together are the whole tensor."""
        found: dict[str, list[StoredPart]] = {name: [] for name in self.tensors}
        for file, entry in self.files.items():
            for name, (start, shape, at) in entry.tensors.items():
                found[name].append(StoredPart(file, at, TensorSlice(start, shape)))
        return found

    def write(self, folder: Folder) -> None:
        """Write the manifest into `folder`, atomically."""
        files = {name: entry.plain() for name, entry in self.files.items()}
        plain = {key: value for key, value in vars(self).items() if key != "files"} | {"files": files}
        body = json.dumps(plain, sort_keys=True, separators=(",", ":"))
        outer = {"saved_at": self.saved_at, "sha256": _digest(body), "body": body}
        folder.put(NAME, [json.dumps(outer).encode()])

    @classmethod
    def read(cls, folder: Folder) -> Manifest:
        """Read the manifest of a checkpoint folder. Raises CheckpointError if it is missing, altered or of another
        format."""
        try:
            text = folder.read(NAME)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{folder} is no checkpoint: it has no {NAME}") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {folder}/{NAME}: {error.strerror or error}") from None
        where = f"{folder}/{NAME}"
        outer = read_json(text, f"{where} is damaged: it")
        body, expected = (outer.get("body"), outer.get("sha256")) if isinstance(outer, dict) else (None, None)
        if not isinstance(body, str) or not isinstance(expected, str):
            raise CheckpointError(f"{where} is damaged: it cannot be read")
        if (found := _digest(body)) != expected:
            raise CheckpointError(f"{where} is damaged: its text has sha256 {found}, not {expected}")
        plain = read_json(body, where)
        if isinstance(plain, dict) and plain.get("format") != FORMAT:
            raise CheckpointError(
                f"{folder} has format {plain.get('format')}; this version of plait reads format {FORMAT}"
            )
        form = checked(_MANIFEST, plain, where)
        files = {name: each.entry() for name, each in form.files.items()}
        manifest = cls(form.step, form.plan, form.saved_at, form.tensors, files, form.values.model_dump())
        manifest.check(where)
        return manifest

    def check(self, where: str) -> None:
        """Raise CheckpointError unless the parts cover each tensor exactly once, and are within their files without
        overlap."""
        found: dict[str, list[StoredPart]] = {name: [] for name in self.tensors}
        for name, (shape, dtype) in self.tensors.items():
            if not fits_memory(shape, dtype):
                raise CheckpointError(f"{where}: tensors.{name}: there is no tensor of shape {list(shape)}")
        for file, entry in self.files.items():
            if len(entry.blocks) != -(-entry.bytes // BLOCK):
                raise CheckpointError(f"{where}: files.{file}: its checksums are not those of {entry.bytes} bytes")
            ranges = []
            for name, (start, shape, at) in entry.tensors.items():
                what = f"{where}: files.{file}.tensors.{name}"
                if name not in found:
                    raise CheckpointError(f"{what}: the checkpoint has no such tensor")
                whole, dtype = self.tensors[name]
                inside = len(start) == len(shape) == len(whole)
                if not inside or any(a + n > of for a, n, of in zip(start, shape, whole, strict=True)):
                    raise CheckpointError(f"{what}: it does not lie within the shape {list(whole)}")
                ranges.append((at, at + math.prod(shape) * item_bytes(dtype), name))
                if ranges[-1][1] > entry.bytes:
                    raise CheckpointError(f"{what}: it does not lie within the file's {entry.bytes} bytes")
                found[name].append(StoredPart(file, at, TensorSlice(start, shape)))
            if twice := first_overlap(ranges):
                raise CheckpointError(f"{where}: files.{file}.tensors.{twice}: its bytes are also another tensor's")
        for name, (shape, _) in self.tensors.items():
            missing = math.prod(shape) - sum(part.block.num_elements for part in found[name])
            if missing > 0:
                raise CheckpointError(f"{where}: tensors.{name}: {missing} elements of it are in no file")
            if missing < 0 or _any_overlap([part.block for part in found[name]]):
                raise CheckpointError(f"{where}: tensors.{name}: some elements of it are there twice")
        check_values(self.values, "values", self.tensors, where)


def saved_at(folder: Folder) -> float | None:
    """When a checkpoint was saved, from the start of its manifest; None if that cannot be read."""
    start = bytearray(100)
    try:
        folder.read_into(NAME, 0, memoryview(start))
    except OSError:
        return None
    found = re.match(rb'\{"saved_at": ([0-9]{1,20}(?:\.[0-9]{1,20})?),', start)
    return float(found[1]) if found else None


def _any_overlap(blocks: list[TensorSlice]) -> bool:
    """Whether two of the blocks overlap. Sweeps along the dim with the most different starts."""
    blocks = [block for block in blocks if block.num_elements]
    if len(blocks) < 2:
        return False
    num_dims = len(blocks[0].start)
    dim = max(range(num_dims), key=lambda d: len({block.start[d] for block in blocks}), default=None)
    if dim is None:
        return True  # 0-d tensors
    blocks.sort(key=lambda block: block.start[dim])
    reach: list[TensorSlice] = []
    for block in blocks:
        reach = [other for other in reach if other.start[dim] + other.shape[dim] > block.start[dim]]
        if any(other.overlap(block) for other in reach):
            return True
        reach.append(block)
    return False


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def combine_crcs(crcs: Sequence[int], block: int, size: int) -> int:
    """The CRC-32 of `size` bytes, from the CRCs of their blocks of `block` bytes, of which the last may be shorter.

    The CRC of two texts end to end is crc(a) * x^(8 len(b)) + crc(b), in polynomials over bits modulo the CRC-32
    polynomial (Adler's crc32_combine in zlib). A polynomial is an integer whose highest bit is the lowest power.
    """
    total = 0
    for index, crc in enumerate(crcs):
        num = min(block, size - index * block)
        total = _times(_shift(num), total) ^ crc
    return total


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo the CRC-32 polynomial."""
    product, bit = 0, _ONE
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product


@functools.lru_cache(maxsize=64)
def _shift(num_bytes: int) -> int:
    """x to the power of 8 num_bytes."""
    result, square, exponent = _ONE, _ONE >> 1, 8 * num_bytes
    while exponent:
        if exponent & 1:
            result = _times(result, square)
        square = _times(square, square)
        exponent >>= 1
    return result


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
