"""The models of bench.local_truth: small, of many kinds, each with its loss and a global batch of 8 rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.llama import Llama, LlamaShape, llama_loss
from plait.api.job.gpt import BytesGPT
from plait.api.job.gpt import loss_fn as gpt_loss

ROWS = 8
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class TruthModel:
    """A model, its loss and its batch; the same on every rank."""

    make: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Any], Any]
    batch: Callable[[], Batch]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()


def _symbols(length: int, vocab: int = 256) -> Batch:
    found = torch.randint(vocab, (ROWS, length + 1), generator=torch.Generator().manual_seed(1))
    return {"x": found[:, :-1].contiguous(), "y": found[:, 1:].contiguous()}


def _images(size: int, classes: int = 100) -> Batch:
    seed = torch.Generator().manual_seed(1)
    return {"x": torch.randn(ROWS, 3, size, size, generator=seed), "y": torch.randint(classes, (ROWS,), generator=seed)}


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021) of torch's own layers."""

    def __init__(self, size: int = 96, patch: int = 8, width: int = 192, layers: int = 4, classes: int = 100) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, patch)
        self.place = nn.Parameter(torch.randn(1, (size // patch) ** 2, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.cut(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h).mean(1))


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


class Convolutions(nn.Module):
    """Two convolutions with group norm, added to their input."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(8, outer), nn.GroupNorm(8, outer)])
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.norms[0](self.first(x)))
        return F.silu(self.norms[1](self.second(h)) + self.skip(x))


class UNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015) that predicts the noise of an image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Convolutions(a, b) for a, b in zip([width, *widths[:-1]], widths, strict=True))
        self.middle = Convolutions(widths[-1], widths[-1])
        self.up = nn.ModuleList(
            Convolutions(a + b, b) for a, b in zip([widths[-1], *widths[:0:-1]], widths[::-1], strict=True)
        )
        self.leave = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, kept = self.enter(x), []
        for block in self.down:
            h = block(h)
            kept.append(h)
            h = F.avg_pool2d(h, 2)
        h = self.middle(h)
        for block in self.up:
            h = block(torch.cat([F.interpolate(h, scale_factor=2.0), kept.pop()], 1))
        return self.leave(h)


def noise_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["x"].flip(-1))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=512, d_model=256, d_kv=32, d_ff=1024, num_layers=2, num_decoder_layers=2, num_heads=8,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def _sentences() -> Batch:
    seed = torch.Generator().manual_seed(1)
    return {name: torch.randint(1, 512, (ROWS, 96), generator=seed) for name in ("input_ids", "labels")}


def model_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


class Experts(nn.Module):
    """A layer of experts, of which each token takes the best two (Shazeer et al. 2017); all are computed."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best = weights.topk(2, -1)
        kept = torch.zeros_like(weights).scatter(-1, best.indices, best.values)
        made = F.gelu(torch.einsum("bsw,ewh->bseh", x, self.up))
        return torch.einsum("bseh,ehw,bse->bsw", made, self.down, kept)


class MoE(nn.Module):
    """A GPT whose MLPs are experts."""

    def __init__(self, width: int = 128, layers: int = 4, experts: int = 4, length: int = 64) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(256, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "attend": nn.TransformerEncoderLayer(width, 4, width, 0.0, "gelu", batch_first=True, norm_first=True),
                "norm": nn.LayerNorm(width),
                "experts": Experts(width, experts),
            })
            for _ in range(layers)
        )  # fmt: skip
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x) + self.place
        for block in self.blocks:
            h = block["attend"](h)
            h = h + block["experts"](block["norm"](h))
        return self.head(h)


def next_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


_LLAMA = LlamaShape(192, 4, 6, 2, 512, vocabulary=512, length=512, rows=ROWS)
MODELS = {
    "gpt": TruthModel(lambda: BytesGPT(4, 256, 8, 128), gpt_loss, lambda: _symbols(128)),
    "gpt-wide": TruthModel(lambda: BytesGPT(4, 512, 8, 64), gpt_loss, lambda: _symbols(64)),
    "llama-long": TruthModel(lambda: Llama(_LLAMA), llama_loss, lambda: _symbols(512, 512)),
    "moe": TruthModel(MoE, next_loss, lambda: _symbols(64)),
    "vit": TruthModel(ViT, class_loss, lambda: _images(96)),
    "unet": TruthModel(UNet, noise_loss, lambda: _images(48)),
    "t5": TruthModel(_t5, model_loss, _sentences),
}
