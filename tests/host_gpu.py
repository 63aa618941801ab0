"""A CUDA device without a GPU, for a process that imports this module before torch.

Its tensors have values, in memory of the host; its kernels are those of the CPU. It is stricter than a GPU where a GPU
would go wrong without a word: new memory is NaN, a copy to the host is there only once the host has waited for it, and
`races` tells of memory that two streams use at once, or that the host changes while it is being copied. `waits` has
every wait of the host. There are eight such devices, of which no two mix; they have no NCCL.
`build(folder)` compiles the device by g++, in seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from device_library import build_library, torch_folder

LIBRARY = "PLAIT_TEST_HOST_GPU"  # environment variable: the path of the library
NUM_DEVICES = 8
MEMORY = 1 << 30  # bytes of each, as it says of itself
_SOURCE = Path(__file__).with_suffix(".cpp")


def build(folder: Path) -> Path:
    """Compile the library into a folder. Raises FileNotFoundError if there is no g++."""
    return build_library(_SOURCE, folder)


class Wait(NamedTuple):
    """A wait of the host for the device.

    behind   operations that the stream has got since the point that is waited for: 0 where the host lets it run dry
    place    file and line of plait's that waits
    """

    what: str
    behind: int
    thread: int
    place: str


waits: list[Wait] = []
races: list[str] = []  # what went wrong, and the line


@contextlib.contextmanager
def waits_here() -> Iterator[list[Wait]]:
    """Give the waits of this thread within the context, as soon as it ends."""
    start, found = len(waits), list[Wait]()
    yield found
    me = threading.get_ident()
    found += [each for each in waits[start:] if each.thread == me]


def is_here() -> bool:
    """Whether the GPUs of this process are these."""
    return _library is not None


def set_limit(num_bytes: int, device: int = 0) -> None:
    """Set how many bytes the device has; 0: no end."""
    _library.set_limit(device, ctypes.c_size_t(num_bytes))


def _place() -> str:
    frame: Any = sys._getframe(2)
    found = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "/plait/" in name or "/tests/" in name:
            found += f"{name.rpartition('/plait/')[2]}:{frame.f_lineno} "
            if found.count(" ") == 4:
                break
        frame = frame.f_back
    return found.strip()


def _waited(what: bytes, behind: int) -> None:
    waits.append(Wait(what.decode(), behind, threading.get_ident(), _place()))


def _raced(what: bytes) -> None:
    races.append(f"{what.decode()}: {_place()}")


def _install() -> None:
    global _library, _callbacks
    assert "torch" not in sys.modules, "autograd looks for accelerators when torch is imported"
    ctypes.CDLL(str(torch_folder() / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    _library = ctypes.CDLL(os.environ[LIBRARY])
    _library.bytes_now.restype = _library.bytes_most.restype = ctypes.c_size_t
    _library.register_device()
    _callbacks = (
        ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int)(_waited),
        ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_raced),
    )
    _library.set_callbacks(*_callbacks)

    import torch

    def index(device: Any = None) -> int:
        found = device if isinstance(device, int) or device is None else torch.device(device).index
        return int(_library.get_device()) if found is None else int(found)

    def exchange(number: int) -> int:
        before = int(_library.get_device())
        if number >= 0:
            _library.set_device(number)
        return before

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
            return super().__new__(cls, device=torch.device("cuda", index(device)), priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
            return super().__new__(cls, "cuda", enable_timing=enable_timing)

    generator = torch.ops.host_gpu.generator
    facts = types.SimpleNamespace(
        name="a GPU that is not there", major=9, minor=0, total_memory=MEMORY, multi_processor_count=1
    )
    replaced = {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: NUM_DEVICES,
        "current_device": index,
        "set_device": lambda device: exchange(index(device)) and None,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "get_device_properties": lambda device=None: facts,
        "get_device_capability": lambda device=None: (facts.major, facts.minor),
        "get_device_name": lambda device=None: facts.name,
        "synchronize": lambda device=None: torch.accelerator.synchronize(index(device)),
        "memory_allocated": lambda device=None: _library.bytes_now(index(device)),
        "max_memory_allocated": lambda device=None: _library.bytes_most(index(device)),
        "reset_peak_memory_stats": lambda device=None: _library.reset_most(index(device)),
        "mem_get_info": lambda device=None: (MEMORY - _library.bytes_now(index(device)), MEMORY),
        "empty_cache": lambda: None,
        "get_rng_state": lambda device="cuda": generator(index(device)).get_state(),
        "set_rng_state": lambda state, device="cuda": generator(index(device)).set_state(state),
        "manual_seed_all": lambda seed: [generator(each).manual_seed(seed) for each in range(NUM_DEVICES)],
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: torch.accelerator.current_stream(index(device)),
        "default_stream": lambda device=None: torch.Stream(0, index(device), 1),
        "stream": lambda stream: stream,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)


_library: Any = None
_callbacks: Any = None
if os.environ.get(LIBRARY):
    _install()
