"""Ranks decide together: what to capture, whether they hold the same batch, how long they wait for each other."""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from comm_worlds import Script, run, start_scripts
from torch import Tensor, nn

import plait
from plait import Plan, RankFailed, Trainer, WorldError
from plait.comm.agree import agree, attempt
from plait.comm.monitor import NOTICE, TIMEOUT, timeout
from plait.comm.protocol import World
from plait.comm.thread_world import run_ranks
from plait.engine.local_batch import LocalBatch
from plait.engine.same_batch import _of_device, checksum
from plait.errors import CaptureError, PlanError, Refusal
from plait.spec.mesh import Mesh

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def mesh(size: int) -> Mesh:
    return Mesh((("data", size),))


def rows(num: int = 8, seed: int = 0) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(num, 6, generator=made), "y": torch.randn(num, 3, generator=made)}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def on_threads(plan: str, fn: Any) -> list[Any]:
    return run_ranks(Plan.parse(plan).mesh, fn)


# Work that all ranks must have done.


def test_what_one_rank_cannot_do_stops_all() -> None:
    def fail(world: World) -> str:
        def work() -> int:
            if world.rank == 1:
                raise KeyError("no such thing")
            return world.rank

        try:
            attempt(world, work, "working")
        except (KeyError, RankFailed) as error:
            return f"{type(error).__name__}: {error}"
        return "went on"

    own, other, third = run_ranks(mesh(3), fail)
    assert other == "KeyError: 'no such thing'"
    assert own == third == "RankFailed: rank 1 failed: KeyError: 'no such thing'"


def test_a_capture_that_fails_on_one_rank_fails_on_all_in_one_way() -> None:
    def fail(world: World) -> str:
        def work() -> None:
            if world.rank < 2:
                raise CaptureError("a branch") if world.rank == 0 else ValueError("a mistake")

        if world.rank == 2:
            time.sleep(0.05)
        try:
            attempt(world, work, "capturing")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "went on"

    first, second, third = run_ranks(mesh(3), fail)
    assert second == "ValueError: a mistake"
    assert first == third == "RankFailed: rank 1 failed: ValueError: a mistake"

    def capture(world: World) -> None:
        def work() -> None:
            if world.rank == 1:
                raise CaptureError("a branch")

        with pytest.raises(CaptureError, match="a branch" if world.rank == 1 else "on rank 1 of 2: a branch"):
            attempt(world, work, "capturing")

    run_ranks(mesh(2), capture)


def test_a_refusal_on_one_rank_is_the_same_on_all() -> None:
    """Also on those that are late, or that found nothing against the plan."""

    def refuse(world: World) -> Refusal | None:
        def work() -> None:
            if world.rank < 2:
                time.sleep(0.05 * world.rank)
                raise PlanError(Refusal("a=1", "it is odd", "use a=2"))

        with pytest.raises(PlanError, match="^a=1: it is odd; use a=2$") as caught:
            attempt(world, work, "checking")
        return caught.value.refusal

    assert run_ranks(mesh(3), refuse) == [Refusal("a=1", "it is odd", "use a=2")] * 3


@pytest.mark.parametrize("plan", ["tensor=8", "data=3", "data=2 recompute=nowhere", "data=2 zero=1 micro=2"])
def test_a_plan_is_refused_by_every_rank_alike(plan: str) -> None:
    """Ranks find it at different moments; none takes another's refusal for a failure."""
    found: dict[int, BaseException] = {}

    class Whole(torch.optim.SGD):
        """Moves a parameter by the norm of its gradient."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in (p for p in group["params"] if p.grad is not None):
                    p.sub_(p.grad / p.grad.norm())

    def rank(world: World) -> None:
        try:
            Trainer(mlp(), loss_fn, functools.partial(Whole, lr=0.1), plan, world=world).prepare(rows())
        except BaseException as error:
            found[world.rank] = error
            raise

    with pytest.raises(RankFailed):
        on_threads(plan, rank)
    assert len(found) == Plan.parse(plan).num_processes
    assert len({str(error) for error in found.values()}) == 1
    assert all(isinstance(error, PlanError) and error.refusal is not None for error in found.values())


def test_ranks_that_capture_different_steps_are_refused() -> None:
    def rank(world: World) -> None:
        def odd(model: nn.Module, batch: Any) -> Tensor:
            loss = loss_fn(model, batch)
            return loss + model(batch["x"]).abs().mean() if world.rank == 1 else loss

        Trainer(mlp(), odd, SGD, "data=2", world=world).step(rows())

    with pytest.raises(RankFailed, match="do not agree on the result of capturing the step: rank 0: .* calls.*rank 1"):
        on_threads("data=2", rank)


def test_ranks_that_capture_different_constants_are_refused() -> None:
    def rank(world: World) -> None:
        def noisy(model: nn.Module, batch: Any) -> Tensor:
            return (model(batch["x"]) * torch.tensor([1.0, 2.0, 3.0 + world.rank]) - batch["y"]).square().mean()

        Trainer(mlp(), noisy, SGD, "tensor=2", world=world).step(rows())

    with pytest.raises(RankFailed, match="do not agree on the result of capturing the step"):
        on_threads("tensor=2", rank)


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ({"seed": 1}, "seed=0.*seed=1"),
        ({"clip_norm": 1.0}, "clip_norm=None.*clip_norm=1.0"),
        ({"plan": "data=2 zero=1"}, "rank 0: plan data=2, .*rank 1: plan data=2 zero=1"),
        ({"model": nn.Linear(6, 3)}, "rank 0: .*Sequential of 83 numbers.*rank 1: .*Linear of 21 numbers"),
        ({"optimizer": functools.partial(torch.optim.SGD, lr=0.2)}, r"rank 0: SGD\(.*lr=0.1,.*rank 1: SGD\(.*lr=0.2,"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_trainers_that_differ_are_refused_before_the_first_step(odd: dict[str, Any], why: str) -> None:
    def rank(world: World) -> None:
        given = {"model": mlp(), "loss_fn": loss_fn, "optimizer": SGD, "plan": "data=2"} | (odd if world.rank else {})
        Trainer(**given, world=world).step(rows())

    with pytest.raises(RankFailed, match=f"do not agree on .*{why}"):
        on_threads("data=2", rank)


def test_an_optimizer_that_one_rank_cannot_make_stops_all() -> None:
    def rank(world: World) -> None:
        def make(parameters: Any) -> torch.optim.Optimizer:
            if world.rank == 1:
                raise ValueError("no optimizer here")
            return SGD(parameters)

        Trainer(mlp(), loss_fn, make, "data=2", world=world).step(rows())

    with pytest.raises(RankFailed, match="rank 1 failed: ValueError: no optimizer here"):
        on_threads("data=2", rank)


def test_a_callback_that_fails_on_one_rank_stops_all() -> None:
    def rank(world: World) -> None:
        def callback(end: plait.StepEnd) -> None:
            if world.rank == 1 and end.step == 2:
                raise ValueError("no disk for the log")

        trainer = Trainer(mlp(), loss_fn, SGD, "tensor=2", world=world, callbacks=[callback])
        for seed in range(5):
            trainer.step(rows(seed=seed))

    with pytest.raises(RankFailed, match="rank 1 failed: ValueError: no disk for the log"):
        on_threads("tensor=2", rank)


# The same batch.


@pytest.mark.parametrize("plan", ["data=2", "tensor=2", "pipeline=2 micro=2", "data=2 zero=3"])
def test_one_number_that_differs_is_found_in_its_step(plan: str) -> None:
    done: list[int] = []

    def rank(world: World) -> None:
        trainer = Trainer(mlp(), loss_fn, SGD, plan, world=world)
        for step in range(1, 8):
            batch = rows(seed=step)
            if world.rank == 1 and step == 6:  # not one of the steps 1, 2, 4, 8
                batch["x"][5, 3] += 1e-6
            trainer.step(batch)
            done.append(step)

    found = r"do not agree on the numbers of the global batch.*plait.loader.*\(step 6, which was not applied\)"
    with pytest.raises(RankFailed, match=found):
        on_threads(plan, rank)
    assert max(done) == 5


def test_rows_of_one_part_must_be_alike_and_those_of_others_need_not() -> None:
    def rank(world: World, differ: bool) -> None:
        part = world.mesh.coordinates(world.rank)["data"]
        trainer = Trainer(mlp(), loss_fn, SGD, "data=2 tensor=2", world=world)
        for step in range(4):
            seed = 10 * part + step + (100 if differ and world.rank == 3 and step == 3 else 0)
            trainer.step(LocalBatch(rows(4, seed), 4, 8, f"batch {step}"))

    on_threads("data=2 tensor=2", functools.partial(rank, differ=False))
    with pytest.raises(RankFailed, match="rows of a part of the batch.*batch 3, part 1 .*seeded by the index"):
        on_threads("data=2 tensor=2", functools.partial(rank, differ=True))


def test_evaluation_on_different_batches_is_refused() -> None:
    def rank(world: World) -> None:
        Trainer(mlp(), loss_fn, SGD, "tensor=2", world=world).evaluate(iter([rows(seed=0), rows(seed=world.rank)]))

    with pytest.raises(RankFailed, match="numbers of the global batch.*evaluation"):
        on_threads("tensor=2", rank)


def test_checksums_see_single_elements() -> None:
    torch.manual_seed(0)
    small = {"a": torch.randn(100, 7), "b": torch.randint(0, 9, (64,))}
    before = checksum(small, 0)
    for name, leaf in small.items():
        for at in range(0, leaf.numel(), 13):
            changed = {**small, name: leaf.clone()}
            changed[name].view(-1)[at] += 1
            assert checksum(changed, 0) != before
    assert checksum({"a": small["a"].T.contiguous().T, "b": small["b"]}, 0) == before  # the same numbers
    large = torch.zeros(5 << 20, dtype=torch.float32)  # 20 MiB: a window of 16 that moves
    before = [checksum({"a": large}, turn) for turn in range(2)]
    large[-1] = 1e-6
    assert [checksum({"a": large}, turn) for turn in range(2)] != before
    large[-1] = 0
    large[77] = 1e-6
    assert checksum({"a": large}, 0) != before[0]
    odd = torch.zeros((17 << 20) + 3, dtype=torch.uint8)[1:]
    assert checksum({"a": odd}, 0) == checksum({"a": odd.clone()}, 0)
    for size in (1, 7, 8, 4097, (4 << 20) + 1):  # as it is read on a GPU
        one = torch.arange(size, dtype=torch.float32)
        other = one.clone()
        other[size // 2] += 1
        assert _of_device(one, 0) == _of_device(one.clone(), 0) != _of_device(other, 0)
        assert size < 7 or _of_device(one.flip(0), 0) != _of_device(one, 0)
    assert checksum({"a": torch.zeros(8, 0), "b": torch.tensor(3.0, dtype=torch.bfloat16)}, 0) != 0


# Waiting.


def test_timeouts_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timeout() == 1800
    monkeypatch.setenv(TIMEOUT, "2.5")
    assert timeout() == 2.5
    for wrong in ("soon", "0", "-1", "inf"):
        monkeypatch.setenv(TIMEOUT, wrong)
        with pytest.raises(WorldError, match="PLAIT_TIMEOUT='.*'; it should be a number of seconds above 0"):
            timeout()


def test_threads_that_wait_for_notes_and_for_collectives_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.comm.thread_transport.Meetings.look_around", 0.2)

    def cross(world: World) -> None:
        if world.rank == 0:
            agree(world, "[4]", "shape of batch")
        else:
            world.everyone().barrier()

    with pytest.raises(WorldError, match=r"all ranks wait for each other: .*shape of batch \(\[4\]\).*barrier"):
        run_ranks(mesh(2), cross)

    def leave(world: World) -> None:
        if world.rank == 0:
            agree(world, "[4]", "shape of batch")

    with pytest.raises(WorldError, match="rank 1 finished while rank 0 waited in the agreement on the shape of batch"):
        run_ranks(mesh(2), leave)


def test_a_late_thread_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.comm.thread_transport.Meetings.look_around", 0.05)

    def late(world: World) -> None:
        if world.rank == 1:
            time.sleep(0.3)
        agree(world, "same")

    run_ranks(mesh(2), late)


def test_a_thread_that_is_too_late_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, "0.3")
    over = threading.Event()

    def late(world: World) -> None:
        if world.rank == 1:
            over.wait(10)
            return
        try:
            agree(world, "same", "plan")
        finally:
            over.set()

    with pytest.raises(WorldError, match=r"rank 0 waited 0 s for rank 1 in the agreement on the plan \(same\)"):
        run_ranks(mesh(2), late)


# Processes.

_SCRIPT = """
import os, sys, time, torch
from plait.comm.agree import agree
from plait.comm.process_world import process_world
from plait.spec.mesh import Mesh
world = process_world(Mesh((("data", 2),)), device="cpu", shared_memory={shared})
comm = world.everyone()
{body}
"""


def processes(folder: Path, body: str, shared: bool = True) -> list[Script]:
    return start_scripts(_SCRIPT.format(body=body, shared=shared), 2, folder)


def test_a_process_that_is_late_is_waited_for_and_named(tmp_path: Path) -> None:
    body = (
        f"os.environ['{NOTICE}'] = '1.2'; world.monitor.does('its first item')\n"
        "if world.rank == 1: time.sleep(2.4)\n"
        "comm.barrier(); agree(world, 'same'); print('done'); comm.barrier()"
    )
    first, second = (script.outcome() for script in processes(tmp_path, body))
    assert first[:2] == second[:2] == (0, "done\n"), (first, second)
    assert "s for rank 1 in barrier() of" in first[2] and first[2].startswith("plait: rank 0 has waited ")
    assert "lives, and has been at this for" in first[2] and "its first item" in first[2]
    assert second[2] == ""


@pytest.mark.parametrize("shared", [True, False], ids=["shm", "gloo"])
def test_processes_that_wait_for_each_other_are_told(shared: bool, tmp_path: Path) -> None:
    # Where gloo waits, no Python runs that could say so: the process is ended.
    wait = 20 if shared else 5
    body = (
        "try:\n"
        "    agree(world, '[4]', 'shape of batch') if world.rank == 0 else comm.all_reduce(torch.ones(3)).wait()\n"
        "except Exception as error: print(error); world.store.set(f'told/{world.rank}', '')\n"
        f"world.store.missing(['told/0', 'told/1'], {wait})"
    )
    first, second = (script.outcome() for script in processes(tmp_path, body, shared))
    told = first[1] + first[2] + second[1] + second[2]
    assert (
        "ranks wait for each other, and none can go on: rank 0 waits for rank 1 in the agreement on the shape" in told
    )
    assert "rank 1 waits for rank 0 in all_reduce" in told


def test_a_process_that_ends_early_is_named_as_finished(tmp_path: Path) -> None:
    body = (
        "comm.barrier()\n"
        "if world.rank == 1: world.close(); os._exit(0)\n"
        "try: agree(world, 'same', 'plan')\n"
        "except Exception as error: print(error)"
    )
    first, _ = (script.outcome() for script in processes(tmp_path, body))
    assert "rank 1 has finished while rank 0 still waits for it in the agreement on the plan" in first[1], first


def numbers_only_on_one_rank(world: World) -> list[float]:
    """Rank 0 prints its loss, so that it alone cannot capture the step."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = loss_fn(model, batch)
        if world.rank == 0:
            float(found.item())
        return found

    trainer = Trainer(mlp(), loss, SGD, "data=2", world=world)
    return [float(trainer.step(rows(seed=seed))) for seed in range(3)]


def test_all_ranks_fall_back_where_one_cannot_capture() -> None:
    expected = []
    model = mlp()
    optimizer = SGD(model.parameters())
    for seed in range(3):
        optimizer.zero_grad()
        loss = loss_fn(model, rows(seed=seed))
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    for losses in run("shm", 2, numbers_only_on_one_rank):
        assert losses == pytest.approx(expected, rel=1e-5)
