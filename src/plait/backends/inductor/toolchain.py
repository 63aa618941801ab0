"""Whether this machine has what Inductor compiles with."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys


def missing_compiler(device: str) -> str:
    """What compiling for this type of device lacks, in words; empty if it lacks nothing.

    Inductor makes C++ for CPUs, which it compiles with the program that CXX names, or g++ (clang++ on macOS). For GPUs
    it makes Triton, which comes with PyTorch for CUDA and needs a C compiler for its launcher.
    """
    if device == "cpu":
        program = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        return "" if shutil.which(program.split()[0]) else f"there is no {program} to compile C++ with"
    return "" if importlib.util.find_spec("triton") else "the package triton is not installed"
