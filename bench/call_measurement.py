"""Measures the calls of lowered steps one by one, so that simulations need not estimate them: a cluster's `calls`.

Each call runs by itself on tensors of its shapes, dtypes and strides. Its operands are taken from several sets in turn,
which together are larger than a core's cache, and another call runs in between, as in a step. Each signature is
measured once, whatever number of plans and layers have it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from plait.api.simulate_step import local_shapes, update_call
from plait.backends.eager.passes import eager_graphs
from plait.comm.device import synchronize
from plait.compile.ir.calls import is_item, is_tensor, num_bytes, op_spec_of, tensor_inputs
from plait.compile.ir.dtypes import torch_name
from plait.compile.ir.estimate import carried_out
from plait.compile.rank_program import RankProgram
from plait.compile.step_calls import call_bytes, signature_of
from plait.engine.cpu_settings import prefer_fused
from plait.engine.rank_optimizers import OptimizerFactory, make_optimizer
from plait.optim.combined import optimizers_within
from plait.spec.cluster import CallTime

_CACHE = 16 << 20  # bytes of operand sets of a call, more than a core's own cache
_BETWEEN = 1 << 20  # bytes that another call touches before each run
_MOST_SETS = 24
_RUNS = 9
_SECONDS = 0.03  # of the runs of a call


def distinct_calls(programs: Iterable[RankProgram]) -> dict[str, Node]:
    """A node for each signature of the programs' calls that one rank computes alone, with tensors and numbers only."""
    found: dict[str, Node] = {}
    for program in programs:
        for graph in eager_graphs(program).values():
            _collect(graph, found)
    return found


def _collect(graph: Graph, found: dict[str, Node]) -> None:
    for node in graph.nodes:
        row = op_spec_of(node)
        if node.op != "call_function" or row.communicates is not None or row.transfers or is_item(node):
            continue
        if all(is_tensor(each) for each in node.all_input_nodes):
            found.setdefault(signature_of(node), node)


def measure_calls(nodes: Mapping[str, Node], device: torch.device) -> list[CallTime]:
    """The seconds of each call, on this device; the median of several runs. Calls that cannot run on operands of
    random values are left out."""
    found = []
    for signature, node in nodes.items():
        seconds = _measured(node, device)
        if seconds is not None:
            inputs = [each.meta["val"] for each in tensor_inputs(node)]
            dtype = torch_name(inputs[0].dtype) if inputs else "float32"
            found.append(CallTime(signature, seconds, carried_out(node), float(call_bytes(node)), dtype))
    return found


def measure_updates(
    programs: Iterable[RankProgram], optimizer: OptimizerFactory, device: torch.device
) -> list[CallTime]:
    """The seconds of the optimizer's updates at each place of the programs' pipelines."""
    found: dict[str, CallTime] = {}
    for program in programs:
        for place in range(1 if program.pipeline is None else program.pipeline.schedule.num_ranks):
            call = update_call(program, place, optimizer)
            if call is None or call.signature in found:
                continue
            shapes = local_shapes(program, place)
            own = {n: nn.Parameter(torch.randn(s, device=device).to(d)) for n, (s, d) in shapes.items()}
            made = make_optimizer(optimizer, list(own.items()))
            for member in optimizers_within(made).values() or [made]:
                prefer_fused(member)
            for parameter in own.values():
                parameter.grad = torch.randn_like(parameter)
            seconds = _median(made.step, device)
            found[call.signature] = CallTime(call.signature, seconds, 0.0, call.num_bytes, call.dtype)
    return list(found.values())


def _measured(node: Node, device: torch.device) -> float | None:
    like = [each.meta["val"] for each in tensor_inputs(node)]
    size = max(sum(map(num_bytes, like)), 1)
    target: Any = node.target
    sets = []
    with torch.no_grad():
        for _ in range(max(min(_CACHE // size, _MOST_SETS), 2)):
            args, kwargs = map_arg((node.args, node.kwargs), lambda each: _operand(each.meta["val"], device))
            sets.append((args, kwargs))
        results: list[Any] = [None] * len(sets)
        turn = 0

        def run() -> None:
            nonlocal turn
            args, kwargs = sets[turn]
            results[turn] = target(*args, **kwargs)
            turn = (turn + 1) % len(sets)

        try:
            return _median(run, device, len(sets))
        except (RuntimeError, IndexError, TypeError, NotImplementedError):
            return None  # such as a shape that a value of an operand must fit


def _median(run: Callable[[], object], device: torch.device, first: int = 1) -> float:
    """The median of several runs, after the first ones."""
    for _ in range(first + 1):
        run()
    synchronize(device)
    found: list[float] = []
    between = torch.ones(_BETWEEN // 4, device=device)
    while len(found) < 3 or (len(found) < max(_RUNS, first) and sum(found) < _SECONDS):
        between.neg_()
        begin = time.perf_counter()
        run()
        synchronize(device)
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def _operand(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of this form: normal numbers, small whole ones that are indices everywhere, or true and false."""
    length = 1 + sum((num - 1) * stride for num, stride in zip(value.shape, value.stride(), strict=True) if num)
    base = torch.empty(length, dtype=value.dtype, device=device)
    base = base.normal_() if value.dtype.is_floating_point or value.dtype.is_complex else base.random_(0, 2)
    return base.as_strided(tuple(value.shape), value.stride())


def as_rows(calls: Sequence[CallTime]) -> str:
    """The table [calls] of a cluster file."""
    rows = [
        f'"{each.signature}" = [{each.seconds:.4g}, {each.flops:.6g}, {each.num_bytes:.6g}, "{each.dtype}"]'
        for each in calls
    ]
    return "\n".join(["[calls]", *rows])
