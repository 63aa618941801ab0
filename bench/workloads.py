"""The two workloads that every benchmark uses: a byte-level GPT, small (width 256) and wide (width 512); and one with
longer sequences."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.api.job.gpt import BytesGPT, loss_fn

GLOBAL_BATCH = 8
SEQUENCE = 128


@dataclass(frozen=True)
class Workload:
    """A GPT and its global batch of sequences of bytes."""

    width: int = 256
    num_layers: int = 8
    sequence: int = SEQUENCE
    rows: int = GLOBAL_BATCH

    def model(self) -> BytesGPT:
        """The same on every rank."""
        torch.manual_seed(0)
        return BytesGPT(self.num_layers, self.width, heads=8, sequence=self.sequence)

    def batch(self, rank: int = 0, num_ranks: int = 1) -> dict[str, Tensor]:
        """`x` and `y`: rank's rows of the global batch of symbols and of their successors."""
        symbols = torch.randint(256, (self.rows, self.sequence + 1), generator=torch.Generator().manual_seed(1))
        part = symbols.chunk(num_ranks)[rank]
        return {"x": part[:, :-1].contiguous(), "y": part[:, 1:].contiguous()}


WORKLOADS = {"small": Workload(256), "wide": Workload(512)}
LONG = {"long": Workload(256, 4, sequence=2048, rows=1)}

optimizer = functools.partial(torch.optim.AdamW, lr=3e-4)

__all__ = ["GLOBAL_BATCH", "LONG", "SEQUENCE", "WORKLOADS", "Workload", "loss_fn", "optimizer"]
