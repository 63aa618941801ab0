"""Families of transformers, unmodified, with their sequence cut: padding, windows, few key heads, encoder-decoders."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import plait
from plait.engine.compiler import Compiler
from plait.plan.plan import Plan
from plait.report.explanation import explanation

VOCABULARY, LENGTH = 64, 16
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "sdpa",
}  # fmt: skip
WHOLE = {"attention_dropout": 0.0, "attn_pdrop": 0.0, "attention_probs_dropout_prob": 0.0}  # dropped out is gathered
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 6}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"head_dim": 8, "sliding_window": 6}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 32}),
    "bert": ("BertForMaskedLM", "BertConfig", {}),
    "phi": ("PhiForCausalLM", "PhiConfig", {}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    "opt": ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 32, "word_embed_proj_dim": 16}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4}),
    "bart": ("BartForConditionalGeneration", "BartConfig", {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 1,
    }),
}  # fmt: skip
# Each family has both kinds of context and sequence=yes, some of them in one plan.
# Attentions and MLPs: those of Phi read one norm, and are summed at once.
NUM_BLOCKS = {"phi": 1}
PLANS = ("context=2 context.kind=ring", "context=2 context.kind=ulysses", "tensor=2 sequence=yes")


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def batch() -> dict[str, Tensor]:
    """Three rows, of which two are padded."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (3, LENGTH), generator=generator)
    real = (torch.arange(LENGTH) < torch.tensor([LENGTH, 11, 14])[:, None]).long()
    return {"input_ids": ids, "attention_mask": real, "labels": ids.masked_fill(real == 0, -100)}


@pytest.mark.filterwarnings("ignore:plait has no rule")
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str) -> None:
    model, config, options = FAMILIES[family]
    torch.manual_seed(0)
    made = getattr(hf, model)(getattr(hf, config)(**{**TINY, **WHOLE, **options}))
    verifier = plait.Verifier(made, loss_fn, batch())
    for plan in PLANS:
        report = verifier.verify(plan)
        assert report.ok, f"{family}\n{report}"
    sent = of_the_layer(verifier, PLANS[-1])
    assert "all_reduce" not in {kind for _, kind in sent}, sent
    if family not in ("gpt_neox", "bart"):  # of which more is gathered: for two norms, and for the cross-attention
        ways = itertools.product(("forward", "backward"), ("all_gather", "reduce_scatter"))
        assert sent == dict.fromkeys(ways, NUM_BLOCKS.get(family, 2)), sent
    if family == "mixtral":  # a token travels once, whatever the number of its experts
        sums = 1 + 2 + 2 + 1  # of the embedding, of attention and experts in each pass, of the head
        for plan in ("tensor=2", PLANS[-1]):
            found = explanation(Compiler(verifier.captures, Plan.parse(plan)).compiled(verifier.batch))
            streams = sum(found.sent_bytes.values()) / (3 * LENGTH * TINY["hidden_size"] * 4)
            assert sums <= streams < sums + 1


def of_the_layer(verifier: plait.Verifier, plan: str) -> Counter[tuple[str, str]]:
    """The collectives of activations of the one layer of a decoder, or of those of encoder and decoder."""
    found = explanation(Compiler(verifier.captures, Plan.parse(plan)).compiled(verifier.batch)).collectives
    least = 3 * LENGTH * TINY["hidden_size"] * 4 // 2
    layers = (item for item in found if re.search(r"\b(layers?|h)\.0\b", item.module) and item.tensor_bytes >= least)
    return Counter((item.phase, item.kind) for item in layers if not item.value[0].isdigit())
