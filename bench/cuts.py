"""The automatic cut against every cut between modules: layers of which one costs four times as much, two stages.

python -m bench.cuts [--write]
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.harness import Variant, arguments, compare, publish
from plait import Plan, Trainer
from plait.comm.process_world import process_world

WIDTH, HIDDEN, NUM_LAYERS, SLOW = 256, 1024, 8, 5
ROWS, NUM_MICRO, ROUNDS, STEPS = 2048, 8, 9, 3
TEXT = """{num} residual MLPs of width {width} and hidden size {hidden}, but of layer {slow}, which has {times} times as
much; `pipeline=2 micro={micro}`, 2 processes of 1 thread. To reach: the automatic cut takes at most 1.02 times as long
as the best of all cuts between layers. Ratios to that one, which is the one of the least median, within rounds.

{table}"""


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Unbalanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(HIDDEN * (4 if i == SLOW else 1)) for i in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def job(cut: str) -> Any:
    """The step of a trainer with that cut, or with the automatic one."""
    torch.manual_seed(0)
    plan = Plan.parse(f"pipeline=2 micro={NUM_MICRO}{f' cut={cut}' if cut else ''}")
    sgd = functools.partial(torch.optim.SGD, lr=1e-3)
    trainer = Trainer(Unbalanced(), _loss, sgd, plan, world=process_world(plan.mesh))
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return functools.partial(trainer.step, rows)


def _loss(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(rows) - rows).square().mean()


def main() -> None:
    """Runs the comparison."""
    given = arguments(__doc__)
    names = {"": "automatic"} | {f"layers.{i}": f"cut=layers.{i}" for i in range(1, NUM_LAYERS)}
    variants = [Variant(name, job, (cut,)) for cut, name in names.items()]
    results = compare(variants, ROUNDS, STEPS, memory=False)
    best = min(results[1:], key=lambda result: result.median)
    rows = ["| cut | ms/step | time / the best |", "| --- | --- | --- |"]
    for result in results:
        found = result.ratios(best)
        ratio = f"{statistics.median(found):.3f} ({min(found):.3f}-{max(found):.3f})"
        rows.append(f"| {result.name} | {result.median * 1e3:.1f} | {ratio} |")
    text = TEXT.format(
        num=NUM_LAYERS, width=WIDTH, hidden=HIDDEN, slow=SLOW, times=4, micro=NUM_MICRO, table="\n".join(rows)
    )
    publish("Cuts of an unbalanced model", text, "cuts", given.write)


if __name__ == "__main__":
    main()
