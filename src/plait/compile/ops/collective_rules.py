"""Rules of the collectives of mesh axes that were partitioned before: tensors of the same rank, other dims are free."""

from __future__ import annotations

from collections.abc import Sequence

from plait.compile.ops import comm_ops
from plait.compile.ops.base import Call, Factor, OpSpec, register

# Where each op has the dims that it cuts or joins: those stay whole along a later axis.
_DIMS = {
    comm_ops.all_reduce: (),
    comm_ops.broadcast: (),
    comm_ops.all_gather: (3,),
    comm_ops.reduce_scatter: (3,),
    comm_ops.shard: (3,),
    comm_ops.all_to_all: (3, 5),
}


def _factors(call: Call) -> Sequence[Factor]:
    busy = {call.args[position] for position in _DIMS[call.op]}
    return [Factor((d,), (d,)) for d in range(call.inputs[0].ndim) if d not in busy]


def _linear(call: Call) -> Sequence[tuple[int, ...]]:
    if call.op is comm_ops.all_reduce and len(call.args) > 3 and call.args[3] != "sum":
        return ()
    return ((0,),)


for _op in _DIMS:
    register(_op, spec=OpSpec(factors=_factors, linear=_linear))
