"""Convolutions whose sequence is cut: each rank computes its part, and neighbours exchange the edges."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from oracle import Sample, check
from rule_makers import f
from torch import Tensor, nn

import plait
from plait.comm.protocol import World
from plait.compile.ops import OP_SPECS
from plait.compile.ops.padded_conv import padded_convolution, padded_convolution_backward
from plait.engine.compiler import Compiler
from plait.plan.plan import Plan
from plait.report.explanation import Explanation, explanation

pytestmark = pytest.mark.xdist_group("halo")  # plans share a verifier
LENGTH, WIDTH = 24, 4


@pytest.mark.parametrize("pads", [[1, 1, 2, 0], [0, 2, 1, 1], [1, 1, 1, 1], [0, 0, 0, 2]])
@pytest.mark.parametrize("bias", [True, False])
def test_parts_make_the_whole(pads: list[int], bias: bool) -> None:
    """Of [samples, channels, 12, 6] along the dims that stay as long, with windows of 3 positions."""
    x, weight, b = f(2, 2, 12, 6), f(4, 1, 3, 3), f(4) if bias else None
    args = (weight, b, pads, [1, 1], 2)
    out = padded_convolution(x, *args)
    alike = sum(before == after for before, after in zip(out.shape[2:], x.shape[2:], strict=True))
    assert check(Sample(padded_convolution, (x, *args), {}), OP_SPECS[padded_convolution]) >= alike
    given = (f(*out.shape), x, weight, [4] if bias else None, pads, [1, 1], 2, [True, True, bias])
    assert check(Sample(padded_convolution_backward, given, {}), OP_SPECS[padded_convolution_backward]) >= alike


class Convolutions(nn.Module):
    """The convolutions of speech and state-space models: causal ones by a slice and by padding, dilated ones, with a
    window of an even number of positions, point by point, and on planes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 8)
        self.causal = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)  # Mamba
        self.dilated = nn.Conv1d(WIDTH, WIDTH, 3, padding="same", dilation=2)
        self.padded = nn.Conv1d(WIDTH, 2 * WIDTH, 3)
        self.pointwise = nn.Conv1d(WIDTH, WIDTH, 1)  # Conformer
        self.even = nn.Conv1d(WIDTH, WIDTH, 4, padding=2, groups=2, bias=False)  # HuBERT
        self.norm = nn.BatchNorm1d(WIDTH)
        self.plane = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens).transpose(1, 2)
        x = F.silu(self.causal(x)[..., : x.shape[-1]])
        x = self.norm(self.dilated(x))
        x = F.glu(self.padded(F.pad(x, (2, 0))), 1)
        x = self.even(self.pointwise(x))[..., :-1]
        x = self.plane(x.unsqueeze(1)).squeeze(1)
        return self.head(x.transpose(1, 2))  # type: ignore[no-any-return]


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def made() -> Convolutions:
    torch.manual_seed(0)
    return Convolutions().double()


def tokens() -> Tensor:
    return torch.randint(0, 8, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def verifier() -> plait.Verifier:
    return plait.Verifier(made(), loss_fn, tokens())


@pytest.mark.parametrize("plan", ["context=2", "context=4", "data=2 context=3 zero=2", "context=2 micro=2"])
def test_numbers_are_those_of_one_device(plan: str, verifier: plait.Verifier) -> None:
    report = verifier.verify(plan, tolerance=1e-9)
    assert report.ok, report


def explained(plan: str, verifier: plait.Verifier) -> Explanation:
    return explanation(Compiler(verifier.captures, Plan.parse(plan)).compiled(verifier.batch))


def test_only_edges_travel(verifier: plait.Verifier) -> None:
    """Windows of 4, 5, 3, 1, 4 and 3 positions need as many less one of the neighbours, in forward once, and in
    backward once with their gradients."""
    found = explained("context=4", verifier)
    sent = [item for item in found.collectives if item.kind == "halo"]
    edges = [3, 4, 2, 3, 2]
    forward = [item.sent_bytes for item in sent if item.phase == "forward"]
    assert forward == [num * 2 * WIDTH * 8 for num in edges]
    assert sum(item.sent_bytes for item in sent) == 3 * sum(forward)
    assert "all_gather" not in {item.kind for item in found.collectives}
    assert found.compiled.whole_sequences == ()

    compiler = Compiler(verifier.captures, Plan.parse("context=4"))

    def rank(world: World) -> int:
        options: dict[str, Any] = {"world": world, "compiler": compiler}
        trainer = plait.Trainer(compiler.model, loss_fn, lambda p: torch.optim.SGD(p, lr=0.1), "context=4", **options)
        trainer.step(verifier.batch)
        world.comm("context").links.reset()
        trainer.step(verifier.batch)
        return world.comm("context").links.total()

    ranks = plait.run_ranks(Plan.parse("context=4").mesh, rank)
    assert ranks[1] == pytest.approx(found.sent_bytes["context"], abs=16)  # and the loss once more, for the result
    assert ranks[0] < ranks[1] > ranks[3]  # the first rank and the last have one neighbour


class Window(nn.Module):
    """One convolution, behind layers that do more work."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.down(self.up(self.table(tokens)).tanh())
        return self.convolution(x.transpose(1, 2))  # type: ignore[no-any-return]


def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 4, "stride": 2, "padding": 1},
        {"kernel_size": 15, "padding": 7},  # a part has 6 positions
        {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
        {"kernel_size": 3},
    ],
)
def test_what_is_no_exchange_of_edges_runs_whole_and_is_named(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Window(**options).double()
    windows = plait.Verifier(model, mean_loss, tokens())
    report = windows.verify("context=4", tolerance=1e-9)
    assert report.ok, report
    text = str(explained("context=4", windows))
    (line,) = (line for line in text.splitlines() if line.startswith("read whole sequences, on every rank: "))
    assert "in convolution" in line


@pytest.mark.filterwarnings("ignore:plait has no rule")
@pytest.mark.parametrize(
    ("family", "options", "length"),
    [("Mamba", {}, 8), ("Mamba2", {"num_heads": 4, "head_dim": 4, "n_groups": 1, "chunk_size": 4}, 16)],
)
def test_state_space_models(family: str, options: dict[str, Any], length: int) -> None:
    """Edges travel for the convolution. Of Mamba, a loop over positions, so does the state, once in forward, twice in
    backward. The scan of Mamba-2 is of chunks, each on its rank, of which the states are gathered."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 1, "pad_token_id": 0}
    model = getattr(hf, f"{family}ForCausalLM")(getattr(hf, f"{family}Config")(**sizes, **options))
    ids = torch.randint(3, 32, (2, length))
    scans = plait.Verifier(model, lambda m, b: m(**b).loss, {"input_ids": ids, "labels": ids})
    report = scans.verify("context=2")
    assert report.ok, report
    found = explained("context=2", scans)
    mixer = [item for item in found.collectives if item.module.endswith("mixer")]
    gathered = sum(item.tensor_bytes for item in mixer if item.kind == "all_gather" and item.phase == "forward")
    state = 2 * 16 * 4 * 4  # of 2 rows
    if family == "Mamba":
        edges = 2 * 16 * 3 * 4
        assert [item.sent_bytes for item in mixer if item.kind == "halo"] == [edges, state, state, state, edges, edges]
    assert gathered <= (0 if family == "Mamba" else length // 4 * state)
    assert not any("select.int in backbone.layers.0.mixer" in text for text in found.compiled.whole_sequences)


def test_a_sum_of_edges_is_the_transpose_of_an_exchange() -> None:
    """<halo(x), y> = <x, halo_sum(y)> over all ranks, also where a rank sends to one side only."""
    from plait.backends.eager.collectives import halo, halo_sum

    for before, after in itertools.product((0, 1, 3), repeat=2):
        wide = 3 + before + after

        def rank(world: World, before: int = before, after: int = after, wide: int = wide) -> tuple[float, float]:
            generator = torch.Generator().manual_seed(world.rank)
            x, y = (torch.randn(2, n, dtype=torch.float64, generator=generator) for n in (3, wide))
            there = halo(world, x, "context", 1, before, after)
            back = halo_sum(world, y, "context", 1, before, after)
            return float((there * y).sum()), float((x * back).sum())

        found = torch.tensor(plait.run_ranks(Plan.parse("context=3").mesh, rank), dtype=torch.float64).sum(0)
        torch.testing.assert_close(found[0], found[1])
