"""Runs that tests of checkpoints save and load: a small model with all that makes it hard; ranks are threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.comm.thread_world import run_ranks
from plait.engine.compiler import Captures, Compiler
from plait.errors import RankFailed
from plait.plan.plan import Plan

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


class Small(nn.Module):
    """A fused q, k, v, a tied embedding, sizes that nothing divides, and buffers that last and that do not."""

    def __init__(self, hidden: int = 10) -> None:
        super().__init__()
        self.symbols = nn.Embedding(13, 8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8, bias=False)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.symbols.weight
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("made", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.symbols(x)
        q, k, v = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in self.qkv(h).chunk(3, -1))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(h + self.down(F.gelu(self.up(h))))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def batch(seed: int) -> dict[str, Tensor]:
    found = torch.randint(0, 13, (8, 6), generator=torch.Generator().manual_seed(seed))
    return {"x": found[:, :-1].contiguous(), "y": found[:, 1:].contiguous()}


_captures: dict[Any, Captures] = {}
_compilers: dict[Any, Compiler] = {}
_making = threading.Lock()


def compiler_of(plan: str, make: Callable[[], nn.Module], loss: Any) -> Compiler:
    """One for all trainers of the model under the plan: a step is captured once."""
    with _making:
        if make not in _captures:
            torch.manual_seed(0)
            _captures[make] = Captures(make(), loss)
        if (make, plan) not in _compilers:
            _compilers[make, plan] = Compiler(_captures[make], Plan.parse(plan))
        return _compilers[make, plan]


def trainer_of(
    plan: str, world: Any, other: bool = False, make: Callable[[], nn.Module] = Small, **options: Any
) -> plait.Trainer:
    """A trainer that knows its batch; with `other` it starts from other values and another seed."""
    compiler = compiler_of(plan, make, loss_fn)
    options = {"optimizer": ADAMW, "seed": 7 if other else 0} | options
    trainer = plait.Trainer(compiler.model, loss_fn, plan=Plan.parse(plan), world=world, compiler=compiler, **options)
    trainer.prepare(batch(0))
    if other:
        for parameter in trainer.executor.parameters.values():
            parameter.data.add_(1)
        trainer.executor.updated()
    return trainer


def on(plan: str, fn: Callable[[Any], Any]) -> list[Any]:
    """`fn(world)` on each thread rank; a rank's own error is raised as it was."""
    try:
        return run_ranks(Plan.parse(plan).mesh, fn)
    except RankFailed as failed:
        raise failed.__cause__ or failed from None


def on_axes(plan: str, fn: Callable[[Any], Any]) -> list[Any]:
    """As `on`, given a whole plan."""
    axes = ("pipeline", "replica", "data", "tensor", "stages")
    return on(" ".join(word for word in plan.split() if word.split("=")[0] in axes), fn)


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{path}/{key}")
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from flat(value, f"{path}/{index}")
    else:
        yield path, tree


def assert_same_state(found: Any, expected: Any) -> None:
    """Bit for bit, and without looking at how a step is computed."""
    mine, other = dict(flat(found)), dict(flat(expected))
    skipped = {name for name in mine.keys() | other.keys() if name.endswith(("/foreach", "/fused"))}
    assert mine.keys() - skipped == other.keys() - skipped
    for name in other.keys() - skipped:
        a, b = mine[name], other[name]
        if torch.is_tensor(b):
            assert a.dtype == b.dtype and torch.equal(a, b), name
        else:
            assert type(a) is type(b) and a == b, name


def whole_state(trainer: plait.Trainer) -> Any:
    state = trainer.state_dict()
    return {key: {k: (v.clone() if torch.is_tensor(v) else v) for k, v in flat(state[key])} for key in state}


def make_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    from plait.optim import Lamb

    return {
        "SGD": functools.partial(torch.optim.SGD, lr=0.1),
        "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "Adafactor": functools.partial(torch.optim.Adafactor, lr=0.1),
        "Lamb": functools.partial(Lamb, lr=0.1),
        "amsgrad": functools.partial(torch.optim.Adam, lr=0.1, amsgrad=True),
        "Rprop": functools.partial(torch.optim.Rprop, lr=0.1),
    }[name]


def whole_model(trainer: plait.Trainer) -> dict[str, Tensor]:
    return trainer.full_state_dict()


def saved_once(world: Any, path: Path, plan: str = "data=4", **options: Any) -> None:
    trainer = trainer_of(plan, world, **options)
    trainer.step(batch(0))
    trainer.save(path)
