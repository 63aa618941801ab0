"""What is in the graphs of a fake CUDA device: kernels of attention, batch norms, casts. Cases of device_ranks.py."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import fake_cuda  # first: before torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from plait.comm.dry_run_world import DryRunWorld
from plait.compile.capture.capture import capture
from plait.compile.capture.precision import Precision
from plait.compile.ir.node_info import info_of
from plait.compile.memory_meter import Meter
from plait.engine.compiler import Captures, Compiler
from plait.plan.plan import Plan

DEVICE = torch.device("cuda", 0)
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MASKS = ("none", "causal", "boolean", "added", "learnt")
TOKENS = 20  # no multiple of what the memory-efficient kernel wants of masks


class Attention(nn.Module):
    def __init__(self, kernel: str, mask: str, dropout: float) -> None:
        super().__init__()
        self.kernel, self.mask, self.dropout = KERNELS[kernel], mask, dropout
        self.qkv = nn.Linear(32, 96)
        self.bias = nn.Parameter(torch.zeros(4, TOKENS, TOKENS)) if mask == "learnt" else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mask = None
        if self.mask == "boolean":
            mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=x.device).tril()
        elif self.mask != "causal" and self.mask != "none":
            mask = (torch.zeros(TOKENS, TOKENS, device=x.device) if self.bias is None else self.bias).to(q.dtype)
        with sdpa_kernel(self.kernel):
            mixed = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, self.mask == "causal")
        return mixed.transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, kernel: str, mask: str, dropout: float) -> None:
        super().__init__()
        self.norm, self.mixer, self.out = nn.LayerNorm(32), Attention(kernel, mask, dropout), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.mixer(self.norm(x)))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, *block: Any) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 32), nn.Linear(32, 32)
        self.blocks = nn.Sequential(Block(*block), Block(*block))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.last(self.two(F.relu(self.norm(self.one(x))))))


def text_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


class Attentions(nn.Module):
    """A block of each name, on its own copy of the input, in its own dtype."""

    def __init__(self, cases: dict[str, tuple[str, str, float, torch.dtype]]) -> None:
        super().__init__()
        self.cases = nn.ModuleDict({n: Attention(*case).to(dtype) for n, (*case, dtype) in cases.items()})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([each(x.to(each.qkv.weight.dtype)).float().mean() for each in self.cases.values()])


def kernels() -> dict[str, Any]:
    """The ops of attention in a step by dtype, mask, dropout and kernel, for all that PyTorch's kernels take."""
    cases = {
        f"{dtype} {mask} {'dropout' if dropout else 'plain'} {kernel}": (kernel, mask, dropout, DTYPES[dtype])
        for dtype, mask, dropout, kernel in itertools.product(DTYPES, MASKS, (0.0, 0.1), KERNELS)
        if _takes(kernel, dtype, mask)
    }
    step = capture(Attentions(cases), mean_loss, torch.zeros(2, TOKENS, 32), device=DEVICE)
    found: dict[str, Any] = {name: [] for name in cases}
    for node in step.graph.nodes:
        if "attention" in str(node.target):
            found[info_of(node).module.removeprefix("cases.")].append(str(node.target))
    return found


def _takes(kernel: str, dtype: str, mask: str) -> bool:
    """Whether a kernel of PyTorch's takes such an attention, and differentiates it."""
    masks = {"flash": ("none", "causal"), "efficient": MASKS, "cudnn": MASKS[:-1]}
    return mask in masks[kernel] and (kernel == "efficient" or dtype != "fp32")


def attention_under_a_plan(precision: str, kernel: str, mask: str, dropout: float) -> dict[str, Any]:
    """The shapes of queries, and of what else has their dims, in the graphs of a rank of eight."""
    plan = Plan.parse(f"data=2 tensor=2 pipeline=2 micro=2 precision={precision}")
    batch = {name: torch.zeros(8, TOKENS, dtype=torch.int64) for name in "xy"}
    compiled = Compiler(Captures(Decoder(kernel, mask, dropout), text_loss, DEVICE), plan).compiled(batch)
    nodes = [(name, node) for name, each in compiled.program.graphs.items() for node in each.graph.nodes]
    calls = [(name, node) for name, node in nodes if "attention" in str(node.target)]
    layouts = {n: str(layout) for n, layout in compiled.program.layouts.items() if n.startswith("blocks.0.")}
    return {
        "forward": sorted({str(node.target) for name, node in calls if name.startswith("F")}),
        "backward": sorted({str(node.target) for name, node in calls if name.startswith("B")}),
        "cells": sorted({name[:2] for name, _ in calls}),
        "queries": sorted({tuple(node.args[0].meta["val"].shape) for _, node in calls}),
        "dtypes": sorted({str(node.args[0].meta["val"].dtype) for _, node in calls}),
        "layouts": layouts,
        "without rule": sorted(map(str, compiled.without_rule)),
    }


def images(plan: str) -> dict[str, Any]:
    """The convolutions and batch norms of a rank, channels last in half precision."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Residual(8), Residual(8), nn.Conv2d(8, 3, 1))
    own = model.to(memory_format=torch.channels_last)
    compiled = Compiler(Captures(own, mean_loss, DEVICE), Plan.parse(plan)).compiled(torch.zeros(8, 3, 8, 8))
    nodes = [node for each in compiled.program.graphs.values() for node in each.graph.nodes]
    convolutions = [node for node in nodes if str(node.target) == "aten.convolution.default"]
    return {
        "norms": sorted({str(node.target) for node in nodes if "batch_norm" in str(node.target)}),
        "dtypes": sorted({str(node.args[0].meta["val"].dtype) for node in convolutions}),
        "rows": sorted({node.args[0].meta["val"].shape[0] for node in convolutions}),
        "layouts": {n: str(layout) for n, layout in compiled.program.layouts.items() if n.startswith("1.")},
        "without rule": sorted(map(str, compiled.without_rule)),
    }


CAST = ("addmm", "tanh", "exp", "native_layer_norm", "_softmax")


class Casts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.exact = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return self.exact(torch.tanh(h) + torch.exp(h) + self.norm(h) + h.softmax(-1))


def casts(device: str) -> dict[str, Any]:
    """The dtypes of results under a plan's precision, by op, and by its exception for a module."""
    precision = Precision("bf16", (("exact", "fp32"),))
    where = torch.device(device)
    step = capture(Casts(), mean_loss, torch.zeros(4, 8), device=where, precision=precision, differentiate=False)
    found: dict[str, list[str]] = {}
    for node in step.graph.nodes:
        if (name := str(node.target).removeprefix("aten.").split(".")[0]) in CAST:
            value = node.meta["val"]
            found.setdefault(name, []).append(str((value[0] if isinstance(value, tuple) else value).dtype))
    return found


def optimizer(factory: Callable[..., torch.optim.Optimizer]) -> dict[str, Any]:
    """Two steps; where the state is then."""
    import plait

    plan = Plan.parse("data=2 zero=1")
    world = DryRunWorld(plan.mesh, 0, DEVICE, plan.allreduce, False, Meter(DEVICE))
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.zeros(4, 8)
    with fake_cuda.fake_device():
        trainer = plait.Trainer(model, mean_loss, factory, plan, world=world)
        for _ in range(2):
            trainer.step(batch)
        assert trainer.optimizer is not None
        found = [item for state in trainer.optimizer.state.values() for item in state.items()]
        return {"state": {key: value.device.type for key, value in found if torch.is_tensor(value)}}


OPTIMIZERS = {
    "AdamW fused": functools.partial(torch.optim.AdamW, fused=True),
    "AdamW foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "AdamW capturable": functools.partial(torch.optim.AdamW, lr=1e-3, capturable=True),
    "AdamW fused capturable": functools.partial(torch.optim.AdamW, fused=True, capturable=True),
    "RMSprop capturable": functools.partial(torch.optim.RMSprop, capturable=True),
    "SGD fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adagrad fused": functools.partial(torch.optim.Adagrad, fused=True),
}
UNDER_A_PLAN = (
    ("bf16", "flash", "causal", 0.0), ("fp32", "efficient", "boolean", 0.0), ("fp16", "efficient", "learnt", 0.0),
    ("bf16", "cudnn", "boolean", 0.0), ("bf16", "flash", "causal", 0.1),
)  # fmt: skip
CASES: dict[str, Callable[[], dict[str, Any]]] = {"kernels": kernels}
for _case in UNDER_A_PLAN:
    CASES[f"attention {' '.join(map(str, _case))}"] = functools.partial(attention_under_a_plan, *_case)
for _plan in ("data=1", "data=2 tensor=2", "data=2 tensor=2 pipeline=2 micro=2"):
    CASES[f"images {_plan}"] = functools.partial(images, f"{_plan} precision=bf16")
CASES |= {f"casts on {device}": functools.partial(casts, device) for device in ("cuda", "cpu")}
CASES |= {f"optimizer {name}": functools.partial(optimizer, factory) for name, factory in OPTIMIZERS.items()}
