"""An estimate of how long a call takes, from its arithmetic and the memory it touches; only ratios are meant."""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from plait.compile.ir.calls import num_bytes, output_values, tensor_inputs
from plait.compile.ir.views import is_view

# Of one core with AVX-512; a GPU's are some thousand times as high, their ratio three times.
FLOPS_PER_SECOND = 1e11
BYTES_PER_SECOND = 1e10


def flops_of(node: Node) -> int:
    """Floating-point operations of products, convolutions and attention; 0 for all else."""
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def seconds_of(node: Node) -> float:
    """The time of one call on local shapes."""
    if is_view(node) or node.op != "call_function":
        return 0.0
    moved = sum(num_bytes(i.meta["val"]) for i in tensor_inputs(node))
    moved += sum(num_bytes(v) for v in output_values(node) if isinstance(v, torch.Tensor))
    return flops_of(node) / FLOPS_PER_SECOND + moved / BYTES_PER_SECOND
