"""The op table: one file per family of ops, one row per op, and `op_spec` to find a row."""

from __future__ import annotations

from typing import Any

from plait.compile.ops import (  # noqa: F401  (each registers its rows)
    attention,
    batch_norm,
    comm_ops,
    conv,
    create,
    dropped_attention,
    experts,
    index,
    index_list,
    loss,
    matmul,
    norm,
    packed_attention,
    padded_conv,
    pointwise,
    random,
    reduce,
    split_cat,
    view,
)
from plait.compile.ops.base import (
    NO_OP_SPEC,
    OP_SPECS,
    Builder,
    Call,
    CollectiveKind,
    Communication,
    Emit,
    Factor,
    MemoryUse,
    OpSpec,
    Partial,
    Placement,
    Replicate,
    RowAccess,
    Shard,
    Strategy,
    TensorSpec,
    View,
    einsum,
    register,
    state,
    strategies_of,
)

# Ops of other libraries, by name, because they do not exist before the library is imported.
NAMED: dict[str, OpSpec] = {
    "transformers.grouped_mm_fallback.default": matmul.GROUPED,
    "transformers.grouped_mm_fallback_backward.default": matmul.GROUPED_BACKWARD,
}


def op_spec(op: Any) -> OpSpec:
    """The row of an op; for an op without one, a row that is not `known`, so that it runs on whole inputs."""
    row = OP_SPECS.get(op)
    return row if row is not None else NAMED.get(str(op), NO_OP_SPEC)


__all__ = [
    "NAMED",
    "NO_OP_SPEC",
    "OP_SPECS",
    "Builder",
    "Call",
    "CollectiveKind",
    "Communication",
    "Emit",
    "Factor",
    "MemoryUse",
    "OpSpec",
    "Partial",
    "Placement",
    "Replicate",
    "RowAccess",
    "Shard",
    "Strategy",
    "TensorSpec",
    "View",
    "einsum",
    "op_spec",
    "register",
    "state",
    "strategies_of",
]  # fmt: skip
