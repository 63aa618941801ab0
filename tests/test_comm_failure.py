"""What happens when ranks fail, disagree or are told to stop: all of them end, and one message says why."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from comm_worlds import Script, run, start_scripts
from typer import Exit

from plait.api.command import errors_shown_once
from plait.comm import rendezvous
from plait.comm.agree import agree
from plait.comm.process_world import device_mesh, process_world
from plait.comm.protocol import World
from plait.comm.stop_vote import _TWICE_SECONDS, StopVote
from plait.comm.thread_world import run_ranks
from plait.errors import PlanError, RankFailed, WorldError
from plait.spec.mesh import Mesh

_SCRIPT = """
import os, signal, sys, time, torch
from plait.comm.failure import guard
from plait.comm.process_world import process_world
from plait.comm.stop_vote import StopVote
from plait.spec.mesh import Mesh
world = process_world(Mesh((("data", int(os.environ["WORLD_SIZE"])),)), device="cpu", shared_memory={shared})
comm = world.everyone()
with guard(world):
    {body}
world.close()
"""
_STUCK = (
    "comm.barrier(); print('ready', flush=True); {act}; [comm.all_reduce(torch.ones(8)).wait() for _ in range(10**9)]"
)


def mesh(size: int) -> Mesh:
    return Mesh((("data", size),))


def processes(folder: Path, body: str, size: int, shared: bool = True) -> list[Script]:
    return start_scripts(_SCRIPT.format(body=body, shared=shared), size, folder)


# Threads.


def test_first_exception_stops_all_threads() -> None:
    def fail(world: World) -> None:
        if world.rank == 2:
            raise ValueError("no such luck")
        world.everyone().barrier()

    with pytest.raises(RankFailed, match="rank 2 failed: ValueError: no such luck") as caught:
        run_ranks(mesh(4), fail)
    assert caught.value.rank == 2
    assert isinstance(caught.value.__cause__, ValueError)


def test_threads_name_both_calls_that_do_not_match() -> None:
    def mismatch(world: World) -> None:
        world.comm("data").all_reduce(torch.ones(world.rank + 1)).wait()

    with pytest.raises(WorldError, match=r"all_reduce\(sum\) over data of float32\[[12]\], rank [01] all_reduce"):
        run_ranks(mesh(2), mismatch)


def test_threads_that_would_wait_for_ever() -> None:
    def leave(world: World) -> None:
        if world.rank:
            world.everyone().barrier()

    def cross(world: World) -> None:
        world.everyone().recv(torch.ones(1), 1 - world.rank).wait()

    with pytest.raises(WorldError, match="rank 0 finished while rank 1 waited in barrier"):
        run_ranks(mesh(2), leave)
    with pytest.raises(WorldError, match="all ranks wait for each other"):
        run_ranks(mesh(2), cross)


def test_many_ranks_keep_the_callers_grad_mode() -> None:
    def total(world: World) -> tuple[float, bool]:
        return world.comm("data").all_reduce(torch.tensor(1.0)).wait().item(), torch.is_grad_enabled()

    num_threads = torch.get_num_threads()
    with torch.no_grad():
        assert run_ranks(Mesh((("data", 32), ("tensor", 2))), total) == [(32.0, False)] * 64
    assert torch.get_num_threads() == num_threads


# Processes.


@pytest.mark.parametrize("shared", [True, False])
def test_one_exception_is_shown_once(shared: bool, tmp_path: Path) -> None:
    act = "exec('if world.rank == 1: raise ValueError(\"no such luck\")')"
    results = [rank.outcome() for rank in processes(tmp_path, _STUCK.format(act=act), 3, shared)]
    assert [status for status, _, _ in results] == [1, 1, 1]
    complaints = "".join(text for _, _, text in results)
    assert complaints.count("plait: rank 1 failed: ValueError: no such luck") == 1
    assert complaints.count("Traceback") == 1


def test_ranks_end_with_the_status_of_the_error(tmp_path: Path) -> None:
    raises = (
        "from plait.errors import CheckpointError; error = CheckpointError('in use'); error.status = 2; raise error"
    )
    results = [rank.outcome() for rank in processes(tmp_path, raises, 2)]
    assert [status for status, _, _ in results] == [2, 2], results
    assert "".join(text for _, _, text in results).count("in use") == 1


def test_killed_rank_ends_the_others(tmp_path: Path) -> None:
    ranks = processes(tmp_path, _STUCK.format(act="pass"), 3)
    for rank in ranks:
        rank.wait_ready()
    time.sleep(0.1)
    ranks[1].process.kill()
    results = [rank.outcome() for rank in ranks]
    assert [status for status, _, _ in results] == [1, -signal.SIGKILL, 1]
    complaints = "".join(text for _, _, text in results)
    assert complaints.count("plait: rank 1 failed: its process ended without a word") == 1
    assert "Traceback" not in complaints


def test_signal_to_one_rank_stops_all_at_one_step(tmp_path: Path) -> None:
    body = (
        "vote = StopVote(world); step = 0; print('ready', flush=True)\n"
        "    while not vote.should_stop(step): comm.all_reduce(torch.ones(1)).wait(); time.sleep(0.01); step += 1\n"
        "    print(step)"
    )
    ranks = processes(tmp_path, body, 3)
    for rank in ranks:
        rank.wait_ready()
    ranks[2].process.terminate()
    results = [rank.outcome() for rank in ranks]
    assert [status for status, _, _ in results] == [0, 0, 0], results
    steps = {text for _, text, _ in results}
    assert len(steps) == 1, steps


_ONE_STICKS = (
    "import plait.comm.stop_vote as votes; votes._GRACE_SECONDS = {grace}; vote = StopVote(world); step = 0\n"
    "    while not vote.should_stop(step):\n"
    "        comm.all_reduce(torch.ones(1)).wait(); step += 1; world.monitor.num_steps = step\n"
    "        if step == 3: print('ready', flush=True)\n"
    "        if step == 3 and world.rank == 1: time.sleep(600)"
)


@pytest.mark.parametrize("again", [False, True])
def test_a_rank_that_is_stuck_does_not_hold_up_a_stop(again: bool, tmp_path: Path) -> None:
    ranks = processes(tmp_path, _ONE_STICKS.format(grace=600 if again else 0.1), 2)
    for rank in ranks:
        rank.wait_ready()
    ranks[0].process.terminate()
    if again:
        time.sleep(_TWICE_SECONDS + 0.1)
        os.kill(ranks[0].process.pid or 0, signal.SIGINT)
    results = [rank.outcome() for rank in ranks]
    assert [status for status, _, _ in results] == [1, 1], results
    complaints = "".join(text for _, _, text in results)
    assert complaints.count("plait: rank 1 failed: ") == complaints.count("plait: ") == 1, complaints
    why = "stopped at once, by a second signal after SIGTERM" if again else "no further step in the 0 s after SIGTERM"
    assert why in complaints and "Traceback" not in complaints


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_goes_away_stops_a_run_unless_it_is_ignored(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with StopVote(process_world(Mesh(()))) as vote:
            os.kill(os.getpid(), signal.SIGHUP)
            assert vote.should_stop(1) is not ignored
            assert vote.number == (signal.SIGINT if ignored else signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


def vote_in_threads(world: World) -> int:
    step = 0
    with StopVote(world) as vote:
        while not vote.should_stop(step):
            if world.rank == 1 and step == 5:
                vote.request()
            world.everyone().barrier()
            step += 1
    return step


def test_threads_stop_at_one_step() -> None:
    assert len(set(run_ranks(mesh(3), vote_in_threads))) == 1


def disagreements(world: World) -> list[str]:
    agree(world, "same")
    texts = []
    try:
        agree(world, f"[8, {world.rank // 2}]", "batch shape")
    except WorldError as error:
        texts.append(str(error))
    return texts


@pytest.mark.parametrize("transport", ["threads", "shm"])
def test_disagreement_names_the_ranks(transport: str) -> None:
    results = run(transport, 3, disagreements)
    assert all("the batch shape: ranks 0, 1: [8, 0]; rank 2: [8, 1]" in texts[0] for texts in results)


def mismatch(world: World) -> str:
    try:
        world.comm("data").all_reduce(torch.ones(world.rank + 1)).wait()
    except WorldError as error:
        return str(error)
    return ""


def test_shared_memory_names_both_calls_that_do_not_match() -> None:
    for rank, text in enumerate(run("shm", 2, mismatch)):
        ours, theirs = rank + 1, 2 - rank
        assert text == (
            f"rank {rank} called all_reduce(sum) of {ours} float32, rank {1 - rank} all_reduce(sum) of {theirs} float32"
        )


def test_worlds_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorldError, match=r"data=4\) is of 4 ranks but there is 1 process.*--processes 4"):
        process_world(mesh(4))
    with pytest.raises(PlanError, match="allreduce=tree is unknown; choose backend, ring or naive"):
        run_ranks(mesh(2), mismatch, algorithm="tree")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(WorldError, match="RANK, MASTER_ADDR, MASTER_PORT is not"):
        process_world(mesh(2))


def mesh_names(world: World) -> tuple[tuple[str, ...], int]:
    found = device_mesh(world)
    assert found.mesh_dim_names is not None
    return found.mesh_dim_names, found.get_local_rank("tensor")


def test_device_mesh() -> None:
    names = ("data", "tensor")
    assert run("shm", Mesh((("data", 1), ("tensor", 2))), mesh_names) == [(names, 0), (names, 1)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"RANK": "5"}, "RANK='5': WORLD_SIZE=2 has ranks 0 to 1"),
        ({"RANK": "x"}, "RANK='x': WORLD_SIZE=2 has ranks 0 to 1"),
        ({"RANK": "-1"}, "RANK='-1': WORLD_SIZE=2 has ranks 0 to 1"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two': it is a whole number from 1"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT='99999': it is a whole number from 1 to 65535"),
    ],
)
def test_variables_of_ranks_started_by_hand(
    given: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, text in (good | given).items():
        monkeypatch.setenv(name, text)
    with pytest.raises(WorldError, match=message):
        process_world(mesh(2))
    with pytest.raises(Exit), errors_shown_once():
        process_world(mesh(2))
    assert message in capsys.readouterr().err


def test_a_rank_that_waits_for_others_to_join_says_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "PLAIT_NOTICE": "0.01"}.items():
        monkeypatch.setenv(name, text)
    with rendezvous._telling(1, 4):
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()  # what is read while it prints may be lost
    said = capsys.readouterr().err
    assert "rank 1 has waited 0 s at 10.0.0.1:29500 (MASTER_ADDR and MASTER_PORT) for 4 ranks" in said
