"""Op rules, one file a family. A new op is one row in the file of its family; `op_spec` finds it."""

from __future__ import annotations

from typing import Any

from plait.compile.ops import (  # noqa: F401  (each registers its rules)
    attention,
    batch_norm,
    cell,
    collective_rules,
    conv,
    create,
    draw_rule,
    index,
    index_list,
    loss,
    matmul,
    norm,
    pieces,
    pointwise,
    pool,
    reduce,
    reshape,
    softmax,
    strided,
    view,
)
from plait.compile.ops.base import (
    OP_SPECS,
    Builder,
    Call,
    Emit,
    Factor,
    OpSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    Strategy,
    TensorSpec,
    einsum,
    register,
    strategies_of,
)
from plait.compile.ops.dims import overloads

# Ops of other libraries, by name: they are not there before the library is imported.
NAMED: dict[str, OpSpec] = {
    "transformers.grouped_mm_fallback.default": matmul.GROUPED,
    "transformers.grouped_mm_fallback_backward.default": matmul.GROUPED_BACKWARD,
}

# Where a dim that is cut may end: rows of a table that are looked up, and a vocabulary whose softmax goes into a loss.
LOOKUPS = frozenset(overloads("embedding"))
SOFTMAXES = frozenset(overloads("_log_softmax"))
LOSSES = frozenset(overloads("nll_loss_forward", "nll_loss2d_forward"))
NORMS = frozenset(overloads("native_layer_norm", "_fused_rms_norm"))  # of a cut dim: sums that are small


def op_spec(op: Any) -> OpSpec | None:
    """The rule of an op, None if it has none: such an op runs on whole inputs."""
    rule = OP_SPECS.get(op)
    return rule if rule is not None else NAMED.get(str(op))


__all__ = [
    "LOOKUPS",
    "LOSSES",
    "NAMED",
    "NORMS",
    "OP_SPECS",
    "SOFTMAXES",
    "Builder",
    "Call",
    "Emit",
    "Factor",
    "OpSpec",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Strategy",
    "TensorSpec",
    "einsum",
    "op_spec",
    "register",
    "strategies_of",
]  # fmt: skip
