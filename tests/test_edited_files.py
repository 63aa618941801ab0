"""Checkpoints and weights that somebody has edited: refused with file and field, and nothing else is touched."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import lr_scheduler

import plait
from plait.engine.checkpoint.checkpoint_folders import newest
from plait.engine.checkpoint.manifest import Manifest
from plait.engine.checkpoint.plain_values import check_scheduler
from plait.engine.checkpoint.storage import folder_of
from plait.errors import CheckpointError, DataError
from plait.report.checkpoint_text import describe_checkpoint, verify_checkpoints

NUM_EDITS = 250


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.fixture(scope="module")
def trainer() -> plait.Trainer:
    torch.manual_seed(0)
    found = plait.Trainer(
        Two(), loss_fn, functools.partial(torch.optim.AdamW, lr=0.1),
        scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2),
    )  # fmt: skip
    found.step(torch.ones(2, 4))
    return found


@pytest.fixture(scope="module")
def good(trainer: plait.Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    extra = {"data": {"epoch": 0, "items": 2}, "kinds": [(1, 2), {1, 2}, b"x", {3: torch.ones(2)}]}
    trainer.save(folder, extra, wait=True)
    return folder / "step-00000001"


def body_of(folder: Path) -> Any:
    return json.loads(json.loads((folder / "manifest.json").read_text())["body"])


def sign(folder: Path, body: Any) -> None:
    """Write a manifest whose own checksum is right: what is edited is up to the schema to find."""
    text = body if isinstance(body, str) else json.dumps(body)
    outer = {"saved_at": 1.5, "sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text}
    (folder / "manifest.json").write_text(json.dumps(outer))


def refused(trainer: plait.Trainer, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        trainer.load(folder)
    return str(caught.value)


# ---- one edit each


def rename_file(body: Any, name: str) -> None:
    (old,) = body["files"]
    body["files"][name] = body["files"].pop(old)


def at(body: Any) -> Any:
    return next(iter(body["files"].values()))["tensors"]


EDITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a path": (lambda b: rename_file(b, "../x.safetensors"), "not the plain name of a file in the folder"),
    "an absolute path": (lambda b: rename_file(b, "/etc/passwd"), "not the plain name of a file in the folder"),
    "a hidden path": (lambda b: rename_file(b, ".."), "not the plain name of a file in the folder"),
    "no files": (lambda b: b.pop("files"), "files: Field required"),
    "another key": (lambda b: b.update(more=1), "more: Extra inputs are not permitted"),
    "a step as text": (lambda b: b.update(step="1"), "step: Input should be a valid integer"),
    "a step below zero": (lambda b: b.update(step=-1), "step: Input should be greater than or equal to 0"),
    "a huge step": (lambda b: b.update(step=2**80), "step: "),
    "no time": (lambda b: b.update(saved_at=float("nan")), "saved_at: Input should be a finite number"),
    "a dtype": (lambda b: b["tensors"]["model/first.weight"].__setitem__(1, "object"), "is not one of float64"),
    "a shape": (lambda b: b["tensors"]["model/first.weight"].__setitem__(0, [6, -4]), "tensors.model/first.weight.0.1"),
    "a vast shape": (lambda b: b["tensors"]["model/first.weight"].__setitem__(0, [2**61, 2**61]), "no tensor of shape"),
    "more rows": (lambda b: b["tensors"]["model/first.weight"].__setitem__(0, [7, 4]), "4 elements of it are in no"),
    "an offset below zero": (lambda b: at(b)["model/first.weight"].__setitem__(2, -8), "greater than or equal to 0"),
    "an offset beyond": (lambda b: at(b)["model/first.weight"].__setitem__(2, 1 << 40), "lie within the file's"),
    "a start beyond": (lambda b: at(b)["model/first.weight"].__setitem__(0, [1, 0]), "lie within the shape"),
    "the bytes of another": (
        lambda b: at(b)["model/first.weight"].__setitem__(2, at(b)["model/second.weight"][2]), "are also another"),
    "a tensor too many": (lambda b: at(b).update(x=[[0], [1], 0]), "tensors.x: the checkpoint has no such tensor"),
    "checksums": (lambda b: next(iter(b["files"].values())).update(crc32=""), "its checksums are not those of"),
    "a mark": (lambda b: b["values"]["common"].update(extra={"$": "os.system", "of": []}), "values.common.extra: it"),
    "a key": (lambda b: b["values"]["common"].update(extra={"$": "dict", "of": [[[], 1]]}), "extra: it is no dict"),
    "a tensor that is none": (
        lambda b: b["values"]["common"].update(extra={"$": "tensor", "name": "model/no"}), "no such tensor"),
    "no groups": (lambda b: b["values"]["common"].pop("groups"), "values.common: groups|groups: Field required"),
    "a rate as text": (lambda b: b["values"]["common"]["groups"][0].update(lr="0.1"), "the state has lr = '0.1'"),
    "a flag as a number": (
        lambda b: b["values"]["common"]["groups"][0].update(amsgrad=1), "values.common.groups.0.amsgrad: the state"),
    "a flag that is no number": (
        lambda b: b["values"]["common"]["groups"][0].update(differentiable=float("nan")), "groups.0.differentiable"),
    "a rate that is none": (lambda b: b["values"]["common"]["groups"][0].update(lr=None), "groups.0.lr"),
    "a huge rate": (lambda b: b["values"]["common"]["groups"][0].update(lr=10**30), "groups.0.lr"),
    "rates of a scheduler": (
        lambda b: b["values"]["common"]["scheduler"].update(base_lrs=[[]]), "values.common.scheduler.base_lrs cannot"),
    "too few rates": (lambda b: b["values"]["common"]["scheduler"].update(base_lrs=[]), "scheduler.base_lrs"),
    "an epoch": (lambda b: b["values"]["common"]["scheduler"].update(last_epoch="x"), "scheduler.last_epoch"),
    "a count": (lambda b: b["values"]["common"]["scheduler"].update(_step_count=None), "scheduler._step_count"),
    "a step of zero": (lambda b: b["values"]["common"]["scheduler"].update(step_size=0), "StepLR fails: ZeroDivision"),
    "a method": (lambda b: b["values"]["common"]["scheduler"].update(step=3), "scheduler.step cannot be taken over"),
    "a scheduler": (lambda b: b["values"]["common"].update(scheduler=[1]), "common.scheduler cannot be taken over"),
    "random numbers": (lambda b: b["values"]["own"].update({"random/0": 3}), "own.random/0 cannot be taken over"),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_manifest_is_refused_with_its_field(
    edit: str, trainer: plait.Trainer, good: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "step-00000001"))
    body = body_of(folder)
    change, part = EDITS[edit]
    change(body)
    sign(folder, body)
    message = refused(trainer, folder)
    assert str(folder) in message or "the state has" in message
    assert any(each in message for each in part.split("|")), message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"format": 2, "step": 1, "step": 2}', "the key 'step' is there twice"),
        ("[]", "manifest.json is not as plait reads it: it"),
        ("nothing", "cannot be read"),
        ("1" * 10_000, "cannot be read"),
    ],
)
def test_text_that_is_no_manifest(text: str, part: str, trainer: plait.Trainer, good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "step-00000001"))
    sign(folder, text)
    assert part in refused(trainer, folder)
    (folder / "manifest.json").write_text(text)
    assert "damaged" in refused(trainer, folder)


def test_values_that_are_nested_too_deeply_are_neither_kept_nor_read(
    trainer: plait.Trainer, good: Path, tmp_path: Path
) -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    with pytest.raises(CheckpointError, match="nested more than 100 deep"):
        trainer.save(tmp_path / "none", {"deep": deep})
    folder = Path(shutil.copytree(good, tmp_path / "step-00000001"))
    body = body_of(folder)
    body["values"]["common"]["extra"]["deep"] = deep
    sign(folder, body)
    assert "it is nested too deeply" in refused(trainer, folder)


# ---- many edits, drawn


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] + [found for key, item in inner for found in places(item, (*path, key))]


def edited(value: Any, draw: random.Random) -> Any:
    """A copy with one value replaced, removed, repeated, or under another name."""
    value = copy.deepcopy(value)
    path = draw.choice([path for path in places(value) if path])
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    last = path[-1]
    others = [None, True, -1, 0, 3, 2**63, 2**80, -(2**70), 1.5, float("nan"), float("inf"), "", "x", "../x", "/x", [],
              [[]], {}, {"$": "tuple"}, {"$": "tensor", "name": "x"}, {"$": "set", "of": [[]]}, [0] * 100]  # fmt: skip
    what = draw.random()
    if what < 0.6:
        holder[last] = draw.choice(others)
    elif what < 0.75:
        del holder[last]
    elif isinstance(holder, list):
        holder.insert(last, copy.deepcopy(holder[last]))
    else:
        holder[draw.choice(["", "x", "../x", "$", "of", *holder])] = holder.pop(last)
    return value


def test_whatever_is_edited_in_a_manifest_only_a_checkpoint_error_comes_of_it(
    trainer: plait.Trainer, good: Path, tmp_path: Path
) -> None:
    draw = random.Random(5)
    folder = Path(shutil.copytree(good, tmp_path / "step-00000001"))
    body, num_refused = body_of(folder), 0
    for _ in range(NUM_EDITS):
        sign(folder, edited(body, draw))
        for read in (trainer.load, trainer.load_weights, describe_checkpoint, verify_checkpoints):
            try:
                read(str(folder))
            except CheckpointError:
                num_refused += 1
    assert num_refused > NUM_EDITS
    trainer.load(good)


def test_whatever_bytes_are_changed_in_a_manifest_it_is_damaged(good: Path, tmp_path: Path) -> None:
    draw = random.Random(6)
    folder = Path(shutil.copytree(good, tmp_path / "step-00000001"))
    data = (folder / "manifest.json").read_bytes()
    for _ in range(NUM_EDITS):
        at = draw.randrange(len(data))
        (folder / "manifest.json").write_bytes(data[:at] + draw.randbytes(draw.randrange(4)) + data[at + 1 :])
        try:
            Manifest.read(folder_of(folder))
            newest(tmp_path)
        except CheckpointError:
            continue


@pytest.fixture
def weights(trainer: plait.Trainer, tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({name: value.contiguous() for name, value in trainer.full_state_dict().items()}, path)
    return path


def header_of(data: bytes) -> tuple[Any, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header: Any, rest: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


HEADERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "negative": (lambda h: h["first.bias"].update(data_offsets=[-24, 0]), "data_offsets.0: Input should be greater"),
    "backwards": (lambda h: h["first.bias"].update(data_offsets=[24, 0]), "does not take bytes 24 to 0"),
    "beyond": (lambda h: h["first.bias"].update(data_offsets=[10**6, 10**6 + 24]), "does not lie within it"),
    "overlapping": (
        lambda h: h["first.bias"].update(data_offsets=[x := h["first.weight"]["data_offsets"][0], x + 24]),
        "are also another tensor's",
    ),
    "another shape": (lambda h: h["first.bias"].update(shape=[7]), "does not take bytes"),
    "a vast shape": (lambda h: h["first.bias"].update(shape=[2**61, 2**61, 0]), "does not take bytes"),
    "another dtype": (lambda h: h["first.bias"].update(dtype="F64"), "does not take bytes"),
    "an unknown dtype": (lambda h: h["first.bias"].update(dtype="F4"), "is not one of F64"),
    "no shape": (lambda h: h["first.bias"].pop("shape"), "first.bias.shape: Field required"),
    "another key": (lambda h: h["first.bias"].update(pickle="x"), "Extra inputs are not permitted"),
    "marks": (lambda h: h.update(__metadata__={"DCP_SHARDING_INFO": "[]"}), "DCP_SHARDING_INFO is not as"),
}


@pytest.mark.parametrize("edit", HEADERS)
def test_an_edited_header_is_refused_with_its_field(edit: str, trainer: plait.Trainer, weights: Path) -> None:
    header, rest = header_of(weights.read_bytes())
    change, part = HEADERS[edit]
    change(header)
    weights.write_bytes(with_header(header, rest))
    with pytest.raises(CheckpointError) as caught:
        trainer.load_weights(weights)
    assert part in str(caught.value) and str(weights) in str(caught.value)


def test_whatever_is_edited_in_a_header_only_a_checkpoint_error_comes_of_it(
    trainer: plait.Trainer, weights: Path
) -> None:
    draw = random.Random(7)
    data = weights.read_bytes()
    header, rest = header_of(data)
    for i in range(NUM_EDITS):
        if i % 2:
            weights.write_bytes(with_header(edited(header, draw), rest))
        else:
            at = draw.randrange(len(data) - len(rest))
            weights.write_bytes(data[:at] + draw.randbytes(draw.randrange(10)) + data[at + draw.randrange(10) :])
        try:
            trainer.load_weights(weights)
        except CheckpointError:
            continue


@pytest.mark.parametrize(
    ("index", "part"),
    [
        ('{"weight_map": {"a": "../model.safetensors"}}', "not the plain name"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not the plain name"),
        ('{"weight_map": {"a": 3}}', "weight_map.a: Input should be a valid string"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"a": "model.safetensors", "a": "x"}}', "there twice"),
        ('{"weight_map": {"a": "model.safetensors"}}', "model.safetensors has a, which it has not"),
        ("[]", "not as plait reads it"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_an_index_names_files_of_its_folder(index: str, part: str, trainer: plait.Trainer, weights: Path) -> None:
    (weights.parent / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError) as caught:
        trainer.load_weights(weights.parent)
    assert part in str(caught.value)


def test_the_cache_of_the_hub_is_made_of_links(trainer: plait.Trainer, weights: Path) -> None:
    (weights.parent / "blob").mkdir()
    blob = weights.rename(weights.parent / "blob" / "1234")
    weights.symlink_to(blob)
    trainer.load_weights(weights.parent)


# ---- links


def test_a_linked_checkpoint_is_neither_pruned_nor_written_into(trainer: plait.Trainer, tmp_path: Path) -> None:
    trainer.save(tmp_path / "elsewhere")
    there = tmp_path / "elsewhere" / "step-00000001"
    before = {path.name: path.read_bytes() for path in there.iterdir()}
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "step-00000000").symlink_to(there)
    (runs / "step-00000001").symlink_to(there)
    (there / "part-00000-other.safetensors").write_text("of a save that goes on elsewhere")
    trainer.save(runs, keep=1)
    assert not (runs / "step-00000001").is_symlink() and newest(runs).name == "step-00000001"
    trainer.load(runs)
    (there / "part-00000-other.safetensors").unlink()
    assert {path.name: path.read_bytes() for path in there.iterdir()} == before


def test_links_in_a_checkpoint_are_not_followed(trainer: plait.Trainer, good: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("keep")
    folder = Path(shutil.copytree(good, tmp_path / "runs" / "step-00000001"))
    (part,) = folder.glob("part-*")
    part.rename(tmp_path / "part")
    part.symlink_to(tmp_path / "part")
    assert f"{part.name} (crc32" in refused(trainer, folder)
    assert "is a link, which is not followed" in refused(trainer, folder)
    part.unlink()
    os.mkfifo(part)
    assert "is a FIFO" in refused(trainer, folder)
    part.unlink()
    assert "is missing" in refused(trainer, folder)
    (folder / "manifest.json").rename(tmp_path / "manifest")
    (folder / "manifest.json").symlink_to(tmp_path / "manifest")
    refused(trainer, folder)
    os.symlink(secret, folder / ".manifest.json.aside")
    trainer.save(tmp_path / "runs")
    assert secret.read_text() == "keep"
    os.mkfifo(tmp_path / "runs" / "step-00000009")
    os.unlink(folder / "manifest.json")
    os.mkfifo(folder / "manifest.json")
    refused(trainer, folder)  # and nobody waits for somebody to write into it


@pytest.mark.parametrize("state", [None, [], {"epoch": 0}, {"epoch": "0", "items": 0}, {"epoch": 0, "items": -2}])
def test_the_state_of_a_loader_is_looked_at(state: Any) -> None:
    loader = plait.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=2)
    if state and len(state) > 1:
        state = loader.state_dict() | state
    with pytest.raises(DataError, match="this is no state of a loader"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("seed", [torch.ones(3), "0", 0.0, None])
def test_a_seed_that_is_none_is_another_one(seed: Any) -> None:
    loader = plait.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=2)
    with pytest.raises(DataError, match="the data is not that of the saved run: seed was"):
        loader.load_state_dict(loader.state_dict() | {"seed": seed})


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda i: [1.0, 0.9, 0.8, 0.7, 0.6, 0.5][i]),  # which ends
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_takes_over_its_own_state_of_any_step(name: str) -> None:
    def after(num: int) -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        for _ in range(num):
            optimizer.step()
            scheduler.step()
        return scheduler

    for one, other in itertools.product((0, 1, 5), repeat=2):
        scheduler, saved = after(one), after(other).state_dict()
        before = copy.deepcopy(scheduler.state_dict())
        check_scheduler(scheduler, saved)
        assert scheduler.state_dict() == before


class Best:
    """A scheduler of the user's, which has no number before its first step."""

    def __init__(self) -> None:
        self.best: float | None = None
        self.seen: list[float] = []

    def step(self) -> None:
        self.best = 0.5
        self.seen.append(0.5)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def test_a_scheduler_of_the_users_may_have_no_number_yet() -> None:
    new, old = Best(), Best()
    old.step()
    check_scheduler(new, old.state_dict())
    check_scheduler(old, new.state_dict())
