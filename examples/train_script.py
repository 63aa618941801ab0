"""Your own training script: plain Python, one process or many.

python examples/train_script.py
plait run examples/train_script.py --processes 2 --plan "data=2"
torchrun --nproc-per-node 2 examples/train_script.py
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import nn

import plait


class Lines(torch.utils.data.Dataset):
    """Points whose target is a noisy linear function of them."""

    def __init__(self, size: int = 4096) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, 16, generator=generator)
        self.y = self.x @ torch.randn(16, 1, generator=generator) + 0.01 * torch.randn(size, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def main(steps: int = 60) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    trainer = plait.Trainer(model, loss_fn, functools.partial(torch.optim.AdamW, lr=1e-2))
    # batch_size is that of all ranks together; each rank reads its own rows only
    loader = plait.loader(Lines(), batch_size=64)
    for batch in loader:
        loss = trainer.step(batch)
        if trainer.world.rank == 0 and trainer.step_number % 10 == 0:
            print(f"step {trainer.step_number}  loss {float(loss):.6f}")
        if trainer.step_number == steps:
            break
    trainer.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
