"""Homes: what is kept on disk changes no number; what goes wrong with a disk is said with the file's name."""

from __future__ import annotations

import errno
import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import covering
from test_verify import Branches, Tied, gpt, gpt_batch, image_batch, image_loss
from torch import Tensor
from torch.fx import Node

import plait
from plait.api.job.gpt import loss_fn
from plait.api.trainer import Trainer
from plait.backends.eager.offload.disk import DiskFile
from plait.backends.eager.passes import eager_graphs
from plait.backends.eager.rewrites import offload_rewrites
from plait.backends.eager.rewrites.bucket_gradients import bucket_wait
from plait.comm.device import page_memory
from plait.comm.thread_world import alone, run_ranks
from plait.engine import optimizer_step
from plait.engine.compiler import Captures, Compiler
from plait.errors import HomeError
from plait.optim import Lamb
from plait.plan import sharding_plan

pytestmark = pytest.mark.xdist_group("offload")  # plans share what is captured

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
ADAMW_EXACT = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)  # where rounding does not decide on signs


@pytest.fixture(autouse=True)
def _all_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests train is small, and would stay in memory."""
    monkeypatch.setattr(sharding_plan, "SMALL", 1)
    monkeypatch.setattr(optimizer_step, "_CHUNK_BYTES", 1 << 14)


@functools.cache
def in_memory(optimizer: Any = ADAMW) -> tuple[list[float], dict[str, Tensor]]:
    return trained("", optimizer)


@functools.cache
def captures() -> Captures:
    return Captures(gpt(layers=1), loss_fn)


def trainer_of(plan: str, optimizer: Any = ADAMW, **options: Any) -> Trainer:
    """On one device; all of them share the captured step."""
    compiler, world = Compiler(captures(), plait.Plan.parse(plan)), alone(plait.Plan.parse(plan).mesh)
    return Trainer(compiler.model, loss_fn, optimizer, plan, world=world, compiler=compiler, **options)


def trained(plan: str, optimizer: Any = ADAMW, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    trainer = trainer_of(plan, optimizer, **options)
    losses = [float(trainer.step(gpt_batch())) for _ in range(3)]
    weights = trainer.full_state_dict()
    trainer.close()
    return losses, weights


def assert_same(one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> None:
    assert one[0] == other[0]
    assert [name for name, tensor in one[1].items() if not torch.equal(tensor, other[1][name])] == []


@pytest.mark.parametrize(
    "optimizer",
    [
        ADAMW,
        functools.partial(torch.optim.AdamW, lr=1e-2, foreach=False, amsgrad=True),
        functools.partial(torch.optim.SGD, lr=1e-1, momentum=0.9),
        functools.partial(torch.optim.Adagrad, lr=1e-2),
        functools.partial(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
        functools.partial(torch.optim.NAdam, lr=1e-3),
        functools.partial(torch.optim.Adafactor, lr=1e-2),
    ],
    ids=["adamw", "amsgrad", "momentum", "adagrad", "rmsprop", "nadam", "adafactor"],
)
def test_optimizer_state_on_disk_is_that_in_memory_bit_for_bit(optimizer: Any) -> None:
    assert_same(in_memory(optimizer), trained("home.optimizer=disk", optimizer))


class Counting(torch.optim.Optimizer):
    """Counts in its groups, as some optimizers do, and calls hooks."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "num": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["num"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 1 / group["num"])
                    p.add_(state["mean"], alpha=-group["lr"])


def test_an_optimizer_sees_one_step() -> None:
    calls: list[str] = []

    def make(named_parameters: Any) -> torch.optim.Optimizer:
        every = [p for _, p in named_parameters]
        optimizer = Counting([{"params": every[:5], "lr": 1e-1}, {"params": every[5:]}])
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        return optimizer

    trainer = trainer_of("home.optimizer=disk", make)
    losses = [float(trainer.step(gpt_batch())) for _ in range(3)]
    assert trainer.optimizer is not None
    assert [group["num"] for group in trainer.optimizer.param_groups] == [3, 3]
    assert sum(len(group["params"]) for group in trainer.optimizer.param_groups) == len(
        list(gpt(layers=1).parameters())
    )
    assert calls == ["pre", "post"] * 3
    assert losses == trained("", make)[0]


def test_no_state_is_left_in_memory_and_all_can_be_had() -> None:
    inside, outside = trainer_of(""), trainer_of("home.optimizer=disk")
    for trainer in (inside, outside):
        trainer.step(gpt_batch())
    assert inside.optimizer is not None and outside.optimizer is not None
    assert {v.device.type for s in outside.optimizer.state.values() for v in s.values() if v.ndim} == {"meta"}
    for one, other in zip(inside.optimizer.state.items(), outside.optimizer.state, strict=True):
        found = outside.state.update.state_of(other)
        assert {key: value.tolist() for key, value in one[1].items()} == {k: v.tolist() for k, v in found.items()}
        outside.optimizer.state[other].update({key: value + 1 for key, value in found.items() if value.ndim})
        outside.state.update.settle(other)
        assert torch.equal(outside.state.update.state_of(other)["exp_avg"], found["exp_avg"] + 1)
    assert {v.device.type for s in outside.optimizer.state.values() for v in s.values() if v.ndim} == {"meta"}


ALL = "home.parameters=disk home.optimizer=disk home.activations=disk"
GRID = [
    " ".join(filter(None, case.values()))
    for case in covering(
        {
            "rows": ("", "data=2 zero=1", "data=2 zero=2", "data=2 zero=3"),
            "axis": ("tensor=2", "replica=2"),
            "micro": ("", "micro=3"),
            "optimizer": ("home.optimizer=disk", ""),
            "parameters": ("home.parameters=disk", ""),
            "activations": ("home.activations=disk", ""),
            "recompute": ("", "recompute=layer"),
            "bucket": ("bucket=16KiB",),
        }
    )
]
GRID += [
    f"{pipeline} bucket=16KiB {ALL}"
    for pipeline in (
        "pipeline=2 micro=4",
        "pipeline=2 micro=3 schedule=gpipe data=2 zero=3",
        "pipeline=2 micro=3 schedule=zb-v tensor=2 recompute=layer",
        "pipeline=2 micro=4 schedule=interleaved chunks=2",
        "pipeline=[1,2] micro=4",
    )
]


@pytest.fixture(scope="module")
def verifier() -> plait.Verifier:
    """Dropout, so that values are drawn again; clipping, so that gradients that have left are measured and scaled."""
    return plait.Verifier(
        gpt(layers=1, width=32, dropout=0.1), loss_fn, gpt_batch(12), optimizer=ADAMW_EXACT, steps=3, clip_norm=0.1
    )


@pytest.mark.parametrize("plan", GRID)
def test_every_home_with_every_zero_stage(plan: str, verifier: plait.Verifier) -> None:
    report = verifier.verify(plan)
    assert report.ok, report


@pytest.mark.parametrize("mesh", ["data=2 zero=1", "tensor=2", "data=2 zero=3 precision=bf16 micro=2"])
def test_tied_weights_from_disk(mesh: str) -> None:
    report = plait.verify(Tied(), loss_fn, gpt_batch(), f"{mesh} bucket=16KiB {ALL}")
    assert report.ok, report


def test_branches_on_different_ranks_from_disk() -> None:
    layouts = {"narrow.*": "only:tensor=0", "wide.*": "only:tensor=1", "head.*": "-"}
    report = plait.verify(Branches(), image_loss, image_batch(), f"tensor=2 bucket=1KiB {ALL}", layouts=layouts)
    assert report.ok, report


def test_what_microbatches_in_flight_keep_is_on_disk() -> None:
    """All six of gpipe leave, but the last one on the last rank, whose backward comes next."""

    def moved(world: Any) -> tuple[int, int]:
        trainer = Trainer(compiler.model, loss_fn, ADAMW, plan, world=world, compiler=compiler)
        trainer.prepare(gpt_batch(12))
        before = trainer.engine.offload.file.num_written
        trainer.step(gpt_batch(12))
        written, read = trainer.engine.offload.file.num_written - before, trainer.engine.offload.file.num_read
        trainer.close()
        return written, read

    plan = plait.Plan.parse("pipeline=2 micro=6 schedule=gpipe home.activations=disk")
    compiler = Compiler(Captures(gpt(), loss_fn), plan)
    memory = plait.memory(gpt(), loss_fn, gpt_batch(12), "pipeline=2 micro=6 schedule=gpipe")
    kept = [memory.rank(number) for number in (0, 1)]
    (first, read), (last, read_last) = run_ranks(plan.mesh, moved)
    assert first == read and last == read_last
    assert first >= 0.9 * kept[0].saved and last >= 0.9 * kept[1].saved * 5 / 6


def test_norms_over_ranks_of_what_is_on_disk() -> None:
    optimizer = functools.partial(Lamb, lr=1e-2)
    report = plait.verify(gpt(), loss_fn, gpt_batch(), f"data=2 zero=3 {ALL}", optimizer=optimizer, steps=3)
    assert report.ok, report


def test_an_overflow_among_gradients_that_have_left_skips_the_step() -> None:
    plan = f"precision=fp16 {ALL}"
    trainer = Trainer(gpt(), loss_fn, ADAMW, plan)
    before = trainer.prepare(gpt_batch()) or trainer.full_state_dict()
    assert trainer.state.loss_scale is not None
    trainer.state.loss_scale.value = 2.0**40
    trainer.step(gpt_batch())
    assert [name for name, tensor in trainer.full_state_dict().items() if not torch.equal(tensor, before[name])] == []
    assert trainer.state.loss_scale.value == 2.0**39
    report = plait.verify(gpt(), loss_fn, gpt_batch(), plan)
    assert report.ok, report


def test_evaluates_from_disk() -> None:
    inside, outside = trainer_of(""), trainer_of(ALL)
    for trainer in (inside, outside):
        trainer.step(gpt_batch())
    assert inside.evaluate(gpt_batch()) == outside.evaluate(gpt_batch())


def test_the_host_is_the_device_on_cpu() -> None:
    plan = plait.Plan.parse("home.parameters=host home.optimizer=host home.activations=host")
    graph = eager_graphs(Compiler(captures(), plan).compiled(gpt_batch()).program)["alone"]
    assert [node for node in graph.nodes if node.name == offload_rewrites.OFFLOAD] == []
    assert_same(in_memory(), trained(str(plan)))


def test_at_most_two_buckets_are_here_and_gradients_leave_while_backward_runs() -> None:
    plan = plait.Plan.parse("data=2 bucket=32KiB home.parameters=disk home.activations=disk")
    program = Compiler(Captures(gpt(), loss_fn), plan).compiled(gpt_batch()).program
    nodes = list(eager_graphs(program)["alone"].nodes)
    for op in (offload_rewrites.fetch_start, offload_rewrites.unstash_start):
        starts = [i for i, node in enumerate(nodes) if node.target is op]
        waits = [nodes.index(next(iter(nodes[i].users))) for i in starts]
        assert len(starts) > 8 and waits == sorted(waits)
        assert all(start > wait for start, wait in zip(starts[2:], waits, strict=False))
    leaving = [i for i, node in enumerate(nodes) if node.target is offload_rewrites.leave]
    products = [i for i, node in enumerate(nodes) if node.target is torch.ops.aten.mm.default]
    assert sum(i < products[-1] for i in leaving) > len(leaving) / 2
    assert not any(isinstance(r, Node) and r.target is bucket_wait for r in nodes[-1].args[0])


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("nowhere", r"nowhere .* does not exist; make it, or give another folder as Trainer\(..., scratch="),
        ("file", r"file .* is a file, not a folder"),
        ("/proc", r"no file can be made in /proc"),
    ],
)
def test_a_home_that_cannot_be_used_is_refused_before_start(folder: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HomeError, match=message):
        Trainer(gpt(), loss_fn, ADAMW, "home.optimizer=disk", scratch=tmp_path / folder)


def test_a_disk_that_is_too_small_is_refused_before_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        if offset:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    trainer = Trainer(gpt(), loss_fn, ADAMW, "home.optimizer=disk", scratch=tmp_path)
    with pytest.raises(
        HomeError, match=rf"{tmp_path}.* needs 1\.3 MiB more for the optimizer's state, and the disk has"
    ):
        trainer.prepare(gpt_batch())


def test_a_file_cannot_be_larger_than_its_disk(tmp_path: Path) -> None:
    with pytest.raises(HomeError, match=r"needs 1048576.0 GiB more for much, and the disk has .* GiB free"):
        DiskFile(tmp_path, "rank0").reserve(1 << 50, "much")


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_disk_that_fails_is_named_and_a_save_still_loads(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of("home.optimizer=disk", scratch=tmp_path)
    trainer.step(gpt_batch())

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, broken)
    with pytest.raises(HomeError, match=rf"cannot .* {tmp_path}/plait.*Input/output error.*go on from the last one"):
        [trainer.step(gpt_batch()) for _ in range(3)]


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    trainer = Trainer(gpt(), loss_fn, ADAMW, "home.optimizer=disk", scratch=tmp_path)
    trainer.step(gpt_batch())
    assert list(tmp_path.iterdir()) == []  # not even while it trains
    trainer.close()


def test_buffered_where_direct_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskFile, "_try_direct", lambda self: False)
    assert_same(in_memory(), trained("home.optimizer=disk", scratch=tmp_path))


def test_places_are_read_after_what_was_written_before(tmp_path: Path) -> None:
    """Also in pieces, and of tensors that no page ends with."""
    file = DiskFile(tmp_path, "rank0")
    place = file.place(torch.empty(3, 1_000_003), "numbers")
    for number in range(5):
        memory = page_memory(place.num_bytes)
        place.view(memory).fill_(number)
        place.write(memory)
        memory = page_memory(place.num_bytes)
        place.read(memory).wait()
        assert bool((place.view(memory) == number).all())
    turned = torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last)
    place = file.place(turned)
    place.put(turned)
    assert torch.equal(place.get(), turned)
    assert place.get().stride() == turned.stride()
    file.close()
