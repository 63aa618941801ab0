"""Weights alone, to and from the layout of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import (
    ADAMW,
    on,
)
from torch import Tensor, nn

import plait
from plait.engine.checkpoint.export import export_weights
from plait.errors import CheckpointError

pytestmark = pytest.mark.xdist_group("checkpoints")  # trainers of tests/checkpointing.py share what is compiled


def test_weights_to_and_from_hugging_face(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    kept = {"attn_implementation": "sdpa"}

    def gpt2() -> nn.Module:
        return GPT2LMHeadModel._from_config(config, **kept).eval()

    def loss(model: nn.Module, found: Tensor) -> Tensor:
        return model(input_ids=found, labels=found, use_cache=False).loss

    ids = torch.randint(0, 31, (4, 8), generator=torch.Generator().manual_seed(0))
    theirs = gpt2()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="2KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 1

    def run(world: Any) -> dict[str, Tensor]:
        trainer = plait.Trainer(gpt2(), loss, ADAMW, "data=2 zero=3", world=world)
        trainer.prepare(ids)
        trainer.load_weights(tmp_path / "theirs")
        assert all(torch.equal(v, theirs.state_dict()[k]) for k, v in trainer.full_state_dict().items())
        trainer.step(ids)
        trainer.save(tmp_path / "run")
        return trainer.full_state_dict()

    def unprepared(world: Any) -> dict[str, Tensor]:
        trainer = plait.Trainer(gpt2(), loss, ADAMW, "data=2 zero=3", world=world)
        trainer.load_weights(tmp_path / "theirs")
        trainer.step(ids)
        return trainer.full_state_dict()

    trained = on("data=2", run)[0]
    assert all(torch.equal(value, trained[name]) for name, value in on("data=2", unprepared)[0].items())
    files = export_weights(tmp_path / "run", tmp_path / "ours", shard_bytes=2048)
    assert len(files) > 3 and files[-2].endswith("model.safetensors.index.json") and files[-1].endswith("/config.json")
    assert json.loads(Path(files[-1]).read_text())["architectures"] == ["GPT2LMHeadModel"]
    index = json.loads(Path(files[-2]).read_text())
    assert "lm_head.weight" not in index["weight_map"]  # tied to transformer.wte.weight
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in theirs.parameters())
    ours = GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(value, trained[name]) for name, value in ours.state_dict().items())
    one = tmp_path / "one.safetensors"
    export_weights(tmp_path / "run", one)

    def again(world: Any) -> None:
        half = gpt2().bfloat16()
        trainer = plait.Trainer(half, loss, ADAMW, "", world=world)
        trainer.prepare(ids)
        for place in (one, tmp_path / "ours", tmp_path / "run"):
            trainer.load_weights(place)
            assert all(torch.equal(v, trained[k].bfloat16()) for k, v in trainer.full_state_dict().items())
        one.write_bytes(one.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match="one.safetensors is no whole safetensors file"):
            trainer.load_weights(one)
        with pytest.raises(
            CheckpointError, match="has no checkpoint, no model.safetensors and no model.safetensors.in"
        ):
            trainer.load_weights(tmp_path / "theirs" / "none")
        Path(files[0]).unlink()
        with pytest.raises(CheckpointError, match=r"has no model-00001-of-\d+.safetensors, which its .*json names"):
            trainer.load_weights(tmp_path / "ours")

    on("", again)
