"""Refusals of `shapes=bucket:N`, which pads sequences: of the plan alone, and of what padding changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from plait.errors import Refusal
from plait.plan.axes import axis_kind
from plait.plan.plan import Plan


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
