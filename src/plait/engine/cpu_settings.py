"""Settings of a process that computes on CPUs. They speed up a step by several percent and do not change results."""

from __future__ import annotations

import ctypes
import platform
import warnings

import torch

from plait.comm.device import is_host

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_FROM_BYTES = 64 << 20
_GIVE_BACK_FROM_BYTES = 1 << 20
_NEVER_TRIM = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Make glibc keep the memory that a step frees for the next step, which saves thousands of page faults per step.

    Does nothing except on Linux with glibc.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)


def give_freed_memory_back() -> None:
    """Make glibc return large freed tensors to the system, for a process that is short of memory.

    Otherwise the gaps that they leave are often too small for later tensors, and the heap grows to several times the
    memory in use. It costs page faults. Does nothing except on Linux with glibc.
    """
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _GIVE_BACK_FROM_BYTES)


def warn_of_slow_precision(precision: str, device: torch.device) -> None:
    """Warn if the CPU has no instructions for the half precision, which is then slower than float32."""
    if not is_host(device) or precision == "fp32":
        return
    name = precision[:4]  # of the dtype, whether autocast computes in it or the model as a whole
    asks = {"bf16": "_is_avx512_bf16_supported", "fp16": "_is_amx_fp16_supported"}
    supported = getattr(torch.cpu, asks[name], lambda: True)
    if platform.machine() in ("x86_64", "AMD64") and not supported():
        warnings.warn(
            f"this processor has no {name} units: precision={precision} saves bytes but is slower than fp32 here",
            stacklevel=4,
        )


def prefer_fused(optimizer: torch.optim.Optimizer) -> None:
    """Use the fused implementation if the optimizer has one and the user has chosen none.

    It computes the same update in one pass over memory; results differ by rounding only.
    """
    for group in optimizer.param_groups:
        unsaid = group.get("fused", True) is None and group.get("foreach", True) is None
        plain = not group.get("differentiable") and not group.get("capturable")
        # In half precision the fused SGD of torch 2.13 leaves all but the smallest tensors on CPU as they are.
        floats = all(
            p.dtype in (torch.float32, torch.float64) and p.device.type in ("cpu", "cuda")
            for p in group["params"]
            if not p.is_meta  # a parameter of another rank
        )
        if unsaid and plain and floats and not torch.is_tensor(group.get("lr")):
            group["fused"] = True
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # as the constructor does


def not_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Turn off `capturable` where parameters are on the host. It keeps counters on an accelerator, where a CUDA graph
    finds them; PyTorch's optimizers refuse it elsewhere, as where a plan for GPUs is verified."""
    for group in optimizer.param_groups:
        if group.get("capturable") and not group.get("fused") and any(is_host(p.device) for p in group["params"]):
            group["capturable"] = False
