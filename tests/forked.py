"""Imported once by the process that ranks of tests are forked from: ranks find it imported, and torch knows the shapes
of what most of them capture."""

from __future__ import annotations

import gc

import process_ranks as ranks
import torch
import torch.distributed.tensor

from plait.engine.compiler import Captures, Compiler
from plait.plan.plan import Plan

torch.set_num_threads(1)
for _plan in ("data=2", "tensor=2"):
    for _rows in (8, 12):
        Compiler(Captures(ranks.gpt(), ranks.loss_fn), Plan.parse(_plan)).compiled(ranks.batch(_rows))
gc.collect()
gc.freeze()  # else a collection in each rank would copy all pages of what was imported
