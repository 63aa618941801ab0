"""Packed sequences: several documents in a row, as transformers' DataCollatorWithFlattening packs them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

import plait
from plait.api.trainer import Trainer
from plait.comm.protocol import World
from plait.engine.data.loader import loader
from plait.engine.padding_rules import find_rules
from plait.errors import BatchError
from plait.plan.plan import Plan

pytestmark = pytest.mark.xdist_group("packed")
VOCABULARY = 32


def documents(lengths: list[int], seed: int = 0) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(1, VOCABULARY, (n,), generator=generator).tolist()} for n in lengths]


def packed(*lengths: list[int], **options: Any) -> dict[str, Any]:
    """A batch with a row of documents of these lengths for each list."""
    rows = [DataCollatorWithFlattening(**options)(documents(each, n)) for n, each in enumerate(lengths)]
    if len(rows) == 1:
        return dict(rows[0])
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


def llama(attention: str) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch, use_cache=False).loss  # type: ignore[no-any-return]


@functools.cache
def verifier(attention: str, rows: int) -> plait.Verifier:
    return plait.Verifier(llama(attention), own_loss, packed(*([5, 9, 10], [12, 4, 8])[:rows]), steps=1)


@pytest.mark.parametrize(
    ("attention", "rows", "plan"),
    [
        ("sdpa", 2, "data=2 zero=3"), ("sdpa", 1, "tensor=2"), ("sdpa", 1, "tensor=2 sequence=yes"),
        ("sdpa", 1, "context=2 context.kind=ring"), ("sdpa", 2, "context=4 context.kind=gather"),
        ("sdpa", 2, "data=2 context=2 context.kind=ulysses"), ("sdpa", 1, "context=2 tensor=2 shapes=bucket:16"),
        ("sdpa", 2, "pipeline=2 micro=2 cut=model.norm shapes=bucket:16"), ("sdpa", 2, "data=2 shapes=bucket:32"),
        ("eager", 2, "data=2"), ("eager", 1, "context=2"), ("eager", 1, "tensor=2 sequence=yes shapes=bucket:16"),
    ],
)  # fmt: skip
def test_packed_documents_under_plans(attention: str, rows: int, plan: str) -> None:
    report = verifier(attention, rows).verify(plan, tolerance=1e-6)
    assert report.ok, report


def test_a_document_does_not_see_another() -> None:
    model, batch = llama("sdpa"), packed([5, 9, 10])
    alone = {"input_ids": batch["input_ids"][:, 5:14], "labels": batch["labels"][:, 5:14]}
    whole = model(**batch, use_cache=False).logits[:, 5:14]
    torch.testing.assert_close(whole, model(**alone, use_cache=False).logits)


class Varlen(nn.Module):
    """Attention within documents that offsets name, as kernels for sequences of variable lengths take them."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 24), nn.Linear(8, VOCABULARY)
        self.causal = causal

    def forward(self, ids: Tensor, offsets: Tensor, longest: int) -> Tensor:
        x = self.embed(ids)
        at = torch.arange(ids.shape[1])
        document = torch.bucketize(at, offsets[1:].contiguous(), right=True)
        mask = (document[:, None] == document) & ((at[:, None] >= at) | (not self.causal))
        mask = mask & ((at[:, None] - at).abs() < longest)  # which none in a document is
        q, k, v = self.qkv(x).unflatten(2, (6, 4)).transpose(1, 2).chunk(3, 1)
        return self.head(x + F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def varlen_loss(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch["input_ids"], batch["cu_seq_lens_q"], batch["max_length_q"])
    return F.cross_entropy(out[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("plan", ["tensor=2", "context=2 shapes=bucket:8", "shapes=bucket:32"])
def test_offsets_of_documents(causal: bool, plan: str) -> None:
    """Padding is one more document, so that it is exact also without a causal mask."""
    torch.manual_seed(0)
    batch = packed([5, 9, 7], return_flash_attn_kwargs=True)
    report = plait.verify(Varlen(causal).double(), varlen_loss, batch, plan, steps=1, tolerance=1e-6)
    assert report.ok, report


def test_offsets_and_the_longest_document_are_padded() -> None:
    torch.manual_seed(0)
    batch = packed([5, 9, 7], return_flash_attn_kwargs=True)
    rules = find_rules(Varlen(False).double(), varlen_loss, batch, 8, True, 0)
    made = rules.pad(batch, rules.to_multiple(rules.lengths(batch)))
    assert made["cu_seq_lens_q"].tolist() == [0, 5, 14, 21, 24, 24, 24, 24] == made["cu_seq_lens_k"].tolist()
    assert made["input_ids"].shape == (1, 24) and made["max_length_q"] == 16
    assert made["labels"][0, 21:].tolist() == [-100] * 3


def test_a_run_with_other_documents_in_each_batch_has_one_capture() -> None:
    torch.manual_seed(0)
    trainer = Trainer(Varlen().double(), varlen_loss, torch.optim.SGD, "shapes=bucket:32")
    for lengths in ([5, 9, 7], [20, 3], [1, 2, 3, 4, 5, 6]):
        batch = packed(lengths, return_flash_attn_kwargs=True)
        wanted = varlen_loss(trainer.engine.compiler.model, batch).item()
        assert float(trainer.step(batch)) == pytest.approx(wanted, rel=1e-12)
    assert len(trainer.captures) == 1
    trainer.close()


def test_each_rank_packs_the_items_that_it_reads() -> None:
    """With the loader a rank has one row, of its own documents; the ranks pad to the longest row."""
    data = documents([5, 9, 10, 12, 4, 8, 3, 3])
    model = llama("sdpa")
    collate = DataCollatorWithFlattening()

    def rank(world: World) -> list[float]:
        plan = "data=2 shapes=bucket:8"
        trainer = Trainer(models[world.rank], own_loss, torch.optim.SGD, plan, world=world)
        rows = loader(data, 4, plan=plan, world=world, collate=collate, shuffle=False)
        return [float(trainer.step(batch)) for batch in rows]

    models = [llama("sdpa"), llama("sdpa")]
    found, _ = plait.run_ranks(Plan.parse("data=2").mesh, rank)
    trainer = Trainer(model, own_loss, torch.optim.SGD, "")
    for n, loss in enumerate(found):
        rows = [collate(data[4 * n + 2 * each : 4 * n + 2 * each + 2]) for each in range(2)]
        longest = max(row["labels"].shape[1] for row in rows)
        pads = {"input_ids": 0, "labels": -100, "position_ids": 0}
        wide = [{k: F.pad(t, (0, longest - t.shape[1]), value=pads[k]) for k, t in row.items()} for row in rows]
        assert float(trainer.step({k: torch.cat([row[k] for row in wide]) for k in pads})) == pytest.approx(loss)
    trainer.close()


@pytest.mark.parametrize("plan", ["data=2 zero=2 shapes=bucket:8", "data=2 context=2 shapes=bucket:8"])
def test_each_rank_has_documents_with_offsets_of_its_own(plan: str) -> None:
    data = documents([5, 9, 10, 12, 4, 8, 3, 3])
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    torch.manual_seed(0)
    model = Varlen(False).double()
    parsed = Plan.parse(plan)
    models = [copy.deepcopy(model) for _ in range(parsed.mesh.size)]

    def rank(world: World) -> list[float]:
        trainer = Trainer(models[world.rank], varlen_loss, torch.optim.SGD, plan, world=world)
        rows = loader(data, 4, plan=plan, world=world, collate=collate, shuffle=False)
        return [float(trainer.step(batch)) for batch in rows]

    found = plait.run_ranks(parsed.mesh, rank)[0]
    optimizer = torch.optim.SGD(model.parameters())
    for n, loss in enumerate(found):
        optimizer.zero_grad()
        rows = [collate(data[4 * n + 2 * each : 4 * n + 2 * each + 2]) for each in range(2)]
        weights = [int((row["labels"][:, 1:] != -100).sum()) for row in rows]
        wanted = sum(varlen_loss(model, row) * weight / sum(weights) for row, weight in zip(rows, weights, strict=True))
        assert isinstance(wanted, Tensor)
        wanted.backward()
        optimizer.step()
        assert loss == pytest.approx(wanted.item(), rel=1e-12)


def test_rows_of_padding_cannot_be_packed() -> None:
    collate = DataCollatorWithFlattening()
    batches = loader(documents([5, 9, 10]), 3, plan="", collate=collate, drop_last=False, row_weights="weight")
    with pytest.raises(
        BatchError, match="row_weights='weight' weighs rows, and the collate function makes 1 of 3 items"
    ):
        next(iter(batches))
    batches.close()
