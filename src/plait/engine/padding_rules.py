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
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from plait.compile.capture.batch import (
    batch_leaves,
    batch_numbers,
    count_rows,
    map_batch,
    sequence_dims,
    spec_of,
    take_rows,
)
from plait.compile.capture.capture import LossFn, one_at_a_time
from plait.compile.capture.loss_values import LossPart, Outputs
from plait.engine.initial_values import with_values
from plait.engine.model_copy import preserved
from plait.engine.padding_check import StepValues, difference, dims_of_outputs, step_values
from plait.errors import PlanError
from plait.plan.refused_cuts import nothing_to_pad, padding_changes, padding_unchecked

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

    multiple  of which lengths become multiples
    leaves    by name, the tensors that are padded
    outputs   by name of an output of the loss function, (its dim, the tensor of the batch whose padding it has)
    together  whether all tensors get the same number of positions, rather than each its own multiple
    most      the largest length that the model takes; None if that is not known
    offsets   by name of a tensor with the places where packed documents begin and end, the tensor of their positions
    longest   by name of a number, which is the length of the longest document, the same
    """

    multiple: int
    leaves: Mapping[str, LeafPadding]
    outputs: Mapping[str, tuple[tuple[int, str], ...]] = field(default_factory=dict)
    together: bool = False
    most: int | None = None
    offsets: Mapping[str, str] = field(default_factory=dict)
    longest: Mapping[str, str] = field(default_factory=dict)

    def lengths(self, batch: Any) -> dict[str, int]:
        """The length of the sequence, or number of offsets, of each tensor of a batch that is padded."""
        leaves = batch_leaves(batch)
        found = {n: leaves[n].shape[p.dim] for n, p in self.leaves.items() if n in leaves and leaves[n].ndim > p.dim}
        return found | {name: len(leaves[name]) for name in self.offsets if name in leaves}

    def rounded(self, name: str, length: int) -> int:
        """The length of a tensor rounded up to a multiple, but not beyond what the model takes.

        The number of offsets has room for a document of padding.
        """
        found = -(-(length + (name in self.offsets)) // self.multiple) * self.multiple
        if self.most is None or length > self.most or name in self.offsets:
            return found
        return min(found, self.most)

    def apart(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """The lengths that are rounded each for itself; those that get the same padding as one, named ''."""
        if not self.together:
            return dict(lengths)
        found = {name: length for name, length in lengths.items() if name in self.offsets}
        return {"": max(length for name, length in lengths.items() if name not in found)} | found

    def of_all(self, lengths: Mapping[str, int], apart: Mapping[str, int]) -> dict[str, int]:
        """The lengths to which tensors of these lengths are padded, from those of `apart`."""
        if not self.together:
            return dict(apart)
        more = apart[""] - self.apart(lengths)[""]
        return {name: apart[name] if name in apart else length + more for name, length in lengths.items()}

    def to_multiple(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """The lengths to which tensors of these lengths are padded, for few more positions."""
        return self.of_all(lengths, {name: self.rounded(name, each) for name, each in self.apart(lengths).items()})

    def longest_documents(self, batch: Any, lengths: Mapping[str, int]) -> dict[str, int]:
        """The numbers of a batch that are the length of its longest document, once it is padded to these lengths,
        rounded up to a multiple. Padding is a document too."""
        leaves = batch_leaves(batch)
        found = {}
        for name, number in batch_numbers(batch).items():
            if (of := self.longest.get(name)) is not None:
                most = max(int(number), lengths[of] - leaves[of].shape[self.leaves[of].dim])
                found[name] = -(-most // self.multiple) * self.multiple
        return found

    def pad(self, batch: Any, lengths: Mapping[str, int], longest: Mapping[str, int] | None = None) -> Any:
        """The batch with its tensors padded to these lengths. Padding of packed documents is one document more.

        `longest` has the lengths of the longest document, if other ranks may have a longer one.
        """
        leaves = batch_leaves(batch)
        numbers = self.longest_documents(batch, lengths) if longest is None else longest

        def change(name: str, leaf: Any) -> Any:
            if name in numbers:
                return numbers[name]
            if not torch.is_tensor(leaf) or name not in lengths:
                return leaf
            value: float
            if (of := self.offsets.get(name)) is not None:
                dim, value = 0, math.prod(leaves[of].shape[: self.leaves[of].dim]) * lengths[of]
            else:
                dim, value = self.leaves[name].dim, self.leaves[name].value
            if (more := lengths[name] - leaf.shape[dim]) <= 0:
                return leaf
            shape = (*leaf.shape[:dim], more, *leaf.shape[dim + 1 :])
            return torch.cat([leaf, leaf.new_full(shape, value)], dim)

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
        outputs = {name: list(dims) for name, dims in self.outputs.items()}
        rest = [self.together, self.most, dict(self.offsets), dict(self.longest)]
        return json.dumps([self.multiple, leaves, outputs, *rest])

    @classmethod
    def from_text(cls, text: str) -> PaddingRules:
        """The rules that `to_text` wrote."""
        multiple, leaves, outputs, *rest = json.loads(text)
        return cls(
            multiple,
            {name: LeafPadding(dim, value) for name, (dim, value) in leaves.items()},
            {name: tuple((dim, leaf) for dim, leaf in dims) for name, dims in outputs.items()},
            *rest,
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
            step = functools.partial(step_values, made, loss_fn, train, device)
            likely = likely_rules(model, batch, multiple)
            return _Search(step, batch, dims, likely, _candidates(model, batch, dims)).rules()


def likely_rules(model: nn.Module, batch: Any, multiple: int) -> PaddingRules:
    """The rules that names and dtypes suggest, which are not checked. Raises PlanError for a batch without
    sequences."""
    if not (dims := sequence_dims(batch)):
        raise PlanError(nothing_to_pad(multiple))
    candidates = _candidates(model, batch, dims)
    leaves = {name: LeafPadding(dim, candidates[name][0]) for name, dim in dims.items()}
    offsets = _offsets(batch, dims)
    return PaddingRules(
        multiple, leaves, most=_longest(model), offsets=offsets, longest=_longest_documents(batch, offsets)
    )


_Step = Callable[[Any, torch.dtype | None], StepValues]


class _Search:
    """The search for rules with which a padded batch gives what the batch gives."""

    def __init__(
        self,
        step: _Step,
        batch: Any,
        dims: Mapping[str, int],
        rules: PaddingRules,
        candidates: Mapping[str, Sequence[float]],
    ) -> None:
        self._step, self._multiple = step, rules.multiple
        self._dims, self._rules, self._candidates = dims, rules, candidates
        self._given = batch
        self._first: Mapping[str, float] = {name: values[0] for name, values in candidates.items()}

    def rules(self) -> PaddingRules:
        batch, without, dtype = self._reference()
        why = ""
        for trial in itertools.islice(self._trials(batch), _MOST_TRIALS):
            lengths = trial.lengths(batch)
            wanted = trial.to_multiple(lengths)
            if all(wanted[name] == lengths[name] for name in trial.leaves):  # there is nothing to see without padding
                wanted = {name: length + self._multiple for name, length in lengths.items()}
            try:
                found = self._step(trial.pad(batch, wanted), dtype)
            except Exception as error:
                why = why or f"padded it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                continue
            more = {name: wanted[name] - length for name, length in lengths.items()}
            outputs, differs = dims_of_outputs(without, found, lengths, more)
            differs = differs or difference(without, found)
            if not differs:
                return replace(trial, outputs=outputs)
            why = differs if not why or why.startswith("padded it raises") else why
        raise PlanError(padding_changes(self._multiple, self._first, why, self._with_two_dims(self._given)))

    def _with_two_dims(self, batch: Any) -> dict[str, tuple[int, ...]]:
        """The shapes of tensors that are not padded, and have the length of one that is in two dims, by name."""
        leaves = batch_leaves(batch)
        lengths = {leaves[name].shape[dim] for name, dim in self._dims.items() if name in leaves}
        others = {name: tuple(leaf.shape) for name, leaf in leaves.items() if name not in self._first}
        return {name: s for name, s in others.items() if any(s[-2:] == (n, n) for n in lengths if n > 1)}

    def _reference(self) -> tuple[Any, StepValues, torch.dtype | None]:
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
        """The first positions of each sequence, so few that nearly a multiple of them is padding. Two at least: what
        normalises over one position says nothing of padding."""
        longest = max(batch_leaves(batch)[name].shape[dim] for name, dim in self._dims.items())
        less = longest - 1 - self._multiple if longest > self._multiple else max(0, longest - 2)

        def shorter(name: str, leaf: Any) -> Any:
            dim, of = self._dims.get(name), self._rules.offsets.get(name)
            if of is not None:  # documents end with the sequence
                return leaf.clamp(max=max(batch_leaves(batch)[of].shape[self._dims[of]] - less, 1))
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
            yield replace(self._rules, leaves=rules, together=together)

    def _changes(self) -> Iterator[dict[str, float]]:
        """Other values for no tensor, for one, and for two."""
        for num in (0, 1, 2):
            for names in itertools.combinations(self._dims, num):
                for values in itertools.product(*(self._candidates[name][1:] for name in names)):
                    yield dict(zip(names, values, strict=True))


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


def _offsets(batch: Any, dims: Mapping[str, int]) -> dict[str, str]:
    """The tensors of the batch with the places where the packed documents of its one row begin and end, such as
    cu_seq_lens_q, and for each the tensor whose positions they are."""
    found: dict[str, str] = {}
    leaves = batch_leaves(batch)
    sizes = {leaves[name].shape[dim]: name for name, dim in dims.items() if math.prod(leaves[name].shape[:dim]) == 1}
    for name, leaf in leaves.items():
        if leaf.ndim == 1 and len(leaf) > 1 and leaf.dtype in (torch.int32, torch.int64):
            places = leaf.tolist()
            if places[0] == 0 and places == sorted(places) and places[-1] in sizes:
                found[name] = sizes[places[-1]]
    return found


def _longest_documents(batch: Any, offsets: Mapping[str, str]) -> dict[str, str]:
    """The numbers of the batch that are the length of its longest document, such as max_length_q."""
    leaves = batch_leaves(batch)
    longest = {int(leaves[name].diff().max()): of for name, of in offsets.items()}
    numbers = batch_numbers(batch)
    return {name: longest[int(n)] for name, n in numbers.items() if "max" in name and int(n) == n and n in longest}


def _padding_id(model: nn.Module) -> int:
    """The id that a model gives to padding, or 0."""
    known = getattr(getattr(model, "config", None), "pad_token_id", None)
    if isinstance(known, int) and known >= 0:
        return known
    ids = {m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None}
    return ids.pop() if len(ids) == 1 else 0
