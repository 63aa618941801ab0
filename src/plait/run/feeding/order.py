"""The order in which a run reads its data: of the whole batch, whatever the number of ranks that share it.

epoch 3:  7 0 9 4 | 1 8 2 5      batches of 4 items, from (seed, epoch) alone
micro=2:  7 0 , 9 4              a batch is cut into microbatches first
data=2:   rank 0 reads 7 , 9     and each of these over the ranks: a rank's rows are those of its
          rank 1 reads 0 , 4     microbatches, one after the other
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from plait.errors import BatchError
from plait.spec.plan import BATCH_AXES, Plan


@dataclass(frozen=True)
class Rows:
    """What one rank reads for one batch: items of the dataset by index."""

    epoch: int
    items: tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """The items of every batch; of each of its `num_micro` microbatches this rank has part `part` of `num_parts`."""

    size: int
    batch_size: int
    shuffle: bool
    seed: int
    num_micro: int = 1
    num_parts: int = 1
    part: int = 0

    @property
    def num_batches(self) -> int:
        """Batches in an epoch; a short last one is left out."""
        return self.size // self.batch_size

    def rows_from(self, epoch: int, batch: int) -> Iterator[Rows]:
        """This rank's rows from that batch of that epoch on, epoch after epoch, without end."""
        while True:
            order = self._epoch(epoch)
            for index in range(batch, self.num_batches):
                start = index * self.batch_size
                cut = order[start : start + self.batch_size].view(self.num_micro, self.num_parts, -1)
                yield Rows(epoch, tuple(cut[:, self.part].flatten().tolist()))
            epoch, batch = epoch + 1, 0

    def _epoch(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.size)
        key = (self.seed * 0x9E3779B1 + epoch) & ((1 << 62) - 1)
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(key))


def check_batch_size(size: int, plan: Plan, what: str) -> None:
    """Raise BatchError, which names the batch as `what`, unless each microbatch splits evenly over the batch axes."""
    num = plan.num_batch_parts * plan.micro
    if size % num == 0:
        return
    sizes = {axis: plan.mesh.axis_size(axis) for axis in BATCH_AXES} | {"micro": plan.micro}
    cuts = [f"{name}={n}" for name, n in sizes.items() if n > 1]
    total = f" ({num} parts)" if len(cuts) > 1 else ""
    raise BatchError(
        f"{what} does not split over {' '.join(cuts)}{total}; choose a multiple of {num}, such as"
        f" {max(size // num, 1) * num}"
    )
