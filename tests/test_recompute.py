"""Recompute: the choice of what to keep against brute force, what it does to the bytes kept, and what is refused."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verify import gpt, gpt_batch
from torch import Tensor, nn
from torch.fx import Graph, Node

import plait
from plait.api.job.gpt import loss_fn
from plait.backends.eager.collectives import all_reduce, all_reduce_start
from plait.backends.eager.passes import eager_graphs
from plait.compile.ir.calls import is_view, num_bytes
from plait.compile.ir.node_info import info_of, is_backward, is_forward
from plait.engine.compiler import Captures, Compiler
from plait.errors import PlanError
from plait.plan.plan import Plan
from plait.schedule.recompute_solver import KeptValue, choose_kept


def saved_bytes(graph: Graph) -> int:
    """Bytes of forward values that the backward pass of a local graph reads, each memory counted once."""
    return sum(num_bytes(node.meta["val"]) for node in saved_nodes(graph))


def saved_nodes(graph: Graph) -> set[Node]:
    """The forward nodes whose memory the backward pass reads."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not is_backward(node):
            continue
        for source in node.all_input_nodes:
            while source.op == "call_function" and is_view(source):
                source = source.all_input_nodes[0]
            tensor = hasattr(source.meta.get("val"), "numel")
            if source.op == "call_function" and is_forward(source) and tensor:
                found.add(source)
    return found


def seconds_again(values: list[KeptValue], kept: set[int]) -> float:
    """What it takes to work out again what backward needs and is not kept; infinite where that cannot be."""
    again: set[int] = set()
    stack = [i for i, value in enumerate(values) if value.needed]
    while stack:
        i = stack.pop()
        if i not in kept and i not in again:
            again.add(i)
            stack += values[i].sources
    return sum(values[i].seconds for i in again) if all(values[i].droppable for i in again) else math.inf


def held(values: list[KeptValue], kept: set[int]) -> int:
    return sum(values[i].bytes for i in kept)


def every_choice(values: list[KeptValue]) -> list[set[int]]:
    keepable = [i for i, value in enumerate(values) if value.keepable]
    sizes = range(len(keepable) + 1)
    return [set(kept) for num in sizes for kept in itertools.combinations(keepable, num)]


@st.composite
def graphs(draw: st.DrawFn) -> list[KeptValue]:
    values: list[KeptValue] = []
    for i in range(draw(st.integers(1, 7))):
        keepable = draw(st.booleans()) or draw(st.booleans())
        values.append(
            KeptValue(
                bytes=draw(st.integers(1, 1000)),
                seconds=float(draw(st.integers(1, 50))),
                needed=draw(st.booleans()),
                keepable=keepable,
                droppable=not keepable or draw(st.integers(0, 3)) > 0,
                sources=tuple(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else (),
            )
        )
    return values


@settings(max_examples=40)
@given(graphs(), st.floats(0, 1))
def test_the_choice_is_the_best_of_all(values: list[KeptValue], share: float) -> None:
    feasible = [kept for kept in every_choice(values) if seconds_again(values, kept) < math.inf]
    least = min(held(values, kept) for kept in feasible)
    assert held(values, choose_kept(values, None) or set()) == least
    budget = round(share * sum(value.bytes for value in values))
    chosen = choose_kept(values, budget)
    if budget < least:
        assert chosen is None
        return
    assert chosen is not None and held(values, chosen) <= budget
    best = min(seconds_again(values, kept) for kept in feasible if held(values, kept) <= budget)
    assert seconds_again(values, chosen) == pytest.approx(best, rel=2e-3)


def test_hand_made_choices() -> None:
    """A layer's input (kept anyway), a cheap wide value and a dear narrow one that come from it."""
    stream = KeptValue(bytes=100, seconds=9, needed=True, droppable=False)
    cheap = KeptValue(bytes=400, seconds=1, needed=True, sources=(0,))
    dear = KeptValue(bytes=100, seconds=50, needed=True, sources=(1,))
    values = [stream, cheap, dear]
    assert choose_kept(values, 600) == {0, 1, 2}
    assert choose_kept(values, 599) == choose_kept(values, 200) == {0, 2}  # the wide one is worked out again
    assert choose_kept(values, 199) == choose_kept(values, 100) == {0}
    assert choose_kept(values, 99) is None
    assert choose_kept(values, None) == {0}
    assert choose_kept([], 0) == set()
    assert choose_kept([KeptValue(8, 1, needed=False)], 0) == set()


def test_a_sum_over_ranks_is_kept_where_something_is_worked_out_from_it() -> None:
    """Backward does not read it, but what it reads comes from it: cheaper to keep the sum than both its readers."""
    values = [
        KeptValue(bytes=10, seconds=0, needed=False, droppable=False),
        KeptValue(bytes=30, seconds=1, needed=True, sources=(0,)),
        KeptValue(bytes=30, seconds=1, needed=True, sources=(0,)),
    ]
    assert choose_kept(values, None) == {0}
    assert choose_kept(values, 60) == {1, 2}
    assert len(choose_kept(values, 40) or ()) == 2


@functools.cache
def captures() -> Captures:
    return Captures(gpt(), loss_fn)


def eager_graph(plan: str) -> Graph:
    program = Compiler(captures(), Plan.parse(plan)).compiled(gpt_batch()).program
    return eager_graphs(program)[program.micro_graphs[-1]]


@pytest.mark.parametrize("axes", ["", "data=2 tensor=2"])
def test_what_is_kept_fits_the_budget_and_uses_it(axes: str) -> None:
    everything = saved_bytes(eager_graph(axes))
    layers = saved_bytes(eager_graph(f"{axes} recompute=layer"))
    assert layers < 0.5 * everything
    before = everything
    for share in (0.8, 0.5):
        budget = round(share * everything)
        kept = saved_bytes(eager_graph(f"{axes} recompute=budget={budget}B"))
        assert 0.9 * budget < kept <= min(budget, before)
        before = kept


def test_products_are_the_last_to_be_worked_out_again() -> None:
    aten = torch.ops.aten
    everything = saved_bytes(eager_graph(""))
    graph = eager_graph(f"recompute=budget={round(0.8 * everything)}B")
    again = {node.target for node in graph.nodes if info_of(node).recomputed}
    assert aten.gelu.default in again
    assert not again & {aten.mm.default, aten.addmm.default}


def test_a_budget_that_cannot_be_met_says_the_least_that_can() -> None:
    with pytest.raises(PlanError, match=r"recompute=budget=1KiB cannot be met: \d+KiB of activations stay") as error:
        eager_graph("data=2 recompute=budget=1KiB")
    least = str(error.value).partition("met: ")[2].partition(" ")[0]
    kept = saved_bytes(eager_graph(f"data=2 recompute=budget={least}"))
    assert 0 <= Plan.parse(f"recompute=budget={least}").recompute.budget_bytes - kept < 1024


class Unnumbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x)).sin()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("recompute=*.mlq", r"recompute=\*\.mlq matches no module of the model; it has .*body"),
        ("recompute=layer", "recompute=layer needs numbered layers, .* but this model has modules body"),
    ],
)
def test_refusals_of_what_is_not_there(plan: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plait.explain(Unnumbered(), lambda m, b: m(b).sum(), torch.randn(4, 4), plan)


def test_without_layers_a_budget_counts_for_the_whole_model() -> None:
    report = plait.verify(Unnumbered(), lambda m, b: m(b).sum(), torch.randn(4, 4), "data=2 recompute=budget=40B")
    assert report.ok, report


@pytest.mark.parametrize("how", ["layer", "*.up", "budget=400KiB"])
def test_sums_over_ranks_are_not_sent_again(how: str) -> None:
    def sums(plan: str) -> int:
        return sum(n.target in (all_reduce, all_reduce_start) for n in eager_graph(plan).nodes)

    assert sums(f"tensor=2 recompute={how}") == sums("tensor=2")
