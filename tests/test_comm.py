"""The contract that every transport keeps."""

from __future__ import annotations

import functools

import pytest
import torch
from comm_worlds import TRANSPORTS, run

from plait.comm.group import REDUCERS
from plait.comm.protocol import Comm, World
from plait.spec.mesh import Mesh

SIZES = [(0,), (1,), (5,), (7, 3), (300_000,)]  # the last is larger than a segment is at first
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
HALF = (torch.bfloat16, torch.float16)


@functools.cache
def value(shape: tuple[int, ...], dtype: torch.dtype, rank: int, salt: int = 0) -> torch.Tensor:
    """What that rank brings: every rank can tell. Sums of half precision are exact in float32, in any order."""
    generator = torch.Generator().manual_seed(100 * salt + rank)
    if dtype in HALF:
        return (torch.randint(-255, 256, shape, generator=generator) / 8).to(dtype)
    return (torch.randn(shape, generator=generator) * 8).to(dtype)


def total(values: list[torch.Tensor], op: str) -> torch.Tensor:
    result = values[0].float() if values[0].dtype in HALF else values[0]
    for one in values[1:]:
        result = REDUCERS[op](result, one)
    return result.to(values[0].dtype)


def check(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    if result.dtype == torch.float32:
        assert torch.allclose(result, expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(result, expected)


def check_take(comm: Comm, values: list[torch.Tensor], given: torch.Tensor | None = None) -> None:
    """Every rank's tensor is handed out once, flat, before `wait` returns."""
    found: dict[int, torch.Tensor] = {}

    def take(rank: int, row: torch.Tensor) -> None:
        assert rank not in found
        found[rank] = row.clone()

    comm.all_gather(values[comm.rank] if given is None else given, take=take).wait()
    for rank, one in enumerate(values):
        check(found.pop(rank), one.view(-1))
    assert not found


def check_rows(comm: Comm, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Some rows to each rank: none to some, and none at all; those after the last are not sent."""
    rank, size = comm.rank, comm.size
    for salt, tables in enumerate((
        [[(r + 2 * to) % 3 for to in range(size)] for r in range(size)],
        [[r * int(to == 0) for to in range(size)] for r in range(size)],
        [[0] * size] * size,
    )):  # fmt: skip
        rows = [value((sum(nums) + 2, *shape), dtype, r, 2 + salt) for r, nums in enumerate(tables)]
        expected = [each.split([*nums, 2])[rank] for each, nums in zip(rows, tables, strict=True)]
        counts = torch.tensor([tables[rank], [len(each) for each in expected]])
        before, mine = comm.links.total(), rows[rank].clone()
        check(comm.all_to_all_rows(mine, counts).wait(), torch.cat(expected))
        assert torch.equal(mine, rows[rank]), "an input was changed"
        others = sum(tables[rank]) - tables[rank][rank]
        assert comm.links.total() - before == others * mine[:1].nbytes


def check_buffers(comm: Comm, values: list[torch.Tensor], rows: list[torch.Tensor]) -> None:
    """Collectives from the transport's own memory, each of which ends a buffer's life."""
    mine, mine_rows = values[comm.rank], rows[comm.rank]
    for _ in range(2):
        if (buffer := comm.buffer(mine.numel(), mine.dtype)) is not None:
            check_take(comm, values, buffer.copy_(mine.view(-1)))
        if (buffer := comm.buffer(mine.numel(), mine.dtype)) is not None:
            check(comm.all_gather(buffer.copy_(mine.view(-1))).wait(), torch.stack(values).view(comm.size, -1))
        if (buffer := comm.buffer(mine_rows.numel(), mine.dtype)) is not None:
            work = comm.reduce_scatter(buffer.copy_(mine_rows.view(-1)).view(comm.size, -1), consume=True)
            check(work.wait(), total([row[comm.rank].view(-1) for row in rows], "sum"))


def every_collective(world: World) -> list[bytes]:
    """Checks values; returns the bits of what must be equal between ranks."""
    comm = world.comm("data")
    rank, size = comm.rank, comm.size
    bits = []
    for shape in SIZES:
        for dtype in DTYPES if shape != SIZES[-1] else DTYPES[:1]:
            values = [value(shape, dtype, r) for r in range(size)]
            mine = values[rank].clone()
            for op in ("sum", "max", "min") if dtype != torch.bool else ("sum", "max"):
                result = comm.all_reduce(mine, op).wait()
                check(result, total(values, op))
                bits.append(result.view(torch.uint8).numpy().tobytes())
            check(comm.all_gather(mine).wait(), torch.stack(values))
            check(comm.broadcast(mine, size - 1).wait(), values[size - 1])
            rows = [value((size, *shape), dtype, r, 1) for r in range(size)]
            mine_rows = rows[rank].clone()
            check(comm.reduce_scatter(mine_rows).wait(), total([row[rank] for row in rows], "sum"))
            check(comm.all_to_all(mine_rows).wait(), torch.stack([row[rank] for row in rows]))
            check_rows(comm, shape, dtype)
            sent = comm.send(mine, (rank + 1) % size, tag=3)
            check(comm.recv(mine, (rank - 1) % size, tag=3).wait(), values[(rank - 1) % size])
            sent.wait()
            assert torch.equal(mine, values[rank]), "an input was changed"
            assert torch.equal(mine_rows, rows[rank]), "an input was changed"
            check_take(comm, values)
            check_buffers(comm, values, rows)
            check(comm.all_reduce(mine, consume=True).wait(), total(values, "sum"))
        comm.barrier()
    scalar = comm.all_reduce(torch.tensor(float(rank))).wait()
    assert scalar.shape == () and scalar == size * (size - 1) / 2
    return bits


def interleaved(world: World) -> None:
    """Many collectives under way at once, waited for in another order on each rank, results kept."""
    comm = world.comm("data")
    rank, size = comm.rank, comm.size
    kept = []
    for round_ in range(3):
        works = []
        for i in range(12):
            mine = torch.full((1 + 5000 * (i % 4),), float(rank + i + 100 * round_))
            everyone = torch.stack([torch.full_like(mine, float(r + i + 100 * round_)) for r in range(size)])
            if i % 3 == 1:
                works.append((comm.all_gather(mine), everyone))
                continue
            if i % 3 == 2 and (buffer := comm.buffer(mine.numel(), mine.dtype)) is not None:
                mine = buffer.copy_(mine)
            works.append((comm.all_reduce(mine, consume=i % 2 == 0), everyone.sum(0)))
        order = list(range(12))
        for i in order if rank % 2 else reversed(order):
            kept.append((works[i][0].wait(), works[i][1]))
    for result, expected in kept:
        assert torch.equal(result, expected)


def messages(world: World, by_tag: bool) -> None:
    """More messages than fit under way; `by_tag`, taken in another order of tags than they were sent."""
    comm = world.comm("data")
    if comm.rank == 0:
        works = [comm.send(torch.full((3,), float(i)), 1, tag=i % 2 if by_tag else 0) for i in range(60)]
        assert comm.recv(torch.empty(1), 1).wait() == 1
        for work in works:
            work.wait()
    else:
        tags = (1, 0) if by_tag else (0,)
        expected = [[float(i) for i in range(60) if not by_tag or i % 2 == tag] for tag in tags]
        received = [[comm.recv(torch.empty(3), 0, tag) for _ in each] for tag, each in zip(tags, expected, strict=True)]
        assert [[work.wait()[0].item() for work in works] for works in received] == expected
        comm.send(torch.ones(1), 0).wait()


def bytes_sent(world: World) -> dict[str, int]:
    comm = world.comm("data")
    counts = {}

    def count(name: str) -> None:
        counts[name] = comm.links.total()
        comm.links.reset()

    tensor = torch.ones(12 * 8)
    comm.links.reset()
    comm.all_reduce(tensor).wait()
    count("all_reduce")
    comm.all_gather(tensor).wait()
    count("all_gather")
    comm.reduce_scatter(tensor.view(comm.size, -1)).wait()
    count("reduce_scatter")
    comm.all_to_all(tensor.view(comm.size, -1)).wait()
    count("all_to_all")
    comm.broadcast(tensor, 0).wait()
    count("broadcast")
    return counts


def results_are_each_ranks_own(world: World) -> None:
    """A rank may change its result at once, while others still take theirs."""
    comm = world.comm("data")
    ones = torch.ones(200_000)
    for _ in range(12):
        for result, expected in (
            (comm.all_reduce(ones).wait(), float(comm.size)),
            (comm.all_gather(ones).wait(), 1.0),
            (comm.broadcast(ones, 0).wait(), 1.0),
        ):
            assert torch.equal(result, torch.full_like(result, expected))
            result.zero_()


def shared_memory(world: World) -> None:
    """Every rank sees what any wrote, before it sent anything; several such pieces are apart."""
    comm = world.comm("data")
    rank, size = comm.rank, comm.size
    pieces = [comm.shared(num) for num in (64 * size, 3 * size, 0)]
    for index, piece in enumerate(pieces):
        assert piece is not None and piece.dtype == torch.uint8 and piece.data_ptr() % 64 == 0
        assert not piece.any()
        comm.barrier()
        mine = piece.view(size, -1)[rank] if piece.numel() else piece
        mine.fill_(1 + rank + 10 * index)
    comm.barrier()
    for index, piece in enumerate(pieces[:2]):
        assert piece is not None
        expected = torch.arange(1 + 10 * index, 1 + size + 10 * index, dtype=torch.uint8)
        assert torch.equal(piece.view(size, -1), expected[:, None].expand(size, piece.numel() // size))
    comm.barrier()


def contract(world: World, by_tag: bool = True) -> tuple[list[bytes], dict[str, int]]:
    interleaved(world)
    results_are_each_ranks_own(world)
    shared_memory(world)
    if world.mesh.size == 2:
        messages(world, by_tag)
    return every_collective(world), bytes_sent(world)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_contract(transport: str, num_ranks: int) -> None:
    by_tag = not transport.startswith("strict")  # like NCCL, which has no tags
    results = run(transport, num_ranks, functools.partial(contract, by_tag=by_tag))
    bits = [bits for bits, _ in results]
    assert all(other == bits[0] for other in bits), "ranks got different bits"
    n, num_bytes = num_ranks, 12 * 8 * 4
    all_reduce = (n - 1) * num_bytes if transport.endswith("naive") else 2 * (n - 1) * num_bytes // n
    for _, counts in results:
        assert counts["all_reduce"] == all_reduce
        assert counts["all_gather"] == (n - 1) * num_bytes
        assert counts["reduce_scatter"] == counts["all_to_all"] == (n - 1) * num_bytes // n
    assert sum(counts["broadcast"] for _, counts in results) == (n - 1) * num_bytes


def over_both_axes(world: World) -> list[list[int]]:
    def members(comm: Comm) -> list[int]:
        found: list[int] = comm.all_gather(torch.tensor(world.rank)).wait().tolist()
        return found

    joined = members(world.comm("data*tensor"))
    return [members(world.comm("data")), members(world.comm("tensor")), joined, members(world.everyone())]


@pytest.mark.parametrize("transport", ["threads", "gloo", "shm"])
def test_a_comm_for_each_axis(transport: str) -> None:
    results = run(transport, Mesh((("data", 2), ("tensor", 2)), ("data*tensor",)), over_both_axes)
    both = [[0, 1, 2, 3]] * 2  # of both axes at once, and of everyone
    assert results == [
        [[0, 2], [0, 1], *both], [[1, 3], [0, 1], *both], [[0, 2], [2, 3], *both], [[1, 3], [2, 3], *both]
    ]  # fmt: skip


def crossed(world: World) -> tuple[float, float]:
    """Ranks wait for two groups in different orders: waiting for one must not hold up the other."""
    comms = [world.comm("data"), world.everyone()]
    works = [comm.all_reduce(torch.tensor(1.0)) for comm in comms]
    order = (0, 1) if world.rank % 2 else (1, 0)
    sums = {i: works[i].wait().item() for i in order}
    return sums[0], sums[1]


@pytest.mark.parametrize("transport", ["threads", "gloo", "shm"])
def test_groups_do_not_hold_each_other_up(transport: str) -> None:
    assert run(transport, 3, crossed) == [(3.0, 3.0)] * 3


def alone(world: World) -> None:
    for comm in (world.comm("data"), world.comm("tensor"), world.everyone()):
        tensor = torch.arange(3.0)
        assert torch.equal(comm.all_reduce(tensor).wait(), tensor)
        assert torch.equal(comm.all_gather(tensor).wait(), tensor[None])
        assert torch.equal(comm.reduce_scatter(tensor[None]).wait(), tensor)
        assert torch.equal(comm.all_to_all(tensor[None]).wait(), tensor[None])
        assert torch.equal(comm.all_to_all_rows(tensor, torch.tensor([[2], [2]])).wait(), tensor[:2])
        assert torch.equal(comm.broadcast(tensor, 0).wait(), tensor)
        comm.barrier()
        assert torch.equal(comm.shared(3), torch.zeros(3, dtype=torch.uint8))
        assert comm.links.total() == 0


def test_one_rank_moves_nothing() -> None:
    run("threads", Mesh((("data", 1), ("tensor", 1))), alone)
