"""The op table: one file per family of ops, one row per op, and `op_spec` to find a row."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch._ops import OpOverload
from torch.fx.node import Target

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
    linear_scan,
    loss,
    matmul,
    norm,
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
    Call,
    CollectiveKind,
    Communication,
    MemoryUse,
    OpSpec,
    RowAccess,
    Shard,
    Strategy,
    TensorSpec,
    View,
    register,
    strategies_of,
)

# Ops of other libraries, by name, because they do not exist before the library is imported.
NAMED: dict[str, OpSpec] = {
    "transformers.grouped_mm_fallback.default": matmul.GROUPED,
    "transformers.grouped_mm_fallback_backward.default": matmul.GROUPED_BACKWARD,
}


def _register_copies_of_views() -> None:
    """Give the ops that functionalization writes for views, such as aten.select_copy, the rows of the views; but for
    those that are given strides."""
    for op, row in [*OP_SPECS.items()]:
        if row.view is not None and row.known and isinstance(op, OpOverload) and "stride" not in str(op._schema):
            name = op._schema.name.removeprefix("aten::")
            copy = getattr(getattr(torch.ops.aten, f"{name}_copy", None), op._overloadname, None)
            if copy is not None and copy not in OP_SPECS:
                register(copy, spec=replace(row, view=None))


_register_copies_of_views()


def op_spec(op: Target) -> OpSpec:
    """The row of an op; for an op without one, a row that is not `known`, so that it runs on whole inputs."""
    row = OP_SPECS.get(op)
    return row if row is not None else NAMED.get(str(op), NO_OP_SPEC)


__all__ = [
    "OP_SPECS",
    "Call",
    "CollectiveKind",
    "Communication",
    "MemoryUse",
    "OpSpec",
    "RowAccess",
    "Shard",
    "Strategy",
    "TensorSpec",
    "View",
    "op_spec",
    "register",
    "strategies_of",
]  # fmt: skip
