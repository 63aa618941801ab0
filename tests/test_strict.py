"""The transport that is as strict as NCCL: one queue a communicator, and messages that meet."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from comm_worlds import run
from strategies import SYNCHRONOUS
from torch import Tensor, nn

import plait
from plait.backends.eager.schedule_executor import ScheduleExecutor
from plait.comm import strict_transport
from plait.comm.process_world import _check_messages
from plait.comm.protocol import REDUCTIONS, World
from plait.comm.thread_world import run_ranks
from plait.compile.stages.stage_graphs import Value
from plait.engine.compiler import Compiler
from plait.errors import RankFailed, WorldError
from plait.schedule.families import FAMILIES, make_schedule
from plait.schedule.readiness import chain
from plait.schedule.transfers import add_transfers, add_updates
from plait.spec.mesh import Mesh

ONE = torch.ones(1)


def stopped(fn: Callable[[World], object], num_ranks: int = 2) -> str:
    """What the ranks are stopped with."""
    with pytest.raises(RankFailed) as error:
        run_ranks(Mesh((("pipeline", num_ranks),)), fn, strict=True)
    return str(error.value)


def test_a_cycle_is_a_deadlock_with_the_queue_of_every_rank() -> None:
    def fn(world: World) -> None:
        comm = world.comm("pipeline")
        other = 1 - comm.rank
        if comm.rank == 0:
            comm.all_reduce(ONE)
            comm.recv(ONE, other, tag=7).wait()
        else:
            comm.all_reduce(ONE).wait()
            comm.broadcast(ONE, 0).wait()
            comm.send(ONE, other, tag=7)

    text = stopped(fn)
    assert "deadlock: no rank can go on" in text
    assert "rank 0 waits in send/recv(tag 7) over pipeline of float32[1] (queues: send/recv(tag 7)" in text
    assert "of float32[1] from rank 1)" in text
    assert "rank 1 waits in broadcast(root 0) over pipeline of float32[1] (queues: broadcast(root 0)" in text


def test_messages_of_a_pair_are_received_in_the_order_in_which_they_are_sent() -> None:
    def fn(world: World) -> None:
        comm = world.comm("pipeline")
        if comm.rank == 0:
            for work in [comm.send(ONE, 1, tag) for tag in (1, 2)]:
                work.wait()
        else:
            for work in [comm.recv(ONE, 0, tag) for tag in (2, 1)]:
                work.wait()

    text = stopped(fn)
    assert "rank 0 called send/recv(tag 1) over pipeline" in text
    assert "rank 1 send/recv(tag 2) over pipeline" in text


def test_a_send_is_not_buffered() -> None:
    def fn(world: World) -> None:
        comm = world.comm("pipeline")
        comm.send(ONE, 1 - comm.rank).wait()
        comm.recv(ONE, 1 - comm.rank).wait()

    assert "deadlock" in stopped(fn)


def test_two_directions_do_not_wait_for_each_other() -> None:
    def fn(world: World) -> float:
        comm = world.comm("pipeline")
        sent = comm.send(torch.full((1,), float(comm.rank)), 1 - comm.rank)
        received = comm.recv(ONE, 1 - comm.rank).wait()
        sent.wait()
        return received.item()

    assert run("strict", Mesh((("pipeline", 2),)), fn) == [1.0, 0.0]


def test_a_rank_that_has_finished_is_waited_for_in_vain() -> None:
    def fn(world: World) -> None:
        if world.rank == 1:
            world.comm("pipeline").barrier()

    text = stopped(fn)
    assert "rank 1 waits in barrier" in text and "rank 0 finished" in text


def test_a_rank_waits_for_all_messages_that_it_sends() -> None:
    """The memory of a tensor may be given to another one before a GPU has sent it."""

    def fn(world: World) -> float:
        comm = world.comm("pipeline")
        if comm.rank == 0:
            comm.send(ONE, 1, tag=3)
            return 1.0
        return comm.recv(ONE, 0, tag=3).wait().item()

    assert "rank 0 finished and has not waited for send/recv(tag 3)" in stopped(fn)


def test_a_channel_does_not_wait_for_the_collectives_of_its_axis() -> None:
    """A gather of parameters that rank 1 calls late does not hold up the sum of gradients."""

    def fn(world: World, channel: str = REDUCTIONS) -> float:
        comm, sums = world.comm("pipeline"), world.comm("pipeline", channel)
        assert sums.links is comm.links
        if comm.rank == 0:
            gathered = comm.all_gather(ONE)
        total = sums.reduce_scatter(torch.ones(2, 1)).wait().item()
        if comm.rank == 1:
            gathered = comm.all_gather(ONE)
        return total + gathered.wait().sum().item()

    assert run("strict", Mesh((("pipeline", 2),)), fn) == [4.0, 4.0]
    assert "rank 0 called all_gather" in stopped(lambda world: fn(world, ""))


class Chain:
    """A Runner whose cells count how far a microbatch has come, in place of activations and gradients."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int, int], float] = {}  # by kind, stage and microbatch

    def run_cell(self, cell: tuple[str, int], micro: int, box: dict[str, Tensor]) -> dict[str, Tensor]:
        kind, stage = cell
        before = box.pop(f"{kind}{stage - 1 if kind == 'F' else stage + 1}", None)
        now = torch.full((1,), 100.0 * micro) if before is None else before + 1
        self.found[kind, stage, micro] = now.item()
        return {f"{kind}{stage}": now}

    def reduce(self) -> None:
        pass

    def update(self, micro: int) -> None:
        pass


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_schedule_deadlocks(name: str, num_ranks: int) -> None:
    plain = make_schedule(name, num_ranks, 1 if name == "naive" else 2 * num_ranks, None)
    edges = chain(plain.num_stages)
    schedule = add_updates(add_transfers(plain, edges), edges)
    last = schedule.num_stages - 1
    values = [Value(f"F{s}", ("F", s), (("F", s + 1),), ONE) for s in range(last)]
    if not schedule.forward_only:
        values += [Value(f"B{s}", ("B", s), (("B", s - 1),), ONE) for s in range(last, 0, -1)]
    kinds = "F" if schedule.forward_only else "FB"
    cells = [(kind, stage) for kind in kinds for stage in range(last + 1)]

    def fn(world: World) -> dict[tuple[str, int, int], float]:
        comm, runner = world.comm("pipeline"), Chain()
        ScheduleExecutor(schedule, values, cells, comm, {"pipeline": comm.rank}).run(runner)
        return runner.found

    found = run_ranks(Mesh((("pipeline", num_ranks),)), fn, strict=True)
    seen = {key: value for each in found for key, value in each.items()}
    assert seen == {
        (kind, stage, micro): 100.0 * micro + (stage if kind == "F" else last - stage)
        for kind, stage in cells
        for micro in range(schedule.num_micro)
    }


def test_a_pipeline_of_tensor_parallel_stages_compares_its_order_too() -> None:
    """Of values that cells hand on, some are tuples: those between a backward and its weight pass."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)) for _ in range(2)]
    model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(8))
    plan = "pipeline=2 tensor=2 micro=2 schedule=zb-h1"
    report = plait.verify(model, lambda m, x: m(x).square().mean(), torch.randn(4, 8), plan)
    assert report.ok, report


def test_stages_do_not_exchange_messages_through_groups_bound_to_a_device() -> None:
    bound = torch.device("cuda", 0)
    _check_messages(Mesh((("data", 4), ("tensor", 2))), bound)
    with pytest.raises(WorldError, match="started with device_id=cuda:0.*call init_process_group without device_id"):
        _check_messages(Mesh((("data", 2), ("pipeline", 2))), bound)
    with pytest.raises(WorldError, match="ranks of a ring, wait for each other"):
        _check_messages(Mesh((("context", 2),)), bound)


class TiedTower(nn.Module):
    """Layers for two stages on each of eight ranks; the first, one in the middle and the last have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(16))
        self.layers[8].weight = self.layers[15].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x  # type: ignore[no-any-return]


@functools.cache
def tied() -> plait.Verifier:
    torch.manual_seed(0)
    rows = torch.randn(48, 4, dtype=torch.float64)
    return plait.Verifier(TiedTower().double(), lambda m, x: m(x).square().mean(), rows, steps=1)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_no_schedule_deadlocks_over_tied_weights(name: str, num_ranks: int) -> None:
    """Their gradients are summed over three stages. Asynchronous schedules refuse them (test_asynchronous.py)."""
    num_micro = 1 if name == "naive" else 2 * num_ranks
    report = tied().verify(f"pipeline={num_ranks} micro={num_micro} schedule={name}", tolerance=1e-9)
    assert report.ok, report


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_an_evaluation_does_not_deadlock(num_ranks: int) -> None:
    """Whose schedule is forward-only."""
    plan = plait.Plan.parse(f"pipeline={num_ranks} micro={2 * num_ranks}")
    compiler = Compiler(tied().captures, plan)

    def evaluated(world: World) -> float:
        given = {"world": world, "compiler": compiler}
        trainer = plait.Trainer(compiler.model, compiler.loss_fn, torch.optim.SGD, plan, **given)
        return trainer.evaluate(tied().batch)  # type: ignore[no-any-return]

    wanted = float(compiler.loss_fn(compiler.model, tied().batch).detach())
    assert run_ranks(plan.mesh, evaluated, strict=True) == pytest.approx([wanted] * num_ranks, rel=1e-12)


def test_verify_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    enqueue = strict_transport.Queues.enqueue
    monkeypatch.setattr(strict_transport.Queues, "enqueue", lambda *args: called.append(args[2]) or enqueue(*args))
    assert tied().verify("data=2").ok and called
