"""Host memory that files are read into and written from, around the page cache where that works."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.cost.memory_model import PAGE, padded


def page_memory(num_bytes: int, pinned: bool = False) -> Tensor:
    """New memory, flat uint8 of `padded(num_bytes)`, that begins at a page."""
    size = padded(num_bytes)
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=pinned)
    return memory.narrow(0, -memory.data_ptr() % PAGE, size)
