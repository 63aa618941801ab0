"""The byte GPT in stages for torch.distributed.pipelining, cut by hand between blocks, as its users do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.workloads import GLOBAL_BATCH, Workload
from plait.api.job.gpt import BytesGPT


class GPTStage(nn.Module):
    """Some of the model's blocks; the first stage has the embeddings, the last one the head."""

    def __init__(self, model: BytesGPT, start: int, stop: int) -> None:
        super().__init__()
        first, last = start == 0, stop == len(model.blocks)
        self.symbols, self.places = (model.symbols, model.places) if first else (None, None)
        self.blocks = nn.ModuleList(model.blocks[start:stop])
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.symbols is not None:
            x = self.symbols(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def torch_pipeline(
    work: Workload, schedule: str, num_micro: int, rank: int, size: int, updates: Any
) -> Callable[[], Any]:
    """One training step under torch's schedule of that name."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
    from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleZBVZeroBubble

    kinds = {
        "gpipe": (ScheduleGPipe, 1), "1f1b": (Schedule1F1B, 1),
        "interleaved": (ScheduleInterleaved1F1B, 2), "zb-v": (ScheduleZBVZeroBubble, 2),
    }  # fmt: skip
    make, chunks = kinds[schedule]
    num_stages = size * chunks
    mine = [rank + chunk * size for chunk in range(chunks)]
    if schedule == "zb-v":
        mine = [rank, num_stages - 1 - rank]
    model = work.model()
    each = len(model.blocks) // num_stages
    modules = [GPTStage(model, stage * each, (stage + 1) * each) for stage in mine]
    device = torch.device("cpu")
    batch = work.batch()
    rows = GLOBAL_BATCH // num_micro
    stages = []
    for stage, module in zip(mine, modules, strict=True):
        x = batch["x"][:rows] if stage == 0 else torch.zeros(rows, batch["x"].shape[1], work.width)
        stages.append(PipelineStage(module, stage, num_stages, device, input_args=(x,)))
    runs = make(stages[0] if chunks == 1 else stages, num_micro, loss_fn=_loss)
    optimizer = updates([p for module in modules for p in module.parameters()])
    first, last = 0 in mine, num_stages - 1 in mine

    def step() -> Any:
        losses: list[Tensor] = []
        given = (batch["x"],) if first else ()
        if last:
            runs.step(*given, target=batch["y"], losses=losses)
        else:
            runs.step(*given)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    dist.barrier()
    return step
