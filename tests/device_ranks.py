"""Cases on a fake CUDA device, each in turn: `python device_ranks.py` prints one JSON line for each of CASES."""

from __future__ import annotations

import json
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import device_kernels
import fake_cuda  # first: before torch
import torch


def waits() -> dict[str, Any]:
    """What a step gets that reads a value of the device."""
    with fake_cuda.fake_device():
        return {"value": torch.ones((), device="cuda").item()}


def mixes() -> dict[str, Any]:
    """What a step gets that mixes tensors of two devices."""
    with fake_cuda.fake_device():
        return {"value": str(torch.ones(2, device="cuda") + torch.ones(2))}


CASES: dict[str, Callable[[], dict[str, Any]]] = {}
CASES["a wait for the device"] = waits
CASES["two devices"] = mixes
CASES |= device_kernels.CASES


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, case in CASES.items():
        try:
            line = case()
        except BaseException as error:
            cause = error.__cause__ or error
            line = {"error": f"{type(error).__name__}: {error}", "trace": "".join(traceback.format_exception(cause))}
        print(json.dumps({"case": name, **line}), flush=True)
