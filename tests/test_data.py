"""Text for the byte model: where it comes from, its split, its windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from metrics_file import read_metrics

from plait.api.job.gpt import BytesGPT, ByteText, bytes_gpt, loss_fn, python_text, read_text, sample_text, split_text
from plait.api.job.metrics import MetricsLog
from plait.errors import DataError


def test_python_ships_enough_english() -> None:
    text = python_text()
    assert len(text) > 300_000
    assert text.count(b" the ") > 3000


def test_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.md").write_text("first é")
    (tmp_path / "sub" / "c").write_text("third")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / ".hidden").write_text("hidden")
    assert read_text(str(tmp_path)).decode() == "first é\n\nsecond\n\nthird"
    assert read_text(str(tmp_path / "b.txt")) == b"second"


def test_missing_and_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no text file or folder"):
        read_text(str(tmp_path / "none"))
    (tmp_path / "x.bin").write_bytes(b"\0\1")
    with pytest.raises(DataError, match="holds no text: 1 files"):
        read_text(str(tmp_path))


def test_split_keeps_every_byte_once() -> None:
    data = bytes(range(256)) * 400
    train, held_out = split_text(data, 0.1)
    assert len(train) + len(held_out) == len(data)
    assert len(held_out) == pytest.approx(0.1 * len(data), rel=0.25)
    assert split_text(data, 0) == (data, b"")


def test_windows_follow_on_each_other() -> None:
    data = ByteText(b"abcdefghij", 3)
    assert len(data) == 3
    assert bytes(data[1]["x"].tolist()) == b"def" and bytes(data[1]["y"].tolist()) == b"efg"
    assert data[0]["x"].dtype == torch.int64
    assert len(ByteText(b"", 3)) == 0


def test_model_is_causal_and_of_the_size_named() -> None:
    assert sum(p.numel() for p in BytesGPT().parameters()) == 6_482_432
    model, loss = bytes_gpt(layers=2, width=16, heads=2, sequence=8)
    assert loss is loss_fn
    symbols = torch.randint(256, (2, 8))
    changed = symbols.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 256
    before, after = model(symbols), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5], after[:, 5])
    assert loss_fn(model, {"x": symbols, "y": symbols}).ndim == 0


def test_sample_is_reproducible_and_leaves_the_mode() -> None:
    model, _ = bytes_gpt(layers=1, width=8, heads=2, sequence=8)
    model.train()
    text = sample_text(model, "The ", 12, 1.0, seed=3)
    assert text.startswith("The ") and text == sample_text(model, "The ", 12, 1.0, seed=3)
    assert model.training


def test_metrics_go_on_where_the_checkpoint_stands(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 1)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 1 / 3})
    log.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # killed while it wrote
    log = MetricsLog(tmp_path, 3)
    log.write({"step": 3, "loss": 0.5})
    log.close()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[2]["loss"] == 0.5
    assert lines[0]["loss"] == pytest.approx(1 / 3, rel=1e-8)
