"""Graphs as Python functions: what is written, what is freed, and what a failure tells."""

from __future__ import annotations

import traceback
import weakref

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from plait.backends.eager.codegen import _Writer, as_function, failed_node

aten = torch.ops.aten


def graph_of_parts() -> Graph:
    """Joins the second half of x to y, and adds a constant in float64."""
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    half = graph.call_function(aten.slice.Tensor, (x, 0, 2))
    both = graph.call_function(aten.cat.default, ([half, y], 0))
    cast = graph.call_function(aten._to_copy.default, (both,), {"dtype": torch.float64})
    graph.output((cast, None, x))
    return graph


def test_the_text_of_a_function() -> None:
    writer = _Writer(graph_of_parts())
    assert writer.text == "\n".join(
        [
            "def plait__call(x, y):",
            " slice_tensor = plait__0(x, 0, 2)",
            " cat_default = plait__1([slice_tensor, y], 0); del slice_tensor, y",
            " _to_copy_default = plait__3(cat_default, dtype=plait__2); del cat_default",
            " return (_to_copy_default, None, x,)",
        ]
    )
    assert writer.names["plait__2"] is torch.float64


def test_a_function_computes_what_the_graph_says_and_is_made_once() -> None:
    graph = graph_of_parts()
    x, y = torch.randn(4), torch.randn(3)
    cast, nothing, same = as_function(graph)(x, y)
    assert torch.equal(cast, torch.cat([x[2:], y]).double()) and nothing is None and same is x
    assert as_function(graph) is as_function(graph)


@pytest.mark.parametrize(
    "given",
    [
        float("inf"),
        -0.5,
        True,
        "mean",
        (2, 3),
        torch.Size([4]),
        torch.float16,
        torch.device("cpu"),
        [torch.float32],
        {},
    ],
)
def test_constants_are_passed_as_they_are(given: object) -> None:
    graph = Graph()
    graph.output((graph.call_function(lambda *args, **kwargs: (args, kwargs), (given,), {"key": given}),))
    ((args, kwargs),) = as_function(graph)()
    assert args == (given,) and kwargs == {"key": given}


def test_values_inside_slices_dicts_and_nested_lists() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(lambda *args: args, (slice(x, None, 2), {"a": [x, 1]}, [[x], [None]])),))
    ((cut, named, nested),) = as_function(graph)(5)
    assert (cut, named, nested) == (slice(5, None, 2), {"a": [5, 1]}, [[5], [None]])


def test_a_value_is_freed_after_its_last_use_and_one_that_nothing_reads_at_once() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def make(x: Tensor) -> Tensor:
        found = x + 1
        alive.append(weakref.ref(found))
        return found

    def count(*_: Tensor) -> int:
        return sum(each() is not None for each in alive)

    graph = Graph()
    x = graph.placeholder("x")
    first, _ = graph.call_function(make, (x,)), graph.call_function(make, (x,))
    before = graph.call_function(count, (first,))
    after = graph.call_function(count)
    graph.output((before, after))
    assert as_function(graph)(torch.zeros(1)) == (1, 0)


def test_a_failure_tells_its_node_and_shows_its_line() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    fine = graph.call_function(aten.neg.default, (x,))
    wrong: Node = graph.call_function(aten.mm.default, (fine, fine))
    graph.output((wrong,))
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        as_function(graph)(torch.zeros(2, 3))
    assert failed_node(caught.value.__traceback__, graph) is wrong
    assert "mm_default = plait__1(neg_default, neg_default)" in "".join(traceback.format_exception(caught.value))
