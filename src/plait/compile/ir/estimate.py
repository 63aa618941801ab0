"""An estimate of the time of a call on a device, from its arithmetic and the memory that it reads and writes."""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from plait.compile.ir.calls import (
    call_of,
    is_view,
    num_bytes,
    op_spec_of,
    output_values,
    tensor_inputs,
    writes_in_place,
)
from plait.compile.ir.dtypes import torch_name
from plait.cost.op_time import op_time
from plait.spec.cluster import DeviceSpec


def flops_of(node: Node) -> int:
    """Floating-point operations of a matrix product, convolution or attention; 0 for other ops."""
    if (own := op_spec_of(node).flops) is not None:
        return int(own(call_of(node)))
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is None and writes_in_place(node):  # takes as many as the op that makes a new tensor
        name = str(packet).rpartition(".")[2]
        formula = flop_registry.get(getattr(torch.ops.aten, name.removesuffix("_"), None))
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def carried_out(node: Node) -> float:
    """Those of `flops_of` that a kernel carries out."""
    skips = op_spec_of(node).skips
    return flops_of(node) * (1.0 if skips is None else 1 - skips(call_of(node)))


def is_attention(node: Node) -> bool:
    """Whether the call is an attention that stores no scores."""
    return op_spec_of(node).role == "attention"


def seconds_of(node: Node, device: DeviceSpec) -> float:
    """Seconds of one call on local shapes."""
    if is_view(node) or node.op != "call_function":
        return 0.0
    read = [i.meta["val"] for i in tensor_inputs(node)]
    moved = sum(map(num_bytes, read))
    moved += sum(num_bytes(v) for v in output_values(node) if isinstance(v, torch.Tensor))
    # A product that is summed and returned in float32 is of its inputs.
    dtype = torch_name(read[0].dtype) if read else "float32"
    return op_time(device, carried_out(node), moved, dtype, is_attention(node))
