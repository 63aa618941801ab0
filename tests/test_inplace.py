"""Sums that are written into an operand: which, and that no number changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import plait
from plait.backends.eager.rewrites.dead_values import reuse_dead_operands

aten = torch.ops.aten


def graph_of(fn: Callable[..., Tensor], *inputs: Tensor) -> GraphModule:
    """The graph of a function that calls ATen ops, with the values of its nodes."""
    module = symbolic_trace(fn)
    FakeTensorProp(module).propagate(*inputs)
    for node in module.graph.nodes:
        node.meta["val"] = node.meta.get("val", node.meta.get("tensor_meta"))
    return module


def in_place(graph: Graph) -> list[tuple[str, ...]]:
    return [tuple(str(a) for a in n.args) for n in graph.nodes if n.target is aten.add_.Tensor]


def scaled_second(x: Tensor, y: Tensor) -> Tensor:
    return aten.add.Tensor(x, aten.mul.Tensor(y, 3.0), alpha=0.1)


def scaled_first(x: Tensor, y: Tensor) -> Tensor:
    return aten.add.Tensor(aten.mul.Tensor(x, 3.0), y, alpha=0.1)


def plain_second(x: Tensor, y: Tensor) -> Tensor:
    return aten.add.Tensor(x, aten.mul.Tensor(y, 3.0))


def read_again(x: Tensor, y: Tensor) -> Tensor:
    made = aten.mul.Tensor(x, 3.0)
    return aten.mul.Tensor(aten.add.Tensor(made, y), made)


def of_inputs(x: Tensor, y: Tensor) -> Tensor:
    return aten.add.Tensor(x, y)


def broadcast(x: Tensor, y: Tensor) -> Tensor:
    return aten.add.Tensor(aten.sum.dim_IntList(x, [0], True), y)


def through_a_reshape(x: Tensor, y: Tensor) -> Tensor:
    return aten.add.Tensor(aten.reshape.default(aten.mul.Tensor(x, 3.0), [4, 3]), aten.reshape.default(y, [4, 3]))


def through_a_transpose(x: Tensor, y: Tensor) -> Tensor:
    return aten.add.Tensor(aten.t.default(aten.mul.Tensor(x, 3.0)), aten.t.default(y))


@pytest.mark.parametrize(
    ("fn", "num"),
    [
        (scaled_second, 0), (scaled_first, 1), (plain_second, 1), (read_again, 0), (of_inputs, 0), (broadcast, 0),
        (through_a_reshape, 1), (through_a_transpose, 0),
    ],
)  # fmt: skip
def test_what_is_written_in_place_has_the_same_numbers(fn: Callable[..., Tensor], num: int) -> None:
    x, y = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    module = graph_of(fn, x, y)
    expected, given = module(x, y), (x.clone(), y.clone())
    reuse_dead_operands(module.graph)
    module.recompile()
    assert len(in_place(module.graph)) == num
    assert torch.equal(module(x, y), expected)
    assert torch.equal(x, given[0]) and torch.equal(y, given[1])


def test_a_running_mean_whose_news_is_split_is_scaled_once() -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(24)
            self.register_buffer("mean", torch.randn(24))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            with torch.no_grad():
                self.mean.mul_(0.9).add_(y.sum(0), alpha=0.1)
            return (y * self.mean).sum()

    torch.manual_seed(0)
    rows = torch.randn(4, 24, dtype=torch.float64)
    report = plait.verify(Codebook().double(), lambda m, x: m(x), rows, "tensor=2", layouts={"norm.weight": "tensor/3"})
    assert report.ok, report
