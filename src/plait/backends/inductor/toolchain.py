"""Whether this machine has what Inductor compiles with."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys

_PROGRAM = "#include <cmath>\n#include <vector>\nint main() { return 0; }\n"


def missing_compiler(device: str) -> str:
    """What compiling for this type of device lacks, in words; empty if it lacks nothing.

    Inductor makes C++ for CPUs, which it compiles with the program that CXX names, or g++ (clang++ on macOS). For GPUs
    it makes Triton, which comes with PyTorch for CUDA and needs a C compiler for its launcher: what CC names, or gcc or
    clang.
    """
    if device == "cpu":
        program = _cpp_compiler()
        return "" if shutil.which(program) else f"there is no {program} to compile C++ with"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    named = os.environ.get("CC")
    if any(map(shutil.which, [named] if named else ["gcc", "clang"])):
        return ""
    return f"there is no {named or 'gcc'} to compile C with, as Triton does"


def broken_compiler(device: str) -> str:
    """Why the C++ compiler of this machine compiles nothing, in words; empty if it does, and for other devices."""
    return _complaint(_cpp_compiler()) if device == "cpu" else ""


def _cpp_compiler() -> str:
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


@functools.cache
def _complaint(program: str) -> str:
    """Why a C++ compiler does not compile a small program; empty if it does."""
    try:
        command = [program, "-x", "c++", "-fsyntax-only", "-"]
        run = subprocess.run(
            command, input=_PROGRAM, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
    except OSError as error:
        return f"{program} does not start: {error}"
    said = next((line.strip() for line in run.stderr.splitlines() if line.strip()), f"status {run.returncode}")
    return f"{program} does not compile a program of three lines: {said}" if run.returncode else ""
