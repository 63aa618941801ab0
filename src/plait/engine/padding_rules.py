"""How the sequences of a batch can be padded without changing the step: found by trial, on one device in float64.

The first rows of a batch run twice through model and loss, once as they are and once padded. Padding is exact if the
loss, its weight, every gradient, buffer and output of the loss function are the same to rounding. Values are those that
the batch's spec names, or else those that the names and dtypes of its tensors suggest, then others. What no values make
exact is refused.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from plait.compile.capture.batch import (
    batch_leaves,
    count_rows,
    map_batch,
    sequence_dims,
    spec_of,
    take_rows,
)
from plait.compile.capture.capture import LossFn, one_at_a_time
from plait.compile.capture.loss_values import ROWS, LossPart, Outputs, read_loss
from plait.compile.ops.base import NO_OP_SPEC, OP_SPECS
from plait.compile.ops.random import GlobalRandom
from plait.engine.initial_values import with_values
from plait.engine.model_copy import Twin, preserved
from plait.errors import PlanError
from plait.plan.padding_refusals import nothing_to_pad, padding_changes, padding_unchecked

_ROWS = 2  # rows of the batch that the check runs, if the loss has a value for so few
_MOST_TRIALS = 32
_IGNORED = -100  # the label that torch.nn.functional.cross_entropy leaves out

# By pattern of a tensor's name, the value that its padding has by convention; None: the model's id of padding.
_BY_NAME: tuple[tuple[str, float | None], ...] = (
    ("padding_mask", True), ("mask", 0), ("label", _IGNORED), ("target", _IGNORED), ("position", 0), ("ids", None),
)  # fmt: skip
_LONGEST = ("max_position_embeddings", "n_positions", "max_target_positions")  # in the config of a transformers model


@dataclass(frozen=True)
class LeafPadding:
    """How a tensor of the batch is padded: at the end of `dim`, with `value`."""

    dim: int
    value: float


@dataclass(frozen=True)
class PaddingRules:
    """How the batches of a step are padded.

    leaves    by name, the tensors that are padded
    outputs   by name of an output of the loss function, (its dim, the tensor of the batch whose padding it has)
    together  whether all tensors get the same number of positions, rather than each its own multiple
    most      the largest length that the model takes; None if that is not known
    """

    leaves: Mapping[str, LeafPadding]
    outputs: Mapping[str, tuple[tuple[int, str], ...]] = field(default_factory=dict)
    together: bool = False
    most: int | None = None

    def lengths(self, batch: Any) -> dict[str, int]:
        """The length of the sequence of each tensor of a batch that is padded."""
        leaves = batch_leaves(batch)
        return {n: leaves[n].shape[p.dim] for n, p in self.leaves.items() if n in leaves and leaves[n].ndim > p.dim}

    def rounded(self, length: int, multiple: int) -> int:
        """A length rounded up to a multiple, but not beyond what the model takes."""
        found = -(-length // multiple) * multiple
        return found if self.most is None or length > self.most else min(found, self.most)

    def to_multiple(self, lengths: Mapping[str, int], multiple: int) -> dict[str, int]:
        """The lengths to which tensors of these lengths are padded."""
        if not self.together:
            return {name: self.rounded(length, multiple) for name, length in lengths.items()}
        more = self.rounded(longest := max(lengths.values(), default=0), multiple) - longest
        return {name: length + more for name, length in lengths.items()}

    def pad(self, batch: Any, lengths: Mapping[str, int]) -> Any:
        """The batch with its tensors padded to these lengths."""

        def change(name: str, leaf: Any) -> Any:
            rule = self.leaves.get(name)
            if rule is None or not torch.is_tensor(leaf) or leaf.ndim <= rule.dim:
                return leaf
            more = lengths.get(name, 0) - leaf.shape[rule.dim]
            if more <= 0:
                return leaf
            shape = (*leaf.shape[: rule.dim], more, *leaf.shape[rule.dim + 1 :])
            return torch.cat([leaf, leaf.new_full(shape, rule.value)], rule.dim)

        return map_batch(change, batch)

    def crop(self, outputs: Outputs, more: Mapping[str, int]) -> Outputs:
        """The outputs of a loss function without the positions of padding; `more` says how many each tensor got."""

        def cropped(name: str, part: LossPart) -> LossPart:
            value = part.value
            for dim, leaf in self.outputs.get(name, ()):
                value = value.narrow(dim, 0, value.shape[dim] - more.get(leaf, 0))
            return LossPart(part.kind, value, part.weight)

        return {name: cropped(name, part) for name, part in outputs.items()}

    def to_text(self) -> str:
        """The rules as text, which `from_text` reads."""
        leaves = {name: (rule.dim, rule.value) for name, rule in self.leaves.items()}
        return json.dumps([leaves, {n: list(dims) for n, dims in self.outputs.items()}, self.together, self.most])

    @classmethod
    def from_text(cls, text: str) -> PaddingRules:
        """The rules that `to_text` wrote."""
        leaves, outputs, together, most = json.loads(text)
        return cls(
            {name: LeafPadding(dim, value) for name, (dim, value) in leaves.items()},
            {name: tuple((dim, leaf) for dim, leaf in dims) for name, dims in outputs.items()},
            together,
            most,
        )


def find_rules(model: nn.Module, loss_fn: LossFn, batch: Any, multiple: int, train: bool, seed: int) -> PaddingRules:
    """The rules by which a batch can be padded to a multiple, so that the step stays the same.

    Args:
        model: the model, which is left as it was; one on the meta device is given values for the check.
        loss_fn: as the Trainer takes it.
        batch: rows of a batch.
        multiple: of which lengths become multiples.
        train: whether to check the gradients too, in training mode; else the forward pass in evaluation mode.
        seed: of the values of a model on the meta device.

    Raises PlanError, with a Refusal, if the batch has no sequence, or if padding changes the step.
    """
    dims = sequence_dims(batch)
    if not dims:
        raise PlanError(nothing_to_pad(multiple))
    with one_at_a_time:
        made = with_values(model, seed)
        with preserved(made, loss_fn):
            device = next((p.device for p in made.parameters()), torch.device("cpu"))
            step = functools.partial(_run, made, loss_fn, train, device)
            return _Search(step, batch, dims, multiple, _longest(model), _candidates(model, batch, dims)).rules()


def likely_rules(model: nn.Module, batch: Any, multiple: int) -> PaddingRules:
    """The rules that names and dtypes suggest, which are not checked. Raises PlanError for a batch without
    sequences."""
    if not (dims := sequence_dims(batch)):
        raise PlanError(nothing_to_pad(multiple))
    candidates = _candidates(model, batch, dims)
    leaves = {name: LeafPadding(dim, candidates[name][0]) for name, dim in dims.items()}
    return PaddingRules(leaves, most=_longest(model))


@dataclass(frozen=True)
class _Found:
    """What a run of the step gave.

    values   tensors by what they are, in words
    outputs  what the loss function returned beside the loss
    eps      the rounding of the narrowest dtype in which something was computed
    """

    values: dict[str, Tensor]
    outputs: Outputs
    eps: float


_Step = Callable[[Any, torch.dtype | None], _Found]


class _Search:
    """The search for rules with which a padded batch gives what the batch gives."""

    def __init__(
        self,
        step: _Step,
        batch: Any,
        dims: Mapping[str, int],
        multiple: int,
        most: int | None,
        candidates: Mapping[str, Sequence[float]],
    ) -> None:
        self._step, self._multiple = step, multiple
        self._dims, self._most, self._candidates = dims, most, candidates
        self._given = batch
        self._first: Mapping[str, float] = {name: values[0] for name, values in candidates.items()}

    def rules(self) -> PaddingRules:
        batch, without, dtype = self._reference()
        why = ""
        for trial in itertools.islice(self._trials(batch), _MOST_TRIALS):
            lengths = trial.lengths(batch)
            wanted = trial.to_multiple(lengths, self._multiple)
            if wanted == lengths:  # there is nothing to see without padding
                wanted = {name: length + self._multiple for name, length in lengths.items()}
            try:
                found = self._step(trial.pad(batch, wanted), dtype)
            except Exception as error:
                why = why or f"padded it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                continue
            more = {name: wanted[name] - length for name, length in lengths.items()}
            outputs, differs = _outputs_of(without, found, lengths, more)
            differs = differs or _difference(without, found)
            if not differs:
                return PaddingRules(trial.leaves, outputs, trial.together, trial.most)
            why = differs if not why or why.startswith("padded it raises") else why
        raise PlanError(padding_changes(self._multiple, self._first, why))

    def _reference(self) -> tuple[Any, _Found, torch.dtype | None]:
        """A part of the batch, what it gives without padding, and the dtype in which that runs.

        Positions at the end of the batch are left out where that makes the padding a larger part of the sequence.
        """
        error: BaseException | str = "the loss is not finite"
        rows = count_rows(self._given)
        several = [take_rows(self._given, rows, 0, num) for num in (min(rows, _ROWS), rows)]
        parts = [self._shortened(several[0]), several[0], several[1]]
        for dtype, part in itertools.product((torch.float64, None), parts):
            try:
                found = self._step(part, dtype)
            except Exception as raised:
                error = raised
                continue
            if all(bool(value.isfinite().all()) for value in found.values.values()):
                return part, found, dtype
        raise PlanError(padding_unchecked(self._multiple, error)) from (None if isinstance(error, str) else error)

    def _shortened(self, batch: Any) -> Any:
        """The first positions of each sequence, so few that nearly a multiple of them is padding."""
        longest = max(batch_leaves(batch)[name].shape[dim] for name, dim in self._dims.items())
        less = longest - 1 - self._multiple * (longest > self._multiple)

        def shorter(name: str, leaf: Any) -> Any:
            dim = self._dims.get(name)
            return leaf if dim is None else leaf.narrow(dim, 0, max(leaf.shape[dim] - less, 1))

        return map_batch(shorter, batch)

    def _trials(self, batch: Any) -> Iterator[PaddingRules]:
        """Rules to try, the most likely first: values by name for all tensors, then ever more that is otherwise."""
        leaves = batch_leaves(batch)
        groups: dict[int, list[str]] = {}
        for name, dim in self._dims.items():
            groups.setdefault(leaves[name].shape[dim], []).append(name)
        alike = [*groups.values()]
        without = [{*itertools.chain(*some)} for num in (0, 1, 2) for some in itertools.combinations(alike, num)]
        without += [{*self._dims} - {*some} for some in alike]
        ways = [
            (len(out) + together + len(changed), out, together, {**self._first, **changed})
            for out in without
            for together in ([False, True] if len(groups) > 1 and not out else [False])
            for changed in self._changes()
            if len(out) < len(self._dims) and out.isdisjoint(changed)
        ]
        for _, out, together, each in sorted(ways, key=lambda way: way[0]):
            rules = {n: LeafPadding(dim, each[n]) for n, dim in self._dims.items() if n not in out}
            yield PaddingRules(rules, together=together, most=self._most)

    def _changes(self) -> Iterator[dict[str, float]]:
        """Other values for no tensor, for one, and for two."""
        for num in (0, 1, 2):
            for names in itertools.combinations(self._dims, num):
                for values in itertools.product(*(self._candidates[name][1:] for name in names)):
                    yield dict(zip(names, values, strict=True))


def _run(
    model: nn.Module, loss_fn: LossFn, train: bool, device: torch.device, batch: Any, dtype: torch.dtype | None
) -> _Found:
    """The step on a copy of the model in this dtype, without chance."""

    def moved(_: str, leaf: Any) -> Any:
        if not torch.is_tensor(leaf):
            return leaf
        return leaf.to(device, dtype if dtype is not None and leaf.is_floating_point() else None).contiguous()

    batch = map_batch(moved, batch)
    twin = Twin(model, dtype)
    with _WithoutChance() as mode, torch.set_grad_enabled(train), twin.installed() as own:
        if not train:
            own.eval()
        loss = read_loss(loss_fn(own, batch), count_rows(batch))
        if train:
            loss.mean.backward()
    values = {"the loss": loss.mean.detach(), "the sum of its terms": loss.total.detach()}
    values |= {} if loss.weight is None else {"its weight": loss.weight.detach().double()}
    values |= {f"the gradient of {n}": p.grad for n, p in twin.named_parameters() if p.grad is not None}
    values |= {f"the buffer {n}": b for n, b in twin.named_buffers() if b.is_floating_point()}
    return _Found(values, loss.outputs or {}, mode.eps)


def _difference(without: _Found, padded: _Found) -> str:
    """What padding has changed by more than rounding, in words; empty if nothing."""
    tolerance = max(without.eps, padded.eps) ** 0.75
    if without.values.keys() != padded.values.keys():
        return f"{sorted(without.values.keys() ^ padded.values.keys())[0]} is there in one case only"
    largest = max((float(v.abs().max()) for n, v in without.values.items() if "gradient" in n and v.numel()), default=0)
    for name, value in without.values.items():
        other = padded.values[name]
        if value.shape != other.shape:
            return f"{name} has shape {list(value.shape)}, and {list(other.shape)} with padding"
        if not value.numel():
            continue
        scale = float(value.abs().max())
        if "gradient" in name:
            scale = max(scale, 1e-3 * largest)
        error = float((value - other).abs().max())
        if not error <= tolerance * scale + max(without.eps, padded.eps):
            shown = f"{_shown(value)}, and {_shown(other)} with padding"
            return f"{name} is {shown}" if value.numel() == 1 else f"{name} differs by {error:.3g} of {scale:.3g}"
    return ""


def _outputs_of(
    without: _Found, padded: _Found, lengths: Mapping[str, int], more: Mapping[str, int]
) -> tuple[dict[str, tuple[tuple[int, str], ...]], str]:
    """The dims of outputs that have positions of padding, and what padding changes in the outputs, in words."""
    found: dict[str, tuple[tuple[int, str], ...]] = {}
    tolerance = max(without.eps, padded.eps) ** 0.75
    for name, part in without.outputs.items():
        if (other := padded.outputs.get(name)) is None or other.kind != part.kind:
            return found, f"the output {name!r} is not there with padding"
        value, wide = part.value, other.value
        dims = []
        for dim, (short, long) in enumerate(zip(value.shape, wide.shape, strict=False)):
            if short == long:
                continue
            leaves = [leaf for leaf, number in more.items() if number == long - short]
            if part.kind != ROWS or not leaves or value.ndim != wide.ndim:
                return found, f"the output {name!r} has shape {list(value.shape)}, and {list(wide.shape)} with padding"
            leaf = min(leaves, key=lambda each: abs(lengths[each] - short))
            wide = wide.narrow(dim, 0, short)
            dims.append((dim, leaf))
        if dims:
            found[name] = tuple(dims)
        pairs = [(value, wide)]
        pairs += [(torch.as_tensor(part.weight), torch.as_tensor(other.weight))] if part.kind != ROWS else []
        for one, two in pairs:
            scale = float(one.double().abs().max()) if one.numel() else 0.0
            if one.numel() and not float((one.double() - two.double()).abs().max()) <= tolerance * (scale + 1):
                return found, f"the output {name!r} is {_shown(one)}, and {_shown(two)} with padding"
    return found, ""


def _shown(value: Tensor) -> str:
    return f"{float(value):.9g}" if value.numel() == 1 else f"a tensor of norm {float(value.double().norm()):.9g}"


def _longest(model: nn.Module) -> int | None:
    """The number of positions that a transformers model says that it takes."""
    config = getattr(model, "config", None)
    found = [value for name in _LONGEST if isinstance(value := getattr(config, name, None), int)]
    return min(found, default=None)


def _candidates(model: nn.Module, batch: Any, dims: Mapping[str, int]) -> dict[str, list[float]]:
    """For each sequence of the batch the values with which it may be padded, the most likely first."""
    spec, leaves, padding_id = spec_of(batch), batch_leaves(batch), _padding_id(model)
    found: dict[str, list[float]] = {}
    for name in dims:
        leaf, given = leaves[name], spec.pad_value(name)
        word = name.rpartition(".")[2].lower()
        guess = next((value for pattern, value in _BY_NAME if pattern in word), None)
        if given is not None:
            found[name] = [given]
        elif leaf.dtype == torch.bool:
            found[name] = [bool(guess), not guess]
        elif leaf.is_floating_point() or leaf.is_complex():
            found[name] = [0.0]
        else:
            signed = leaf.dtype != torch.uint8
            others = [padding_id, *([_IGNORED, -1] if signed else []), 0]
            wanted = [padding_id if guess is None or (guess < 0 and not signed) else int(guess), *others]
            found[name] = [*dict.fromkeys(wanted)]
    return found


def _padding_id(model: nn.Module) -> int:
    """The id that a model gives to padding, or 0."""
    known = getattr(getattr(model, "config", None), "pad_token_id", None)
    if isinstance(known, int) and known >= 0:
        return known
    ids = {m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None}
    return ids.pop() if len(ids) == 1 else 0


class _NoDropout(TorchFunctionMode):
    """Runs fused attention without dropout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
                del kwargs["dropout_p"]
        return func(*args, **kwargs)


# The number that each kind of draw gives: numbers of other lengths would differ by chance.
_CONSTANT: dict[str, Callable[..., float]] = {
    "bernoulli": lambda p: float(p > 0), "uniform": lambda low, high: (low + high) / 2,
    "normal": lambda mean, std: mean + std / 2, "randint": lambda low, high: (int(low) + int(high) - 1) // 2,
    "exponential": lambda rate: 1 / rate, "geometric": lambda p: 1.0, "cauchy": lambda median, sigma: median + sigma,
    "log_normal": lambda mean, std: 1.0,
}  # fmt: skip


class _WithoutChance(GlobalRandom):
    """Runs eager code in which every random number is the same. `eps` is the coarsest rounding that was seen."""

    def __init__(self) -> None:
        super().__init__(0)
        self.eps = torch.finfo(torch.float64).eps
        self._no_dropout: list[_NoDropout] = []

    def __enter__(self) -> _WithoutChance:
        super().__enter__()
        self._no_dropout.append(_NoDropout())
        self._no_dropout[-1].__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._no_dropout.pop().__exit__(*exception)
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = OP_SPECS.get(func, NO_OP_SPEC).random
        found = func(*args, **(kwargs or {})) if drawn is None else drawn(self._draw, *args, **(kwargs or {}))
        for value in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(value, Tensor) and value.is_floating_point():
                self.eps = max(self.eps, torch.finfo(value.dtype).eps)
        return found

    def _draw(
        self, shape: Any, dtype: torch.dtype, device: torch.device, kind: str, params: tuple[float, ...]
    ) -> Tensor:
        return torch.full(tuple(shape), _CONSTANT[kind](*params), dtype=dtype, device=device)
