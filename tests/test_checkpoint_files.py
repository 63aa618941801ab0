"""The files of checkpoints: who writes what, in which format; what is kept, what is named when it is damaged."""

from __future__ import annotations

import builtins
import json
import math
import resource
import zlib
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpointing import (
    on,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plait.engine.checkpoint import write
from plait.engine.checkpoint.checkpoint_folders import check_files, checkpoints, damages, newest
from plait.engine.checkpoint.json_values import decode, encode
from plait.engine.checkpoint.local_shards import LocalShard, pieces
from plait.engine.checkpoint.manifest import BLOCK, Manifest, combine_crcs
from plait.engine.checkpoint.safetensor import read_header
from plait.engine.checkpoint.storage import LocalFolder, folder_of
from plait.engine.checkpoint.write import Image
from plait.engine.local_tensors import lies_here, local_part
from plait.engine.slices import TensorSlice, copies, fragments
from plait.errors import CheckpointError
from plait.report.checkpoint_text import describe_checkpoint
from plait.spec.layout import Layout, Only, Shard
from plait.spec.mesh import Mesh

pytestmark = pytest.mark.xdist_group("checkpoints")  # trainers of tests/checkpointing.py share what is compiled

# ---- what a rank holds, and who writes it


AXES = ["a", "b", "c"]


@st.composite
def laid_out(draw: Any) -> tuple[Layout, Mesh]:
    """Layouts as plans make them: block by block only where that divides, uneven only as the last cut of a dim."""
    mesh = Mesh(tuple((axis, draw(st.integers(1, 3))) for axis in AXES))
    shape = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 3)))]
    placements: list[tuple[str, Any]] = []
    for axis in draw(st.permutations(AXES)):
        size, kind = mesh.axis_size(axis), draw(st.sampled_from(["whole", "shard", "blocks", "uneven", "only"]))
        dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
        taken = [p for _, p in placements if isinstance(p, Shard) and p.dim == dim]
        if kind in ("shard", "blocks") and shape and not any(p.blocks > 1 for p in taken):
            blocks = 1 if kind == "shard" or taken else 2
            shape[dim] *= size * blocks
            placements.append((axis, Shard(dim, blocks)))
        elif kind == "uneven" and shape and not taken:
            shape[dim] += 1
            placements.append((axis, Shard(dim)))
        elif kind == "only":
            placements.append((axis, Only(draw(st.integers(0, size - 1)))))
    # an uneven cut must stay the only one of its dim
    uneven = {p.dim for a, p in placements if isinstance(p, Shard) and shape[p.dim] % (mesh.axis_size(a) * p.blocks)}
    cuts = Counter(p.dim for _, p in placements if isinstance(p, Shard))
    kept = [(a, p) for a, p in placements if not isinstance(p, Shard) or cuts[p.dim] == 1 or p.dim not in uneven]
    return Layout("float32", tuple(shape), tuple(kept)), mesh


class _World:
    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank = mesh, rank


@given(laid_out())
def test_fragments_are_the_local_part_and_every_element_has_one_writer(case: tuple[Layout, Mesh]) -> None:
    layout, mesh = case
    whole = torch.arange(math.prod(layout.shape), dtype=torch.float32).view(layout.shape)
    written = torch.zeros_like(whole)
    for rank in range(mesh.size):
        world: Any = _World(mesh, rank)
        here = mesh.coordinates(rank)
        found = fragments(layout, mesh, here)
        if not lies_here(layout, world):
            assert found == ()
            continue
        local = local_part(whole, layout, world)
        assert sum(fragment.block.num_elements for fragment in found) == local.numel()
        for fragment in found:
            assert torch.equal(local[fragment.slices], whole[fragment.block.within(TensorSlice.whole(layout.shape))])
        for layer in pieces("x", LocalShard.laid_out(local, layout, world)):
            for piece in layer:
                written[piece.block.within(TensorSlice.whole(layout.shape))] += 1
                assert torch.equal(piece.take(), whole[piece.block.within(TensorSlice.whole(layout.shape))])
    assert torch.equal(written, torch.ones_like(written))


def test_those_who_hold_the_same_share_the_writing() -> None:
    whole = torch.randn(50_000)
    mesh = Mesh((("data", 3), ("tensor", 2)))
    layout = Layout("float32", (50_000,), (("tensor", Shard(0)),))
    sizes = []
    for rank in range(mesh.size):
        world: Any = _World(mesh, rank)
        assert copies(layout, mesh, mesh.coordinates(rank)) == (3, rank // 2)
        (layer,) = pieces("x", LocalShard.laid_out(local_part(whole, layout, world), layout, world))
        sizes.append(layer[0].block.num_elements)
    assert sizes == [8334] * 4 + [8332] * 2


# ---- values, checksums, files


def test_values_come_back_with_their_types() -> None:
    value = {
        "numbers": [0.1, 1e-310, -0.0, math.inf, 3, 2**80, True, False, None],
        "tuple": (0.9, (0.999,), []),
        "keys": {30: 0.1, (1, 2): "x", None: 1},
        "marked": {"$": "tuple", "of": [1]},
        "kinds": [{1, 2}, frozenset({3}), b"\x00\xff", Counter({30: 1, 60: 2}), OrderedDict(b=1, a=2)],
        "numpy": [np.float32(0.5), np.int64(7), np.float64(0.1), np.bool_(True)],
        "tensor": [torch.tensor(0.25), {"x": torch.arange(3)}],
    }
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, "v", tensors.__setitem__))
    found = decode(json.loads(text), tensors.__getitem__)
    assert set(tensors) == {"v/tensor/0", "v/tensor/1/x"}
    assert found.pop("tensor")[0] == 0.25 and value.pop("tensor")
    assert found.pop("numpy") == [0.5, 7, 0.1, True] and value.pop("numpy")
    assert repr(found) == repr(value)
    assert math.copysign(1, found["numbers"][2]) == -1
    with pytest.raises(CheckpointError, match="v/f is a builtins.function, which a checkpoint does not keep"):
        encode({"f": test_values_come_back_with_their_types}, "v", tensors.__setitem__)


@given(st.binary(max_size=400), st.integers(1, 100))
def test_the_checksum_of_a_file_from_those_of_its_blocks(data: bytes, block: int) -> None:
    crcs = [zlib.crc32(data[i : i + block]) for i in range(0, len(data), block)]
    assert combine_crcs(crcs, block, len(data)) == zlib.crc32(data)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8,
          torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]  # fmt: skip


def state_of(step: int, value: float = 1.0) -> write.State:
    """Tensors of every type, one of them longer than a block; rank 0's only."""
    tensors = {f"model/{dtype}": torch.full((3, 5), value).to(dtype) for dtype in DTYPES}
    tensors |= {
        "model/scalar": torch.tensor(value),
        "model/none": torch.zeros(0, 4),
        "model/long": torch.rand(3_000_001),
    }
    tensors["model/turned"] = torch.rand(6, 4).t()
    values = {"step": step, "optimizer": "", "groups": [{"lr": torch.tensor(value), "betas": (0.9, 0.999)}]}
    return write.State({name: LocalShard.whole(tensor) for name, tensor in tensors.items()}, values)


def save(path: Path | str, step: int, keep: int = 2, num_ranks: int = 1) -> write.State:
    state = state_of(step, float(step))
    rest = write.State({}, state.values)

    def run(world: Any) -> None:
        mine = state if world.rank == 0 else rest
        write.save(path, mine, world=world, plan="data=2", keep=keep)

    on(f"data={num_ranks}", run)
    return state


def test_files_are_safetensors_that_others_read(tmp_path: Path) -> None:
    from safetensors import safe_open

    state = save(tmp_path, 3)
    folder = newest(tmp_path)
    (name,) = Manifest.read(folder).files
    assert Manifest.read(folder).files[name].crc32 == zlib.crc32((tmp_path / "step-00000003" / name).read_bytes())
    with safe_open(tmp_path / "step-00000003" / name, framework="pt") as file:
        assert set(file.keys()) == state.tensors.keys() - {"model/none"} | {"values/groups/0/lr"}
        for key, shard in state.tensors.items():
            if key != "model/none":
                assert same_bits(file.get_tensor(key), shard.data)


def same_bits(a: Tensor, b: Any) -> bool:
    plain = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*plain)


# ---- keeping, killing, failing


def test_keeps_the_last_saved(tmp_path: Path) -> None:
    def names() -> list[str]:
        return [folder.name[-2:] for folder in checkpoints(tmp_path)]

    for step in (30, 40, 10):
        save(tmp_path, step)
    assert names() == ["40", "10"]
    save(tmp_path, 10)
    assert names() == ["40", "10"]
    save(tmp_path, 50, keep=4)
    save(tmp_path, 60, keep=4, num_ranks=2)
    assert names() == ["40", "10", "50", "60"]
    save(tmp_path, 70, keep=1)
    assert names() == ["70"]
    with pytest.raises(CheckpointError, match="keep=0: at least one"):
        save(tmp_path, 80, keep=0)


def test_what_a_killed_save_leaves_hides_nothing_and_goes_away(tmp_path: Path) -> None:
    save(tmp_path, 1)
    good = {path.name for path in (tmp_path / "step-00000001").iterdir()}
    for folder in ("step-00000001", "step-00000002"):  # one of the same step, one of another
        (tmp_path / folder).mkdir(exist_ok=True)
        for name in ("part-00000-1234abcd.safetensors", ".manifest.json.aside", "record-00000-1234abcd.json"):
            (tmp_path / folder / name).write_bytes(b"half")
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "notes.txt").write_text("mine")
    assert newest(tmp_path).name == "step-00000001"
    with pytest.raises(CheckpointError, match="step-00000002: it has no manifest.json, so it was not finished"):
        newest(tmp_path / "step-00000002")
    save(tmp_path, 4)
    assert {path.name for path in (tmp_path / "step-00000001").iterdir()} == good
    assert not (tmp_path / "step-00000002").exists()
    assert (tmp_path / "step-00000003" / "notes.txt").exists()
    assert check_files(newest(tmp_path)).step == 4


def test_a_full_disk_is_named_and_leaves_the_last_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK + 4096 * 3, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step-00000002 was not written: .*/part-00000-.*: File too large"):
            save(tmp_path, 2, num_ranks=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "step-00000002").iterdir())
    assert check_files(newest(tmp_path)).step == 1 and damages(newest(tmp_path)) == []
    save(tmp_path, 2)
    assert check_files(newest(tmp_path)).step == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"step-00000002 was not written: .*file.*: Not a directory"):
        save(tmp_path / "file" / "run", 2, num_ranks=2)


def test_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        newest(tmp_path / "none")
    with pytest.raises(CheckpointError, match="there is no checkpoint .*step-00000009"):
        newest(tmp_path / "step-00000009")


def test_an_older_format_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = newest(tmp_path)
    manifest = Manifest.read(folder)
    Manifest(**{**vars(manifest), "format": 1}).write(folder)
    with pytest.raises(CheckpointError, match="has format 1; this version of plait reads format 2"):
        Manifest.read(folder)


# ---- elsewhere


def test_a_url_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name == "fsspec":
            raise ImportError(name)
        return original(name, *arguments)

    with pytest.raises(CheckpointError, match="nowhere://x cannot be used: .*nowhere"):
        folder_of("nowhere://x")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CheckpointError, match=r"s3://bucket/run needs fsspec: pip install 'plait\[fsspec\]'"):
        folder_of("s3://bucket/run")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (1 << 20).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"[1,]",
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(60),
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"F31","shape":[0],"data_offsets":[0,0]}}'.ljust(60),
    ],
)
def test_a_header_that_lies_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="x is no whole safetensors file"):
        read_header("x", len(data), lambda offset, num: data[offset : offset + num])


def test_show(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 12)
    text = describe_checkpoint(str(tmp_path))
    for part in ("step-00000012", "step 12, saved 20", "under the plan data=2", "11.4 MiB in 1 files", "crc32 "):
        assert part in text
    assert "long" in text and "[3000001]" in text and "12,000,004" in text
    assert isinstance(newest(tmp_path), LocalFolder) and newest(tmp_path).path.parent.name == "checkpoints"


def test_a_folder_that_is_gone_in_the_middle_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"

    def gone(*given: Any) -> Any:
        (folder / "step-00000002").rename(tmp_path / "elsewhere")
        (folder / "step-00000002").write_text("")
        raise NotADirectoryError(20, "Not a directory")

    monkeypatch.setattr(Image, "write", gone)
    with pytest.raises(CheckpointError, match=r"step-00000002 was not written: .*/part-.*: Not a directory; earlier"):
        save(folder, 2)
