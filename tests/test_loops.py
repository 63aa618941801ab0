"""Loops over the positions of a sequence that is cut: each rank runs its own rounds, and a state goes to the next."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from oracle import Sample, check
from rule_makers import f
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

import plait
from plait.compile.ops import OP_SPECS
from plait.compile.ops.linear_scan import joined_steps, linear_scan, state_at
from plait.compile.passes.roll_loops import roll_loops
from plait.engine.compiler import Compiler
from plait.plan.plan import Plan
from plait.report.explanation import Explanation, explanation

pytestmark = pytest.mark.xdist_group("loops")
ROWS, LENGTH, WIDTH = 2, 12, 4
STATE = ROWS * WIDTH * 8  # bytes


@pytest.mark.parametrize("reverse", [False, True])
def test_parts_make_the_whole(reverse: bool) -> None:
    """Of 12 positions with a state [2, 6]; factors may be the same for all rows, or zeros."""
    b, first, state = f(12, 2, 6), f(2, 6), None
    for a in (f(12, 2, 6), f(12, 1, 6), None):
        for start in (first, None):
            assert check(Sample(linear_scan, (a, b, start, reverse), {}), OP_SPECS[linear_scan]) >= 10
    for num in (1, 7, 12):
        a, b, state = f(num, 1, 6), f(num, 2, 6), first
        states = linear_scan(a, b, first, reverse)
        for at in range(num)[:: -1 if reverse else 1]:
            torch.testing.assert_close(states[at], state)
            state = a[at] * state + b[at]
        factor, term = joined_steps(a, b, reverse)
        torch.testing.assert_close(factor * first + term, state)
    check(Sample(joined_steps, (a, b, reverse), {}), OP_SPECS[joined_steps])
    assert check(Sample(state_at, (b, 10), {}), OP_SPECS[state_at]) > 5


class Loop(nn.Module):
    """A loop over positions between linear layers, as `kind` says."""

    def __init__(self, kind: Callable[[Loop, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.gate, self.value, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.kind = kind

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.down(self.up(self.table(tokens)).tanh())
        return self.head(self.kind(self, x, torch.zeros_like(x[:, 0])))  # type: ignore[no-any-return]


def minimal_gru(m: Loop, x: Tensor, h: Tensor) -> Tensor:
    """Of Feng et al. 2024, "Were RNNs All We Needed?", with its weights in the loop."""
    out = []
    for at in range(x.shape[1]):
        z = torch.sigmoid(m.gate(x[:, at]))
        h = (1 - z) * h + z * m.value(x[:, at])
        out.append(h)
    return torch.stack(out, 1)


def learned_state(m: Loop, x: Tensor, h: Tensor) -> Tensor:
    """From a learned state, of which the last is read too."""
    z, h, out = torch.sigmoid(m.gate(x)), m.first.expand(len(x), -1), list[Tensor]()
    for at in range(x.shape[1]):
        h = h * z[:, at] + x[:, at]
        out.append(h)
    return torch.stack(out, 1)


def averages(m: Loop, x: Tensor, h: Tensor) -> Tensor:
    """Positions first, with a factor that all rounds read."""
    a, out = torch.sigmoid(m.first), list[Tensor]()
    for each in x.transpose(0, 1):
        h = a * h + (1 - a) * each
        out.append(h)
    return torch.stack(out).transpose(0, 1)


def from_the_end(m: Loop, x: Tensor, h: Tensor) -> Tensor:
    """Slices of one position, the last first."""
    out, h = list[Tensor](), m.first.expand(len(x), 1, -1)
    for at in reversed(range(x.shape[1])):
        h = 0.5 * h - x[:, at : at + 1]
        out.insert(0, h.tanh())
    return torch.cat(out, 1)


def linear_attention(m: Loop, x: Tensor, h: Tensor) -> Tensor:
    """A matrix as state, with one factor for all of it (RetNet, GLA)."""
    q, k, g = m.gate(x), m.value(x), torch.sigmoid(x.mean(-1))
    state, out = h[:, :, None] * h[:, None], list[Tensor]()
    state = torch.zeros_like(state)
    for at in range(x.shape[1]):
        state = state * g[:, at, None, None] + k[:, at, :, None] * x[:, at, None, :]
        out.append((q[:, at, None] @ state)[:, 0])
    return torch.stack(out, 1)


def written(m: Loop, x: Tensor, h: Tensor) -> Tensor:
    """To slices of a tensor, as RecurrentGemma's."""
    z, out = torch.sigmoid(m.gate(x)), torch.empty_like(x)
    for at in range(x.shape[1]):
        h = h * z[:, at] + x[:, at]
        out[:, at] = h
    return out


def scanned(m: Loop, x: Tensor, h: Tensor) -> Tensor:
    """By torch's scan."""

    def step(h: Tensor, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h = h * given[0] + given[1]
        return h, h.tanh()

    given = torch.sigmoid(m.gate(x)).transpose(0, 1).contiguous(), x.transpose(0, 1).contiguous()
    return scan(step, h, given)[1].transpose(0, 1)  # type: ignore[no-any-return]


def last_state(m: Loop, x: Tensor, h: Tensor) -> Tensor:
    z = torch.sigmoid(m.gate(x))
    for at in range(x.shape[1]):
        h = h * z[:, at] + x[:, at]
    return x * h[:, None]


def each_alone(m: Loop, x: Tensor, h: Tensor) -> Tensor:
    return torch.stack([m.gate(x[:, at]).tanh() for at in range(x.shape[1])], 1)


def two_states(m: Loop, x: Tensor, h: Tensor) -> Tensor:
    """One reads the other."""
    z, g, out = torch.sigmoid(m.gate(x)), h, list[Tensor]()
    for at in range(x.shape[1]):
        h = h * z[:, at] + x[:, at]
        g = g * z[:, at] + h.tanh()
        out.append(g * h)
    return torch.stack(out, 1)


def token_before(m: Loop, x: Tensor, h: Tensor) -> Tensor:
    """A first state from the sequence, and slices of the position before, of which the first is the last."""
    h, out = x[:, 0], list[Tensor]()
    for at in range(x.shape[1]):
        h = 0.5 * h + x[:, at - 1] + m.first
        out.append(h.tanh())
    return torch.stack(out, 1)


def recurrent(m: Loop, x: Tensor, h: Tensor) -> Tensor:
    out = []
    for at in range(x.shape[1]):
        h = torch.tanh(m.gate(x[:, at]) + m.value(h))
        out.append(h)
    return torch.stack(out, 1)


def rotating(m: Loop, x: Tensor, h: Tensor) -> Tensor:
    """Two states that read each other."""
    g, out = h, list[Tensor]()
    for at in range(x.shape[1]):
        h, g = 0.5 * h - 0.3 * g + x[:, at], 0.3 * h + 0.5 * g
        out.append(g)
    return torch.stack(out, 1)


def dropping(m: Loop, x: Tensor, h: Tensor) -> Tensor:
    out = []
    for at in range(x.shape[1]):
        h = 0.5 * h + F.dropout(x[:, at], 0.5)
        out.append(h)
    return torch.stack(out, 1)


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@functools.cache
def verifier(kind: Callable[[Loop, Tensor, Tensor], Tensor]) -> plait.Verifier:
    torch.manual_seed(0)
    tokens = torch.randint(0, 8, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return plait.Verifier(Loop(kind).double(), loss_fn, tokens, steps=1)


def explained(plan: str, kind: Callable[[Loop, Tensor, Tensor], Tensor]) -> Explanation:
    of = verifier(kind)
    return explanation(Compiler(of.captures, Plan.parse(plan)).compiled(of.batch))


@pytest.mark.parametrize(
    ("kind", "sent"),  # states sent, in forward and in backward; once more where backward reads them too
    [
        (minimal_gru, [1, 1]), (learned_state, [1, 1]), (averages, [1, 1]), (from_the_end, [1, 1]),
        (linear_attention, [WIDTH, WIDTH, WIDTH]), (written, [1, 1]), (scanned, [1, 1]), (last_state, [1, 1]),
        (each_alone, []),
    ],
)  # fmt: skip
def test_only_states_travel(kind: Callable[[Loop, Tensor, Tensor], Tensor], sent: list[int]) -> None:
    report = verifier(kind).verify("context=3", tolerance=1e-9)
    assert report.ok, report
    found = explained("context=3", kind)
    assert [item.sent_bytes for item in found.collectives if item.kind == "halo"] == [num * STATE for num in sent]
    assert "all_gather" not in {item.kind for item in found.collectives}


@pytest.mark.parametrize(
    "plan",
    ["context=2", "context=4 micro=2", "data=2 context=2 zero=3", "tensor=2 context=2", "context=2 "
     "pipeline=2 micro=2"],
)  # fmt: skip
@pytest.mark.parametrize("kind", [minimal_gru, two_states, token_before])
def test_numbers_are_those_of_one_device(kind: Callable[[Loop, Tensor, Tensor], Tensor], plan: str) -> None:
    report = verifier(kind).verify(plan, tolerance=1e-9)
    assert report.ok, report


@pytest.mark.parametrize("kind", [recurrent, rotating, dropping])
def test_what_is_not_linear_in_one_state_runs_whole_and_is_named(
    kind: Callable[[Loop, Tensor, Tensor], Tensor],
) -> None:
    report = verifier(kind).verify("context=2", tolerance=1e-9)
    assert report.ok, report
    found = explained("context=2", kind)
    assert "halo" not in {item.kind for item in found.collectives}
    assert any("select.int" in text for text in found.compiled.whole_sequences)
    if kind is recurrent:
        assert found.compiled.whole_loops == ("the loss (aten.tanh.default, aten.addmm.default of the state)",)


def test_a_loop_is_as_many_calls_for_any_length() -> None:
    model = Loop(minimal_gru).double()
    sizes = []
    for length in (5, 9):
        captures = plait.Verifier(model, loss_fn, torch.zeros(1, length, dtype=torch.long)).captures
        graph = captures.captured(torch.zeros(1, length, dtype=torch.long), True).graph
        assert roll_loops(graph, [length - 1, 1]) is graph
        sizes.append(len(roll_loops(graph, [length]).nodes))
    assert sizes[0] == sizes[1] < 150


def out_of_matrices(m: Loop, x: Tensor, h: Tensor) -> Tensor:
    """A product with a weight of what a rank has in another order than the whole."""
    state, out = h[:, :, None] * h[:, None], list[Tensor]()
    for at in range(x.shape[1]):
        state = 0.7 * state + x[:, at, :, None] * m.value(x[:, at])[:, None]
        out.append(m.gate((state @ x[:, at, :, None])[:, :, 0]))
    return torch.stack(out).transpose(0, 1)


@pytest.mark.parametrize(
    "plan", ["data=1", "tensor=2", "data=2 tensor=2 zero=3", "pipeline=2 micro=2 recompute=budget=1MiB"]
)
@pytest.mark.parametrize("kind", [minimal_gru, out_of_matrices])
def test_every_plan_rolls_loops(kind: Callable[[Loop, Tensor, Tensor], Tensor], plan: str) -> None:
    report = verifier(kind).verify(plan, tolerance=1e-9)
    assert report.ok, report
    targets = {node.target for graph in explained(plan, kind)._graphs() for node in graph.nodes}
    assert linear_scan in targets


def test_what_all_rounds_share_is_multiplied_once() -> None:
    """Weights of a loop meet the values of all rounds in one product, and gradients of them are one product."""
    (graph,) = explained("data=1", minimal_gru)._graphs()
    assert sum(node.target is torch.ops.aten.bmm.default for node in graph.nodes) == 0
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    assert sum(node.target in products for node in graph.nodes) == 3 * 5  # of five layers
