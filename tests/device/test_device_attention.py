"""The kernels of attention that only a GPU has, in parts of samples and heads; what graphs have, tests/test_devices.py
shows without one."""

from __future__ import annotations

import device_kernels
import host_gpu
import pytest
import torch

import plait


@pytest.mark.skipif(host_gpu.is_here(), reason="a GPU in the host's memory has the kernels of a CPU")
@pytest.mark.parametrize(("precision", "kernel", "mask", "dropout"), device_kernels.UNDER_A_PLAN)
def test_parts_of_attention_have_the_numbers_of_the_whole(
    precision: str, kernel: str, mask: str, dropout: float
) -> None:
    torch.manual_seed(0)
    model = device_kernels.Decoder(kernel, mask, dropout).cuda()
    batch = {name: torch.randint(0, 32, (8, device_kernels.TOKENS), device="cuda") for name in "xy"}
    plan = f"data=2 tensor=2 pipeline=2 micro=2 precision={precision}"
    report = plait.verify(model, device_kernels.text_loss, batch, plan)
    assert report.ok, report
