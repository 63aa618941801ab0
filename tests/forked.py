"""Imported once by the process that ranks of tests are forked from: ranks find it imported, and `process_ranks.gpt()`
captured. Torch knows the shapes of what most others capture."""

from __future__ import annotations

import gc

import process_ranks as ranks
import torch
import torch.distributed.tensor

from plait.engine.compiler import Compiler
from plait.plan.plan import Plan

torch.set_num_threads(1)
# Autograd starts a thread for each device, which forks do not have. Where torch has CUDA and there is no GPU, it would
# count the device of fake tensors among them, if its first backward were that of a capture.
torch.ones((), requires_grad=True).backward()
for _plan in ("data=2", "tensor=2"):
    for _rows in (8, 12):
        Compiler(ranks.captures(), Plan.parse(_plan)).compiled(ranks.batch(_rows))
gc.collect()
gc.freeze()  # else a collection in each rank would copy all pages of what was imported
