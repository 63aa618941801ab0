"""No third case: over a grid of plans and models, a plan is verified, or `refusals` says why it cannot be, in the words
of the PlanError that verify raises before any rank starts."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.api import verify as verifying
from plait.backends.inductor import inductor_backend
from plait.backends.inductor.region_compiler import CompileReport
from plait.comm.thread_world import run_ranks
from plait.engine.compiler import Compiler
from plait.engine.local_batch import batch_of_replica, microbatches, num_rows
from plait.engine.setup_checks import check_captured, known_facts, place_of_threads
from plait.errors import CaptureError, PlanError, Refusal
from plait.plan.legality import refusals
from plait.plan.plan import Plan

pytestmark = pytest.mark.xdist_group("legality_grid")  # plans share what is captured

SEED = 20261122
PLANS_OF_EACH = 40


# Models, each tiny, with what makes some plans impossible.


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))


class Conv(nn.Module):
    """Batch norm, whose running statistics every microbatch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)])
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu() if isinstance(layer, nn.BatchNorm2d) else layer(x)
        return self.head(x.mean((2, 3)))


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)])
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.drop(layer(x))
        return self.head(x)


class Grouped(nn.Module):
    """Attention with 4 heads of queries, and 2 of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q(x).view(rows, length, 4, 4).transpose(1, 2)
        k, v = (f(x).view(rows, length, 2, 4).transpose(1, 2).repeat_interleave(2, 1) for f in (self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(found.transpose(1, 2).reshape(rows, length, 16))


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


class Branching(nn.Module):
    """What it computes depends on numbers, which no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.layers[1](x if float(x.detach().sum()) > 0 else -x)


class Mixture(nn.Module):
    """Four experts, of which each row has two; their weights are looked up for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.up = nn.Parameter(torch.randn(4, 8, 4) * 0.3)
        self.down = nn.Parameter(torch.randn(4, 4, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2, -1)
        rows, expert = x.repeat_interleave(2, 0).unsqueeze(1), ids.flatten()
        y = (rows @ self.up[expert]).relu() @ self.down[expert]
        return x + (y.squeeze(1) * weights.reshape(-1, 1)).view(-1, 2, 8).sum(1)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def first_tokens(model: nn.Module, batch: Tensor) -> Tensor:
    """The loss of predicting tokens but 0, which padding may be."""
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten(), ignore_index=0)


def tokens(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


class Closure(torch.optim.LBFGS):
    """An optimizer that needs a closure."""


class Mixing(torch.optim.Optimizer):
    """Divides each gradient by the norm of its tensor, as layer-wise rates do: parts are not the whole."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad / (p.grad.norm() + 1.0), alpha=group["lr"])


def muon(params: Any) -> list[torch.optim.Optimizer]:
    """Muon for matrices and AdamW for the rest, as it is used."""
    params = list(params)
    matrices, rest = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
    found: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=0.02)] if matrices else []
    return found + ([torch.optim.AdamW(rest, lr=1e-3, eps=1e-4)] if rest else [])


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4),
    "muon": muon,
    "mixing": Mixing,
    "closure": Closure,
}


@dataclass(frozen=True)
class Case:
    """A model, and the shape of one of its rows."""

    make: Callable[[], nn.Module]
    row: tuple[int, ...]
    loss_fn: Callable[[Any, Any], Tensor] = squares
    ids: int = 0  # the batch is of so many kinds of ids

    def batch(self, rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(rows)
        if self.ids:
            return torch.randint(self.ids, (rows, *self.row), generator=generator)
        return torch.randn(rows, *self.row, generator=generator)


MODELS = {
    "mlp": Case(mlp, (8,)),
    "conv": Case(Conv, (2, 4, 4)),
    "tied": Case(Tied, (4,), tokens, 12),
    "grouped": Case(Grouped, (4, 8)),
    "frozen": Case(frozen, (8,)),
    "branching": Case(Branching, (8,)),
    "masked": Case(Tied, (3,), first_tokens, 12),
    "experts": Case(Mixture, (8,)),
}
DRAWN = [name for name in MODELS if name != "masked"]  # which is for some of ALWAYS

# Every key of a plan, and what stands beside it, with values; the first is that of a key that is left out.
GRID: dict[str, tuple[str, ...]] = {
    "data": ("", "2", "3"),
    "expert": ("", "2", "3"),
    "expert.capacity": ("", "9"),
    "tensor": ("", "2", "4"),
    "pipeline": ("", "2", "[1,2]"),
    "replica": ("", "2"),
    "stages": ("", "[tensor=2|data=2]"),
    "context": ("", "2", "3"),
    "context.kind": ("", "ring", "ulysses", "gather"),
    "sequence": ("", "yes"),
    "zero": ("", "1", "3"),
    "micro": ("", "2", "4"),
    "shapes": ("", "bucket:4"),
    "shapes.limit": ("", "1"),
    "schedule": ("", "gpipe", "interleaved", "zb-h1", "pipedream"),
    "chunks": ("", "2"),
    "cut": ("", "head", "2", "nowhere"),
    "recompute": ("", "layer", "gathers", "budget=1KiB", "nowhere"),
    "precision": ("", "bf16", "fp16", "bf16-params"),
    "precision.*": ("", "fp32"),
    "precision.nowhere": ("", "bf16"),
    "reduce": ("", "bf16"),
    "home.parameters": ("", "host", "disk"),
    "home.activations": ("", "host", "disk"),
    "home.optimizer": ("", "host", "disk"),
    "central": ("", "host"),
    "backend": ("",),  # tests/test_xla.py has a grid of its own
    "batchnorm": ("", "local"),
    "allreduce": ("", "ring"),
    "bucket": ("", "64B"),
    "sync": ("", "2", "1..2"),
    "outer": ("", "nesterov"),
    "outer.lr": ("", "0.5"),
    "outer.momentum": ("", "0.5"),
    "moments": ("", "averaged"),
    "streaming": ("", "2"),
    "overlap": ("", "1"),
    "compress": ("", "int8", "powersgd:1"),
    "compress.nowhere": ("", "none"),
    "workers": ("", "2"),
    "servers": ("", "1"),
    "staleness": ("", "0"),
    "backup": ("", "1"),
    "compile": ("", "inductor"),
    "compile.nowhere": ("", "none"),
    "cudagraphs": ("", "yes"),
    "rows": ("8", "6", "5"),
    "optimizer": tuple(OPTIMIZERS),
    "clip_norm": ("", "0.5"),
}
BESIDE = ("rows", "optimizer", "clip_norm")  # keys of the grid that are none of a plan

# A key that another needs comes with it, so that a pair is more than what the text of a plan refuses.
WITH = {
    "schedule": {"pipeline": "2", "micro": "4"}, "chunks": {"pipeline": "2", "schedule": "interleaved", "micro": "2"},
    "cut": {"pipeline": "2"}, "zero": {"data": "2"}, "central": {"data": "2"}, "batchnorm": {"data": "2"},
    "allreduce": {"data": "2"}, "bucket": {"data": "2"}, "sync": {"data": "2"}, "compress": {"data": "2"},
    "outer": {"data": "2", "sync": "2"}, "outer.lr": {"data": "2", "sync": "2", "outer": "nesterov"},
    "outer.momentum": {"data": "2", "sync": "2", "outer": "nesterov"}, "moments": {"data": "2", "sync": "2"},
    "streaming": {"data": "2", "sync": "2", "outer": "nesterov"},
    "overlap": {"data": "2", "sync": "2", "outer": "nesterov"}, "compress.nowhere": {"data": "2", "compress": "int8"},
    "workers": {"servers": "1"}, "servers": {"workers": "2"}, "staleness": {"workers": "2", "servers": "1"},
    "expert.capacity": {"expert": "2"},
    "context.kind": {"context": "2"}, "sequence": {"tensor": "2"}, "shapes.limit": {"shapes": "bucket:4"},
    "compile.nowhere": {"compile": "inductor"}, "cudagraphs": {"compile": "inductor"},
    "backup": {"workers": "2", "servers": "1", "staleness": "0"}, "home.optimizer": {"data": "2"},
}  # fmt: skip
MOST_RANKS = 8


def test_every_key_of_a_plan_is_in_the_grid() -> None:
    from plait.plan.plan import describe_keys

    families = {key.partition(".")[0] + "." for key in GRID if "." in key}
    known = {name for name, _, _ in describe_keys()} - {"axes."}
    assert {key for key in known if key not in GRID and key not in families} == set()


# Plans of which the grid has few: verified by a serial program of their own, or with an optimizer on workers' parts.
ALWAYS = (
    ("mlp", "data=2 precision=fp16 sync=2"), ("conv", "data=2 precision=fp16 compress=int8"),
    ("mlp", "pipeline=2 data=2 micro=4 schedule=pipedream sync=2 outer=nesterov"),
    ("conv", "pipeline=2 data=2 micro=2 schedule=pipedream batchnorm=local"),
    ("conv", "pipeline=2 replica=2 data=2 micro=2 schedule=pipedream batchnorm=local sync=2"),
    ("tied", "data=2 zero=1 sync=2 workers=2 servers=1 staleness=0 optimizer=mixing"),
    ("tied", "data=2 zero=1 sync=2 workers=2 servers=1 staleness=0 optimizer=adam"),
    ("mlp", "tensor=2 sync=2 workers=2 servers=1 staleness=0 optimizer=mixing"),
    ("mlp", "tensor=2 workers=2 servers=1 staleness=0 optimizer=mixing"),
    ("masked", "data=2 shapes=bucket:4"), ("masked", "context=2 tensor=2 sequence=yes shapes=bucket:4"),
    ("masked", "context=2 tensor=2"), ("masked", "data=2 sync=2 shapes=bucket:4"),
    ("masked", "data=2 micro=2 shapes=bucket:4 rows=6"), ("masked", "context=4 shapes=bucket:6"),
)  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """A model with a plan, and what stands beside both."""

    model: str
    words: tuple[tuple[str, str], ...]

    @property
    def given(self) -> dict[str, str]:
        return {key: values[0] for key, values in GRID.items() if key in BESIDE} | dict(self.words)

    @property
    def text(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.words if key not in BESIDE)

    def __str__(self) -> str:
        return f"{self.model}: {' '.join(f'{key}={value}' for key, value in self.words)}"


def drawn() -> Iterator[Choice]:
    """Of each model plans in which two keys have values, drawn so that those not yet seen come first, with the keys
    that these need. What the text of a plan alone refuses has tests of its own."""
    for model, text in ALWAYS:
        yield Choice(model, tuple((key, value) for key, _, value in (word.partition("=") for word in text.split())))
    rng = random.Random(SEED)
    pairs = [
        ((key, value), (other, another))
        for key, other in itertools.combinations(GRID, 2)
        for value in GRID[key][1:]
        for another in GRID[other][1:]
    ]
    rng.shuffle(pairs)
    for model in DRAWN:
        found = 0
        seen: set[tuple[str, str]] = set()
        while found < PLANS_OF_EACH:
            at = min(range(len(pairs)), key=lambda i: sum(word in seen for word in pairs[i]))
            one, other = pairs.pop(at)
            words = WITH.get(one[0], {}) | WITH.get(other[0], {}) | dict([one, other])
            choice = Choice(model, tuple(sorted(words.items(), key=lambda word: [*GRID].index(word[0]))))
            seen |= {one, other}
            try:
                plan = Plan.parse(choice.text)
            except PlanError:
                continue
            if plan.num_processes <= MOST_RANKS:
                found += 1
                yield choice


class Grid:
    """Verifies choices; a capture and its references serve all plans of a model, rows, optimizer and norm."""

    def __init__(self) -> None:
        self._verifiers: dict[tuple[str, str, str, str], plait.Verifier] = {}

    def verifier(self, choice: Choice) -> plait.Verifier:
        given, case = choice.given, MODELS[choice.model]
        key = (choice.model, given["rows"], given["optimizer"], given["clip_norm"])
        if key not in self._verifiers:
            torch.manual_seed(0)
            self._verifiers[key] = plait.Verifier(
                case.make(), case.loss_fn, case.batch(int(given["rows"])), optimizer=OPTIMIZERS[given["optimizer"]],
                clip_norm=float(given["clip_norm"]) if given["clip_norm"] else None, steps=2,
            )  # fmt: skip
        return self._verifiers[key]


@pytest.fixture(scope="module")
def grid() -> Grid:
    return Grid()


def said_before(verifier: plait.Verifier, plan: Plan) -> tuple[Refusal, ...]:
    """What `refusals` says, once of what is known before the step is captured, and then of the captured step, of which
    nothing is laid out yet. Nothing where the step cannot be captured."""
    model, batch = verifier.captures.model, verifier.batch
    facts = replace(known_facts(plan, model, verifier.clip_norm), rows=num_rows(batch))
    if found := refusals(plan, facts, place_of_threads()):
        return found
    if plan.workers:
        return ()
    compiler = Compiler(verifier.captures, plan.inner_plan)
    try:
        captured = compiler.captured(microbatches(batch_of_replica(compiler.padded(batch), plan), plan.micro)[0])
        check_captured(compiler, plan, captured, verifier.clip_norm)
    except CaptureError as error:
        return refusals(plan, replace(facts, uncaptured=str(error)))
    except PlanError as error:
        return (error.refusal,) if error.refusal is not None else ()
    return ()


@pytest.mark.parametrize("choice", [*drawn()], ids=str)
def test_a_plan_is_verified_or_refused(choice: Choice, grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, plan = grid.verifier(choice), Plan.parse(choice.text)
    started: list[object] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        started.append(args)
        return run_ranks(*args, **kwargs)

    monkeypatch.setattr(verifying, "run_ranks", run)
    monkeypatch.setattr(inductor_backend, "compile_regions", lambda functions, plan: CompileReport(0, 0, 0, 0.0))
    found, of_schedule = attempted(lambda: said_before(verifier, plan))
    if isinstance(of_schedule, PlanError):  # which the plan's text alone does not say
        found = (of_schedule.refusal,)
    report, error = attempted(lambda: verifier.verify(plan))
    if error is None:
        assert found == () and report.ok, f"{found} {report}"
        return
    assert not started, "refused when ranks had started"
    if isinstance(error, CaptureError):
        assert choice.model == "branching" and all(refusal.why in str(error) for refusal in found)
        return
    assert isinstance(error, PlanError) and error.refusal is not None and str(error) == str(error.refusal)
    assert not found or error.refusal in found


def attempted(work: Callable[[], Any]) -> tuple[Any, PlanError | CaptureError | None]:
    """What `work` gives, or why it is refused."""
    try:
        return work(), None
    except (PlanError, CaptureError) as error:
        return None, error
