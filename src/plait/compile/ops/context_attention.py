"""Attention whose sequence is cut over an axis: each rank has a part of the queries, and of the keys and values.

    ulysses  tensors are exchanged for all positions of a part of the heads, and results back (Jacobs et al. 2023,
             "DeepSpeed Ulysses")
    gather   keys and values are gathered (Dubey et al. 2024, "The Llama 3 Herd of Models")
    ring     keys and values travel from rank to rank (Liu et al. 2023, "Ring Attention")

The three are one strategy of a rule, because each takes and gives the same parts. Which of them is written is decided
when the local graph is written (`Builder.context_kind`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from plait.compile.ops import comm_ops
from plait.compile.ops.attention_signature import LSE, MASK, SIGNATURES, ArgumentPlace, K, Q, Signature
from plait.compile.ops.base import (
    REPLICATE,
    Args,
    Builder,
    Call,
    Emitted,
    Kwargs,
    Partial,
    Placement,
    Shard,
    Strategy,
    TensorSpec,
)
from plait.spec.layout import Blocks

aten = torch.ops.aten
_HEADS, _POSITIONS = 1, 2
_MOST_SCORES = 2**24  # a mask of more scores a rank is not written; keys and values then travel


def attention_kind(call: Call, size: int, kind: str) -> str:
    """How `size` ranks compute an attention: the `kind`, or with auto what sends the fewest bytes."""
    signature = SIGNATURES[call.op]
    query, key, _ = signature.qkv(call)
    masks = signature.mask is not None or not signature.is_causal(call)  # whether queries can be kept from later keys
    if kind != "auto":
        return "ring" if kind == "gather" and not masks else kind
    heads, key_heads = query.shape[_HEADS], key.shape[_HEADS]
    if divides_heads(call, size) and heads + key_heads <= key_heads * size:
        return "ulysses"
    scores = query.shape[_POSITIONS] // size * key.shape[_POSITIONS]
    return "gather" if masks and scores <= _MOST_SCORES else "ring"


def divides_heads(call: Call, size: int) -> bool:
    """Whether `size` ranks can each take a part of the heads of an attention."""
    query, key, _ = SIGNATURES[call.op].qkv(call)
    return query.shape[_HEADS] % size == 0 and key.shape[_HEADS] % size == 0


def attends_causally(call: Call) -> bool:
    """Whether the queries of an attention see no later keys."""
    return SIGNATURES[call.op].is_causal(call)


def over_sequence(
    call: Call, signature: Signature, looks: Mapping[int, str], blocks: Sequence[Blocks]
) -> list[Strategy]:
    """The strategies with a part of the positions of queries and keys; `looks` are the dims of the call's inputs."""
    parts = {*looks.values(), *signature.outputs}
    if signature.emit is not None or not parts <= {Q, K, LSE, MASK} or MASK in signature.outputs:
        return []
    query = signature.qkv(call)[0]
    results = list(zip(call.outputs, signature.outputs, strict=False))
    found = []
    for each in blocks:
        part = Shard(_POSITIONS, each)
        inputs = tuple(
            _mask_part(spec, query, each) if looks.get(i) == MASK else (part if i in looks else REPLICATE)
            for i, spec in enumerate(call.inputs)
        )
        outputs: tuple[Placement, ...] = tuple(
            part if o is not None and look in (Q, K, LSE) else REPLICATE for o, look in results
        )
        outputs += (REPLICATE,) * (len(call.outputs) - len(outputs))

        def emit(b: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
            return _Writer(b, call, strategy, signature, args, kwargs).write()

        found.append(Strategy(inputs, outputs, emit, sends=True))
    return found


def _mask_part(mask: TensorSpec, query: TensorSpec, blocks: Blocks) -> Placement:
    rows = mask.ndim - 2
    return Shard(rows, blocks) if mask.shape[rows] == query.shape[_POSITIONS] and mask.shape[rows] > 1 else REPLICATE


class _Writer:
    """Writes one attention of a rank that has the positions of `part`."""

    def __init__(
        self, b: Builder, call: Call, strategy: Strategy, signature: Signature, args: Args, kwargs: Kwargs
    ) -> None:
        self.b, self.call, self.signature = b, call, signature
        self.args, self.kwargs = list(args), dict(kwargs)
        self.query, self.key, _ = signature.qkv(call)
        (part,) = {p for p in strategy.outputs if isinstance(p, Shard)}
        self.part = part
        self.rows = strategy.inputs[self._index(signature.mask)] if self._mask() is not None else REPLICATE

    def write(self) -> Emitted:
        kind = attention_kind(self.call, self.b.size, self.b.context_kind)
        return {"ulysses": self._ulysses, "gather": self._gather, "ring": self._ring}[kind]()

    # Arguments by place

    def _mask(self) -> Node | None:
        return None if self.signature.mask is None else self._get(self.signature.mask)

    def _get(self, place: ArgumentPlace) -> Any:
        if isinstance(place, str):
            return self.kwargs.get(place)
        return self.args[place] if place < len(self.args) else None

    def _set(self, place: ArgumentPlace, value: object) -> None:
        if isinstance(place, str):
            self.kwargs[place] = value
        else:
            self.args[place] = value

    def _index(self, place: ArgumentPlace | None) -> int:
        assert place is not None
        spec = self.call.kwargs[place] if isinstance(place, str) else self.call.args[place]
        assert isinstance(spec, TensorSpec)
        return spec.index

    def _outputs(self, result: Node, convert: Mapping[str, Placement]) -> Emitted:
        """The outputs of a call in the placements that the strategy says; those of a kind have been `convert`."""
        found = []
        for i, spec in enumerate(self.call.outputs):
            node = self.b.call(operator.getitem, result, i)
            look = self.signature.outputs[i] if i < len(self.signature.outputs) else ""
            found.append(self.b.convert(node, convert[look], self.part) if spec and look in convert else node)
        return tuple(found)

    # The three kinds

    def _ulysses(self) -> Emitted:
        heads = Shard(_HEADS)
        for place, look in self.signature.inputs:
            node = self._get(place)
            if node is not None and look in (Q, K, LSE):
                self._set(place, self.b.convert(node, self.part, heads))
        if (mask := self._mask()) is not None:
            assert self.signature.mask is not None
            whole = self.b.convert(mask, self.rows, REPLICATE)
            shape = self.b.shape(whole)
            own = len(shape) == 4 and shape[_HEADS] == self.query.shape[_HEADS] and shape[_HEADS] > 1
            self._set(self.signature.mask, self.b.convert(whole, REPLICATE, heads) if own else whole)
        result = self.b.call(self.call.op, *self.args, **self.kwargs)
        return self._outputs(result, dict.fromkeys((Q, K, LSE), heads))

    def _gather(self) -> Emitted:
        for place, look in self.signature.inputs:
            if look == K:
                self._set(place, self.b.convert(self._get(place), self.part, REPLICATE))
        if self.signature.is_causal(self.call):
            assert self.signature.causal is not None
            self._set(self.signature.causal[0], False)
            assert self.signature.mask is not None
            self._set(self.signature.mask, self._causal_mask())
        if self.signature.num_queries is not None:
            self._set(self.signature.num_queries, self.b.shape(self._get(self.signature.query))[_POSITIONS])
        result = self.b.call(self.call.op, *self.args, **self.kwargs)
        return self._outputs(
            result, {Q: self.part, LSE: self.part} | {K: Partial() if self.signature.backward else REPLICATE}
        )

    def _causal_mask(self) -> Node:
        """0 where a query of this rank sees a key, and -inf elsewhere: [positions of the rank, keys]."""
        b, like = self.b, self.b.value(self._get(self.signature.query))
        options = {"dtype": torch.int64, "device": like.device}
        rows = b.call(aten.arange.default, self.query.shape[_POSITIONS], **options)
        rows = b.convert(rows, REPLICATE, Shard(0, self.part.blocks))
        keys = b.call(aten.arange.default, self.key.shape[_POSITIONS], **options)
        hidden = b.call(aten.gt.Tensor, keys, b.call(aten.unsqueeze.default, rows, 1))
        zeros = b.call(aten.zeros.default, b.shape(hidden), dtype=like.dtype, device=like.device)
        return b.call(aten.masked_fill.Scalar, zeros, hidden, float("-inf"))

    def _ring(self) -> Emitted:
        b, signature = self.b, self.signature
        form = (self.signature.is_causal(self.call), self.part.blocks, self.kwargs.get("scale"))
        query, key, value = (self._get(signature.query + i) for i in range(3))
        mask = self._mask()
        spec = self.call.outputs[1]
        passed = [b.value(each) for each in (key, value)]
        held = sum(each.numel() * each.element_size() for each in passed)
        if signature.backward:
            grad, _, out, lse = (self._get(place) for place, look in signature.inputs if look in (Q, LSE))
            lse = b.call(aten.squeeze.dim, lse, 3) if len(b.shape(lse)) == 4 else lse
            args: Args = (query, key, value, b.axis, form, mask, grad, out, lse)
            held += sum(each.numel() * comm_ops.summed_dtype(each.dtype).itemsize for each in passed)
            results: tuple[Tensor, ...] = tuple(b.value(each) for each in (query, key, value))
            made = b.node(comm_ops.ring_attention_backward, args, {}, results, held, "keys, values and their gradients")
        else:
            like, shape = b.value(query), b.shape(query)
            assert spec is not None
            width = b.shape(value)[3]
            out = like.new_empty((shape[0], shape[2], shape[1], width)).transpose(1, 2)  # as kernels lay it out
            results = out, like.new_empty(shape[:3], dtype=spec.dtype)
            args = (query, key, value, b.axis, form, mask)
            made = b.node(comm_ops.ring_attention, args, {}, results, held, "keys and values")
        found = [b.call(operator.getitem, made, i) for i in range(len(results))]
        if not signature.backward and spec is not None and spec.ndim == 4:
            found[1] = b.call(aten.unsqueeze.default, found[1], 3)
        return (*found, *(None for _ in self.call.outputs[len(found) :]))  # those are for the kernel's own backward
