"""What compiling makes of a step: where collectives stand, how gradients are bucketed, what is split."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from test_verify import gpt, gpt_batch
from torch import Tensor, nn
from torch.fx import Graph
from torch.nn import functional as F

import plait
from plait.api.job.gpt import loss_fn
from plait.backends.eager.collectives import all_reduce_start
from plait.backends.eager.passes import eager_graphs
from plait.backends.eager.rewrites.bucket_gradients import bucket_put, bucket_start, bucket_wait
from plait.compile.capture.capture import capture
from plait.compile.pipeline import compile
from plait.engine.compiler import Captures, Compiler
from plait.plan.plan import Plan
from plait.schedule.buckets import bucket_limit, split_buckets

aten = torch.ops.aten


def eager_graph(plan: str) -> Graph:
    return eager_graphs(Compiler(Captures(gpt(), loss_fn), Plan.parse(plan)).compiled(gpt_batch()).program)["alone"]


def test_buckets_close_when_they_are_full() -> None:
    assert split_buckets([4, 4, 4, 4, 4], bucket_bytes=8, first_bytes=4) == [[0], [1, 2], [3, 4]]
    assert split_buckets([9, 1], bucket_bytes=8, first_bytes=4) == [[0], [1]]
    assert split_buckets([], bucket_bytes=8, first_bytes=4) == []
    assert bucket_limit(100 << 20, 25 << 20) == (100 << 20) // 16
    assert bucket_limit(1 << 30, 25 << 20) == 25 << 20
    assert bucket_limit(1 << 20, 25 << 20) == 1 << 20


def test_gradients_leave_while_backward_runs_and_are_waited_for_at_the_end() -> None:
    nodes = list(eager_graph("data=2 bucket=32KiB").nodes)
    starts = [i for i, n in enumerate(nodes) if n.target is bucket_start]
    waits = [i for i, n in enumerate(nodes) if n.target is bucket_wait]
    products = [i for i, n in enumerate(nodes) if n.target in (aten.mm.default, aten.addmm.default)]
    assert len(starts) == len(waits) > 4
    assert sum(start < products[-1] for start in starts) >= len(starts) - 2
    assert waits[0] > products[-1]


def test_every_gradient_is_put_into_its_bucket_as_soon_as_it_is_there() -> None:
    graph = eager_graph("data=2")
    puts = [n for n in graph.nodes if n.target is bucket_put]
    order = {n: i for i, n in enumerate(graph.nodes)}
    assert len(puts) == len(list(gpt().parameters())) + 1  # and the loss travels with them
    between = [order[put] - order[put.args[2]] for put in puts]
    assert max(between) <= 3  # a new buffer and its first user may stand between


def test_sums_over_tensor_start_at_once_and_overlap_with_what_does_not_need_them() -> None:
    graph = eager_graph("tensor=2")
    order = {n: i for i, n in enumerate(graph.nodes)}
    pairs = [(n, next(iter(n.users))) for n in graph.nodes if n.target is all_reduce_start]
    assert pairs
    for start, done in pairs:
        assert order[start] == order[start.args[1]] + 1
        assert order[done] == min(order[user] for user in done.users) - 1
    assert any(
        n.target is aten.mm.default
        for start, done in pairs
        for n in graph.nodes
        if order[start] < order[n] < order[done]
    )


class Grouped(nn.Module):
    """Attention whose queries share few key-value heads."""

    def __init__(self, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared = heads, shared
        self.table = nn.Embedding(32, 32)
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32 * shared // heads)
        self.value, self.out = nn.Linear(32, 32 * shared // heads), nn.Linear(32, 32)
        self.head = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        q = self.query(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (
            part(h).unflatten(-1, (self.shared, -1)).transpose(1, 2).repeat_interleave(self.heads // self.shared, dim=1)
            for part in (self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(h + self.out(mixed.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize(("shared", "key"), [(4, "f32[32@tensor, 32]"), (2, "f32[16@tensor, 32]"), (1, "f32[8, 32]")])
def test_few_key_value_heads_are_split_if_they_can_be(shared: int, key: str) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    torch.manual_seed(0)
    model = Grouped(4, shared)
    batch = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(0))
    found = plait.explain(model, loss, batch, "tensor=2")
    assert f"{found.program.layouts['query.weight']}" == "f32[32@tensor, 32]"
    assert f"{found.program.layouts['key.weight']}" == key
    report = plait.verify(model, loss, batch, "tensor=2")
    assert report.ok, report


def test_what_a_process_remembers_of_calls_keeps_no_graph() -> None:
    """Strategies and shapes are remembered from one step to the next; the steps themselves are not."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 4)), torch.randn(4, 4)
    captured = capture(model, lambda model, x: model(x).square().mean(), x)
    compile(captured, Plan.parse("data=2 tensor=2"))
    mode = weakref.ref(next(iter(captured.graph.nodes)).meta["val"].fake_mode)  # which every value of the step holds
    del captured
    for _ in range(3):  # a view's base, which C++ holds too, goes only once the view has gone
        gc.collect()
    assert mode() is None
