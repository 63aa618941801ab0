"""Parameter servers: every mode in a given order of pushes equals a serial program of its definition."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.api.trainer import Trainer
from plait.engine.local_sgd.exchange import first_factor
from plait.errors import BatchError, PlanError, WorldError
from plait.integrations.ray_servers.ray_cluster import check_installed, check_memory
from plait.integrations.ray_servers.served_check import OneProcessRun, run_in_one_process
from plait.integrations.ray_servers.server import Member, Server, Standing, UpdateDone, UpdateOrder
from plait.integrations.ray_servers.server_job import Job
from tests.served import NUM_IDS, Serial, job_of, make_click, make_clicks, make_model

# Of each optimizer that works in another way on rows than on the whole, and of those that do not.
OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.05),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.05),
}


def same(found: OneProcessRun, expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-5, atol=1e-6)


def one_by_one(job: Job, order: tuple[int, ...], wait_for: Any = None) -> dict[str, Tensor]:
    """Asynchronous: worker w's gradient is of the values after its push before, or the one `overlap` pushes before
    that; each is an update.

    `wait_for(clocks, worker)` says who must wait; they take the values of the moment at which they need not any more.
    `clocks` counts what a worker has pushed and what it is to push.
    """
    serial, num, overlap = Serial(job), job.plan.workers, job.plan.overlap
    now = serial.values()
    has: dict[int, list[dict[str, Tensor]]] = {w: [now] * (1 + overlap) for w in range(num)}
    pieces = {w: list(range(w, num * (2 + overlap), num)) for w in range(num)}  # of those that it has, and one more
    fresh, clocks = num * (2 + overlap), dict.fromkeys(range(num), 0)
    for number, worker in enumerate(order, start=1):
        gradient = serial.gradient(has[worker].pop(0), pieces[worker].pop(0))
        serial.update(now, [gradient])
        now = serial.values()
        if number % num == 0 and serial.scheduler is not None:
            serial.scheduler.step()
        clocks[worker] += 1
        for _ in range(1 + overlap):
            for w in range(num):
                ahead = {**clocks, w: clocks[w] + len(has[w])}
                if len(has[w]) <= overlap and not (wait_for and wait_for(clocks, ahead[w])):
                    has[w].append(now)
                    pieces[w].append(fresh)
                    fresh += 1
    return now


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_asynchronous_in_a_given_order(tmp_path: Path, optimizer: str) -> None:
    order = (0, 0, 1, 2, 0, 2, 2, 1, 0, 1, 1, 2)
    job = job_of("workers=3 servers=2", tmp_path, optimizer=OPTIMIZERS[optimizer])
    found = run_in_one_process(job, order)
    same(found, one_by_one(job, order))
    assert [commit.staleness[0] for commit in found.commits] == [0, 0, 2, 3, 2, 1, 0, 4, 3, 1, 0, 4]
    cut = any(not piece.is_whole for pieces in job.shards for piece in pieces)
    assert cut == (optimizer != "adafactor")


def test_bounded_in_a_given_order(tmp_path: Path) -> None:
    order = (0, 0, 1, 0, 2, 1, 0, 1, 2, 2, 1, 0)  # worker 0 waits for 2 at its third push, with a bound of 1
    job = job_of("workers=3 servers=2 staleness=1", tmp_path)
    with pytest.raises(Exception, match=r"worker 0 push.*waits for others"):
        run_in_one_process(job, order)
    order = (0, 0, 1, 2, 0, 1, 2, 1, 2, 0, 1, 2)
    found = run_in_one_process(job, order)
    same(found, one_by_one(job, order, lambda clocks, ahead: ahead - min(clocks.values()) > 1))


@pytest.mark.parametrize(("overlap", "staleness"), [(1, "none"), (2, "none"), (1, "2"), (1, "1")])
def test_pushes_beside_the_next_gradient_in_a_given_order(tmp_path: Path, overlap: int, staleness: str) -> None:
    order = (0, 0, 1, 2, 0, 1, 2, 1, 2, 0, 1, 2)
    job = job_of(f"workers=3 servers=2 overlap={overlap} staleness={staleness}", tmp_path)
    found = run_in_one_process(job, order)
    bound = math.inf if staleness == "none" else int(staleness)
    same(found, one_by_one(job, order, lambda clocks, ahead: ahead - min(clocks.values()) > bound))
    alone = job_of(f"workers=1 servers=1 overlap={overlap} staleness={staleness}", tmp_path / "alone")
    stale = [commit.staleness[0] for commit in run_in_one_process(alone, (0,) * 6).commits]
    assert stale == [min(number, overlap) for number in range(6)], "its own pushes that were under way"


@pytest.mark.parametrize(("servers", "clip_norm"), [(1, None), (2, None), (2, 0.3)])
def test_synchronous_is_data_parallel(tmp_path: Path, servers: int, clip_norm: float | None) -> None:
    job = job_of(f"workers=3 servers={servers} staleness=0", tmp_path, clip_norm=clip_norm)
    found = run_in_one_process(job, (2, 0, 1, 1, 0, 2, 0, 1, 2))
    serial = Serial(job)
    for step in range(3):
        pieces = [serial.rows(3 * step + part) for part in range(3)]
        batch = {key: torch.cat([rows[key] for rows in pieces]) for key in pieces[0]}
        serial.optimizer.zero_grad()
        total, weight = serial.loss_fn(serial.model, batch)
        (total / weight).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(serial.model.parameters(), clip_norm)
        serial.optimizer.step()
        serial.scheduler.step()
    same(found, serial.values())
    assert all(commit.ends_step and commit.staleness == (0, 0, 0) for commit in found.commits)


def test_synchronous_with_a_backup_leaves_the_last_one_out(tmp_path: Path) -> None:
    order = (0, 1, 2, 1, 0, 2, 0, 1, 2)  # worker 2 is late for the first two steps, and in time for the third
    job = job_of("workers=3 servers=2 staleness=0 backup=1", tmp_path)
    found = run_in_one_process(job, order)
    assert [commit.members for commit in found.commits] == [(0, 1), (0, 1), (0, 1)]
    assert [commit.members for commit in run_in_one_process(job, (0, 1, 2, 2, 0, 1)).commits] == [(0, 1), (0, 2)]
    serial = Serial(job)
    now = serial.values()
    for pieces in ((0, 1), (3, 4), (6, 7)):
        serial.update(now, [serial.gradient(now, piece) for piece in pieces])
        now = serial.values()
        serial.scheduler.step()
    same(found, now)


def kept_of(compress: str, gradient: Tensor, name: str, factors: dict[str, Tensor]) -> Tensor:
    """What the other side has of a gradient, by the definition of each compressor."""
    kind, _, number = compress.partition(":")
    flat = gradient.flatten()
    if kind == "topk":
        num = math.ceil(float(number) * len(flat))
        return (
            torch.where(gradient.abs() >= flat.abs().sort().values[-num], gradient, 0)
            if 2 * num < len(flat)
            else gradient
        )
    if kind == "powersgd":
        if gradient.ndim < 2 or sum(gradient.shape) * int(number) >= gradient.numel():
            return gradient
        factor = factors.setdefault(name, first_factor(f"{name}:0", gradient.shape[1], int(number)))
        left = torch.linalg.qr(gradient @ factor).Q
        factors[name] = gradient.T @ left
        return left @ factors[name].T
    if len(flat) < 100:  # less than half a block
        return gradient
    if kind == "bf16":
        return gradient.bfloat16().float()
    scale = flat.abs().max() / {"int8": 127, "int4": 7}[kind]  # the tensors of these tests are one block each
    return (gradient / scale).round() * scale


@pytest.mark.parametrize("compress", ["bf16", "int8", "int4", "topk:0.1", "powersgd:2"])
def test_pushes_made_smaller_with_error_feedback(tmp_path: Path, compress: str) -> None:
    order = (0, 0, 1, 1, 0, 1, 1, 1, 0, 0)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    model = functools.partial(make_model, 24)
    job = job_of(
        f"workers=2 servers=1 compress={compress} compress.2.*=none",
        tmp_path,
        scheduler=None,
        optimizer=sgd,
        make_model=model,
    )
    found = run_in_one_process(job, order)
    plain = run_in_one_process(
        job_of("workers=2 servers=1", tmp_path, scheduler=None, optimizer=sgd, make_model=model), order
    )
    serial, now = Serial(job), Serial(job).values()
    has, piece, fresh = {0: now, 1: now}, {0: [0, 2], 1: [1, 3]}, 4
    left_out: list[dict[str, Tensor]] = [{}, {}]
    factors: list[dict[str, Tensor]] = [{}, {}]
    for worker in order:
        gradients, weight = serial.gradient(has[worker], piece[worker].pop(0))
        for name, gradient in gradients.items():
            if name.startswith("0."):
                whole = gradient + left_out[worker].get(name, 0)
                gradients[name] = kept_of(compress, whole, name, factors[worker])
                left_out[worker][name] = whole - gradients[name]
        serial.update(now, [(gradients, weight)])
        now = has[worker] = serial.values()
        piece[worker].append(fresh)
        fresh += 1
    same(found, now)
    far = max(float((found.values[name] - value).abs().max()) for name, value in plain.values.items())
    assert 1e-5 < far < 0.5, "it does make a difference"


@pytest.mark.parametrize("rest", ["", "outer=nesterov", "outer=sgd outer.lr=0.8 outer.momentum=0.5 moments=reset"])
def test_workers_with_steps_of_their_own_are_local_sgd(tmp_path: Path, rest: str) -> None:
    job = job_of(f"workers=3 servers=2 staleness=0 sync=2 {rest}", tmp_path, clip_norm=0.5)
    found = run_in_one_process(job, (2, 0, 1, 1, 0, 2, 0, 1, 2))
    workers = [Serial(job) for _ in range(3)]
    agreed = workers[0].values()
    velocity = {name: torch.zeros_like(value) for name, value in agreed.items()}
    lr, momentum = job.plan.outer_rates
    for first in (0, 2, 4):
        for number, worker in enumerate(workers):
            for name, p in worker.model.named_parameters():
                p.data = agreed[name].clone()
            for step in (first, first + 1):
                rows = worker.rows(3 * step + number)
                worker.optimizer.zero_grad()
                total, weight = worker.loss_fn(worker.model, rows)
                (total / weight).backward()
                torch.nn.utils.clip_grad_norm_(worker.model.parameters(), 0.5)
                worker.optimizer.step()
                worker.scheduler.step()
            if "reset" in rest:
                for kept in worker.optimizer.state.values():
                    for value in kept.values():
                        value.zero_()
        now = [worker.values() for worker in workers]
        for name, before in agreed.items():
            change = sum((before - values[name] for values in now), torch.zeros_like(before)) / 3
            if momentum:
                velocity[name] = momentum * velocity[name] + change
                change = change + momentum * velocity[name] if "nesterov" in rest else velocity[name]
            agreed[name] = before - lr * change
    same(found, agreed)
    assert all(len(commit.members) == 3 and commit.ends_step for commit in found.commits)


def test_tables_have_the_losses_of_a_dense_run(tmp_path: Path) -> None:
    """Rows of the batch alone in the workers, row-wise Adagrad on the servers; in the serial program a whole table."""
    order = (0, 0, 1, 0, 1, 1, 1, 0)
    changes = {"make_model": make_click, "make_data": make_clicks, "scheduler": None}
    job = job_of("workers=2 servers=2", tmp_path, **changes)
    assert [table.name for table in job.tables] == ["table"]
    found = run_in_one_process(job, order)
    serial, sums = Serial(job), torch.zeros(NUM_IDS)
    serial.optimizer = job.optimizer([p for name, p in serial.model.named_parameters() if name != "table.weight"])
    now = serial.values()
    has, piece, ahead, fresh = {0: now, 1: now}, {0: 0, 1: 1}, {0: 2, 1: 3}, 4
    losses = []
    for worker in order:
        gradients, _ = serial.gradient(has[worker], piece[worker])
        losses.append(serial.loss_fn(serial.model, serial.rows(piece[worker])).detach())
        rows = gradients.pop("table.weight")
        sums += rows.square().mean(1)
        for name, p in serial.model.named_parameters():
            p.data, p.grad = now[name].clone(), gradients.get(name)
        serial.optimizer.step()
        serial.model.table.weight.data -= 0.1 * rows / (sums.sqrt() + 1e-8)[:, None]
        now = has[worker] = serial.values()
        piece[worker], ahead[worker], fresh = ahead[worker], fresh, fresh + 1
    torch.testing.assert_close(torch.tensor(found.losses), torch.stack(losses), rtol=1e-5, atol=1e-6)
    same(found, {name: value for name, value in now.items() if name != "table.weight"})
    kept = found.tables["table"]
    torch.testing.assert_close(kept["values"], now["table.weight"][kept["ids"]], rtol=1e-5, atol=1e-6)
    with pytest.raises(PlanError, match="does not go with the tables table: a worker looks up"):
        job_of("workers=2 servers=1 tensor=2", tmp_path, **changes)


def served(tmp_path: Path, plan: str = "workers=2 servers=1") -> tuple[Job, Server, Callable[..., UpdateDone]]:
    """A server with values, and what has it make its next update of one gradient."""
    job = job_of(plan, tmp_path, scheduler=None, optimizer=functools.partial(torch.optim.SGD, lr=1.0))
    server = Server(job.name, job.shards[0], job.optimizer, None, str(tmp_path / "snapshots"))
    server.start([np.zeros(p.own_shape, np.float32) for p in job.shards[0]], {}, Standing(0))

    def update(
        server: Server, number: int, arrays: Any = None, base: int = -1, push: int = 0, name: str = job.name
    ) -> UpdateDone:
        arrays = [np.ones(p.own_shape, np.float32) for p in job.shards[0]] if arrays is None else arrays
        member = Member(0, push or number, 1.0, number - 1 if base < 0 else base, name)
        return server.update(UpdateOrder(number, 0, (member,), 0), [arrays])

    return job, server, update


def test_what_a_server_refuses(tmp_path: Path) -> None:
    job, server, update = served(tmp_path)
    good = [np.ones(p.own_shape, np.float32) for p in job.shards[0]]
    assert update(server, 1) == UpdateDone()
    wrong = {
        "is of": {"name": "another"},
        "pushes a gradient of version 7, which does not exist": {"base": 7},
        "pushes its gradient 1 a second time": {"push": 1},
        r"0.weight is float32\[10, 5\], not float32\[10, 6\]": {"arrays": [good[0][:, 1:], *good[1:]]},
        r"0.weight is float64\[10, 6\], not float32": {"arrays": [good[0].astype(np.float64), *good[1:]]},
        "pushes 1 arrays, and there are 4 variables": {"arrays": good[:1]},
        "0.weight is a str, not an array": {"arrays": ["weight", *good[1:]]},
    }
    for number, (why, changes) in enumerate(wrong.items(), start=2):
        ((worker, said),) = update(server, number, **changes).refused
        assert worker == 0 and re.search(why, said)
    assert update(server, 9).refused == ()
    assert all((array == -2).all() for array in server.state()[0]), "two updates were made"


def test_a_server_that_comes_back_says_what_is_lost(tmp_path: Path) -> None:
    job, server, update = served(tmp_path)
    update(server, 1)
    server.snapshot(wait=True)
    for number in (2, 3):
        update(server, number)
    back = Server(job.name, job.shards[0], job.optimizer, None, str(tmp_path / "snapshots"))
    assert back.standing.number == 1 and (back.state()[0][0] == -1).all()
    done = update(back, 4)
    assert (done.unused, done.came_back) == (2, True) and update(back, 5).unused == 2
    assert update(back, 5) == UpdateDone(unused=2), "an update is made once"
    two = dataclasses.replace(UpdateOrder(6, 0, (Member(0, 6, 1.0, 5, job.name),), 0), two_phase=True)
    back.update(two, [[np.ones(p.own_shape, np.float32) for p in job.shards[0]]])
    assert update(back, 7).unused == 3, "a coordinator that is gone began it, and did not end it"
    back._saver.wait()  # whoever reads a snapshot that is being replaced finds that its files are gone
    other = Server("another", job.shards[0], job.optimizer, None, str(tmp_path / "snapshots"))
    assert other.standing.number == -1, "snapshots of another run are none of its own"


def test_a_worker_with_another_model_is_told_the_first_difference(tmp_path: Path) -> None:
    job = job_of("workers=2 servers=1", tmp_path).fingerprint
    other = job_of("workers=2 servers=1", tmp_path, make_model=functools.partial(make_model, 11)).fingerprint
    assert job.difference(other) == "its 0.weight is float32[11, 6] and the run's float32[10, 6]"
    assert job.digest != other.digest and job.difference(job) == ""
    assert "its plan is 'tensor=2'" in job.difference(dataclasses.replace(job, plan="tensor=2"))
    assert (
        job.difference(dataclasses.replace(job, variables=job.variables[1:])) == "it has no 0.weight, of shape [10, 6]"
    )


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("workers=2 servers=1 sync=4", "sync=4 with workers=2 takes the mean .* add staleness=0"),
        ("workers=2 servers=1 staleness=0 sync=4..8", "sync=4..8 is an interval that grows, .* such as sync=8"),
        ("workers=2 servers=1 staleness=0 sync=4 outer=sgd overlap=1", "waits for the mean of all; leave overlap= out"),
        ("workers=2 servers=1 staleness=0 overlap=1", "waits for the update of all; .* use staleness=1 or none"),
        ("workers=2 servers=1 staleness=1 overlap=2", "give overlap=1 or staleness=2"),
        ("workers=2 servers=1 staleness=0 sync=4 moments=averaged", "use moments=reset"),
        ("workers=2 servers=1 precision=fp16", "use precision=bf16"),
        ("workers=5 servers=1", "the global batch of 12 does not split over the 5 workers"),
        ("workers=4 servers=1 data=2", "a worker's part of the batch, 3 rows, does not split over data=2"),
        ("workers=2 servers=40", "servers=40 do not all get a part"),
    ],
)
def test_what_does_not_go_with_servers(tmp_path: Path, plan: str, why: str) -> None:
    with pytest.raises((PlanError, BatchError), match=why):
        job_of(plan, tmp_path)


def test_what_needs_more_memory_than_there_is(tmp_path: Path) -> None:
    job = job_of("workers=2 servers=1 overlap=999999999", tmp_path)
    with pytest.raises(WorldError, match=r"workers=2 and the overlap=999999999 tasks .* up to .*iB, and this machine"):
        check_memory(job)


def test_without_ray_the_command_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"pip install 'plait\[ray\]'"):
        check_installed()


def test_a_table_without_servers_is_an_embedding() -> None:
    trainer = Trainer(*make_click(), functools.partial(torch.optim.SGD, lr=0.5), "")
    batch = torch.utils.data.default_collate([make_clicks()[0][i] for i in range(8)])
    losses = [float(trainer.step(batch)) for _ in range(5)]
    assert losses[-1] < losses[0]
    trainer.close()
