"""Collectives of activations: started behind their input, waited for before their reader, with work in between."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.fx import Graph, Node

from plait.api.job.gpt import BytesGPT, loss_fn
from plait.backends.eager.passes import eager_graphs
from plait.compile.ir.calls import op_spec_of
from plait.compile.ir.estimate import flops_of
from plait.compile.ir.node_info import info_of
from plait.engine.compiler import Captures, Compiler
from plait.plan.plan import Plan

LAYER = "blocks.1"
CAPTURES = Captures(BytesGPT(layers=3, width=16, heads=4, sequence=8), loss_fn)


def eager_graph(plan: str) -> Graph:
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    program = Compiler(CAPTURES, Plan.parse(plan)).compiled({"x": tokens, "y": tokens}).program
    return eager_graphs(program)["alone"]


@dataclass(frozen=True)
class Sent:
    """One collective of activations: its kind, the phase, and the products between its start and its wait."""

    kind: str
    phase: str
    products: int | None  # None if it is one call


def sent_by_a_layer(graph: Graph, layer: str = LAYER) -> list[Sent]:
    nodes = list(graph.nodes)
    found = []
    for start in nodes:
        does = op_spec_of(start).communicates
        if does is None or does.counted or does.part == "wait" or not info_of(start).module.startswith(layer):
            continue
        products = None
        if does.part == "start":
            (wait,) = start.users
            between = nodes[nodes.index(start) + 1 : nodes.index(wait)]
            products = sum(node.op == "call_function" and flops_of(node) > 0 for node in between)
        found.append(Sent(does.kind.title, info_of(start).phase, products))
    return found


@pytest.mark.parametrize(
    ("plan", "kinds"),
    [
        ("tensor=2 sequence=yes", ["all_gather", "reduce_scatter"] * 2),
        ("tensor=2 sequence=yes recompute=gathers", ["all_gather", "reduce_scatter"] * 2 + ["all_gather"] * 2),
        ("tensor=2", ["all_reduce"] * 2),
        ("context=2", ["all_to_all"] * 4),
        ("context=2 context.kind=gather", ["reduce_scatter"] * 2),
    ],
)
def test_every_collective_of_backward_has_a_product_beside_it(plan: str, kinds: list[str]) -> None:
    backward = [sent for sent in sent_by_a_layer(eager_graph(plan)) if sent.phase == "backward"]
    assert sorted(sent.kind for sent in backward) == sorted(kinds)
    assert all(sent.products for sent in backward), backward


def test_forward_has_work_beside_what_no_chain_waits_for() -> None:
    """Queries travel while keys and values are computed; between split weights each call waits for the one before."""
    chain = [sent for sent in sent_by_a_layer(eager_graph("tensor=2 sequence=yes")) if sent.phase == "forward"]
    assert [sent.products for sent in chain] == [None] * 4
    heads = [sent for sent in sent_by_a_layer(eager_graph("context=2")) if sent.phase == "forward"]
    assert [sent.products for sent in heads[:2]] == [2, 1]


@pytest.mark.parametrize("plan", ["tensor=2 sequence=yes", "tensor=2 sequence=yes recompute=gathers"])
def test_gradients_of_weights_are_not_put_off_far(plan: str) -> None:
    """What a layer's gradients read may be freed before backward reaches the layer after the next."""
    products = [node for node in eager_graph(plan).nodes if node.op == "call_function" and flops_of(node)]
    chain, late = _in_chain(products), 0
    for index, node in enumerate(products):
        if info_of(node).phase == "backward" and node not in chain:
            late = max(late, sum(_layer(other) < _layer(node) - 1 for other in products[:index] if other in chain))
    assert late == 0


def _layer(node: Node) -> int:
    module = info_of(node).module
    return int(module.split(".")[1]) if module.startswith("blocks.") else 99


def _in_chain(products: list[Node]) -> set[Node]:
    """The products of backward that lead to products of other layers."""
    found: set[Node] = set()
    for node in products:
        stack, seen = list(node.users), set[Node]()
        while stack:
            user = stack.pop()
            if user not in seen:
                seen.add(user)
                stack += user.users
        if any(other in seen for other in products) and info_of(node).phase == "backward":
            found.add(node)
    return found
