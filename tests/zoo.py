"""Model families at toy size: name -> (model, loss_fn, batch), for the tests that must hold on every family.

Random weights, float32, dropout on where a family has it, two layers, widths that 4 divides; batches of 12, so that
data=2 and data=3 divide. Python-side stochastic depth (a `torch.rand([])` that an `if` reads) is configured off: such
a step has no one graph.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers as hf
import zoo_written as written
from torch import nn

BATCH, LENGTH, VOCAB = 12, 16, 128


@dataclass(frozen=True)
class Case:
    """One family. `build` seeds nothing: `make` does, so that a case is the same every time."""

    build: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Any], Any]
    batch: Callable[[], Any]

    def make(self, seed: int = 0) -> tuple[nn.Module, Callable[[nn.Module, Any], Any], Any]:
        """The model in training mode, its loss function, and a batch."""
        state = torch.random.get_rng_state()
        torch.manual_seed(seed)
        try:
            return self.build().train(), self.loss_fn, self.batch()
        finally:
            torch.random.set_rng_state(state)


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The loss that a transformers model computes from its labels."""
    return model(**batch).loss


def tokens(length: int = LENGTH, low: int = 5) -> torch.Tensor:
    return torch.randint(low, VOCAB, (BATCH, length))


def text(length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Next-token batch; the tail of one sequence has no label."""
    ids = tokens(length)
    labels = ids.clone()
    labels[0, length // 2 :] = -100
    return {"input_ids": ids, "labels": labels}


def short_text() -> dict[str, torch.Tensor]:
    """For a model that has its layers once in the graph for every token."""
    return text(LENGTH // 2)


def masked_text() -> dict[str, torch.Tensor]:
    """As `text`, with an attention mask that pads two sequences."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[0, LENGTH // 2 :] = 0
    mask[5, LENGTH - 3 :] = 0
    return {**text(), "attention_mask": mask}


def sequence_to_sequence() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(), "labels": tokens(LENGTH // 2)}


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 8, (BATCH,))}


def pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 8, (BATCH, 8, 8))}


def speech() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, 16, 32), "labels": tokens(8)}


def waves() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(BATCH, 400), "labels": torch.randint(0, 8, (BATCH,))}


def image_and_text() -> dict[str, Any]:
    return {"input_ids": tokens(), "pixel_values": torch.randn(BATCH, 3, 32, 32), "return_loss": True}


DECODER = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32,
}  # fmt: skip
GROUPED = {**DECODER, "num_key_value_heads": 2, "head_dim": 16, "attention_dropout": 0.1}
ENCODER = {**DECODER, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
IMAGE = {"image_size": 32, "patch_size": 8, "num_labels": 8}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}


def case(model: str, config: str, options: dict[str, Any], batch: Callable[[], Any], **build: Any) -> Case:
    """A transformers family: model class, config class, config options, batch, and options of the model itself."""

    def make() -> nn.Module:
        return getattr(hf, model)._from_config(getattr(hf, config)(**options), **build)

    return Case(make, loss_of, batch)


ZOO: dict[str, Case] = {
    "llama": case("LlamaForCausalLM", "LlamaConfig", GROUPED, masked_text),
    "qwen3": case("Qwen3ForCausalLM", "Qwen3Config", GROUPED, text),
    "gemma3": case("Gemma3ForCausalLM", "Gemma3TextConfig", {
        **GROUPED, "sliding_window": 8, "query_pre_attn_scalar": 16,
    }, text),
    "gpt2": case("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32,
    }, text),
    "bert": case("BertForMaskedLM", "BertConfig", ENCODER, masked_text),
    "t5": case("T5ForConditionalGeneration", "T5Config", {
        "vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, **SPECIAL,
    }, sequence_to_sequence),
    "vit": case("ViTForImageClassification", "ViTConfig", {**ENCODER, **IMAGE}, images),
    "swin": case("SwinForImageClassification", "SwinConfig", {
        "image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "drop_path_rate": 0.1, "num_labels": 8,
        "problem_type": "single_label_classification",  # else the first step writes it there: captured twice
    }, images),
    "convnext": case("ConvNextForImageClassification", "ConvNextConfig", {
        "hidden_sizes": [16, 32], "depths": [1, 2], "num_stages": 2, "drop_path_rate": 0.1, "num_labels": 8,
        "layer_scale_init_value": 0.1,
    }, images),
    "resnet": case("ResNetForImageClassification", "ResNetConfig", {
        "embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2], "layer_type": "bottleneck", "num_labels": 8,
    }, images),
    "whisper": case("WhisperForConditionalGeneration", "WhisperConfig", {
        "vocab_size": VOCAB, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_mel_bins": 16,
        "max_source_positions": 16, "max_target_positions": 32, "dropout": 0.1, "attention_dropout": 0.1, **SPECIAL,
    }, speech),
    "mamba": case("MambaForCausalLM", "MambaConfig", {
        "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4,
    }, short_text),
    "mixtral": case("MixtralForCausalLM", "MixtralConfig", {
        **GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
    }, text),
    "unet": Case(written.UNet, written.pixel_loss, written.pixel_batch),
    "inception": Case(written.Inception, written.class_loss, written.image_batch),
    "mixer": Case(written.Mixer, written.class_loss, written.image_batch),
    "lstm": Case(written.LSTMLanguageModel, written.token_loss, written.token_batch),
}  # fmt: skip

EXTRA: dict[str, Case] = {
    "mistral": case("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 8}, text),
    "opt": case("OPTForCausalLM", "OPTConfig", {
        "vocab_size": VOCAB, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 32, "word_embed_proj_dim": 64, "dropout": 0.1, "attention_dropout": 0.1,
    }, masked_text),
    "gpt_neox": case("GPTNeoXForCausalLM", "GPTNeoXConfig", {
        **DECODER, "hidden_dropout": 0.1, "attention_dropout": 0.1,
    }, text),
    "distilbert": case("DistilBertForMaskedLM", "DistilBertConfig", {
        "vocab_size": VOCAB, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32,
    }, masked_text),
    "roberta": case("RobertaForMaskedLM", "RobertaConfig", {**ENCODER, "max_position_embeddings": 40}, text),
    "deit": case("DeiTForImageClassification", "DeiTConfig", {**ENCODER, **IMAGE}, images),
    "phi": case("PhiForCausalLM", "PhiConfig", {**DECODER, "resid_pdrop": 0.1, "attention_dropout": 0.1}, text),
    "falcon": case("FalconForCausalLM", "FalconConfig", {
        **DECODER, "hidden_dropout": 0.1, "attention_dropout": 0.1,
    }, text),
    "bloom": case("BloomForCausalLM", "BloomConfig", {
        "vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1,
    }, text),
    "gemma2": case("Gemma2ForCausalLM", "Gemma2Config", {
        **GROUPED, "sliding_window": 8, "query_pre_attn_scalar": 16,
    }, text),
    "clip": case("CLIPModel", "CLIPConfig", {
        "text_config": {**DECODER, "attention_dropout": 0.1, "eos_token_id": 2}, "vision_config": {**DECODER, **IMAGE},
        "projection_dim": 32,
    }, image_and_text),
    "wav2vec2": case("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", {
        **DECODER, "conv_dim": (32, 32), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
        "layerdrop": 0.0, "apply_spec_augment": False, "num_labels": 8,
        "classifier_proj_size": 32,
    }, waves),
    "deepseek_v2": case("DeepseekV2ForCausalLM", "DeepseekV2Config", {
        **DECODER, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
        "topk_method": "greedy", "n_group": 1, "topk_group": 1, "head_dim": 8,
    }, text),
    "deepseek_v3": case("DeepseekV3ForCausalLM", "DeepseekV3Config", {
        **DECODER, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "n_group": 2,
        "topk_group": 1, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    }, text),
    "qwen2_moe": case("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {
        **DECODER, "num_key_value_heads": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
    }, text),
    "mobilenet_v2": case("MobileNetV2ForImageClassification", "MobileNetV2Config", {
        "image_size": 32, "depth_multiplier": 0.25, "num_labels": 8,
    }, images),
    "segformer": case("SegformerForSemanticSegmentation", "SegformerConfig", {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3],
        "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 32,
        "num_labels": 8, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    }, pixels),
    "electra": case("ElectraForMaskedLM", "ElectraConfig", {**ENCODER, "embedding_size": 32}, text),
    "albert": case("AlbertForMaskedLM", "AlbertConfig", {**ENCODER, "embedding_size": 32}, text),
    "mamba2": case("Mamba2ForCausalLM", "Mamba2Config", {
        "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 16,
        "n_groups": 2, "chunk_size": 8,
    }, text),
    "dinov2": case("Dinov2ForImageClassification", "Dinov2Config", {**ENCODER, **IMAGE, "mlp_ratio": 2}, images),
    "efficientnet": case("EfficientNetForImageClassification", "EfficientNetConfig", {
        "image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320, "num_labels": 8,
    }, images),
    "bart": case("BartForConditionalGeneration", "BartConfig", {
        "vocab_size": VOCAB, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 32,
        "dropout": 0.1, "attention_dropout": 0.1, **SPECIAL, "forced_eos_token_id": None,
    }, sequence_to_sequence),
    "olmo2": case("Olmo2ForCausalLM", "Olmo2Config", GROUPED, text),
    "cohere": case("CohereForCausalLM", "CohereConfig", GROUPED, text),
    "gpt_oss": case("GptOssForCausalLM", "GptOssConfig", {
        **GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "output_router_logits": True,
    }, text),
    "deberta_v2": case("DebertaV2ForMaskedLM", "DebertaV2Config", {
        **ENCODER, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm", "share_att_key": True,
    }, text),
}  # fmt: skip
