"""The rows of the README's table of strategies as plans of small models, for what has to hold under each of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.plan.key_values import SCHEDULE_NAMES
from plait.schedule.families import make_schedule

SYNCHRONOUS = [name for name in SCHEDULE_NAMES if not make_schedule(name, 2, 2).asynchronous]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.drop, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Mixture(nn.Module):
    """Four experts, of which each position has two."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 4) * 0.3), nn.Parameter(torch.randn(4, 4, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.gate(rows).softmax(-1).topk(2, -1)
        each, expert = rows.repeat_interleave(2, 0).unsqueeze(1), ids.flatten()
        y = (each @ self.up[expert]).relu() @ self.down[expert]
        return x + (y.squeeze(1) * weights.reshape(-1, 1)).view(-1, 2, 8).sum(1).view_as(x)


class Words(nn.Module):
    """The next word, by layers that differ, and a head that has the weight of the embedding if it is `tied`."""

    def __init__(self, layers: list[nn.Module], tied: bool = True) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(12, 8), nn.ModuleList(layers)
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Images(nn.Module):
    """Convolutions, and two branches of different shape."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.narrow, self.wide = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 6, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.middle(F.relu(self.norm(self.stem(x)))))
        return self.head(torch.cat([self.narrow(x), self.wide(x)], 1).mean((2, 3)))


class Skips(nn.Module):
    """The last of three layers, which has no parameters, reads what the first made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.third(self.second(x)) * x


def next_word(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), words.roll(-1, 1).flatten())


def squares(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).square().mean()


MODELS = {
    "text": lambda: (Words([Attention(), MLP()]), next_word, torch.randint(0, 12, (8, 8))),
    "untied": lambda: (Words([MLP(), MLP()], tied=False), next_word, torch.randint(0, 12, (8, 4))),
    "experts": lambda: (Words([Mixture()]), next_word, torch.randint(0, 12, (4, 4))),
    "skips": lambda: (Skips(), squares, torch.randn(4, 8)),
    "images": lambda: (Images(), squares, torch.randn(4, 2, 4, 4)),
}
BRANCHES = {"narrow.*": "only:tensor=0", "wide.*": "only:tensor=1", "head.*": "-"}

# Plans of each row, which its first words name. What is no plan of a step, or of ranks of PyTorch, has none.
PLANS: dict[str, list[str]] = {
    "data parallel": ["data=2 bucket=1KiB"],
    "tensor parallel": ["tensor=2"],
    "both": ["data=2 tensor=2"],
    "sequence parallel": ["tensor=2 sequence=yes"],
    "context parallel": ["context=2", "context=2 context.kind=ring precision=bf16",
                         "context=2 context.kind=gather precision=bf16"],
    "expert parallel": ["experts: data=2 expert=2", "experts: data=2 expert=2 expert.capacity=100"],
    "vocabulary-parallel": ["tensor=4"],
    "convolutions": ["images: data=2 tensor=2"],
    "branches on different ranks": ["branches: tensor=2"],
    "XLA": [],
    "a model that cannot be captured": [],
    "ZeRO 1, 2, 3": ["data=2 zero=1", "data=2 zero=2 micro=2", "data=2 zero=3 micro=2 bucket=1KiB"],
    "hybrid sharding": ["replica=2 data=2 zero=3", "replica=2 data=2 zero=2"],
    "gradient accumulation": ["micro=4 zero=1"],
    "recompute": ["micro=2 recompute=layer", "recompute=layers.1", "recompute=budget=24KiB",
                  "tensor=2 sequence=yes recompute=gathers"],
    "mixed precision": ["data=2 precision=bf16", "data=2 precision=fp16"],
    "half-precision parameters": ["data=2 zero=3 precision=bf16-params"],
    "ZeRO-Infinity": ["home.activations=disk", "data=2 home.parameters=disk home.optimizer=disk zero=3 micro=2"],
    "central storage": ["data=2 central=host"],
    "pipelines: naive": [f"untied: pipeline=2 micro={1 if name == 'naive' else 4} schedule={name}"
                         for name in SYNCHRONOUS],
    "long skips": ["pipeline=2 micro=2", "skips: pipeline=3 micro=2 cut=second,third schedule=zb-h1"],
    "pipelines with data": ["pipeline=2 data=2 zero=3 micro=2",
                            "pipeline=2 tensor=2 micro=2 recompute=layer precision=bf16"],
    "stages on several ranks": ["pipeline=[1,2] micro=4"],
    "stages that are spread": ["stages=[tensor=2|data=2] micro=2"],
    "asynchronous pipelines": [f"untied: pipeline=2 micro=4 schedule={name}" for name in SCHEDULE_NAMES
                               if name not in SYNCHRONOUS],
    "local SGD": ["data=2 sync=2", "replica=2 data=2 sync=2"],
    "DiLoCo": ["data=2 sync=2 outer=nesterov streaming=2 overlap=1 compress=int8"],
    "compressed gradients": ["data=2 compress=powersgd:2", "data=2 compress=int8"],
    "compiled": [],
    "parameter servers": ["workers=2 servers=2 staleness=0"],
    "gradients to servers": ["workers=2 servers=1 staleness=0 sync=2 outer=nesterov compress=int8"],
    "sparse tables": [],
}  # fmt: skip
CASES = [plan for plans in PLANS.values() for plan in plans]


def rows_of_readme() -> list[str]:
    """The first cell of each row of the README's table of strategies."""
    text = (Path(__file__).parent.parent / "README.md").read_text()
    table = text.partition("## Strategies")[2].partition("| strategy |")[2].partition("\n\n")[0]
    return [line.split("|")[1].strip() for line in table.splitlines()[2:]]


def made(name: str, dtype: torch.dtype) -> tuple[nn.Module, Any, Tensor]:
    """A model in a dtype, its loss and a batch."""
    torch.manual_seed(0)
    model, loss_fn, batch = MODELS[name]()
    return model.to(dtype), loss_fn, batch.to(dtype) if batch.is_floating_point() else batch


def parts(case: str) -> tuple[str, str, dict[str, str] | None, torch.dtype]:
    """The model's name, the plan, the layouts, and the dtype: float64, unless the plan has a precision of its own."""
    name, _, plan = case.rpartition(": ")
    layouts = BRANCHES if name == "branches" else None
    dtype = torch.float32 if "precision=" in plan else torch.float64
    return {"": "text", "branches": "images"}.get(name, name), plan, layouts, dtype


@functools.cache
def _verifier(name: str, dtype: torch.dtype) -> plait.Verifier:
    return plait.Verifier(*made(name, dtype))


def verified(case: str, more: str = "") -> plait.Report:
    """What `verify` finds of one of CASES, with more keys."""
    name, plan, layouts, dtype = parts(case)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    return _verifier(name, dtype).verify(f"{plan} {more}", layouts=layouts, tolerance=tolerance)
