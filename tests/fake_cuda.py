"""A CUDA device without memory or kernels, for a process that imports this module before torch.

Under FakeTensorMode a step then runs as on a GPU, but for its values: tensors of two devices do not mix, and whoever
reads a value on the host (`.item()`, a branch) gets an exception, because the host would wait for the device.
`build(folder)` compiles what PyTorch's CPU build lacks for that, by g++, in seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from device_library import build_library, torch_folder

LIBRARY = "PLAIT_TEST_FAKE_CUDA"  # environment variable: the path of the library
_SOURCE = Path(__file__).with_suffix(".cpp")


def build(folder: Path) -> Path:
    """Compile the library into a folder. Raises FileNotFoundError if there is no g++."""
    return build_library(_SOURCE, folder)


class _Anything:
    """A stream or an event of the device: it has done its work."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Anything:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 0.0

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@contextlib.contextmanager
def fake_device() -> Iterator[None]:
    """Context in which tensors are fake, and may be on the device `cuda`. A thread enters it by itself."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _install() -> None:
    assert "torch" not in sys.modules, "autograd looks for accelerators when torch is imported"
    ctypes.CDLL(str(torch_folder() / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(os.environ[LIBRARY]).register_device()

    import torch
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = _Anything
    for name in ("current_stream", "stream", "set_device", "init", "synchronize"):  # torch wants a function each
        setattr(cuda, name, lambda *_: _Anything())
    cuda.memory_allocated = lambda *_: 0
    cuda.amp.common.amp_definitely_not_available = lambda: False
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.get_device_capability = lambda *_: (9, 0)
    for name in ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr"):
        torch.library.impl(f"aten::{name}", "Meta", lambda *_, **__: None)

    torch.__future__.set_swap_module_params_on_conversion(True)  # `.data =` does not move a fake tensor
    # What is allowed once, before the first step: to compare the ranks' weights, and to try the optimizer on the host.
    from plait.engine import initial_values, rank_optimizers, same_batch

    equal, checksum = torch.equal, same_batch.checksum
    any_fake = lambda *given: any(isinstance(each, FakeTensor) for each in given)  # noqa: E731
    initial_values.torch = type("torch", (), {**vars(torch), "equal": lambda a, b: any_fake(a, b) or equal(a, b)})  # type: ignore[attr-defined]

    rank_optimizers.check_exact = lambda *_: None

    # What is computed on the host, of a batch that is there, and compared once ranks have exchanged it.
    def on_host(*given: Any) -> Any:
        with unset_fake_temporarily():
            return checksum(*given)

    same_batch.checksum = on_host
    same_batch.SameBatch._compare = lambda *_: None  # type: ignore[method-assign]
    FakeTensor.tolist = lambda self: [[0]]  # type: ignore[method-assign]
    # What is read late: the losses of earlier steps.
    from plait.comm.device import HostValue

    HostValue.get = lambda self: 1.0  # type: ignore[method-assign]


if os.environ.get(LIBRARY):
    _install()
