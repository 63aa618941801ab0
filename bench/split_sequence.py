"""What a careful person writes by hand to cut the sequence of a GPT, over Gloo.

megatron   Megatron's sequence parallelism (Korthikanti et al. 2022): residual stream, norms and all outside of
           blocks on a part of the positions; all-gather and reduce-scatter around split weights
ulysses    all-to-all around the fused attention, of a quarter of the heads (Jacobs et al. 2023)
ring       torch's own ring attention, the one that torch.distributed.tensor.experimental.context_parallel runs.
           That context knows the kernels of GPUs only, so its templates get the CPU's kernel here
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from bench.workloads import Workload
from plait.api.job.gpt import Block, BytesGPT

aten = torch.ops.aten
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[[], Tensor]


class CutGPT(nn.Module):
    """A GPT on a part of the positions: the mean loss of these. Blocks take and give [rows, positions, width]."""

    def __init__(self, whole: BytesGPT, blocks: nn.ModuleList, places: Tensor) -> None:
        super().__init__()
        self.symbols, self.table, self.norm, self.head = whole.symbols, whole.places, whole.norm, whole.head
        self.blocks = blocks
        self.places = places

    def forward(self, symbols: Tensor, targets: Tensor) -> Tensor:
        x = self.symbols(symbols) + self.table(self.places)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# Megatron: [rows, positions, width] travels with the positions first, so that parts are contiguous.


def _all_gather(x: Tensor) -> Tensor:
    part = x.transpose(0, 1).contiguous()
    whole = part.new_empty((part.shape[0] * dist.get_world_size(), *part.shape[1:]))
    dist.all_gather_into_tensor(whole, part)
    return whole.transpose(0, 1)


def _reduce_scatter(x: Tensor) -> Tensor:
    whole = x.transpose(0, 1).contiguous()
    part = whole.new_empty((whole.shape[0] // dist.get_world_size(), *whole.shape[1:]))
    dist.reduce_scatter_tensor(part, whole)
    return part.transpose(0, 1)


class _Enter(torch.autograd.Function):
    """Into the split weights: all-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _all_gather(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _reduce_scatter(gradient)


class _Leave(torch.autograd.Function):
    """Out of the split weights: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _all_gather(gradient)


class SplitBlock(nn.Module):
    """One rank's part of a Block between parts of the sequence: its heads, and its columns of the MLP."""

    def __init__(self, whole: Block, rank: int, size: int) -> None:
        super().__init__()
        self.heads = whole.heads // size
        self.attention_norm, self.mlp_norm = whole.attention_norm, whole.mlp_norm
        for name in ("query", "key", "value", "up"):
            setattr(self, name, _part(getattr(whole, name), 0, rank, size))
        for name in ("out", "down"):
            setattr(self, name, _part(getattr(whole, name), 1, rank, size))

    def forward(self, x: Tensor) -> Tensor:
        seen = _Enter.apply(self.attention_norm(x))
        q, k, v = (
            part(seen).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + _Leave.apply(F.linear(mixed, self.out.weight)) + self.out.bias
        inside = F.gelu(self.up(_Enter.apply(self.mlp_norm(x))))
        return x + _Leave.apply(F.linear(inside, self.down.weight)) + self.down.bias  # type: ignore[no-any-return]


def _part(whole: nn.Linear, dim: int, rank: int, size: int) -> nn.Linear:
    bias = whole.bias.chunk(size)[rank] if dim == 0 else whole.bias
    weight = whole.weight.chunk(size, dim)[rank]
    part = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    part.weight, part.bias = (nn.Parameter(each.detach().clone()) for each in (weight, bias))
    return part


def megatron_step(job: Workload, rank: int, size: int, optimizer: Any) -> Step:
    """A step over `size` ranks. Gradients of weights that all ranks have are summed in one flat all-reduce."""
    whole = job.model()
    places = torch.arange(job.sequence).chunk(size)[rank]
    model = CutGPT(whole, nn.ModuleList(SplitBlock(block, rank, size) for block in whole.blocks), places)
    split = {id(getattr(block, name).weight) for block in model.blocks for name in _SPLIT}
    split |= {id(getattr(block, name).bias) for block in model.blocks for name in ("query", "key", "value", "up")}
    shared = [parameter for parameter in model.parameters() if id(parameter) not in split]
    batch = {name: tensor[:, places].contiguous() for name, tensor in job.batch().items()}
    updates = optimizer(model.parameters())

    def step() -> Tensor:
        loss = model(batch["x"], batch["y"]) / size
        loss.backward()
        flat = torch.cat([parameter.grad.view(-1) for parameter in shared])  # type: ignore[union-attr]
        dist.all_reduce(flat)
        for parameter, part in zip(shared, flat.split([p.numel() for p in shared]), strict=True):
            parameter.grad = part.view_as(parameter)
        updates.step()
        updates.zero_grad()
        return loss.detach()

    return step


_SPLIT = ("query", "key", "value", "up", "out", "down")

# Context: the attention of a rank's positions to all.


class _Exchange(torch.autograd.Function):
    """[rows, heads, positions, width]: all heads of a part of the positions -> a part of the heads of all, or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, join: int) -> Tensor:
        ctx.dims = cut, join
        size = dist.get_world_size()
        sent = torch.stack(x.chunk(size, cut))
        found = torch.empty_like(sent)
        dist.all_to_all_single(found, sent)
        return torch.cat(list(found), join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cut, join = ctx.dims
        return _Exchange.apply(gradient, join, cut), None, None


def ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (_Exchange.apply(each, 1, 2) for each in (q, k, v))
    return _Exchange.apply(F.scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1)  # type: ignore[no-any-return]


class _Ring(torch.autograd.Function):
    """torch's templates of ring attention, with the CPU's kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def op(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Any:
            return aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, is_causal)

        out, sums = torch_ring._templated_ring_attention(dist.group.WORLD, 2, op, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        def op(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
               is_causal: bool) -> Any:  # fmt: skip
            flash = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            return flash(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

        q, k, v, out, sums = ctx.saved_tensors
        return torch_ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, op, gradient.contiguous(), "grad_out", q, k, v, out, sums, True
        )[:3]


KINDS: dict[str, Attend] = {"ulysses": ulysses, "ring": _Ring.apply}


class ContextBlock(nn.Module):
    """A Block whose attention sees the positions of other ranks."""

    def __init__(self, whole: Block, attend: Attend) -> None:
        super().__init__()
        self.whole, self.attend = whole, attend

    def forward(self, x: Tensor) -> Tensor:
        own = self.whole
        seen = own.attention_norm(x)
        q, k, v = (
            part(seen).unflatten(-1, (own.heads, -1)).transpose(1, 2) for part in (own.query, own.key, own.value)
        )
        x = x + own.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + own.down(F.gelu(own.up(own.mlp_norm(x))))  # type: ignore[no-any-return]


def context_step(job: Workload, kind: str, rank: int, size: int, optimizer: Any) -> Step:
    """A step over `size` ranks; torch's DDP sums the gradients. A ring has parts r and 2N-1-r of 2N on rank r, as
    torch balances causal attention."""
    whole = job.model()
    places = torch.arange(job.sequence)
    parts = places.chunk(2 * size)
    own = torch.cat([parts[rank], parts[2 * size - 1 - rank]]) if kind == "ring" else places.chunk(size)[rank]
    blocks = nn.ModuleList(ContextBlock(block, KINDS[kind]) for block in whole.blocks)
    model = DistributedDataParallel(CutGPT(whole, blocks, own))
    batch = {name: tensor[:, own].contiguous() for name, tensor in job.batch().items()}
    updates = optimizer(model.parameters())

    def step() -> Tensor:
        loss: Tensor = model(batch["x"], batch["y"])
        loss.backward()
        updates.step()
        updates.zero_grad()
        return loss.detach() / size

    return step
