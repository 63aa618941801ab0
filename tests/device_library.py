"""Compiles the libraries that give PyTorch's CPU build a CUDA device: tests/fake_cuda.cpp and tests/host_gpu.cpp."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

CACHE = Path(__file__).parent.parent / "build" / "tests"


def why_not() -> str:
    """Why the libraries cannot be used here; empty if they can."""
    if shutil.which("g++") is None:
        return "there is no g++ to build a stand-in for a GPU with"
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "a stand-in for a GPU is for a torch without CUDA, and this one has it"
    return ""


def torch_folder() -> Path:
    """The folder of the package torch, which is not imported."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def build_library(source: Path, folder: Path) -> Path:
    """Compile a source, by g++, unless it has been for this torch before; `folder` has what is not whole yet.

    Raises FileNotFoundError if there is no g++.
    """
    digest = hashlib.sha256(source.read_bytes() + importlib.metadata.version("torch").encode()).hexdigest()
    kept = CACHE / f"{source.stem}-{digest[:16]}.so"
    if kept.exists():
        return kept
    torch, library = torch_folder(), folder / f"{source.stem}.so"
    include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", *include, str(source)]
    subprocess.run([*command, f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(library)], check=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    whole = kept.with_suffix(f".{os.getpid()}")
    whole.write_bytes(library.read_bytes())
    return whole.replace(kept)
