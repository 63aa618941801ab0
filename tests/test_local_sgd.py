"""Replicas that agree later: each strategy against a serial program of its definition; saved, resumed and evaluated."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_verify import gpt as gpt_of
from test_verify import gpt_batch, image_batch, image_loss
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import plait
from plait.api.job.gpt import loss_fn
from plait.api.memory import Estimator
from plait.api.trainer import Trainer
from plait.comm.protocol import World
from plait.comm.thread_world import run_ranks
from plait.cost.wire_bytes import BLOCK, coded_bytes
from plait.engine.compiler import Captures, Compiler
from plait.engine.local_sgd.exchange import MeanExchange
from plait.engine.local_sgd.tensor_compression import decode, encode
from plait.errors import BatchError, PlanError, RankFailed
from plait.plan.compression import Compression
from plait.plan.plan import Plan
from plait.schedule.sync_rounds import SyncRounds, split_in_parts
from plait.spec.mesh import Mesh

pytestmark = pytest.mark.xdist_group("local_sgd")  # plans share what is captured

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def gpt() -> nn.Module:
    return gpt_of(layers=1, width=32)


# ---- when


def times(text: str, steps: int = 12) -> str:
    rounds = SyncRounds.of(Plan.parse(f"data=2 {text}"))
    names = "abcdefgh"
    return " ".join(
        str(step)
        + "".join(names[p] for p in rounds.begun(step))
        + "".join(names[p].upper() for p in rounds.ended(step))
        for step in range(1, steps + 1)
    )


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("sync=4", "1 2 3 4aA 5 6 7 8aA 9 10 11 12aA"),
        ("sync=1..4", "1aA 2 3aA 4 5 6 7aA 8 9 10 11aA 12"),
        ("sync=4 outer=sgd streaming=2", "1 2aA 3 4bB 5 6aA 7 8bB 9 10aA 11 12bB"),
        ("sync=4 outer=sgd streaming=2 overlap=1", "1 2a 3A 4b 5B 6a 7A 8b 9B 10a 11A 12b"),
        ("sync=6 outer=sgd streaming=4 overlap=3", "1a 2 3b 4cA 5 6dB 7aC 8 9bD 10cA 11 12dB"),
    ],
)
def test_when_parts_of_the_model_begin_to_agree_and_are_taken_in(plan: str, expected: str) -> None:
    assert times(plan) == expected


def test_when_a_replica_knows_that_all_have_begun_a_step() -> None:
    assert [SyncRounds(4).meeting_after(step) for step in (0, 2, 3, 4, 7)] == [4, 4, 4, 8, 8]
    assert [SyncRounds(4, overlap=1).meeting_after(step) for step in (2, 3, 4)] == [5, 5, 9]
    assert [SyncRounds(4, parts=2).meeting_after(step) for step in (0, 1, 2, 3)] == [2, 2, 4, 4]
    assert SyncRounds((1, 4)).meeting_after(3) == 7


def test_parts_are_neighbours_of_about_the_same_size() -> None:
    assert split_in_parts([4, 1, 1, 2, 4, 4], 4) == [0, 1, 1, 1, 2, 3]
    assert split_in_parts([0, 0], 2) == [0, 0]


# ---- compressors


@pytest.mark.parametrize(("kind", "step"), [("bf16", 2**-7), ("fp8", 2**-3), ("int8", 1 / 127), ("int4", 1 / 7)])
def test_a_coded_number_is_within_half_a_code_step(kind: str, step: float) -> None:
    numbers = torch.randn(3, 4 * BLOCK) * torch.logspace(-6, 3, 4 * BLOCK)
    numbers[1, :BLOCK] = 0
    coded = encode(numbers, kind)
    assert coded.dtype == torch.uint8 and coded.shape == (3, coded_bytes(4 * BLOCK, kind))
    found = decode(coded, kind, 4 * BLOCK)
    largest = numbers.unflatten(1, (-1, BLOCK)).abs().amax(2, keepdim=True)
    allowed = (numbers.abs().unflatten(1, (-1, BLOCK)) if kind in ("bf16", "fp8") else largest) * step / 2
    assert bool(((found - numbers).unflatten(1, (-1, BLOCK)).abs() <= 1.001 * allowed + largest * 2e-5).all())
    assert torch.equal(decode(encode(found, kind), kind, 4 * BLOCK), found)  # what has been coded is not changed again


def exchanged(compression: str, terms: list[list[Tensor]], exempt: tuple[str, ...] = ()) -> list[tuple[Tensor, int]]:
    """The last of several exchanges on each replica, and the bytes that it sent in all."""

    def rank(world: World) -> tuple[Tensor, int]:
        comm = world.comm("data")
        exchange = MeanExchange(comm, Compression.parse(compression), exempt)
        means = [exchange.mean({"w": each})["w"] for each in terms[world.rank]]
        return means[-1], comm.links.total()

    return run_ranks(Mesh((("data", len(terms)),)), rank)


@pytest.mark.parametrize("num", [2, 3])
def test_top_k_as_a_serial_program(num: int) -> None:
    torch.manual_seed(0)
    terms = [[torch.randn(50, 40) for _ in range(3)] for _ in range(num)]
    left = [torch.zeros(2000) for _ in range(num)]
    for step in range(3):
        mean = torch.zeros(2000)
        for r in range(num):
            left[r] += terms[r][step].view(-1)
            places = left[r].abs().argsort(descending=True)[:20]
            mean[places] += left[r][places] / num
            left[r][places] = 0
    for found, num_bytes in exchanged("topk:0.01", terms):
        torch.testing.assert_close(found, mean.view(50, 40), rtol=1e-5, atol=1e-6)
        assert num_bytes == 3 * (num - 1) * 20 * 8


def test_powersgd_as_a_serial_program_and_exact_for_matrices_of_low_rank() -> None:
    torch.manual_seed(0)
    same = torch.randn(40, 3) @ torch.randn(3, 50)
    for found, num_bytes in exchanged("powersgd:3", [[same] * 2, [same] * 2]):
        torch.testing.assert_close(found, same, rtol=1e-3, atol=1e-4)
        assert num_bytes == 2 * (40 + 50) * 3 * 4
    terms = [[torch.randn(40, 50) for _ in range(3)] for _ in range(2)]
    right, left_out = torch.zeros(0), [torch.zeros(40, 50), torch.zeros(40, 50)]
    for step in range(3):
        given = [terms[r][step] + left_out[r] for r in range(2)]
        if step == 0:
            from plait.engine.local_sgd.exchange import first_factor

            right = first_factor("w", 50, 2)
        left, _ = torch.linalg.qr(sum(m @ right for m in given) / 2)
        right = sum(m.T @ left for m in given) / 2
        mean = left @ right.T
        left_out = [m - mean for m in given]
    for found, _ in exchanged("powersgd:2", terms):
        torch.testing.assert_close(found, mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int8", "int4"])
def test_coded_means_lose_nothing_over_time(kind: str) -> None:
    """With error feedback the sum over many exchanges is that of the true means, but for what the last leave out."""
    torch.manual_seed(0)
    terms = [[torch.randn(1024) for _ in range(30)] for _ in range(3)]
    true = sum(sum(each) for each in terms) / 3

    def rank(world: World) -> tuple[Tensor, float, int]:
        comm = world.comm("data")
        exchange = MeanExchange(comm, Compression(kind))
        means = [exchange.mean({"w": each})["w"] for each in terms[world.rank]]
        once = float((means[0] - sum(each[0] for each in terms) / 3).abs().max())
        return sum(means) - true, once, comm.links.total()

    found = run_ranks(Mesh((("data", 3),)), rank)
    for apart, once, num_bytes in found:
        assert float(apart.abs().max()) < 4 * once  # without it about the square root of 30 times as much
        assert num_bytes == 30 * 2 * 2 * coded_bytes(2 * BLOCK, kind)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][0], found[2][0])


def test_what_is_exempt_or_too_small_is_exchanged_as_it_is() -> None:
    terms = [[torch.randn(1000)], [torch.randn(1000)]]
    for found, num_bytes in exchanged("int4", terms, exempt=("w*",)):
        assert torch.equal(found, (terms[0][0] + terms[1][0]) / 2) and num_bytes == 4000
    few = [[torch.randn(100)], [torch.randn(100)]]
    assert torch.equal(exchanged("int8", few)[0][0], (few[0][0] + few[1][0]) / 2)


def test_a_tensor_of_integers_has_no_mean() -> None:
    def rank(world: World) -> None:
        MeanExchange(world.comm("data"), Compression("int8")).start({"w": torch.ones(3).long()})

    with pytest.raises(RankFailed, match="w is int64: only tensors of floating point numbers have a mean"):
        run_ranks(Mesh((("data", 1),)), rank)


# ---- training


@functools.cache
def verifier() -> plait.Verifier:
    return plait.Verifier(gpt(), loss_fn, gpt_batch(12), steps=5, optimizer=ADAMW)


@pytest.mark.parametrize(
    "plan",
    [
        "data=2 sync=2",
        "data=3 sync=1..4 moments=averaged",
        "data=2 sync=2 moments=reset micro=3",
        "data=2 sync=4 outer=nesterov",
        "data=2 sync=4 outer=sgd outer.momentum=0.5 streaming=2",
        "data=2 sync=3 outer=nesterov streaming=2 overlap=1",
        "data=2 sync=2 outer=nesterov compress=int4",
        "data=2 sync=3 outer=nesterov compress=int8 streaming=2 overlap=2",
        "data=2 tensor=2 sync=2 outer=nesterov",
        "replica=2 data=2 zero=3 sync=2",
        "replica=2 data=2 zero=1 micro=3 sync=2 moments=averaged",
        "data=2 pipeline=2 micro=3 sync=2",
        "data=2 recompute=layer precision=bf16 sync=2",
        "data=2 compress=bf16",
        "data=3 compress=fp8",
        "data=2 compress=int8",
        "data=3 compress=int4",
        "data=2 compress=topk:0.1",
        "data=3 compress=powersgd:2 compress.head.*=none",
        "data=2 tensor=2 compress=int8",
        "replica=2 data=2 zero=2 compress=powersgd:2",
        "data=2 pipeline=2 micro=2 compress=int4",
    ],
)
def test_the_numbers_of_the_serial_program(plan: str) -> None:
    report = verifier().verify(plan)
    assert report.ok, report
    assert report.worst_parameter.relative < 1e-4


def test_weighted_losses_batch_norm_and_clipping() -> None:
    def weighted(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        loss = nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="none")
        keep = (batch["y"] < 200).flatten()
        return plait.Weighted((loss * keep).sum(), keep.sum())

    gpts = plait.Verifier(gpt(), weighted, gpt_batch(8), steps=3, optimizer=ADAMW, clip_norm=0.1)
    for plan in ("data=2 compress=int8", "data=2 sync=2 outer=nesterov"):
        report = gpts.verify(plan)
        assert report.ok, report
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(5))
    model(image_batch()["x"])
    report = plait.verify(model, image_loss, image_batch(), "data=2 sync=2", steps=2)
    assert report.ok and report.buffers, report


@functools.cache
def captures(model: Any, loss: Any) -> Captures:
    torch.manual_seed(0)
    return Captures(model(), loss)


def train(plan: str, steps: Any, factory: Any = ADAMW, model: Any = gpt, loss: Any = loss_fn) -> list[Any]:
    """What `steps(trainer)` gives on each rank; all ranks of all plans share the captured step."""
    chosen = Plan.parse(plan)
    compiler = Compiler(captures(model, loss), chosen.inner_plan)

    def rank(world: World) -> Any:
        return steps(Trainer(compiler.model, loss, factory, chosen, world=world, compiler=compiler))

    return ranks(chosen, rank)


def train_apart(plan: str, steps: Any, factory: Any, model: Any, loss: Any) -> list[Any]:
    """As `train`, of ranks that each have a model of their own, and capture it."""
    chosen = Plan.parse(plan)
    torch.manual_seed(0)
    original = model()
    models = [copy.deepcopy(original) for _ in range(chosen.num_processes)]
    return ranks(chosen, lambda world: steps(Trainer(models[world.rank], loss, factory, chosen, world=world)))


def ranks(plan: Plan, rank: Callable[[World], Any]) -> list[Any]:
    try:
        return run_ranks(plan.mesh, rank)
    except RankFailed as error:
        raise error.__cause__ or error from None


def batch(rows: int, seed: int) -> dict[str, Tensor]:
    symbols = torch.randint(256, (rows, 17), generator=torch.Generator().manual_seed(seed))
    return {"x": symbols[:, :-1].contiguous(), "y": symbols[:, 1:].contiguous()}


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {n: trainer.executor.whole(n, trainer.executor.local(n)).clone() for n in trainer.executor.layouts}


def test_replicas_part_and_agree() -> None:
    def steps(trainer: Trainer) -> tuple[Any, ...]:
        for seed in range(3):
            trainer.step(batch(8, seed))
        own = weights(trainer)
        seen, loss = trainer.full_state_dict(), trainer.evaluate(gpt_batch(8))
        after = weights(trainer)
        trainer.agree()
        return own, seen, loss, after, weights(trainer), trainer.evaluate(gpt_batch(8))

    one, other = train("data=2 sync=4", steps)
    for name, tensor in one[0].items():
        assert torch.equal(one[3][name], tensor)  # evaluating changes nothing
        torch.testing.assert_close(one[1][name], (tensor + other[0][name]) / 2)
        assert torch.equal(one[4][name], other[4][name])
        torch.testing.assert_close(one[4][name], one[1][name])
    assert not torch.equal(one[0]["head.weight"], other[0]["head.weight"])
    assert one[2] == other[2] == pytest.approx(one[5])


@pytest.mark.parametrize(
    "plan",
    [
        "data=2 sync=3 moments=averaged",
        "data=2 sync=4 outer=nesterov streaming=2 overlap=1 compress=int8",
        "data=2 compress=powersgd:2",
        "data=2 compress=topk:0.05",
        "data=2 tensor=2 sync=4 outer=nesterov",
    ],
)
def test_a_resumed_run_is_the_unbroken_one(plan: str, tmp_path: Path) -> None:
    expected = train(plan, lambda trainer: stepped(trainer, 0, 8)[5:])
    train(plan, lambda trainer: saved(trainer, 5, tmp_path))
    assert train(plan, lambda trainer: resumed(trainer, 5, 8, tmp_path)) == expected


def stepped(trainer: Trainer, first: int, end: int) -> list[float]:
    """The losses of these steps, each on a batch of its own."""
    return [float(trainer.step(batch(8, seed))) for seed in range(first, end)]


def saved(trainer: Trainer, steps: int, folder: Path) -> None:
    stepped(trainer, 0, steps)
    trainer.save(folder)


def resumed(trainer: Trainer, first: int, end: int, folder: Path) -> list[float]:
    trainer.prepare(gpt_batch(8))
    trainer.load(folder)
    return stepped(trainer, first, end)


def test_a_checkpoint_of_a_step_at_which_an_exchange_would_be_under_way(tmp_path: Path) -> None:
    """What has not begun is not taken in: until the next exchange each replica trains as if it were alone."""
    train("data=2", lambda trainer: saved(trainer, 4, tmp_path))
    plans = ("data=2 sync=4 outer=nesterov overlap=1", "data=2 sync=99")
    overlapping, apart = (train(plan, lambda trainer: resumed(trainer, 4, 8, tmp_path)) for plan in plans)
    assert overlapping == apart


def test_threads_that_each_make_a_trainer() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 3, 3), nn.Flatten())

    def loss(model: Any, images: Tensor) -> Tensor:
        return mse_loss(model(images), images.flatten(1))

    losses = train_apart("data=4", lambda trainer: float(trainer.step(torch.ones(4, 3, 8, 8))), SGD, net, loss)
    assert len(set(losses)) == 1


def test_a_checkpoint_of_replicas_loads_under_any_plan_as_their_mean(tmp_path: Path) -> None:
    def first(trainer: Trainer) -> tuple[dict[str, Tensor], float]:
        for seed in range(3):
            trainer.step(batch(12, seed))
        trainer.save(tmp_path)
        return trainer.full_state_dict(), trainer.evaluate(gpt_batch(12))

    def second(trainer: Trainer) -> tuple[dict[str, Tensor], float, float]:
        trainer.prepare(gpt_batch(12))
        trainer.load(tmp_path)
        return trainer.full_state_dict(), trainer.evaluate(gpt_batch(12)), float(trainer.step(gpt_batch(12)))

    ((mean, loss), _) = train("data=2 sync=4 outer=nesterov", first)
    for plan in ("tensor=2", "data=3 sync=2", "pipeline=2 micro=2"):
        for found, evaluated, stepped in train(plan, second):
            assert [name for name in mean if not torch.equal(found[name], mean[name])] == []
            assert evaluated == pytest.approx(loss, rel=1e-5) and stepped == stepped


def test_bytes_on_the_wire() -> None:
    """Of 64 steps: DiLoCo at most 1/60 of data parallel's, with int8 at most 1/200."""

    def sent(trainer: Trainer) -> int:
        for _ in range(64):
            trainer.step(torch.ones(4, 64))
        return trainer.world.comm("data").links.total()

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))

    def loss(model: Any, rows: Tensor) -> Tensor:
        return mse_loss(model(rows), rows)

    each, later, coded = (
        train(f"data=2 {how}", sent, SGD, wide, loss)[0]
        for how in ("", "sync=64 outer=nesterov", "sync=64 outer=nesterov compress=int8")
    )
    assert later <= each / 60 and coded <= each / 200


class Branching(nn.Module):
    """Cannot be captured: what it does depends on the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else -self.linear(x)


@pytest.mark.filterwarnings("ignore:the model runs as it is")
def test_a_model_that_cannot_be_captured() -> None:
    def loss(model: Any, rows: Tensor) -> Tensor:
        return mse_loss(model(rows), rows)

    def steps(trainer: Trainer) -> Tensor:
        rows = torch.arange(32.0).view(8, 4) / 32
        for _ in range(4):
            trainer.step(rows)
        return trainer.executor.local("linear.weight").clone()

    for plan in ("data=2 sync=2 outer=nesterov", "data=2 compress=int8"):
        one, other = train_apart(plan, steps, SGD, Branching, loss)
        assert torch.equal(one, other)


def test_what_replicas_cannot_do() -> None:
    with pytest.raises(PlanError, match="schedule=pipedream updates within it"):
        train("data=2 pipeline=2 micro=2 schedule=pipedream compress=int8", lambda trainer: None)
    with pytest.raises(PlanError, match="moments=reset needs the optimizer's state in memory"):
        train("data=2 sync=2 moments=reset home.optimizer=disk", lambda trainer: None)
    with pytest.raises(PlanError, match=r"compress.nope\*=none: no parameter has a name that matches"):
        train("data=2 compress=int8 compress.nope*=none", lambda trainer: trainer.step(gpt_batch(4)))
    with pytest.raises(PlanError, match="the memory of parameter servers is not predicted"):
        plait.memory(gpt(), loss_fn, gpt_batch(4), "workers=2 servers=1")
    with pytest.raises(BatchError, match="2 parts of 1 microbatches do not divide the batch of 3 rows"):
        train("data=2 sync=2", lambda trainer: trainer.step(gpt_batch(3)))


def explained_bytes(plan: str) -> float:
    """What explain says that a rank sends, which a run confirms."""
    found = re.search(r"a rank sends ([\d.]+) (KiB|MiB)", str(plait.explain(gpt(), loss_fn, gpt_batch(8), plan)))
    assert found is not None
    said = float(found[1]) * {"KiB": 2**10, "MiB": 2**20}[found[2]]

    def sent(trainer: Trainer) -> int:
        trainer.step(gpt_batch(8))
        before = trainer.world.comm("data").links.total()
        trainer.agree()
        return trainer.world.comm("data").links.total() - before

    assert train(plan, sent)[0] == pytest.approx(said, rel=0.01)
    return said


def test_memory_and_explanation_are_those_of_a_replica() -> None:
    estimator = Estimator(gpt(), loss_fn, gpt_batch(8), ADAMW)

    def peak(plan: str) -> int:
        return estimator.estimate(Plan.parse(plan)).peak

    num = sum(p.numel() for p in gpt().parameters())
    alone = Estimator(gpt(), loss_fn, gpt_batch(4), ADAMW).estimate(Plan()).peak
    assert peak("data=2 sync=8") == alone
    assert peak("data=2 sync=8 outer=nesterov") == alone + 8 * num
    assert peak("data=2 sync=8 compress=int8") == alone + 12 * num
    assert peak("data=2 compress=int8") == alone + 4 * num
    found = estimator.until_it_fits(Plan.parse("data=2 sync=8"), 1)
    assert [each.plan.zero for each in found] == [0] * len(found) and len(found) >= 2
    told = str(plait.explain(gpt(), loss_fn, gpt_batch(8), "data=2 tensor=2 sync=8"))
    first, rest = told.split("\n\neach of them: ", 1)
    num_local = sum(p.numel() for p in gpt().parameters()) / 2  # all but norms and biases of rows are split
    assert "2 replicas along data agree on weights (sync=8); a rank sends" in first
    sent = explained_bytes("data=2 sync=8 compress=int8")
    assert num_local < sent < 2.2 * num_local
    assert rest == str(plait.explain(gpt(), loss_fn, gpt_batch(4), "tensor=2"))


@pytest.mark.parametrize("compress", ["int8", "topk:0.5", "powersgd:2"])
def test_what_is_sent_does_not_depend_on_the_default_dtype(compress: str) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 40)), torch.randn(4, 16)
    torch.set_default_dtype(torch.float64)
    try:
        report = plait.verify(model, lambda m, x: m(x).square().mean(), batch, f"data=2 compress={compress}")
    finally:
        torch.set_default_dtype(torch.float32)
    assert report.ok, report
