"""Every strategy of the README on a device: the numbers of the same plan on the CPU, and a host that does not wait."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import host_gpu
import pytest
import strategies
import torch
from device_training import ADAMW, counted, places
from torch import Tensor
from torch.nn import functional as F

import plait
from plait.comm.protocol import World
from plait.engine.compiler import Captures, Compiler
from plait.plan.plan import Plan

aten = torch.ops.aten
CASES = [case for case in strategies.CASES if "workers=" not in case]  # which are processes of Ray
HOST_STEPS = ("home.optimizer", "central")  # keys with which the optimizer is on the host, and waits for gradients
COARSE = ("int8", "powersgd", "bf16", "fp16")  # which round what is computed in another order to other numbers
OF_EXPERTS = "compile/ops/experts.py"  # hears how many rows arrive, and outside bfloat16 where each expert's rows end


@pytest.fixture(autouse=True, scope="module")
def _fused() -> Iterator[None]:
    """A GPU in the host's memory has no kernels of attention that GPUs have, but here that of a CPU in their place."""
    if not host_gpu.is_here():
        yield
        return
    plain, kernels = F.scaled_dot_product_attention, torch.library.Library("aten", "IMPL")
    kernels.impl("_scaled_dot_product_flash_attention", _flash, "CPU")
    kernels.impl("_scaled_dot_product_flash_attention_backward", _flash_backward, "CPU")
    kernels.impl("_scaled_dot_product_efficient_attention", _efficient, "CPU")
    kernels.impl("_scaled_dot_product_efficient_attention_backward", _efficient_backward, "CPU")

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        if not q.is_cuda or q.dtype != torch.bfloat16:
            return plain(q, k, v, is_causal=is_causal)
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attend)
        yield
    kernels._destroy()


def _flash(q: Tensor, k: Tensor, v: Tensor, rate: float = 0.0, causal: bool = False, debug: bool = False,
           scale: float | None = None) -> tuple[Any, ...]:  # fmt: skip
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, rate, causal, scale=scale)
    none = torch.zeros((), dtype=torch.int64)
    return out, sums, none, none.clone(), q.shape[2], k.shape[2], none.clone(), none.clone(), q.new_empty(0)


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, ends_q: Tensor,
                    ends_k: Tensor, num_q: int, num_k: int, rate: float, causal: bool, seed: Tensor, offset: Tensor,
                    scale: float | None = None) -> tuple[Tensor, ...]:  # fmt: skip
    assert (num_q, num_k) == (q.shape[2], k.shape[2])
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, sums, rate, causal, scale=scale
    )


def _efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, _: bool, rate: float, causal: bool,
               scale: float | None = None) -> tuple[Tensor, ...]:  # fmt: skip
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, rate, causal, attn_mask=bias, scale=scale)
    none = torch.zeros((), dtype=torch.int64)
    return out, F.pad(sums, (0, -sums.shape[2] % 32), value=torch.nan), none, none


def _efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor,
                        seed: Tensor, offset: Tensor, rate: float, mask: list[bool], causal: bool,
                        scale: float | None = None) -> tuple[Tensor, ...]:  # fmt: skip
    assert sums.shape[2] == q.shape[2] + -q.shape[2] % 32, "as the kernel has them"
    given = grad, q, k, v, out, sums[:, :, : q.shape[2]].contiguous(), rate, causal
    return *aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *given, attn_mask=bias, scale=scale
    ), grad.new_empty(0)


@functools.cache
def captures(name: str, device: str, dtype: torch.dtype) -> tuple[Captures, Any]:
    model, loss_fn, batch = strategies.made(name, dtype)
    return Captures(model, loss_fn, torch.device(device)), batch


def trained(case: str, device: str) -> tuple[list[float], list[str], set[str]]:
    """The losses of three steps, the waits of all but the first, and where the state is, on the first rank."""
    name, plan, layouts, dtype = strategies.parts(case)
    of_steps, batch = captures(name, device, dtype)
    compiler = Compiler(of_steps, Plan.parse(plan).inner_plan, layouts)

    def rank(world: World) -> tuple[list[float], list[str], set[str]]:
        options: dict[str, Any] = {
            "world": world,
            "compiler": compiler,
            "clip_norm": None if "pipedream" in plan else 1.0,
        }
        trainer = plait.Trainer(compiler.model, compiler.loss_fn, ADAMW, plan, layouts=layouts, **options)
        losses, waits = [], list[str]()
        for index in range(3):
            with counted([] if index == 0 else waits):
                losses.append(trainer.step(batch))
        found = [float(loss) for loss in losses], waits, places(trainer)
        trainer.close()
        return found

    return plait.run_ranks(Plan.parse(plan).mesh, rank, device=device)[0]


@pytest.mark.parametrize("case", CASES)
def test_a_strategy_has_the_numbers_of_a_cpu_and_the_host_does_not_wait(case: str) -> None:
    losses, waits, where = trained(case, "cuda")
    coarse = any(word in case for word in COARSE)
    assert losses == pytest.approx(trained(case, "cpu")[0], rel=2e-2 if coarse else 1e-6)
    if not any(key in case for key in HOST_STEPS):
        assert ([wait for wait in waits if OF_EXPERTS not in wait], where) == ([], {"cuda"})
        assert case.startswith("experts") or waits == []
