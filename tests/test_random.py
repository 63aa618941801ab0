"""Random numbers by global position: any sharding draws the same ones."""

from __future__ import annotations

import functools
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.compile.capture.capture import capture
from plait.compile.ops import philox
from plait.compile.ops import random as rule
from plait.compile.ops.base import OP_SPECS, Call, Shard, Strategy, TensorSpec, strategies_of
from plait.compile.ops.comm_ops import take
from plait.compile.ops.draw import draw, fill, kept_by
from plait.compile.ops.dropped_attention import dropped_attention, dropped_attention_backward
from plait.compile.ops.philox import CalledWords, Groups
from plait.compile.ops.random import GlobalRandom
from plait.errors import CaptureError

CPU = torch.device("cpu")
KINDS = {
    "bernoulli": (0.75,), "uniform": (-1.0, 2.0), "normal": (1.0, 3.0), "randint": (2, 9), "exponential": (2.0,),
    "geometric": (0.25,), "cauchy": (0.0, 1.0), "log_normal": (0.0, 0.5),
}  # fmt: skip


def numbers(shape, cuts=(), key=3, index=0, kind="normal", dtype=torch.float32):
    return draw(key, index, shape, dtype, CPU, kind, KINDS[kind], cuts)


@st.composite
def sharded_draws(draw_):
    """A shape, and cuts that divide it."""
    cuts, factors = [], [1, 1, 1]
    for _ in range(draw_(st.integers(0, 3))):
        dim, size, blocks = draw_(st.integers(0, 2)), draw_(st.integers(2, 3)), draw_(st.integers(1, 2))
        cuts.append((draw_(st.integers(0, size - 1)), size, dim, blocks))
        factors[dim] *= size * blocks
    sizes = draw_(st.sampled_from([(1, 1, 1), (2, 3, 1), (1, 5, 70), (70, 1, 40), (1, 1, 9000)]))
    return tuple(f * n for f, n in zip(factors, sizes, strict=True)), tuple(cuts)


@settings(max_examples=60, deadline=None)
@given(sharded_draws(), st.sampled_from(["bernoulli", "normal", "randint"]))
def test_a_part_is_the_part_of_the_whole(case, kind):
    shape, cuts = case
    whole = numbers(shape, kind=kind)
    for coordinate, size, dim, blocks in cuts:
        whole = take(whole, coordinate, size, dim, blocks)
    assert torch.equal(numbers(shape, cuts, kind=kind), whole)


@pytest.mark.parametrize("shape", [(), (1,), (200003,), (5, 30001), (2, 3, 7007), (7, 300, 30), (6, 35, 1, 1)])
def test_parts_of_every_shape(shape):
    whole = numbers(shape, kind="uniform")
    assert whole.shape == shape and whole.min() >= -1 and whole.max() <= 2
    assert whole.unique().numel() > 0.95 * whole.numel()
    for dim, n in enumerate(shape):
        size = next((s for s in (2, 3, 5, 7) if n % s == 0), 1)
        parts = [numbers(shape, ((i, size, dim, 1),), kind="uniform") for i in range(size)]
        assert torch.equal(torch.cat(parts, dim), whole)


def test_words_are_those_of_philox():
    """The known answers of Random123."""
    for counter, stream, salt, seed, answer in (
        (0, 0, 0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (-1, 0xFFFFFFFF, 0xFFFFFFFF, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            (0x85A308D3 << 32 | 0x243F6A88) - 2**64, 0x13198A2E, 0x03707344, 0x299F31D0 << 32 | 0xA4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ):  # fmt: skip
        groups = Groups(torch.tensor([counter]), torch.tensor([0]), 1)
        for form in (seed, torch.tensor(seed if seed < 2**63 else seed - 2**64)):
            assert [word.item() for word in CalledWords(groups, form, stream).four(salt)] == answer


def test_numbers_stay_as_they_are():
    """A run that goes on from a checkpoint draws as it would have, so numbers change only for a reason."""
    first = {kind: draw(3, 1, (2, 3), torch.float64, CPU, kind, KINDS[kind])[1, 2].item() for kind in KINDS}
    assert first == pytest.approx(
        {
            "bernoulli": 1.0,
            "uniform": 0.8073866280440747,
            "normal": -1.953321328046652,
            "randint": 6.0,
            "exponential": 0.2533651693291595,
            "geometric": 2.0,
            "cauchy": 0.3334933074134621,
            "log_normal": 0.6112677368080843,
        },
        rel=1e-12,
    )


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_draws_much_by_as_many_calls_as_little(kind):
    counts = []
    for shape in ((4, 8), (64, 128, 4096)):
        with Calls() as calls:
            fill(
                torch.empty(shape, device="meta"), 5, 0, shape, functools.partial(kept_by, (), shape), kind, KINDS[kind]
            )
        counts.append(calls.count)
    assert counts[1] - counts[0] <= 5, counts  # those that number the rows, of one more dim
    assert counts[0] < 300


class OneDevice(TorchDispatchMode):
    """Fails where tensors are copied between a device and the host, for which the host waits."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor) and t.ndim]
        assert len({t.device for t in tensors}) < 2, f"{func} has tensors of two devices"
        assert func is not torch.ops.aten._local_scalar_dense.default or args[0].device.type == "cpu"
        return result


@pytest.mark.parametrize("cut", [(1, 2, 1, 1), (1, 2, 1, 3), (1, 4, 1, 3), (1, 2, 0, 1)])
def test_the_host_does_not_wait_for_a_device_that_draws_a_part(cut):
    shape = (6, 24)
    out = torch.empty((6, 24 // cut[1]) if cut[2] else (3, 24), device="meta")
    with OneDevice():
        fill(out, 5, 0, shape, functools.partial(kept_by, (cut,), shape), "normal", (0.0, 1.0))


@pytest.mark.parametrize("cuts", [[], [1, 2, 0, 1, 1, 3, 1, 1, 0, 2, 2, 1]])
def test_the_host_does_not_wait_for_attention_with_dropout(cuts):
    q, k, seed = (torch.empty(shape, device="meta") for shape in ((2, 2, 6, 4), (2, 2, 9, 4), ()))
    rest = q.new_empty(1, 1, 6, 9), seed.long(), 0.4, True, 0.5, cuts
    with OneDevice():
        out, sums = dropped_attention._init_fn(q, k, k, *rest)
        dropped_attention_backward._init_fn(out, q, k, k, *rest[:2], out, sums, *rest[2:], True)


@pytest.mark.skipif(
    not philox.AVAILABLE or not (torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ),
    reason="there is no Triton, or neither a GPU nor Triton's interpreter",
)
def test_one_kernel_computes_the_same_words(monkeypatch):
    """On a GPU, or by Triton's interpreter (TRITON_INTERPRET=1)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    groups = Groups(torch.tensor([0, 5, 7, (1 << 33) + 1], device=device), torch.arange(3, 600, device=device), 1000)
    for seed in (5, 2**64 - 3, torch.tensor(12345678901234567, device=device), torch.tensor(-5, device=device)):
        called, kernel = CalledWords(groups, seed, 9), philox.KernelWords(groups, seed, 9)
        for salt in (0, 1):
            assert all(map(torch.equal, called.four(salt), kernel.four(salt)))
        for dtype in (torch.bool, torch.float32, torch.bfloat16, torch.int64):
            for limit in (0, 3865470566, 1 << 32):
                one, two = torch.empty(2, 4, 600, 4, dtype=dtype, device=device)[:, :, 3:]
                called.below(limit, one)
                kernel.below(limit, two)
                assert torch.equal(one, two)


def test_numbers_depend_on_key_and_index_alone():
    one = numbers((64, 64))
    torch.manual_seed(99)
    assert torch.equal(one, numbers((64, 64)))
    assert not torch.equal(one, numbers((64, 64), key=4))
    assert not torch.equal(one, numbers((64, 64), index=1))
    assert not torch.equal(numbers((64, 64), key=-1), numbers((64, 64), key=1))


@pytest.mark.parametrize("kind", KINDS)
def test_distributions(kind):
    x = numbers((400, 500), kind=kind).double()
    expected = {
        "bernoulli": (0.75, 0.1875), "uniform": (0.5, 0.75), "normal": (1.0, 9.0), "randint": (5.0, 4.0),
        "exponential": (0.5, 0.25), "geometric": (4.0, 12.0), "log_normal": (1.1331, 0.3647),
    }  # fmt: skip
    if kind == "cauchy":
        assert abs(x.median()) < 0.02
        return
    mean, variance = expected[kind]
    assert abs(x.mean() - mean) < 0.03 * max(mean, 1) and abs(x.var() - variance) < 0.05 * max(variance, 0.2)


def test_dtypes():
    assert numbers((8, 8), kind="bernoulli", dtype=torch.bool).dtype == torch.bool
    assert numbers((8, 8), kind="randint", dtype=torch.int64).dtype == torch.int64
    assert numbers((8, 8), kind="normal", dtype=torch.bfloat16).dtype == torch.bfloat16


def test_threads_draw_at_once():
    shape, found = (64, 4096), {}
    threads = [
        threading.Thread(target=lambda i=i: found.__setitem__(i, numbers(shape, ((i, 8, 0, 1),)))) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.cat([found[i] for i in range(8)]), numbers(shape))


def test_the_rule_offers_every_dim_and_appends_a_cut():
    shape = (4, 6, 1)
    call = Call(
        draw,
        ("key", 0, shape, torch.float32, CPU, "normal", (0.0, 1.0), ()),
        {},
        (),
        (TensorSpec(shape, torch.float32),),
    )
    offered = strategies_of(OP_SPECS[draw], call, (), 2)
    assert [s.outputs[0] for s in offered[1:]] == [Shard(0), Shard(0, 2), Shard(1), Shard(1, 3)]

    class Builder:  # the coordinate is a number at once
        size = 2

        def coordinate(self):
            return 1

        def call(self, op, *args):
            return op(*args)

    args = (3, *call.args[1:])
    part = rule.emit_draw(Builder(), call, Strategy((), (Shard(1, 3),)), args, {})
    assert torch.equal(part, take(draw(*args), 1, 2, 1, 3))


class Noisy(nn.Module):
    """One of every random op that has a row."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)
        self.drop2d, self.alpha = nn.Dropout2d(0.5), nn.AlphaDropout(0.2)

    def forward(self, x):
        x = F.dropout(self.linear(x), 0.2, inplace=True)
        x = self.alpha(self.drop(x)) + self.drop2d(x[:, None, :, None])[:, 0, :, 0]
        x = x * torch.rand(x.shape) + torch.randn_like(x) * torch.rand_like(x)
        x = x + torch.bernoulli(torch.sigmoid(x)) + torch.randint(0, 5, x.shape) + torch.randint_like(x, 3)
        x = x + torch.normal(x.detach(), 2.0) + torch.normal(0.0, 1.0, x.shape) + torch.empty_like(x).exponential_()
        x = x + torch.empty_like(x).uniform_(1, 2) + torch.randn(8).t() + torch.bernoulli(x.detach(), p=0.5)
        x = x + F.rrelu(x, training=True) + F.gumbel_softmax(x, dim=-1) + torch.empty_like(x).random_(2, 7)
        q = x.view(-1, 1, 2, 4)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.4, is_causal=True).sum()


def test_every_random_op_draws_the_same_in_eager_code_and_in_the_graph():
    model, batch = Noisy().double(), torch.randn(6, 8, dtype=torch.float64)
    captured = capture(model, lambda m, b: m(b), batch)
    sources = {"parameter": dict(model.named_parameters()), "batch": {"batch": batch}}
    values = [5 if i.kind == "key" else sources[i.kind][i.name] for i in captured.inputs]
    loss, *gradients = GraphModule({}, captured.graph)(*values)
    with GlobalRandom(5):
        model(batch).backward()
    with GlobalRandom(5):
        assert torch.allclose(loss, model(batch), rtol=1e-6)
    with GlobalRandom(6):
        assert not torch.allclose(loss, model(batch), rtol=1e-3)
    for output, gradient in zip(captured.outputs[1:], gradients, strict=True):
        assert torch.allclose(gradient, model.get_parameter(output.name).grad, rtol=1e-5, atol=1e-5)


def test_a_random_op_without_a_row_is_refused():
    def loss_fn(model, x):
        return (model(x) * torch.poisson(x.abs())).sum()

    with pytest.raises(CaptureError, match=r"test_random.py:\d+.*poisson"):
        capture(nn.Linear(8, 8), loss_fn, torch.randn(2, 8))
    with pytest.raises(CaptureError, match="poisson"), GlobalRandom(0):
        torch.poisson(torch.ones(8))
