"""Compiles the functions of regions by TorchInductor (Ansel et al. 2024, "PyTorch 2"), each different one once.

Between runs the results are kept in Inductor's own cache on disk (TORCHINDUCTOR_CACHE_DIR). Ranks that are processes of
one host divide the work: each compiles what no other is compiling, and then loads the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from plait.backends.inductor.region_graph import RegionFunction, RunRegion, base_of
from plait.backends.inductor.toolchain import broken_compiler, missing_compiler
from plait.compile.ir.calls import device_type, output_node, placeholders
from plait.compile.ir.node_info import info_of
from plait.compile.sharding.decompose import tracing
from plait.errors import PlanError, Refusal
from plait.plan.legality import no_compiler
from plait.plan.plan import Plan

_LOG = logging.getLogger("plait.inductor")  # tells of each region, at level INFO
_compiled: dict[str, RunRegion] = {}  # by key; code once loaded stays in the process
_lock = threading.RLock()


@dataclass(frozen=True)
class CompileReport:
    """What compiling the regions of a program took.

    num_regions   number of regions
    num_distinct  number of different ones
    num_compiled  number of those that this process had not compiled or loaded before
    seconds       time that it took
    """

    num_regions: int
    num_distinct: int
    num_compiled: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"compile=inductor: {self.num_regions} regions, {self.num_distinct} different; {self.num_compiled} compiled"
            f" or loaded in {self.seconds:.1f} s"
        )


def compile_regions(functions: Sequence[RegionFunction], plan: Plan) -> CompileReport:
    """Compile functions of regions, in place, and log the progress. Equal ones are compiled once.

    Raises PlanError if there is no compiler, or for an op that Inductor cannot compile.
    """
    begun = time.monotonic()
    settings = {"triton.cudagraphs": plan.cudagraphs == "yes"}
    with _lock:
        by_key = {_key_of(each, settings): each for each in functions}
        missing = [key for key in by_key if key not in _compiled]
        if missing:
            device = device_type(by_key[missing[0]].graph)
            if lacks := missing_compiler(device):
                refusal = no_compiler(plan, lacks)
                raise PlanError(refusal)
            _compile_missing({key: by_key[key] for key in missing}, settings, plan)
        for each in functions:
            each.compiled = _compiled[_key_of(each, settings)]
    return CompileReport(len(functions), len(by_key), len(missing), time.monotonic() - begun)


def _compile_missing(functions: Mapping[str, RegionFunction], settings: Mapping[str, object], plan: Plan) -> None:
    waiting = dict(functions)
    for must_wait in (False, True):
        for key, function in list(waiting.items()):
            with _alone(key, must_wait) as mine:
                if not mine:
                    continue
                begun = time.monotonic()
                _compiled[key] = _compile(function, settings, plan)
                del waiting[key]
                done = len(functions) - len(waiting)
                took = time.monotonic() - begun
                _LOG.info("compile=%s: region %d of %d in %.1f s", plan.compile, done, len(functions), took)


def _key_of(function: RegionFunction, settings: Mapping[str, object]) -> str:
    """The key of a region: its text, and all else that its code depends on."""
    own = (function.text, function.fixed, function.site)
    parts = (own, sorted(settings.items()), torch.__version__, torch.get_num_threads())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _compile(function: RegionFunction, settings: Mapping[str, object], plan: Plan) -> RunRegion:
    import torch._inductor.config as config  # takes seconds, and only plans with compile= need it
    from torch._guards import TracingContext
    from torch._guards import tracing as in_context
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    likes = [node.meta["val"] for node in placeholders(function.graph)]
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with tracing, torch.no_grad():
        with mode:
            inputs = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in likes]
            traced = make_fx(GraphModule({}, function.graph), decomposition_table=select_decomp_table())(*inputs)
        end = output_node(traced.graph)
        end.meta.update(user_visible_output_idxs=[*range(len(output_node(function.graph).args[0]))])  # type: ignore[arg-type]
        try:
            with config.patch(dict(settings)), in_context(TracingContext(mode)):
                # With CUDA graphs, what is recorded reads fixed inputs where they are, and has copies of others.
                compiled = compile_fx_inner(traced, inputs, is_inference=True, static_input_idxs=function.fixed)
        except Exception as error:  # of many kinds, by the stage of the compiler that raised
            lacks = broken_compiler(device_type(function.graph))
            refusal = no_compiler(plan, lacks) if lacks else _cannot_compile(function, plan, error)
            raise PlanError(refusal) from error
    return _checked(compiled, [tuple(value.stride()) for value in likes], output_node(function.graph).args[0])


def _cannot_compile(function: RegionFunction, plan: Plan, error: Exception) -> Refusal:
    """The refusal of a plan for which Inductor raised an error: names the op, if the error does, and its module."""
    text = str(error)
    named = re.search(r"target: (\S+)", text)
    calls = [node for node in function.graph.nodes if node.op == "call_function"]
    packet = named[1].rpartition(".")[0] if named else ""
    node = next((each for each in calls if packet and str(each.target).startswith(packet)), calls[0])
    module = info_of(node).module
    what = f"{named[1]} in {module or 'the loss'}" if named else f"the calls of {module or 'the loss'}"
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return Refusal(
        f"compile={plan.compile} cannot compile {what}",
        f"{type(error).__name__}: {line}",
        f"leave it out with compile.{module}=none" if module else "leave compile= out",
    )


def _checked(compiled: Callable[..., Any], strides: Sequence[tuple[int, ...]], results: Any) -> RunRegion:
    """The compiled function, given tensors of the strides that it was compiled for, with results that may each be
    written to: Inductor computes equal ones once, and returns the same memory for them."""
    shared: list[int] | None = None  # the results to copy, known from the first call on

    def run(given: list[Tensor]) -> Sequence[Tensor]:
        nonlocal shared
        for index, stride in enumerate(strides):
            if given[index].stride() != stride:
                given[index] = _restrided(given[index], stride)
        found: list[Tensor] = list(compiled(given))
        if shared is None:
            shared = _in_shared_memory(found, results)
        for index in shared:
            found[index] = found[index].clone()
        return found

    return run


def _in_shared_memory(found: Sequence[object], results: Sequence[object]) -> list[int]:
    """The results that have the memory of earlier ones, of which they are no views in the region's graph."""
    bases, shared = dict[int, Node](), list[int]()
    for index, (tensor, node) in enumerate(zip(found, results, strict=True)):
        if isinstance(tensor, Tensor) and tensor.numel() and isinstance(node, Node):
            base = base_of(node)
            if bases.setdefault(tensor.untyped_storage().data_ptr(), base) is not base:
                shared.append(index)
    return shared


def _restrided(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The tensor with other strides: a copy, unless they differ only in dims of one element."""
    if all(n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.stride(), stride, strict=True)):
        return tensor.as_strided(tensor.shape, stride)
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@contextlib.contextmanager
def _alone(key: str, must_wait: bool) -> Iterator[bool]:
    """Whether this process may compile a region now: of the processes of a host one at a time. The others then find it
    in the cache on disk."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir()) / "plait"
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / key, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if must_wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)
