"""Model families of the zoo that are written here, in the plain style of a user's own file."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait


class DoubleConv(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    """Segmentation with skips: [n, 3, 32, 32] -> [n, 4, 32, 32]."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = DoubleConv(3, width), DoubleConv(width, 2 * width)
        self.bottom = DoubleConv(2 * width, 4 * width)
        self.up_second = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up_first = nn.Upsample(scale_factor=2, mode="bilinear")
        self.back_second, self.back_first = DoubleConv(4 * width, 2 * width), DoubleConv(3 * width, width)
        self.drop, self.head = nn.Dropout2d(0.1), nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.first(x)
        two = self.second(F.max_pool2d(one, 2))
        y = self.drop(self.bottom(F.max_pool2d(two, 2)))
        y = self.back_second(torch.cat([self.up_second(y), two], 1))
        y = self.back_first(torch.cat([self.up_first(y), one], 1))
        return self.head(y)


class ConvNorm(nn.Sequential):
    def __init__(self, inside: int, outside: int, kernel: int) -> None:
        super().__init__(nn.Conv2d(inside, outside, kernel, padding=kernel // 2), nn.BatchNorm2d(outside), nn.ReLU())


class InceptionBlock(nn.Module):
    """Four parallel branches, concatenated over channels."""

    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.branch1 = ConvNorm(inside, width, 1)
        self.branch2 = nn.Sequential(ConvNorm(inside, width, 1), ConvNorm(width, width, 3))
        self.branch3 = nn.Sequential(ConvNorm(inside, width, 1), ConvNorm(width, width, 5))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1), ConvNorm(inside, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class Inception(nn.Module):
    """Classifier: [n, 3, 32, 32] -> [n, 8]."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = ConvNorm(3, width, 3)
        self.first, self.second = InceptionBlock(width, width), InceptionBlock(4 * width, width)
        self.pool, self.drop, self.head = nn.AvgPool2d(2), nn.Dropout(0.1), nn.Linear(4 * width, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.pool(self.first(F.max_pool2d(self.stem(x), 2))))
        return self.head(self.drop(F.adaptive_avg_pool2d(y, 1).flatten(1)))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(
            nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * tokens, tokens)
        )
        self.within = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer classifier: [n, 3, 32, 32] -> [n, 8]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.Sequential(MixerBlock(16, width), MixerBlock(16, width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class LSTMLanguageModel(nn.Module):
    """Next byte: [n, length] -> [n, length, 128]."""

    def __init__(self, vocab: int = 128, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.1, batch_first=True)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.drop(self.lstm(self.embed(ids))[0]))


def class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def pixel_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> plait.Weighted:
    """The sum over tokens that have a label, and their number."""
    ids, labels = batch
    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return plait.Weighted(loss, (labels != -100).sum())


def image_batch() -> dict[str, Tensor]:
    return {"x": torch.randn(12, 3, 32, 32), "y": torch.randint(0, 8, (12,))}


def pixel_batch() -> dict[str, Tensor]:
    return {"x": torch.randn(12, 3, 32, 32), "y": torch.randint(0, 4, (12, 32, 32))}


def token_batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 128, (12, 8))  # each token is the cell's ops once more in the graph
    labels = ids.roll(-1, 1)
    labels[0, 4:] = -100
    return ids, labels
