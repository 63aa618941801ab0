"""ZeRO, accumulation, recompute and precision: the numbers of one device under every combination."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from comm_worlds import run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

import plait
from plait.backends.eager.rewrites.read_ahead import Gathering
from plait.comm.protocol import World
from plait.compile.sharding.flat_shards import Cut, FlatShards
from plait.errors import BatchError, PlanError, RankFailed

pytestmark = pytest.mark.xdist_group("zero")  # plans share what is captured

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class SharedGradients(nn.Module):
    """Parameters that are added up have one gradient node between them; `scale` has one that repeats a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.change = nn.Parameter(torch.randn(6, 8) * 0.3), nn.Parameter(torch.randn(48) * 0.3)
        self.bias, self.shift, self.scale = (nn.Parameter(torch.randn(6)) for _ in range(3))
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(x, self.weight + self.change.view(6, 8)) + self.bias + self.shift)
        return self.out(hidden).square().mean() + 0.1 * self.scale.sum()


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


@pytest.mark.parametrize("plan", ["", "micro=2", "data=2", "data=2 micro=3", "data=2 zero=1 micro=2", "data=3 zero=3"])
def test_parameters_that_share_a_gradient(plan: str) -> None:
    report = plait.verify(SharedGradients(), mean_loss, torch.randn(12, 8), plan, clip_norm=0.1, steps=3)
    assert report.ok, report


def let_go_at_once(world: World) -> bool:
    """Whether what was gathered goes with its last reader, not when Python next looks for cycles."""
    gathering = Gathering(world.comm("data"), (((4, 3), 0, 2),), (torch.float32,), (torch.ones(2, 3),))
    kept = weakref.ref(gathering)
    gc.disable()
    try:
        (whole,) = gathering.wait()
        del gathering
        return whole.shape == (4, 3) and kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["threads", "shm", "gloo"])
def test_no_cycle_keeps_what_was_gathered(kind: str) -> None:
    assert all(run(kind, plait.Plan.parse("data=2").mesh, let_go_at_once))


class Odd(nn.Module):
    """What does not divide evenly, or at all: sizes that neither 2 nor 3 divides, a scalar, one element, none; frozen
    and unused parameters, one module in two places, batch statistics, parameters of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.frozen, self.twice, self.unused = (nn.Linear(7, 10), *(nn.Linear(10, 10) for _ in range(3)))
        self.frozen.requires_grad_(False)
        self.scale, self.one = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.full((1,), 0.7))
        self.none = nn.Parameter(torch.empty(0))
        self.layer_norm, self.batch_norm, self.drop = nn.LayerNorm(10), nn.BatchNorm1d(10), nn.Dropout(0.2)
        self.conv = nn.Conv1d(2, 5, 3, padding=1)
        self.wide = nn.Parameter(torch.randn(11, dtype=torch.float64) * 0.3)
        self.narrow = nn.Parameter((torch.randn(10, 5) * 0.3).bfloat16())
        self.whole = nn.Parameter(torch.arange(5), requires_grad=False)
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.frozen(torch.tanh(self.stem(x)))) * self.scale + self.one
        h = self.drop(self.batch_norm(self.layer_norm(self.twice(h)) + self.twice(torch.sin(h))))
        h = h + self.conv(h.view(-1, 2, 5)).mean(1).repeat(1, 2)
        h = h + (h.bfloat16() @ self.narrow).float().repeat(1, 2) + self.wide[1:].float() * h
        return self.head(h + 0.01 * self.whole.repeat(2)) + self.none.sum()


def odd_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = {"x": torch.randn(24, 7, generator=generator), "y": torch.randint(0, 4, (24,), generator=generator)}
    return rows | {"weight": torch.rand(24, generator=generator).index_fill(0, torch.arange(5), 0.0)}


def weighted_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return plait.Weighted((losses * batch["weight"]).sum(), batch["weight"].sum())


@pytest.fixture(scope="module")
def odd() -> plait.Verifier:
    torch.manual_seed(0)
    return plait.Verifier(Odd(), weighted_loss, odd_batch(), clip_norm=0.05, steps=3)


@pytest.mark.parametrize(
    "plan",
    [
        "data=2 zero=1 micro=3",
        "data=3 zero=1 micro=2",
        "data=3 zero=2 micro=2",
        "data=4 zero=3 micro=2",
        "data=3 zero=3 precision=bf16",
        "data=6 zero=3 bucket=64B",
        "replica=2 data=3 zero=3",
        "data=3 central=host micro=2",
        "data=4 central=host precision=bf16",
        "replica=3 data=2 zero=2 micro=2 allreduce=ring",
    ],
)
def test_parameters_of_every_kind(odd: plait.Verifier, plan: str) -> None:
    report = odd.verify(plan)
    assert report.ok, report


def test_local_batch_norm_with_microbatches_of_a_weighted_loss() -> None:
    torch.manual_seed(0)
    model = Odd()
    model.drop.p = 0.0
    report = plait.verify(model, weighted_loss, odd_batch(), "replica=2 data=2 micro=2 zero=1 batchnorm=local")
    assert report.ok, report


class Branches(nn.Module):
    """Which way it goes depends on the data: a step without one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y if y.sum() > 0 else -y).mean()


@pytest.mark.parametrize(
    "needs",
    ["zero=2", "micro=2", "recompute=layer", "precision=bf16", "precision.linear=bf16", "replica=2", "tensor=2"],
)
def test_a_model_without_a_graph_gets_only_data_parallelism(needs: str) -> None:
    plan = plait.Plan.parse(needs)

    def rank(world: World) -> None:
        plait.Trainer(Branches(), mean_loss, SGD, plan, world=world).step(torch.randn(4, 8))

    with pytest.raises(
        RankFailed, match=rf"(?s)needs the graph of the step for {needs}, but.*test_zero.py:\d+.*works is data="
    ):
        plait.run_ranks(plan.mesh, rank)


class Distances(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.pdist(x).float().mean()


class Bessel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.i1(x).float().mean()


@pytest.mark.parametrize(
    ("tail", "op"),
    [
        (Distances(), "aten._pdist_forward.default"),
        pytest.param(
            Bessel(), "an op", marks=pytest.mark.skipif(TorchVersion(torch.__version__) >= (2, 14), reason="has one")
        ),
    ],
)
def test_an_op_without_a_kernel_in_half_precision(tail: nn.Module, op: str) -> None:
    """Found when it runs, or when its backward is captured: the module is named and the plan that helps."""
    model = nn.Sequential(OrderedDict(body=nn.Linear(8, 8), tail=tail))
    batch = torch.randn(4, 8)
    message = rf"{op} of tail has no kernel in half precision \(.*Half'\); .* precision\.tail=fp32"
    with pytest.raises(PlanError, match=message):
        plait.Trainer(model, mean_loss, SGD, "precision=fp16").step(batch)
    report = plait.verify(model, mean_loss, batch, "precision=fp16 precision.tail=fp32")
    assert report.ok, report


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        ("micro=5", BatchError, "micro=5 does not divide the batch of 24 rows; give a multiple of 5, such as 20"),
        ("data=2 micro=8", PlanError, "data=2 does not divide a microbatch of 3; give a batch .* multiple of 16"),
        ("precision.hed=bf16", PlanError, r"precision\.hed=bf16 matches no module of the model; it has stem, frozen"),
        ("recompute=hed.*", PlanError, r"recompute=hed\.\* matches no module of the model; it has .*batch_norm"),
    ],
)
def test_plans_that_do_not_fit_the_model_or_the_batch(plan: str, error: type[Exception], message: str) -> None:
    for check in (plait.verify, plait.explain):
        with pytest.raises(error, match=message):
            check(Odd(), weighted_loss, odd_batch(), plan)


class _Copies(TorchDispatchMode):
    """Counts the copies that are made while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_copies += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def test_a_gather_makes_one_copy_a_parameter_whatever_the_number_of_ranks() -> None:
    """Of each parameter that the ranks divide, into the bucket and out of it: a kernel each on a GPU."""
    num_ranks = 64
    rows = FlatShards(tuple(Cut(shape, dim, num_ranks) for shape, dim in (((128, 3), 0), ((5, 64), 1), ((64,), 0))))
    wholes = [torch.randn(cut.shape) for cut in rows.cuts]
    buffer = torch.zeros(num_ranks, rows.length)
    with _Copies() as copies:
        for index, whole in enumerate(wholes):
            rows.put(buffer, index, whole)
        found = [torch.empty_like(whole) for whole in wholes]
        rows.take_all(buffer, found)
    assert copies.num_copies == 2 * len(wholes)
    for one, other in zip(found, wholes, strict=True):
        assert torch.equal(one, other)
    cuts = (((7, 3), 0), ((2, 5), 1), ((1000, 2), 0), ((3,), 0), ((0, 2), 0))
    uneven = FlatShards(tuple(Cut(shape, dim, num_ranks) for shape, dim in cuts))
    wholes = [torch.randn(cut.shape) for cut in uneven.cuts]
    buffer = torch.zeros(num_ranks, uneven.length)
    with _Copies() as copies:
        for index, whole in enumerate(wholes):
            uneven.put(buffer, index, whole)
        uneven.take_all(buffer, found := [torch.empty_like(whole) for whole in wholes])
    assert copies.num_copies <= 4 * len(wholes), "a part is smaller than the rest, or there is none"
    assert all(torch.equal(one, other) for one, other in zip(found, wholes, strict=True))


class TwoDtypes(nn.Module):
    """Reads a weight in bfloat16 in one mode, and whole in the other."""

    def __init__(self, trains_half: bool) -> None:
        super().__init__()
        self.trains_half, self.weight, self.head = trains_half, nn.Parameter(torch.randn(8)), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        half = self.training is self.trains_half
        return self.head(x * (self.weight.bfloat16().float() if half else self.weight))


@pytest.mark.parametrize("trains_half", [True, False])
@pytest.mark.parametrize("plan", ["data=2 zero=1", "data=2 zero=2", "data=2 zero=3"])
def test_an_evaluation_may_read_a_weight_in_another_dtype_than_training(plan: str, trains_half: bool) -> None:
    batch = {"x": torch.randn(4, 8)}

    def run(world: Any) -> list[float]:
        trainer = plait.Trainer(
            models[world.rank], loss_fn, functools.partial(torch.optim.SGD, lr=0.1), text, world=world
        )
        return [value for _ in range(2) for value in (float(trainer.step(batch)), float(trainer.evaluate(batch)))]

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return model(batch["x"]).square().mean()

    found = []
    for text in ("data=2", plan):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(TwoDtypes(trains_half))
        found.append(plait.run_ranks(plait.Plan.parse(text).mesh, run)[0])
    assert found[1] == pytest.approx(found[0], rel=1e-6) and found[0][1] != found[0][2]
