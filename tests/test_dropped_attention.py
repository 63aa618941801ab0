"""Attention with dropout: in blocks it is what it is on whole tensors, on parts what it is on the whole."""

from __future__ import annotations

import pytest
import torch
from oracle import Sample, check, run_whole
from rule_makers import f
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.compile.capture.capture import capture
from plait.compile.ops import OP_SPECS, dropped_attention
from plait.compile.ops.draw import fill
from plait.compile.ops.dropped_attention import NUM_SEEDS
from plait.compile.ops.random import GlobalRandom
from plait.errors import CaptureError

FORWARD, BACKWARD = torch.ops.plait.dropped_attention.default, torch.ops.plait.dropped_attention_backward.default
MASKS = {
    "none": None, "boolean": f(5, 7) > -0.3, "of scores": f(2, 6, 5, 7), "of keys": f(1, 7),
    "unseen": torch.arange(5)[:, None].expand(5, 7) > 0,
}  # fmt: skip


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float, causal: bool) -> Tensor:
    """PyTorch's weights, dropped out, times the values."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).double().masked_fill(~mask, -torch.inf)
    _, weights = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, mask, 0.0, causal)
    kept = torch.empty(weights.shape, dtype=torch.bool)
    fill(kept, torch.randint(NUM_SEEDS, ()), 0, kept.shape, lambda _: (None,) * 4, "bernoulli", (1 - rate,))
    return weights * kept / (1 - rate) @ v


@pytest.mark.parametrize("block", [1 << 18, 60, 1])
@pytest.mark.parametrize("mask", [*MASKS, "causal"])
@pytest.mark.parametrize("kv_heads", [6, 3])
def test_blocks_are_the_whole(kv_heads: int, mask: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dropped_attention._BLOCK, "cpu", block)
    leaves = [t.requires_grad_() for t in (f(2, 6, 5, 8), f(2, kv_heads, 7, 8), f(2, kv_heads, 7, 12))]
    added = MASKS.get(mask)
    if added is not None and added.dtype != torch.bool:
        leaves.append(added.detach().requires_grad_())
        added = leaves[-1]
    causal = mask == "causal"
    with GlobalRandom(5):
        out = F.scaled_dot_product_attention(*leaves[:3], added, 0.3, causal, enable_gqa=kv_heads == 3)
    with GlobalRandom(5):
        plain = _plain(*leaves[:3], added, 0.3, causal)
    found = [(o, *torch.autograd.grad(o, leaves, torch.arange(12.0).double().expand_as(o))) for o in (out, plain)]
    for one, two in zip(*found, strict=True):
        assert torch.allclose(one, two, 1e-9, 1e-9)


def test_without_a_kept_weight_nothing_comes_out() -> None:
    q = f(2, 3, 4, 8).requires_grad_()
    with GlobalRandom(5):
        out = F.scaled_dot_product_attention(q, q, q, dropout_p=1.0)
    assert not out.any() and not torch.autograd.grad(out.sum(), q)[0].any()


def _samples() -> tuple[list[Sample], list[Sample]]:
    forward, backward = [], []
    seed = torch.tensor(1234567890123)
    for kv_heads, mask, causal in (
        (6, None, False), (6, None, True), (3, f(2, 1, 6, 9), False), (6, f(6, 6, 9)[None, :1], True)
    ):  # fmt: skip
        tensors = f(2, 6, 6, 4), f(2, kv_heads, 9, 4), f(2, kv_heads, 9, 4), mask
        numbers = 0.4, causal, 0.5, []
        forward.append(Sample(FORWARD, (*tensors, seed, *numbers), {}))
        out, sums = run_whole(forward[-1])
        args = (f(*out.shape), *tensors, seed, out, sums, *numbers, mask is not None)
        backward.append(Sample(BACKWARD, args, {}))
    return forward, backward


def test_parts_make_the_whole() -> None:
    for samples in _samples():
        for sample in samples:
            tried = check(sample, OP_SPECS[sample.op])
            assert tried >= 5  # samples by two; heads and queries by two and three


def test_parts_of_parts_make_the_whole() -> None:
    for sample in _samples()[0]:
        q, k, v, mask, *rest = sample.args
        out, _ = run_whole(sample)
        found = torch.empty_like(out)
        for head, query in ((h, s) for h in range(3) for s in range(2)):
            heads, queries = slice(2 * head, 2 * head + 2), slice(3 * query, 3 * query + 3)
            some = slice(head * k.shape[1] // 3, (head + 1) * k.shape[1] // 3)
            own = mask if mask is None else mask[:, heads if mask.shape[1] > 1 else slice(None), queries]
            cuts = [head, 3, 1, 1, query, 2, 2, 1]
            part, _ = FORWARD(q[:, heads, queries], k[:, some], v[:, some], own, *rest[:-1], cuts)
            found[:, heads, queries] = part
        assert torch.allclose(found, out, 1e-12, 1e-12)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_no_value_of_a_step_has_the_size_of_all_scores() -> None:
    batch = torch.randn(2, 64, 16)
    nodes = capture(Block(), loss_fn, batch).graph.nodes
    values = [v for n in nodes for v in torch.utils._pytree.tree_leaves(n.meta["val"]) if isinstance(v, Tensor)]
    assert {FORWARD, BACKWARD} <= {node.target for node in nodes}
    assert max(v.numel() for v in values) < 2 * 4 * 64 * 64


@pytest.mark.parametrize(
    "plan", ["data=2", "tensor=2", "data=2 tensor=2 micro=2 recompute=layer", "pipeline=2 micro=2"]
)
def test_a_plan_drops_what_one_device_drops(plan: str) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(Block(), Block()).double(), torch.randn(8, 6, 16, dtype=torch.float64)
    report = plait.verify(model, loss_fn, batch, plan)
    assert report.ok, report


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_sums_are_wide(dtype: torch.dtype) -> None:
    q, k, v = (f(2, 4, 33, 8).to(dtype) for _ in range(3))
    seed = torch.tensor(7)
    out, sums = FORWARD(q, k, v, None, seed, 0.2, True, 0.5, [])
    wide, exact = FORWARD(q.double(), k.double(), v.double(), None, seed, 0.2, True, 0.5, [])
    assert (out.dtype, sums.dtype) == (dtype, torch.float32)
    assert torch.allclose(sums.double(), exact, 1e-5, 1e-5) and torch.allclose(out.double(), wide, 2e-2, 2e-2)


def test_a_kernel_that_draws_a_mask_of_its_own_is_refused_by_name() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        q = model(batch).view(2, 4, 2, 8)
        return torch.ops.aten._flash_attention_forward(q, q, q, None, None, 4, 4, 0.5, False, False)[0].sum()

    with pytest.raises(CaptureError, match=r"_flash_attention_forward.*its numbers would depend on the plan"):
        capture(nn.Linear(16, 16), loss, torch.randn(2, 4, 16))
