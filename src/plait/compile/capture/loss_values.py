"""The results of loss functions: a mean or a `Weighted`, and named auxiliary outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.compile.capture.late_values import LateNumber
from plait.compile.capture.masked_rows import Selected, is_whole
from plait.errors import LossError

FORMS = (
    "loss_fn(model, batch) returns a scalar tensor, which is the mean over the batch, or plait.Weighted(sum, weight)"
    ' for a loss normalised by a count; or (loss, {"name": tensor}) for one of these and further outputs'
)


class Weighted(NamedTuple):
    """A loss normalized by a count, such as that of unmasked tokens.

    The loss of several parts of a batch is the sum of their sums over the sum of their weights. As an output beside a
    loss it is a ratio of such sums.

    >>> Weighted(torch.tensor(6.0), 4).mean
    tensor(1.5000)
    """

    sum: Tensor
    weight: Tensor | float

    @property
    def mean(self) -> Tensor:
        """The loss of this part alone."""
        return self.sum / self.weight


@dataclass(frozen=True, eq=False)
class Reduction:
    """An auxiliary output of a loss function; its class says how its values for several batches are combined,
    elementwise."""

    value: Tensor


class Sum(Reduction):
    """An output whose values are summed, such as a number of correct rows."""


class Mean(Reduction):
    """An output whose values are averaged, weighted by rows; the default for a scalar."""


class Max(Reduction):
    """An output whose values are combined by their maximum."""


class Min(Reduction):
    """An output whose values are combined by their minimum."""


ROWS, RATIO = "rows", "ratio"
_KINDS: dict[type[Reduction], str] = {Sum: "sum", Mean: "mean", Max: "max", Min: "min"}


@dataclass(frozen=True, eq=False)
class LossPart:
    """An auxiliary output, of one microbatch or of several combined.

    Attributes:
        kind: rows (a row for each row of the batch), sum, mean, max, min or ratio.
        value: the value; of a ratio its numerator.
        weight: the number of rows of a mean, or the denominator of a ratio.
    """

    kind: str
    value: Tensor
    weight: Tensor | float = 1.0

    def result(self) -> Tensor:
        """The value that a user sees."""
        return self.value / self.weight if self.kind == RATIO else self.value


Outputs = dict[str, LossPart]


@dataclass(frozen=True, eq=False)
class Loss:
    """What a loss function returned.

    Attributes:
        total: the sum of a Weighted, or the mean.
        weight: the weight of a Weighted; None for a mean.
        outputs: the outputs beside the loss; None if there was no dict of them.
    """

    total: Tensor
    weight: Tensor | None
    outputs: Outputs | None

    @property
    def mean(self) -> Tensor:
        """The loss."""
        return self.total if self.weight is None else self.total / self.weight

    @property
    def pair(self) -> tuple[Tensor, Tensor | float]:
        """(sum, weight); a mean counts as a sum of weight one."""
        return self.total, 1.0 if self.weight is None else self.weight


def read_loss(value: object, rows: int) -> Loss:
    """Read what a loss function returned for a batch of `rows`. Raises LossError for anything but the FORMS."""
    outputs: Outputs | None = None
    if isinstance(value, (tuple, list)) and not isinstance(value, Weighted):
        if len(value) != 2:
            raise LossError(f"the loss is a {type(value).__name__} of {len(value)} elements; {FORMS}")
        value, beside = value
        if not isinstance(beside, Mapping):
            raise LossError(
                f"loss_fn returns a pair of {_type(value)} and {_type(beside)}, which may be a sum and its weight, or a"
                " loss and another output; write plait.Weighted(sum, weight) for a loss normalised by a"
                ' count, or (loss, {"name": tensor}) for a loss and further outputs'
            )
        outputs = {_name(name): _output(name, each, rows) for name, each in beside.items()}
    if isinstance(value, Weighted):
        total = _scalar(value.sum, "the sum of plait.Weighted(sum, weight)")
        return Loss(total, _weight(value.weight, total, "the weight of plait.Weighted(sum, weight)"), outputs)
    return Loss(_scalar(value, "the loss"), None, outputs)


def join_outputs(parts: Sequence[Outputs]) -> Outputs:
    """Combine the outputs of several microbatches or batches, in their order. Raises LossError if they differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for other in parts[1:]:
        if [(n, p.kind) for n, p in other.items()] != [(n, p.kind) for n, p in first.items()]:
            raise LossError(
                f"the outputs beside the loss are {_listed(first)} of one batch and {_listed(other)} of another; return"
                " the same ones for every batch"
            )
    return {name: _join(name, [part[name] for part in parts]) for name in first}


def copied(outputs: Outputs) -> Outputs:
    """The outputs in new memory: one may be a view of the batch, or of a parameter that changes."""
    return {name: LossPart(part.kind, part.value.clone(), part.weight) for name, part in outputs.items()}


def results(outputs: Outputs) -> dict[str, Tensor]:
    """The values of outputs that a user sees, by name."""
    return {name: part.result() for name, part in outputs.items()}


def loss_and_aux(result: object) -> tuple[Any, dict[str, Tensor]]:
    """Split what Trainer.step or evaluate returned into the loss and its outputs, {} if there are none."""
    return result if isinstance(result, tuple) else (result, {})


def _join(name: str, parts: Sequence[LossPart]) -> LossPart:
    kind, values = parts[0].kind, [part.value for part in parts]
    shapes = {value.shape[kind == ROWS :] for value in values}
    if len(shapes) > 1:
        shown = " and ".join(str(list(value.shape)) for value in {v.shape: v for v in values}.values())
        raise LossError(
            f"the output {name!r} beside the loss has shapes {shown} of different batches, which make no one tensor;"
            " pad it to one size, or return what you need of it as one number a row"
        )
    if kind == ROWS:
        return LossPart(ROWS, torch.cat(values))
    stacked = torch.stack(values)
    if kind == "max":
        return LossPart(kind, stacked.amax(0))
    if kind == "min":
        return LossPart(kind, stacked.amin(0))
    if kind == "mean":
        weights = [float(p.weight) for p in parts]
        total = sum(weights)
        shares = torch.tensor([each / total for each in weights], dtype=_wide(stacked.dtype))
        shares = shares.to(stacked.device, non_blocking=True).view(-1, *[1] * (stacked.ndim - 1))
        mean = (stacked.to(shares.dtype) * shares).sum(0)
        return LossPart(kind, mean.to(stacked.dtype), total)
    summed = stacked.sum(0, dtype=stacked.dtype)
    if kind == "sum":
        return LossPart(kind, summed)
    return LossPart(kind, summed, torch.stack([torch.as_tensor(part.weight) for part in parts]).sum(0))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex else torch.promote_types(dtype, torch.float32)


def _output(name: object, value: object, rows: int) -> LossPart:
    what = f"the output {name!r} beside the loss"
    if isinstance(value, Weighted):
        total = _tensor(value.sum, f"the sum of {what}")
        weight = _weight(value.weight, total, f"the weight of {what}", scalar=False)
        return LossPart(RATIO, total.detach(), weight.detach())
    if isinstance(value, Reduction):
        kind, value = _KINDS[type(value)], _tensor(value.value, what).detach()
        if kind == "mean" and not (value.is_floating_point() or value.is_complex()):
            raise LossError(f"{what} is a plait.Mean of {value.dtype}, which has no mean; convert it with .float()")
        if kind == "sum" and value.dtype == torch.bool:
            value = value.long()
        return LossPart(kind, value, float(rows))
    value = _tensor(value, what).detach()
    if value.ndim and value.shape[0] == rows:
        return LossPart(ROWS, value)
    if value.ndim:
        raise LossError(
            f"{what} has shape {list(value.shape)}, and the batch {rows} rows: give it a row for each row of the batch,"
            " make it a scalar, or say what it is over several parts of a batch: plait.Sum(x), plait.Mean(x),"
            " plait.Max(x), plait.Min(x) or plait.Weighted(sum, weight)"
        )
    if not value.dtype.is_floating_point and not value.dtype.is_complex:
        raise LossError(
            f"{what} is a scalar of {value.dtype}, which may be a count: write plait.Sum(x) if it is, or plait.Max(x)"
            " or plait.Min(x); a scalar without a mark is a mean over the batch"
        )
    return LossPart("mean", value, float(rows))


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise LossError(f"an output beside the loss is called {name!r}; give it a string for a name")
    return name


def _weight(weight: object, total: Tensor, what: str, scalar: bool = True) -> Tensor:
    if isinstance(weight, LateNumber):
        weight = weight.tensor()
    if isinstance(weight, (int, float)):
        return torch.full((), float(weight), dtype=total.dtype, device=total.device)
    return _scalar(weight, what, floating=False) if scalar else _tensor(weight, what)


def _tensor(value: object, what: str) -> Tensor:
    if not is_whole(value):
        raise LossError(f"{what} is a {_type(value)}, not a tensor; {FORMS}")
    return value


def _scalar(value: object, what: str, floating: bool = True) -> Tensor:
    found = _tensor(value, what)
    if found.numel() != 1:
        raise LossError(f"{what} has shape {list(found.shape)}, not one element; {FORMS}")
    if floating and not found.dtype.is_floating_point:
        raise LossError(f"{what} has dtype {found.dtype}, which has no gradient; {FORMS}")
    return found.reshape(()) if found.ndim else found


def _type(value: object) -> str:
    if is_whole(value):
        return "Tensor"
    if isinstance(value, LateNumber):
        return "Python number made by .item()"
    if isinstance(value, Selected):
        return "selection of rows by a mask"
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _listed(outputs: Outputs) -> str:
    return ", ".join(f"{name} ({part.kind})" for name, part in outputs.items()) or "none"


def sum_alone(loss: Loss) -> Tensor:
    if loss.weight is not None and loss.weight.requires_grad:
        raise LossError(
            "the weight of plait.Weighted(sum, weight) depends on parameters, so microbatches cannot be added up;"
            " detach it, or leave micro out of the plan"
        )
    return loss.total
