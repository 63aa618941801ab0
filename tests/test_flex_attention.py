"""flex_attention and scans: higher-order operators captured as the ops that define them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch.nn.attention import flex_attention as flex
from transformers import LlamaConfig, LlamaForCausalLM

import plait
from plait.engine.compiler import Captures, Compiler
from plait.errors import CaptureError
from plait.plan.plan import Plan

pytestmark = [
    pytest.mark.xdist_group("flex"),
    pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile"),
]


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses the backward of flex_attention on a CPU, where it has no kernel; its definition runs there."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)


class Flex(nn.Module):
    """Attention by functions of positions: ALiBi by a slope that trains, and masks that read the batch."""

    def __init__(self, kind: str, key_heads: int = 4) -> None:
        super().__init__()
        self.kind, self.key_heads = kind, key_heads
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 8 * key_heads), nn.Linear(16, 16)
        self.slopes = nn.Parameter(torch.arange(1.0, 5.0) / 4)

    def forward(self, x: Tensor, document: Tensor, weight: Tensor) -> Tensor:
        q = self.q(x).unflatten(2, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(2, (2 * self.key_heads, 4)).transpose(1, 2).chunk(2, 1)
        rows, length, options = len(x), x.shape[1], dict[str, Any]()
        if self.kind in ("score", "both"):
            options["score_mod"] = lambda score, b, h, i, j: score + self.slopes[h] * (j - i) * weight[b, j]
        if self.kind in ("mask", "both"):

            def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return (i >= j) & (document[b, i] == document[b, j])

            options["block_mask"] = flex.create_block_mask(seen, rows, None, length, length, device=x.device)
        found = flex.flex_attention(q, k, v, enable_gqa=self.key_heads < 4, **options)
        return self.out(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"], batch["document"], batch["weight"]).square().mean()


@functools.cache
def verifier(kind: str, key_heads: int) -> plait.Verifier:
    torch.manual_seed(0)
    batch = {
        "x": torch.randn(4, 8, 16).double(), "weight": torch.rand(4, 8).double(),
        "document": torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1]] * 2),
    }  # fmt: skip
    return plait.Verifier(Flex(kind, key_heads).double(), squares, batch, steps=1)


@pytest.mark.parametrize(
    ("kind", "key_heads", "plan"),
    [
        ("plain", 4, "data=2 tensor=2"), ("score", 4, "tensor=2"), ("score", 4, "data=4 zero=3"),
        ("mask", 4, "data=2 micro=2"), ("mask", 2, "tensor=2"), ("both", 2, "data=2 tensor=2"),
        ("both", 4, "context=2"),
    ],
)  # fmt: skip
def test_scores_and_masks_are_cut_with_rows_and_heads(kind: str, key_heads: int, plan: str) -> None:
    report = verifier(kind, key_heads).verify(plan, tolerance=1e-9)
    assert report.ok, report


def test_heads_are_split() -> None:
    """Each of two ranks has two heads, of the scores and of the functions' values too."""
    model, batch = Flex("both").double(), verifier("both", 4).batch
    shapes = [tuple(node.meta["val"].shape) for graph in graphs(model, batch, "tensor=2") for node in graph.nodes
              if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)]  # fmt: skip
    assert (4, 2, 8, 8) in shapes and (4, 4, 8, 8) not in shapes


def graphs(model: nn.Module, batch: Any, text: str) -> list[Any]:
    program = Compiler(Captures(model, squares), Plan.parse(text)).compiled(batch).program
    return [each.graph for each in program.graphs.values()]


@pytest.mark.parametrize("plan", ["data=2 shapes=bucket:16", "tensor=2 sequence=yes", "context=2"])
def test_transformers_with_flex_attention(plan: str) -> None:
    """Its block masks read position_ids of packed documents."""
    report = transformer().verify(plan, tolerance=1e-6)
    assert report.ok, report


@functools.cache
def transformer() -> plait.Verifier:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="flex_attention",
    )  # fmt: skip
    ids, places = torch.randint(0, 32, (2, 12)), torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])
    batch = {"input_ids": ids, "labels": ids, "position_ids": places}
    loss = lambda model, batch: model(**batch, use_cache=False).loss  # noqa: E731
    return plait.Verifier(LlamaForCausalLM(config).double(), loss, batch, steps=1)


class Steps(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(8, 16), nn.Linear(16, 8), kind

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.up(x))
        if self.kind == "scan":
            _, h = scan(lambda kept, now: (kept * 0.5 + now, kept * now), h[:, 0] * 0, h.transpose(0, 1).contiguous())
            h = h.transpose(0, 1)
        elif self.kind == "associative_scan":
            h = associative_scan(lambda one, other: one * 0.5 + other * one, h, 1, combine_mode="generic")
        elif self.kind == "map":
            h = mapped(lambda row, weight: row * weight.sum(), h, self.down.weight)
        else:
            h = torch.cond(h.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (h,))
        return self.down(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["scan", "associative_scan", "map"])
@pytest.mark.parametrize("plan", ["data=2", "tensor=2"])
def test_scans(kind: str, plan: str) -> None:
    report = plait.verify(Steps(kind).double(), _mean, torch.randn(4, 6, 8).double(), plan, steps=1, tolerance=1e-9)
    assert report.ok, report


def test_what_a_tensor_decides_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"torch.cond chooses by a tensor what is computed.*torch.where"):
        plait.verify(Steps("cond").double(), _mean, torch.randn(4, 6, 8).double(), "tensor=2")


def _mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]
