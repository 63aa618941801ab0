"""An estimate of the time of a call, from its arithmetic and the memory that it reads and writes; for ratios only."""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from plait.compile.ir.calls import num_bytes, output_values, tensor_inputs
from plait.compile.ir.views import is_view

# Of one core with AVX-512. A GPU's are about a thousand times as high, and their ratio three times.
FLOPS_PER_SECOND = 1e11
BYTES_PER_SECOND = 1e10


def flops_of(node: Node) -> int:
    """Floating-point operations of a matrix product, convolution or attention; 0 for other ops."""
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def seconds_of(node: Node) -> float:
    """Seconds of one call on local shapes."""
    if is_view(node) or node.op != "call_function":
        return 0.0
    moved = sum(num_bytes(i.meta["val"]) for i in tensor_inputs(node))
    moved += sum(num_bytes(v) for v in output_values(node) if isinstance(v, torch.Tensor))
    return flops_of(node) / FLOPS_PER_SECOND + moved / BYTES_PER_SECOND
