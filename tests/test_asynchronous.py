"""PipeDream and 2BW: each equals the serial program of its definition, and keeps as many versions as that asks for."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor, nn

from plait import PlanError, RankFailed, Trainer, verify
from plait.api.job.gpt import BytesGPT, loss_fn
from plait.backends.eager.pipeline_program import PipelineProgram
from plait.comm.protocol import World
from plait.comm.thread_world import run_ranks
from plait.engine.compiler import Captures, Compiler
from plait.plan.plan import Plan

SGD = functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9)


class Tower(nn.Module):
    """Layers one after the other, as many as any stage count here divides."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(24, 8, generator=generator), torch.randn(24, 8, generator=generator)


@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 micro=6 schedule=pipedream",
        "pipeline=3 micro=8 schedule=pipedream",
        "pipeline=3 micro=8 schedule=pipedream-vertical",
        "pipeline=2 micro=6 schedule=pipedream-2bw",
        "pipeline=3 micro=8 schedule=pipedream-2bw",
        "pipeline=2 data=2 micro=6 zero=1 schedule=pipedream",
        "pipeline=2 data=2 micro=6 zero=3 schedule=pipedream-2bw",
        "pipeline=2 tensor=2 micro=4 schedule=pipedream",
        "pipeline=2 micro=6 precision=bf16 recompute=layer schedule=pipedream",
    ],
)
def test_equals_the_serial_program(plan: str, batch: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    report = verify(Tower(), loss, batch, plan, optimizer=SGD, steps=2)
    assert report.ok, report


def test_dropout_draws_the_same(batch: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    model = BytesGPT(4, 16, heads=2, sequence=12, vocab=32, dropout=0.2)
    symbols = torch.randint(32, (8, 13), generator=torch.Generator().manual_seed(1))
    given = {"x": symbols[:, :-1].contiguous(), "y": symbols[:, 1:].contiguous()}
    assert verify(model, loss_fn, given, "pipeline=2 micro=4 schedule=pipedream").ok


def trained(plan: str, batch: tuple[Tensor, Tensor]) -> list[tuple[dict[str, Tensor], int]]:
    """Parameters after a step, and the most versions that each rank held."""
    given = Plan.parse(plan)
    torch.manual_seed(0)
    compiler = Compiler(Captures(Tower(), loss), given)

    def rank(world: World) -> tuple[dict[str, Tensor], int]:
        trainer = Trainer(compiler.model, loss, SGD, given, world=world, compiler=compiler)
        trainer.step(batch)
        replica = trainer.executor
        versions = 1
        for program in replica._executables.values():  # type: ignore[union-attr]
            versions = program.most_versions if isinstance(program, PipelineProgram) else 1
        return {name: replica.whole(name, replica.local(name)).clone() for name in replica.layouts}, versions

    return run_ranks(given.mesh, rank)


def test_versions_are_as_many_as_the_definition_needs(batch: tuple[Tensor, Tensor]) -> None:
    assert [found for _, found in trained("pipeline=4 micro=12 schedule=pipedream", batch)] == [4, 3, 2, 1]
    assert [found for _, found in trained("pipeline=3 micro=12 schedule=pipedream-vertical", batch)] == [3, 3, 3]
    assert [found for _, found in trained("pipeline=3 micro=12 schedule=pipedream-2bw", batch)] == [2, 2, 2]
    assert [found for _, found in trained("pipeline=3 micro=12 schedule=1f1b", batch)] == [1, 1, 1]


def test_stale_weights_are_not_those_of_a_flush(batch: tuple[Tensor, Tensor]) -> None:
    stale = trained("pipeline=2 micro=6 schedule=pipedream", batch)[0][0]
    doubly = trained("pipeline=2 micro=6 schedule=pipedream-2bw", batch)[0][0]
    synced = trained("pipeline=2 micro=6 schedule=pipedream-vertical", batch)[0][0]
    flushed = trained("pipeline=2 micro=6 schedule=1f1b", batch)[0][0]
    for one, other in itertools.combinations((stale, synced, doubly, flushed), 2):
        assert max(float((one[name] - other[name]).abs().max()) for name in one) > 1e-3


@pytest.mark.parametrize(
    ("plan", "options", "parts"),
    [
        ("pipeline=2 micro=4 schedule=pipedream", {"clip_norm": 1.0}, ["clip_norm=1.0", "schedule=1f1b"]),
        ("pipeline=2 micro=4 schedule=pipedream precision=fp16", {}, ["loss scale", "precision=bf16"]),
        ("pipeline=2 micro=4 schedule=pipedream home.parameters=host", {}, ["older versions", "home.parameters"]),
        ("pipeline=[1,2] micro=4 schedule=pipedream", {}, ["copies of a stage", "one rank"]),
    ],
)
def test_refuses_what_needs_all_ranks_at_each_update(
    plan: str, options: dict[str, float], parts: list[str], batch: tuple[Tensor, Tensor]
) -> None:
    def rank(world: World) -> None:
        Trainer(Tower(), loss, SGD, plan, world=world, **options).step(batch)  # type: ignore[arg-type]

    with pytest.raises((PlanError, RankFailed)) as caught:
        run_ranks(Plan.parse(plan).mesh, rank)
    assert all(part in str(caught.value) for part in parts), caught.value
    with pytest.raises(PlanError) as before:  # which is no RankFailed
        verify(Tower(), loss, batch, plan, optimizer=SGD, **options)  # type: ignore[arg-type]
    assert all(part in str(before.value) for part in parts), before.value


def test_refuses_weights_that_stages_share() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.middle = nn.Embedding(8, 8), Tower(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.middle(self.embed(x)) @ self.embed.weight.t()

    def tied_loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    with pytest.raises(PlanError, match="share the parameter embed.weight; untie it"):
        verify(Tied(), tied_loss, torch.arange(8), "pipeline=2 micro=4 schedule=pipedream")


class _Follows(nn.Module):
    """A layer with a parameter and a buffer that are whole, and of which tensor= reads a part; the buffer changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(8, 8, bias=False), nn.Parameter(torch.randn(8))
        self.register_buffer("mean", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        with torch.no_grad():
            self.mean.lerp_(y.detach().flatten(0, -2).std(0), 0.1)
        return x + torch.relu(y - self.mean) * self.scale


@pytest.mark.parametrize(
    "plan",
    ["pipeline=2 tensor=2 micro=4 schedule=pipedream", "pipeline=2 tensor=2 micro=4 schedule=pipedream-2bw",
     "pipeline=2 tensor=2 micro=2 recompute=0"],
)  # fmt: skip
def test_backward_reads_parts_of_what_changes_as_forward_did(plan: str) -> None:
    """A rank's part of a whole tensor lies in its memory, which an update or a later microbatch writes."""
    torch.manual_seed(0)
    model = nn.Sequential(_Follows(), _Follows(), nn.Linear(8, 6)).double()
    layouts = {"0.up.weight": "tensor, -", "0.scale": "-", "1.up.weight": "tensor, -", "1.scale": "-"}
    rows = torch.randn(12, 4, 8, dtype=torch.float64)
    report = verify(model, lambda m, x: m(x).pow(2).mean(), rows, plan, layouts=layouts)
    assert report.ok, report
