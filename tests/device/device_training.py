"""What tests of the device train, on a device or on the CPU, and the waits of the host for it."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import host_gpu
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.comm.protocol import World
from plait.engine.compiler import Captures, Compiler
from plait.plan.plan import Plan

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)  # where rounding does not decide on signs
STEPS = 3
_LATE = 100  # operations, fewer than a step has, by which the host may run ahead of what it waits for


class DeviceModel(nn.Module):
    """Tied weights, a norm with buffers, dropout and attention; its parameters begin on the CPU."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)) for _ in range(2)
        )
        self.qkv = nn.Linear(16, 48)
        self.norm, self.batch_norm = nn.LayerNorm(16), nn.BatchNorm1d(16)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        for block in self.blocks:
            h = h + block(h)
        q, k, v = self.qkv(h).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = self.batch_norm(self.norm(h).flatten(0, 1)).view_as(h)
        return h @ self.table.weight.t()


class ReadsValues(DeviceModel):
    """Cannot be captured."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.cpu().numpy().sum() > 0 else x


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    logits = model(batch["x"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
    return loss, {"accuracy": (logits.argmax(-1) == batch["y"]).float().mean(), "last": logits[:, -1]}


def batch(index: int = 0) -> dict[str, Tensor]:
    """A global batch of 8 rows."""
    generator = torch.Generator().manual_seed(index)
    x, y = (torch.randint(0, 32, (8, 12), generator=generator) for _ in range(2))
    return {"x": x, "y": y}


@contextlib.contextmanager
def counted(found: list[str]) -> Iterator[None]:
    """Add to `found` what the host waits for within the context. A wait for an event is none, if the host has run ahead
    of it by most of a step."""
    if host_gpu.is_here():
        with host_gpu.waits_here() as waits:
            yield
        found += [f"{each.what}: {each.place}" for each in waits if each.behind < _LATE]
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found += [str(each.message) for each in told if "synchronizing" in str(each.message)]


@dataclass
class Trained:
    """What training gave on the first rank.

    waits   of all steps but the first
    places  the types of devices of parameters, buffers and optimizer state
    """

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    evaluated: Any = None
    waits: list[str] = field(default_factory=list)
    waits_of_evaluation: list[str] = field(default_factory=list)
    places: set[str] = field(default_factory=set)

    def apart(self, other: Trained) -> float:
        """The largest difference of any loss or weight."""
        found = [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)]
        found += [float((t - other.weights[n]).abs().max()) for n, t in self.weights.items()]
        return max(found) if all(map(torch.isfinite, map(torch.tensor, found))) else torch.inf


@functools.cache
def captures(device: str, dtype: torch.dtype = torch.float64) -> Captures:
    """The captured steps of the model, which plans share."""
    return Captures(DeviceModel(dtype), loss_fn, torch.device(device))


def places(trainer: plait.Trainer) -> set[str]:
    """The types of devices of parameters, buffers and the optimizer's states."""
    state = trainer.optimizer.state if trainer.optimizer is not None else {}
    found = [*trainer.executor.parameters.values(), *trainer.executor.buffers.values()]
    found += [t for each in state.values() for key, t in each.items() if torch.is_tensor(t) and key != "step"]
    return {tensor.device.type for tensor in found}


def train(
    plan: str,
    device: str = "cuda",
    model: nn.Module | None = None,
    optimizer: Any = ADAMW,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float64,
    then: Callable[[plait.Trainer, World], Any] = lambda trainer, world: None,
    **options: Any,
) -> Trained:
    """Steps with clipping and an evaluation, with ranks as threads that share the device.

    The result has what `then` returned as its `evaluated`, if that is something.
    """
    parsed = Plan.parse(plan)
    steps_of = captures(device, dtype) if model is None else Captures(model, loss_fn, torch.device(device))
    compiler = Compiler(steps_of, parsed.inner_plan)

    def rank(world: World) -> Trained:
        found = Trained()
        given = {"clip_norm": 1.0, "world": world, "compiler": compiler} | options
        trainer = plait.Trainer(compiler.model, loss_fn, optimizer, parsed, **given)
        losses = []
        for index in range(steps):
            with counted([] if index == 0 else found.waits):
                loss, aux = trainer.step(batch(index))
            losses.append(loss)
        assert (loss.device.type, aux["accuracy"].device.type) == (torch.device(device).type,) * 2
        with counted(found.waits_of_evaluation):
            found.evaluated = trainer.evaluate([batch(0), batch(1)])
        found.evaluated = then(trainer, world) or found.evaluated
        found.losses, found.weights = [float(loss) for loss in losses], trainer.full_state_dict()
        found.places = places(trainer)
        trainer.close()
        return found

    return plait.run_ranks(parsed.mesh, rank, device=device)[0]


@functools.cache
def on_cpu(plan: str) -> Trained:
    """What a plan trains on the CPU."""
    return train(plan, "cpu")
