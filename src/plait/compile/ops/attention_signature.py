"""The tensors of fused attention ops: which argument or result is which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx.node import Target

from plait.compile.ops.base import Call, Emit, TensorSpec

# The dims of a tensor: [B, H, S, D] of queries, [B, H, T, D] of keys, [B, H, S] or [B, H, S, 1], the same with S
# rounded up, a mask over [B, H, S, T], or others.
Q, K, LSE, PADDED, MASK, OTHER = "q", "k", "lse", "padded lse", "mask", "other"
ArgumentPlace = int | str  # of an argument


@dataclass(frozen=True)
class Signature:
    """Arguments by position or name with the dims of each, and likewise outputs.

    Attributes:
        inputs: the tensors among the arguments.
        outputs: the outputs, from the first on.
        query: position of the queries, after which come the keys.
        causal: position and name of the argument that says whether a query sees earlier keys only. The op takes its
            first query for the first of all, so that queries are not cut then.
        dropout: position and name of a rate, if the op draws the mask by position in what it has. It is not cut then.
        num_queries: position of an argument that says how many queries there are.
        emit: writes the local op, which has arguments that say what part it has, if it can be told so: then all dims
            are cut, in equal blocks.
    """

    inputs: Sequence[tuple[ArgumentPlace, str]]
    outputs: Sequence[str]
    query: int
    causal: tuple[int, str] | None = None
    dropout: tuple[int, str] | None = None
    num_queries: int | None = None
    emit: Emit | None = None

    @property
    def backward(self) -> bool:
        """Whether the call computes gradients."""
        return self.query > 0

    @property
    def mask(self) -> ArgumentPlace | None:
        """Where the mask is, of an op that takes one."""
        return next((place for place, look in self.inputs if look == MASK), None)

    def qkv(self, call: Call) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        """Queries, keys and values of a call."""
        query, key, value = call.args[self.query : self.query + 3]
        return query, key, value

    def is_causal(self, call: Call) -> bool:
        """Whether queries see no later keys."""
        return self.causal is not None and bool(call.arg(*self.causal, False))


SIGNATURES: dict[Target, Signature] = {}  # by op
