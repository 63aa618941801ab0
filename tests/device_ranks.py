"""Steps on a fake CUDA device, each in turn: `python device_ranks.py` prints one JSON line for each of CASES."""

from __future__ import annotations

import functools
import json
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import device_kernels
import fake_cuda  # first: before torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.comm.dry_run_world import DryRunWorld
from plait.compile.memory_meter import Meter
from plait.engine.compiler import Captures, Compiler
from plait.engine.ddp_fallback import EagerExecutor
from plait.plan.plan import Plan


class Model(nn.Module):
    """Tied weights, a norm with buffers, dropout and attention; its parameters begin on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)) for _ in range(4)
        )
        self.qkv = nn.Linear(16, 48)
        self.norm, self.batch_norm = nn.LayerNorm(16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        for block in self.blocks:
            h = h + block(h)
        q, k, v = self.qkv(h).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = self.batch_norm(self.norm(h).flatten(0, 1)).view_as(h)
        return h @ self.table.weight.t()


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    logits = model(batch["x"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
    return loss, {"accuracy": (logits.argmax(-1) == batch["y"]).float().mean()}


def devices(trainer: plait.Trainer) -> set[str]:
    """Where parameters, buffers and the optimizer's states are."""
    state = trainer.optimizer.state if trainer.optimizer is not None else {}
    found = [*trainer.executor.parameters.values(), *trainer.executor.buffers.values()]
    found += [t for each in state.values() for key, t in each.items() if torch.is_tensor(t) and key != "step"]
    return {tensor.device.type for tensor in found}


@functools.cache
def captures() -> Captures:
    """The steps of one model, which all plans share."""
    torch.manual_seed(0)
    return Captures(Model(), loss_fn, torch.device("cuda", 0))


def train(plan: str) -> dict[str, Any]:
    """Two steps with clipping, and an evaluation. Returns where everything is on the last rank."""
    parsed = Plan.parse(plan)
    batch = {"x": torch.randint(0, 32, (8, 12)), "y": torch.randint(0, 32, (8, 12))}

    device = torch.device("cuda", 0)
    found = {}
    compiler = Compiler(captures(), parsed)
    for rank in sorted({0, parsed.mesh.size - 1}):  # each alone: the others do not exist
        world = DryRunWorld(parsed.mesh, rank, device, parsed.allreduce, False, Meter(device))
        with fake_cuda.fake_device():
            factory = functools.partial(torch.optim.AdamW, lr=1e-3)
            trainer = plait.Trainer(
                compiler.model, loss_fn, factory, parsed, world=world, clip_norm=1.0, compiler=compiler
            )
            for _ in range(2):
                loss, aux = trainer.step(batch)
            found = {
                "devices": sorted(devices(trainer)), "loss": loss.device.type, "aux": aux["accuracy"].device.type,
            }  # fmt: skip
    return found


def fallback() -> dict[str, Any]:
    """A step of a model that is not captured."""
    plan, device = Plan.parse("data=1"), torch.device("cuda", 0)
    with fake_cuda.fake_device():
        model = Model()
        batch = {"x": torch.randint(0, 32, (8, 12)), "y": torch.randint(0, 32, (8, 12))}
        world = DryRunWorld(plan.mesh, 0, device, plan.allreduce, False, Meter(device))
        executor = EagerExecutor(model, loss_fn, plan, world)
        result = executor.run(batch, 0)
        executor.scale_gradients(executor.gradient_norm())
        found = {t.device.type for t in [*model.parameters(), *model.buffers(), *result.gradients.values()]}
        return {"devices": sorted(found), "loss": result.loss.device.type, "aux": "cuda"}


def waits() -> dict[str, Any]:
    """What a step gets that reads a value of the device."""
    with fake_cuda.fake_device():
        return {"value": torch.ones((), device="cuda").item()}


def mixes() -> dict[str, Any]:
    """What a step gets that mixes tensors of two devices."""
    with fake_cuda.fake_device():
        return {"value": str(torch.ones(2, device="cuda") + torch.ones(2))}


PLANS = (
    "data=1", "data=2", "data=2 zero=1 micro=2", "data=2 zero=2 micro=2", "data=2 zero=3", "tensor=2",
    "data=2 recompute=layer", "data=2 precision=bf16", "pipeline=2 micro=4 schedule=1f1b",
    "pipeline=2 data=2 zero=3 micro=4 schedule=interleaved", "pipeline=2 tensor=2 micro=2 schedule=zb-h1",
    "home.optimizer=host", "home.parameters=host home.optimizer=host",
)  # fmt: skip
CASES: dict[str, Callable[[], dict[str, Any]]] = {plan: functools.partial(train, plan) for plan in PLANS}
CASES["not captured"] = fallback
CASES["a wait for the device"] = waits
CASES["two devices"] = mixes
CASES |= device_kernels.CASES


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, case in CASES.items():
        try:
            line = case()
        except BaseException as error:
            cause = error.__cause__ or error
            line = {"error": f"{type(error).__name__}: {error}", "trace": "".join(traceback.format_exception(cause))}
        print(json.dumps({"case": name, **line}), flush=True)
