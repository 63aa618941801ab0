"""Sample calls, one or more for every op that has a rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from oracle import Sample
from rule_makers import b, f, i, op_of, split, u
from rule_table import HALF, table
from rule_twins import gpu_samples

from plait.compile.ops import OP_SPECS, experts, pointwise


def pointwise_samples(op: Any) -> list[Sample]:
    """From the schema: tensors that broadcast, in the first dtype that the op takes."""
    if op in _SPECIAL:
        return [Sample(op, *split(args)) for args in _SPECIAL[op]]
    found = []
    for shapes in (((6, 12),) * 4, ((12,), (6, 1), (1, 12), (6, 12))):
        for make in (u, lambda *s: i(5, *s) + 1, b):
            remaining = iter(shapes)
            sample = Sample(op, tuple(_argument(a, make, remaining) for a in _required(op)), {})
            try:
                result = op(*sample.args)
            except (RuntimeError, TypeError, NotImplementedError):
                continue
            outs = result if isinstance(result, (tuple, list)) else (result,)
            if all(o.shape == outs[0].shape for o in outs):
                found.append(sample)
                break
    return found


def _required(op: Any) -> list[Any]:
    return [a for a in op._schema.arguments if not a.has_default_value() and not a.kwarg_only]


def _argument(argument: Any, make: Any, shapes: Iterator[tuple[int, ...]]) -> Any:
    kind = str(argument.type)
    if kind == "Tensor":
        return make(*next(shapes))
    if kind == "Optional[str]":
        return "floor"
    return {"bool": False, "int": 1}.get(kind, 2 if make is not u else 0.5)


_SPECIAL = {
    op_of(name): samples
    for name, samples in {
        "add.Tensor": [(f(6, 12), f(12)), (f(6, 12), f(6, 1), {"alpha": 3}), (f(6, 12), 2), (i(9, 12), i(9, 12))],
        "sub.Tensor": [(f(6, 12), f(6, 12), {"alpha": 2})],
        "where.self": [(b(6, 12), f(6, 12), f(12)), (b(12), f(6, 12), f(6, 1))],
        "where.ScalarOther": [(b(6, 12), f(6, 12), 2.0)],
        "where.ScalarSelf": [(b(6, 12), 2.0, f(6, 12))],
        "where.Scalar": [(b(6, 12), 2.0, 3.0)],
        "masked_fill.Scalar": [(f(6, 12), b(12), 0), (f(6, 12), b(6, 1), 2.0)],
        "masked_fill.Tensor": [(f(6, 12), b(6, 12), f())],
        "native_dropout_backward": [(f(6, 12), b(6, 12), 2.0)],
        "fill.Tensor": [(f(6, 12), f())],
        "_to_copy": [(f(6, 12), HALF), (f(6, 12).float(), {"dtype": torch.float64}), (i(9, 12), HALF)],
        "elu_backward": [(f(6, 12), 1.0, 1.0, 1.0, False, f(6, 12))],
        "copy": [(f(6, 12), f(6, 12))],
        "_prelu_kernel": [(f(6, 12), f(12)), (f(6, 12), f(1))],
        "logit_backward": [(f(6, 12), u(6, 12))],
        "clamp": [(f(6, 12), -0.5, 0.5)],
        "clip": [(f(6, 12), -0.5, 0.5)],
        "clamp.Tensor": [(f(6, 12), f(12), f(6, 1))],
        "clip.Tensor": [(f(6, 12), f(12), f(6, 1))],
        "div.Tensor_mode": [(f(6, 12), f(12), {"rounding_mode": "floor"}), (f(6, 12), 2.0, {"rounding_mode": None})],
        "div.Scalar_mode": [(f(6, 12), 2.0, {"rounding_mode": "trunc"})],
        "round.decimals": [(f(6, 12), {"decimals": 1})],
        "ldexp.Tensor": [(f(6, 12), i(3, 12))],
    }.items()
}


def all_samples() -> dict[Any, list[Sample]]:
    found = {op: pointwise_samples(op) for op in pointwise.OPS}
    for name, cases in table().items():
        if (op := op_of(name)) is not None:
            found[op] = [Sample(op, *split(args)) for args in cases]
    for view, samples in [*found.items()]:  # a copy of a view has the samples of the view
        name = f"{view._schema.name.removeprefix('aten::')}_copy.{view._overloadname}"
        if OP_SPECS[view].view is not None and (copy := op_of(name)) in OP_SPECS:
            found.setdefault(copy, [replace(sample, op=copy) for sample in samples])
    for name, samples in gpu_samples().items():
        found[op_of(name)] = samples
    for name, args in (
        ("empty_like", (f(6, 12),)),
        ("empty.memory_format", ([6, 12],)),
        ("new_empty", (f(6), [6, 4])),
        ("new_empty_strided", (f(6), [6, 4], [1, 6])),
    ):
        found[op_of(name)] = [Sample(op_of(name), args, {}, shapes_only=True)]
    return found | expert_samples()


def expert_samples() -> dict[Any, list[Sample]]:
    """Calls of experts, none of whose rows has expert 2, and one of whose rows has none."""
    ids = torch.tensor([3, 0, 1, 3, 3, 0, 1, 4, 0, 1, 3, 3])
    calls = {
        experts.EXPERT_MM: [(f(12, 6), f(4, 6, 12), ids)],
        experts.EXPERT_ADDMM: [(f(4, 12), f(12, 6), f(4, 6, 12), ids)],
        experts.EXPERT_OUTER: [(f(12, 6), f(12, 18), ids, 4)],
        experts.EXPERT_ROWS: [(f(4, 6), ids), (f(4), ids)],
        experts.EXPERT_SUMS: [(f(12, 6, 2), ids, 4)],
    }
    return {op: [Sample(op, args, {}) for args in cases] for op, cases in calls.items()}
