"""Compiles the libraries that give PyTorch's CPU build a CUDA device: tests/fake_cuda.cpp and tests/host_gpu.cpp."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path


def torch_folder() -> Path:
    """The folder of the package torch, which is not imported."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def build_library(source: Path, folder: Path) -> Path:
    """Compile a source into a folder, by g++. Raises FileNotFoundError if there is no g++."""
    torch, library = torch_folder(), folder / f"{source.stem}.so"
    include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", *include, str(source)]
    subprocess.run([*command, f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(library)], check=True)
    return library
