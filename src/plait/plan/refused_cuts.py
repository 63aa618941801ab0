"""Refusals of what a captured step shows: axes that cannot cut the sequence or the experts, which they are for, and
sequences that `shapes=bucket:N` cannot pad.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from plait.errors import Refusal
from plait.plan.axes import axis_kind
from plait.plan.plan import Plan

_LEAST_SHARE = 0.25  # of the operations of a step, that an axis which cuts the sequence must split


def no_experts(axis: str, size: int, unmerged: str = "") -> Refusal:
    """The refusal of an axis that cuts experts, for a step in which none are found; `unmerged` says where a loop over
    experts is whose rounds are not alike."""
    loop = f"; the rounds of a loop over experts differ: {unmerged}" if unmerged else ""
    return Refusal(
        f"{axis}={size} finds no experts in the model",
        "experts are found where weights [experts, ...] are looked up by row, where rows that are sorted by expert are"
        " multiplied in groups, in a loop that adds the rows of experts, and in products of [experts, capacity, ...]"
        f"{loop}",
        f"name weights of all experts in one with layouts=, such as {{'*.experts.*': '{axis}, -, -'}}; of experts that"
        " are modules of their own let a loop treat all alike, and give each the rows that torch.where(ids == number)"
        " finds, with ids of a topk; or use data=N",
    )


def uneven_experts(axis: str, size: int, name: str, num: int) -> Refusal | None:
    """The refusal of an axis that does not divide the experts; `name` is that of their weight."""
    if num % size == 0:
        return None
    fits = math.gcd(size, num)  # which divides the ranks of data too, as size does
    return Refusal(
        f"{axis}={size} does not divide the {num} experts of {name}", "",
        f"use {axis}={fits}" if fits > 1 else f"leave {axis}= out",
    )  # fmt: skip


def no_sequence(axis: str, size: int, lengths: Mapping[str, int], blocks: int = 1) -> Refusal:
    """The refusal of an axis that can cut the sequence of no tensor of the batch.

    Args:
        lengths: the length of the sequence of each tensor of the batch that has one.
        blocks: the number of parts into which sequence=yes cuts that of each rank.
    """
    if not lengths:
        return Refusal(
            f"{axis}={size} finds no sequence in the batch",
            "no tensor of it is [rows, positions] of integers, or [rows, positions, features]",
            "name the dim with a batch_spec, such as BatchSpec({'tokens': 'rows, sequence'}), or use data=N",
        )
    name, length = max(lengths.items(), key=lambda item: item[1])
    parts = size * blocks
    padded = -(-length // parts) * parts
    and_sequence = f", and sequence=yes the part of each rank by {blocks}," if blocks > 1 else ""
    return Refusal(
        f"{axis}={size}{and_sequence} does not divide the sequence of {length} positions", f"of {name} in the batch",
        f"pad it to {padded}, or to {padded + 1} if inputs and targets are all but its last and its first position, or"
        " choose a size that divides it",
    )  # fmt: skip


def little_of_the_step(
    axis: str, size: int, share: float, whole: Sequence[str], dims: Mapping[str, int]
) -> Refusal | None:
    """The refusal of an axis that cuts the sequence, but hardly any of the work.

    Args:
        share: the fraction of the floating-point operations that it splits.
        whole: the ops that need the whole sequence, with their modules.
        dims: the dim of each tensor of the batch that is taken for its sequence.
    """
    if share >= _LEAST_SHARE:
        return None
    given = []
    if any(each.startswith("aten.cat.") for each in whole[:4]):
        given.append("if positions are put before the batch's, as a CLS token is, have them in the batch instead")
    if "aten.slice.Tensor in the loss" in whole[:4]:
        given.append("if inputs and targets are all but its last and its first position, give it one position more")
    name, dim = next(iter(dims.items()))
    given.append(f"use data=N or tensor=N; or if the sequence is not dim {dim} of {name}, name it with a batch_spec")
    return Refusal(
        f"{axis}={size} splits {100 * share:.0f}% of the floating-point operations",
        f"these need the whole sequence: {', '.join(whole[:4]) or 'all of them'}",
        "; ".join(given),
    )  # fmt: skip


def uncut_attention(plan: Plan, axis: str, size: int, divides_heads: Sequence[bool]) -> Refusal | None:
    """The refusal of a kind of attention that the model's does not allow.

    Args:
        divides_heads: for each fused attention of the step, whether the axis divides its heads.
    """
    kind = plan.context_kind
    if kind != "auto" and not divides_heads:
        return Refusal(
            f"{axis}.kind={kind} finds no fused attention that it can split",
            "keys and values are gathered for attention with dropout, and for products and softmax, which PyTorch also"
            " makes of scaled_dot_product_attention with a bias that needs a gradient, with a mask or tensors that have"
            " not 4 dims, and with values of another width than keys",
            f"leave {axis}.kind out, or use scaled_dot_product_attention with tensors of 4 dims and without dropout"
            " (attn_implementation='sdpa' in transformers)",
        )
    if kind == "ulysses" and not all(divides_heads):
        return Refusal(
            f"{axis}={size} does not divide the heads of attention, of queries or of keys and values",
            f"{axis}.kind=ulysses gives each rank a part of the heads",
            f"use {axis}.kind=ring",
        )
    return None


def unsplit_attention(plan: Plan, axis: str, size: int, whole: Sequence[str]) -> Refusal:
    """The refusal of a kind of attention that some attention of the model cannot have.

    Args:
        whole: the modules of these.
    """
    return Refusal(
        f"{axis}.kind={plan.context_kind} cannot split the attention in {', '.join(whole[:3])}",
        f"{axis}={size} does not divide its queries or its keys, or they are not parts of one sequence, or an op before"
        " it mixes neighbours, as a convolution does, of which a causal ring gives each rank every n-th, or a GPU"
        " computes it in float32, whose kernel pads the sums of softmax",
        f"leave {axis}.kind out, with which keys and values are gathered where they are parts of one sequence, or use"
        " precision=bf16 on a GPU",
    )  # fmt: skip


def of_buckets(plan: Plan) -> Iterator[Refusal]:
    """The refusal of a multiple that the ranks of an axis which cuts sequences do not divide."""
    cuts = [(axis, size) for axis, size in plan.mesh.axes if axis_kind(axis).cuts_sequence and size > 1]
    num = math.prod(size for _, size in cuts)
    if plan.shapes % num:
        yield Refusal(
            f"shapes=bucket:{plan.shapes} pads to lengths that {' '.join(f'{axis}={n}' for axis, n in cuts)} does not"
            " divide", "", f"give a multiple of {num}, such as bucket:{math.lcm(plan.shapes, num)}",
        )  # fmt: skip


def nothing_to_pad(multiple: int) -> Refusal:
    """The refusal of a batch without sequences."""
    return Refusal(
        f"shapes=bucket:{multiple} finds no sequence in the batch",
        "no tensor of it is [rows, positions] of integers, or [rows, positions, features]",
        "name the dim with a batch_spec, such as BatchSpec({'frames': 'rows, sequence'}), or leave shapes= out",
    )


def padding_changes(
    multiple: int, values: Mapping[str, float], what: str, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Refusal:
    """The refusal of a step whose loss, gradients or outputs padding changes.

    Args:
        values: the value with which each tensor was padded at first.
        what: what was different, in words.
        shapes: of tensors that have positions in two dims, as a mask of each position for each other, by name.
    """
    shown = ", ".join(f"{name} with {value}" for name, value in values.items())
    if shapes:
        name, shape = next(iter(shapes.items()))
        return Refusal(
            f"shapes=bucket:{multiple} does not pad {name}, whose shape {list(shape)} has positions in two dims",
            f"it pads {shown}; {what}",
            "give a mask of [rows, positions], from which most models make that of each position for each other, or"
            " leave shapes= out",
        )
    return Refusal(
        f"shapes=bucket:{multiple} changes the step: {what}", f"it pads {shown}, and no other values make it exact",
        "let model and loss leave padding out (an attention_mask in the batch, labels of -100, plait.Weighted(sum,"
        " weight) over the labels that count), name other values in the batch_spec, as BatchSpec(pad={'labels': -1}),"
        " or leave shapes= out",
    )  # fmt: skip


def padding_unchecked(multiple: int, error: BaseException | str) -> Refusal:
    """The refusal of a step that does not run on one device, so that nothing says whether padding changes it."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return Refusal(
        f"shapes=bucket:{multiple} is checked with the first rows of a batch, once with padding and once without, and"
        " without it the step gives no loss", text, "give a first batch that has a loss, or leave shapes= out",
    )  # fmt: skip
