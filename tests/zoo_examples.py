"""Model families rewritten from pytorch/examples, small: classifiers, language models, generators, graphs, policies."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait

ROWS = 8
Batch = dict[str, Tensor]


class MnistNet(nn.Module):
    """Convolutions, two kinds of dropout, log softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(256, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


def nll_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.nll_loss(model(batch["x"]), batch["y"])


def digits() -> Batch:
    return {"x": torch.randn(ROWS, 1, 12, 12), "y": torch.randint(0, 10, (ROWS,))}


class RNNModel(nn.Module):
    """The word language model with LSTM, time first, with tied weights."""

    def __init__(self, vocab: int = 24, width: int = 16) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(vocab, width)
        self.rnn = nn.LSTM(width, width, 2, dropout=0.2)
        self.decoder = nn.Linear(width, vocab)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.zeros(2, ids.shape[1], 16, dtype=self.encoder.weight.dtype)
        output, _ = self.rnn(self.drop(self.encoder(ids)), (hidden, hidden))
        return F.log_softmax(self.decoder(self.drop(output)), dim=-1)


class PositionalEncoding(nn.Module):
    def __init__(self, width: int, dropout: float = 0.1, longest: int = 32) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        position = torch.arange(0, longest).unsqueeze(1)
        turn = torch.exp(torch.arange(0, width, 2).float() * (-math.log(10000.0) / width))
        table = torch.zeros(longest, width)
        table[:, 0::2], table[:, 1::2] = torch.sin(position * turn), torch.cos(position * turn)
        self.register_buffer("pe", table.unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[: x.size(0)])


class TransformerModel(nn.Module):
    """The word language model with nn.TransformerEncoder and a square mask."""

    def __init__(self, vocab: int = 24, width: int = 16) -> None:
        super().__init__()
        self.embed, self.positions, self.width = nn.Embedding(vocab, width), PositionalEncoding(width), width
        layer = nn.TransformerEncoderLayer(width, 2, 32, 0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.positions(self.embed(ids) * math.sqrt(self.width))
        mask = torch.log(torch.tril(torch.ones(len(ids), len(ids), dtype=x.dtype)))
        return F.log_softmax(self.decoder(self.encoder(x, mask=mask)), dim=-1)


def words_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Time first, as the examples have it; the batch is rows first."""
    return F.nll_loss(model(batch["x"].t()).flatten(0, 1), batch["y"].t().flatten())


def words(length: int = 8) -> Batch:
    return {"x": torch.randint(0, 24, (ROWS, length)), "y": torch.randint(0, 24, (ROWS, length))}


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.fc3, self.fc4 = nn.Linear(8, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(x.view(-1, 64)))
        mean, log = self.fc21(hidden), self.fc22(hidden)
        z = mean + torch.randn_like(log) * torch.exp(0.5 * log)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mean, log


def vae_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Sums over elements, a mean over rows."""
    found, mean, log = model(batch)
    divergence = -0.5 * torch.sum(1 + log - mean.pow(2) - log.exp())
    return (F.binary_cross_entropy(found, batch.view(-1, 64), reduction="sum") + divergence) / batch.shape[0]


def pictures() -> Tensor:
    return torch.rand(ROWS, 1, 8, 8)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(8, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
            nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, z: Tensor) -> Tensor:
        return self.main(z[:, :, None, None])


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x).flatten()


class DCGAN(nn.Module):
    """Both networks; the discriminator's step, in which the generator makes pictures and gets no gradient."""

    def __init__(self, train: str) -> None:
        super().__init__()
        self.generator, self.discriminator, self.trains = Generator(), Discriminator(), train
        (self.discriminator if train == "generator" else self.generator).requires_grad_(False)


def dcgan_loss(model: Any, batch: Batch) -> Tensor:
    fake = model.generator(batch["z"])
    if model.trains == "generator":
        score = model.discriminator(fake)
        return F.binary_cross_entropy(score, torch.ones_like(score))
    real, made = model.discriminator(batch["x"]), model.discriminator(fake.detach())
    return F.binary_cross_entropy(real, torch.ones_like(real)) + F.binary_cross_entropy(made, torch.zeros_like(made))


def noise_and_pictures() -> Batch:
    return {"z": torch.randn(ROWS, 8), "x": torch.randn(ROWS, 1, 16, 16)}


class SuperResolution(nn.Module):
    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5, 1, 2), nn.Conv2d(16, 16, 3, 1, 1)
        self.conv3, self.conv4 = nn.Conv2d(16, 8, 3, 1, 1), nn.Conv2d(8, factor**2, 3, 1, 1)
        self.shuffle = nn.PixelShuffle(factor)
        for conv in (self.conv1, self.conv2, self.conv3):
            nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv3(F.relu(self.conv2(F.relu(self.conv1(x))))))
        return self.shuffle(self.conv4(x))


def mse_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def small_and_large() -> Batch:
    return {"x": torch.randn(ROWS, 1, 8, 8), "y": torch.randn(ROWS, 1, 16, 16)}


class Siamese(nn.Module):
    """One trunk on two pictures; how alike they are."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 16, 3, 2, 1),
            nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.fc = nn.Sequential(nn.Linear(32, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return torch.sigmoid(self.fc(torch.cat((self.trunk(one), self.trunk(two)), 1)))


def siamese_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    one, two, same = batch
    return F.binary_cross_entropy(model(one, two).squeeze(), same)


def two_pictures() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(ROWS, 1, 8, 8), torch.randn(ROWS, 1, 8, 8), torch.randint(0, 2, (ROWS,)).float()


class GraphConvolution(nn.Module):
    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.kernel, self.bias = nn.Parameter(torch.empty(inside, out)), nn.Parameter(torch.zeros(out))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.matmul(adjacency, x @ self.kernel) + self.bias


class GCN(nn.Module):
    """A batch of small graphs, each with its adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gc1, self.gc2, self.dropout = GraphConvolution(6, 16), GraphConvolution(16, 4), nn.Dropout(0.1)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        degree = adjacency.sum(-1).rsqrt()
        adjacency = degree[:, :, None] * adjacency * degree[:, None, :]
        return F.log_softmax(self.gc2(self.dropout(F.relu(self.gc1(x, adjacency))), adjacency), dim=-1)


class GraphAttention(nn.Module):
    def __init__(self, inside: int, out: int, heads: int, concat: bool) -> None:
        super().__init__()
        self.heads, self.concat, self.out = heads, concat, out // heads if concat else out
        self.weight = nn.Parameter(torch.empty(inside, heads * self.out))
        self.score = nn.Parameter(torch.empty(heads, 2 * self.out, 1))
        nn.init.xavier_normal_(self.weight), nn.init.xavier_normal_(self.score)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = (x @ self.weight).view(*x.shape[:2], self.heads, self.out).transpose(1, 2)
        source, target = h @ self.score[:, : self.out], h @ self.score[:, self.out :]
        scores = F.leaky_relu(source + target.mT, 0.2)
        scores = torch.where(adjacency[:, None] > 0, scores, -9e15 * torch.ones_like(scores))
        h = F.dropout(F.softmax(scores, dim=-1), 0.1, self.training) @ h
        return h.transpose(1, 2).flatten(2) if self.concat else h.mean(1)


class GAT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gat1, self.gat2 = GraphAttention(6, 16, 4, True), GraphAttention(16, 4, 1, False)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return F.log_softmax(self.gat2(F.elu(self.gat1(x, adjacency)), adjacency), dim=-1)


def graph_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.nll_loss(model(batch["x"], batch["edges"]).flatten(0, 1), batch["y"].flatten())


def graphs() -> Batch:
    edges = (torch.rand(ROWS, 5, 5) < 0.4).float() + torch.eye(5)
    return {"x": torch.randn(ROWS, 5, 6), "edges": (edges + edges.mT).clamp(max=1), "y": torch.randint(0, 4, (ROWS, 5))}


class Sequence(nn.Module):
    """Time sequence prediction: two LSTM cells step by step, and two steps of the future."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.width = width
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, width), nn.LSTMCell(width, width), nn.Linear(width, 1)

    def forward(self, x: Tensor, future: int = 2) -> Tensor:
        found = []
        h1, c1, h2, c2 = (torch.zeros(x.size(0), self.width, dtype=x.dtype) for _ in range(4))
        output = x[:, :1]
        for step in range(x.size(1) + future):
            h1, c1 = self.lstm1(x[:, step : step + 1] if step < x.size(1) else output, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            output = self.linear(h2)
            found += [output]
        return torch.cat(found, dim=1)


def waves() -> Batch:
    time = torch.arange(8.0) + torch.rand(ROWS, 1) * 6
    return {"x": torch.sin(time[:, :4]), "y": torch.sin(time[:, 1:7])}


class Policy(nn.Module):
    """REINFORCE's policy; with a value head, actor-critic's."""

    def __init__(self, critic: bool) -> None:
        super().__init__()
        self.affine1, self.dropout, self.action = nn.Linear(4, 32), nn.Dropout(0.6), nn.Linear(32, 2)
        self.value = nn.Linear(32, 1) if critic else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = F.relu(self.dropout(self.affine1(x)))
        return F.softmax(self.action(x), dim=1), None if self.value is None else self.value(x)


def policy_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Minus log probability of the action times the return, or times the advantage."""
    chances, value = model(batch["state"])
    log = chances.gather(1, batch["action"][:, None]).log().squeeze(1)
    gain = batch["return"]
    if value is None:
        return (-log * gain).mean()
    advantage = gain - value.squeeze(1)
    return (-log * advantage.detach()).mean() + F.smooth_l1_loss(value.squeeze(1), gain)


def episodes() -> Batch:
    return {"state": torch.randn(ROWS, 4), "action": torch.randint(0, 2, (ROWS,)), "return": torch.randn(ROWS)}


class ConvLayer(nn.Module):
    def __init__(self, inside: int, out: int, kernel: int, stride: int, up: int = 0) -> None:
        super().__init__()
        self.up, self.pad = up, nn.ReflectionPad2d(kernel // 2)
        self.conv2d = nn.Conv2d(inside, out, kernel, stride)

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, mode="nearest", scale_factor=self.up) if self.up else x
        return self.conv2d(self.pad(x))


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.in1 = ConvLayer(width, width, 3, 1), nn.InstanceNorm2d(width, affine=True)
        self.conv2, self.in2 = ConvLayer(width, width, 3, 1), nn.InstanceNorm2d(width, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.in2(self.conv2(torch.relu(self.in1(self.conv1(x))))) + x


class NeuralStyle(nn.Module):
    """Fast neural style: the transformer net, and frozen features that the loss looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            ConvLayer(3, 8, 5, 1), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), ConvLayer(8, 16, 3, 2),
            nn.InstanceNorm2d(16, affine=True), nn.ReLU(), ResidualBlock(16), ConvLayer(16, 8, 3, 1, up=2),
            nn.InstanceNorm2d(8, affine=True), nn.ReLU(), ConvLayer(8, 3, 5, 1),
        )  # fmt: skip
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.features.requires_grad_(False)


def gram(y: Tensor) -> Tensor:
    n, channels, height, width = y.size()
    flat = y.view(n, channels, width * height)
    return flat.bmm(flat.transpose(1, 2)) / (channels * height * width)


def style_loss(model: Any, batch: Tensor) -> Tensor:
    made, seen = model.features(model.net(batch)), model.features(batch)
    return F.mse_loss(made, seen) + 10 * F.mse_loss(gram(made), gram(seen).roll(1, 0))


def colours() -> Tensor:
    return torch.randn(ROWS, 3, 8, 8)


class Encoder(nn.Module):
    """The translation example's encoder and decoder, with teacher forcing and additive attention."""

    def __init__(self, vocab: int = 24, width: int = 16) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True)
        self.out_embed, self.cell = nn.Embedding(vocab, width), nn.GRUCell(2 * width, width)
        self.query, self.keys, self.score = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.head = nn.Linear(width, vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        keys, hidden = self.gru(self.embed(source))
        state, found = hidden[0], []
        for word in self.out_embed(target).unbind(1):
            weights = self.score(torch.tanh(self.query(state)[:, None] + self.keys(keys))).softmax(1)
            state = self.cell(torch.cat([word, (weights * keys).sum(1)], 1), state)
            found.append(self.head(state))
        return torch.stack(found, 1)


def translation_loss(model: nn.Module, batch: Batch) -> plait.Weighted:
    logits = model(batch["x"], batch["y"][:, :-1])
    right = batch["y"][:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), right.flatten(), ignore_index=0, reduction="sum")
    return plait.Weighted(loss, (right != 0).sum())
