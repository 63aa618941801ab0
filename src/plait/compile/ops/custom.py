"""`op_rule`: a row for a user's own op, from einsum notation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._ops import OpOverload, OpOverloadPacket

from plait.compile.ops.base import Call, Factor, OpSpec, TensorSpec, register
from plait.errors import LayoutError

DimNames = tuple[str, ...]  # the names of one tensor's dims
_TENSORS = ("Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]")
_texts: dict[OpOverload, str] = {}  # by op, for rows that are made here


def op_rule(op: object, text: str) -> None:
    """Declare which dims of a custom op may be sharded, so that it runs on parts of its tensors instead of whole ones.

    Args:
        op: what `torch.library.custom_op` or `torch.library.triton_op` returns, an op of `torch.ops`, or its name, such
            as "mylib::rotate".
        text: the dims of every input tensor, in the order of the op's schema, and of every output tensor:

            plait.op_rule(rotate, "b h s d, S D -> b h s d")

    A lower-case name may be sharded, and is the same dim wherever it stands: the op on a part of it returns that part
    of the result. An output without the name is a sum over it: the results on the parts are its terms. A name in
    capitals stays whole. Write so a dim that the op normalizes, sorts or looks up, one that is broadcast, and one whose
    size is a number among the arguments, because numbers are passed unchanged. A custom op's backward is an op of its
    own, with a rule of its own.

    Call it after the op is defined, in every process. Raises LayoutError for a text that does not fit the op's schema,
    for an op that writes to its arguments or returns a view of them, and for an op that already has a rule.
    """
    from plait.compile.ops import op_spec  # a late import, because it imports this file

    found = _overload(op)
    if _texts.get(found) == text:
        return  # the op was defined again, as in a notebook
    if op_spec(found).known or op_spec(found).random is not None:
        raise LayoutError(f"op_rule: {found} has a rule already" + (f", {_texts[found]!r}" if found in _texts else ""))
    register(found, spec=OpSpec(factors=_factors(found, text), formats=True))
    _texts[found] = text


def _overload(op: object) -> OpOverload:
    """The overload that `op` means. Raises LayoutError if there is none, or if there are several."""
    given = op
    if isinstance(op, str):
        namespace, _, name = op.partition("::")
        op = getattr(getattr(torch.ops, namespace), name, None) if name else None
    op = getattr(op, "_opoverload", op)  # the result of torch.library.custom_op
    if isinstance(op, OpOverloadPacket):
        if len(op.overloads()) > 1:
            names = ", ".join(f"{op}.{name}" for name in op.overloads())
            raise LayoutError(f"op_rule: {op} has several overloads; name one of {names}")
        op = getattr(op, op.overloads()[0])
    if not isinstance(op, OpOverload):
        raise LayoutError(
            f"op_rule: {given!r} is no op; give what torch.library.custom_op or triton_op returns, an op of torch.ops,"
            ' or its name, such as "mylib::rotate"'
        )
    return op


def _factors(op: OpOverload, text: str) -> Callable[[Call], Sequence[Factor]]:
    """The factors that the text names. Raises LayoutError if it does not fit the schema."""
    schema = op._schema
    takes = [(i, a.name) for i, a in enumerate(schema.arguments) if str(a.type) in _TENSORS]
    if schema.is_mutable or any(r.alias_info is not None for r in schema.returns):
        raise LayoutError(f"op_rule: {op} writes into its arguments or gives a view of them ({schema}); let it return"
                          " new tensors")  # fmt: skip
    if not schema.returns or any(str(r.type) != "Tensor" for r in schema.returns):
        raise LayoutError(f"op_rule: {op} gives something else than tensors ({schema})")
    left, arrow, right = text.partition("->")
    if not arrow:
        raise LayoutError(f"op_rule: {text!r} for {op} has no '->'; write it like 'b h s d, S D -> b h s d'")
    inputs, outputs = _parts(left), _parts(right)
    for what, parts, num in (("goes in", inputs, len(takes)), ("comes out", outputs, len(schema.returns))):
        if len(parts) != num:
            raise LayoutError(
                f"op_rule: {text!r} names {len(parts)} tensors that each {what}, and {op} has {num}: {schema}"
            )
    _check_names(op, text, inputs, outputs)
    names = sorted({name for part in inputs for name in part if name.islower()})

    def factors(call: Call) -> list[Factor]:
        given: dict[int, DimNames] = {}
        for (position, name), part in zip(takes, inputs, strict=True):
            value = call.arg(position, name)
            for spec in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(spec, TensorSpec):
                    given[spec.index] = part
        before = [given[spec.index] for spec in call.inputs]
        _check_shapes(op, text, [*zip(before, call.inputs, strict=True), *zip(outputs, call.outputs, strict=True)])
        return [
            Factor(tuple(_place(name, part) for part in before), tuple(_place(name, part) for part in outputs))
            for name in names
            if any(name in part for part in before)  # an optional tensor may be missing
        ]

    return factors


def _parts(text: str) -> list[DimNames]:
    return [tuple(part.split()) for part in text.split(",")] if text.strip() else []


def _place(name: str, part: DimNames) -> int | None:
    return part.index(name) if name in part else None


def _check_names(op: OpOverload, text: str, inputs: list[DimNames], outputs: list[DimNames]) -> None:
    known = {name for part in inputs for name in part}
    for part in (*inputs, *outputs):
        for name in part:
            if not name.isidentifier():
                raise LayoutError(f"op_rule: {name!r} in {text!r} for {op} is no name of a dim; take letters")
            if name.islower() and part.count(name) > 1:
                raise LayoutError(f"op_rule: {text!r} for {op} names two dims of one tensor {name}; give each its name")
            if name.islower() and name not in known:
                raise LayoutError(
                    f"op_rule: {name} in {text!r} for {op} is in no tensor that goes in; a dim that the op makes stays"
                    f" whole: write {name.upper()}"
                )


def _check_shapes(op: OpOverload, text: str, tensors: Sequence[tuple[DimNames, TensorSpec | None]]) -> None:
    """Raise LayoutError if the tensors of a call do not fit the text."""
    sizes: dict[str, int] = {}
    for part, spec in tensors:
        if spec is None:
            continue
        if spec.ndim != len(part):
            raise LayoutError(
                f"op_rule: {text!r} has {' '.join(part) or 'no dims'} where {op} is given or gives a tensor of shape"
                f" {list(spec.shape)}"
            )
        for name, size in zip(part, spec.shape, strict=True):
            if name.islower() and sizes.setdefault(name, size) != size:
                raise LayoutError(
                    f"op_rule: {name} in {text!r} is {sizes[name]} in one tensor of {op} and {size} in another; give"
                    " dims of different sizes different names, in capitals where one is broadcast"
                )
