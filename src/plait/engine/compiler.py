"""Captures and compiles a step once per shape of batch. Plans share captures; ranks that are threads share a
compiler.

A step is captured anew when the Python values that it has read differ (engine/python_watch.py). Values that turn out
not to affect the graph are ignored from then on. A run can say how many captures there were, how long each took, and
what caused it.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from plait.comm.device import device_name
from plait.comm.hidden_group import without_process_group
from plait.compile.capture.batch import batch_form, batch_leaves, batch_numbers
from plait.compile.capture.capture import LossFn, capture, one_at_a_time
from plait.compile.capture.capture_errors import users_line
from plait.compile.capture.captured import Captured, same_step
from plait.compile.capture.precision import FULL, Precision
from plait.compile.capture.reachable import Reached
from plait.compile.compiled import NOTHING_SETTLED, Compiled
from plait.compile.ir.calls import device_type
from plait.compile.ir.dtypes import torch_name
from plait.compile.pipeline import compile
from plait.compile.stages.split import updates_within
from plait.engine.padding_rules import PaddingRules, find_rules, likely_rules
from plait.engine.python_effects import Changes, examine, settled
from plait.engine.python_watch import PythonWatch, Variant, is_flag
from plait.plan.annotation import Annotations
from plait.plan.plan import Plan
from plait.spec.cluster_file import cluster_of_device

Leaves = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class StepCapture:
    """One capture of a step, with its layout and lowering.

    Attributes:
        cause: what differed from the capture before, in words; of a batch the tensor, the dim and both sizes.
        seconds: the time that it took on this rank.
        train: whether it is the step of training, or that of an evaluation.
    """

    cause: str
    seconds: float
    train: bool = True


@dataclass(frozen=True)
class CaptureReport:
    """The captures of a run, in order. Print it for a table."""

    captures: tuple[StepCapture, ...] = ()

    def __len__(self) -> int:
        return len(self.captures)

    def __iter__(self) -> Iterator[StepCapture]:
        return iter(self.captures)

    @property
    def seconds(self) -> float:
        """The time of all captures."""
        return sum(each.seconds for each in self.captures)

    @property
    def again(self) -> int:
        """The number of captures after the first one of training and the first one of evaluation."""
        return len(self) - len({each.train for each in self})

    def __str__(self) -> str:
        if not self.captures:
            return "no step was captured"
        lines = [f"captured {len(self)} time{'s' * (len(self) != 1)}, in {self.seconds:.1f} s"]
        for number, each in enumerate(self.captures, start=1):
            kind = "" if each.train else "evaluation: "
            lines.append(f"  {number:3}  {each.seconds:7.2f} s  {kind}{each.cause}")
        return "\n".join(lines)


def leaves_of(batch: Any) -> Leaves:
    """The dtype and shape of each tensor of a batch, by name."""
    return {name: (torch_name(leaf.dtype), tuple(leaf.shape)) for name, leaf in batch_leaves(batch).items()}


def difference_of_leaves(before: Leaves, now: Leaves) -> str:
    """What differs between the tensors of two batches, in words; empty if the tensors are alike."""
    if gone := [name for name in before if name not in now]:
        return f"the batch has no {gone[0]}, which the one before had"
    if new := [name for name in now if name not in before]:
        return f"the batch has {new[0]}, which the one before had not"
    found: dict[str, list[str]] = {}
    for name, (dtype, shape) in now.items():
        was, sizes = before[name]
        if was != dtype:
            return f"{name} is {dtype} after {was}"
        if len(sizes) != len(shape):
            return f"{name} has shape {list(shape)} after {list(sizes)}"
        for dim, (old, size) in enumerate(zip(sizes, shape, strict=True)):
            if old != size:
                found.setdefault(f"dim {dim} from {old} to {size}", []).append(name)
    return "; ".join(f"{', '.join(names)}: {what}" for what, names in found.items())


MOST_KEPT = 64  # largest number of captures, and of their lowered steps, that are kept
_MANY = 8  # number of captures after which a warning says why there are so many; the next comes at twice as many
_Kind = tuple[str, bool, Precision, bool]
_Key = tuple[_Kind, Variant, str]  # the text is what the step asked of Python numbers in the batch


K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """A dict that keeps the last MOST_KEPT values."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > MOST_KEPT:
            self.popitem(last=False)


_models: WeakSet[nn.Module] = WeakSet()  # all captured models: another trainer may train what a loss reads


class Captures:
    """The captured steps of one model and loss, by the batch's structure and shapes. Plans may share them.

    device    where the steps will run, if not where the model is
    warns     whether to warn of many captures, as in a training run
    changing  the names of untrained parameters that change in a step
    changes   by the id of a capture: the Python values that it changes
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, device: torch.device | None = None, warns: bool = True
    ) -> None:
        self._warns = warns
        self.model = model
        _models.add(model)
        self.loss_fn = loss_fn
        self.device = device
        self.changing: frozenset[str] = frozenset()
        self._watch: PythonWatch | None = None
        self._found: Recent[_Key, Captured] = Recent()
        self.changes: dict[int, Changes] = {}
        self._causes: dict[int, str] = {}  # by the id of a capture, why it was made
        self._num_captured = Counter[bool]()  # by whether the step trains
        self._reasons: list[str] = []  # of the last captures of steps that train
        self._leaves: dict[str, Leaves] = {}  # the dtype and shape of each tensor of a batch, by the batch's form
        self._has_warned = False

    @property
    def watch(self) -> PythonWatch:
        """The watch of the Python values that the step reads."""
        with one_at_a_time:
            if self._watch is None:
                self._watch = PythonWatch(self.model, self.loss_fn)
            return self._watch

    @property
    def variant(self) -> Variant:
        """The differences of those values from those of the first capture."""
        with one_at_a_time:
            return self.watch.variant

    def tensor(self, captured: Captured, name: str) -> Tensor:
        """The current tensor outside the model that a step reads under this name."""
        with one_at_a_time:
            found = self.watch.tensor(name) if name in self.watch.reached.tensors else captured.outside[name]
        return found

    def captured(self, batch: Any, train: bool, precision: Precision = FULL, normalised: bool = True) -> Captured:
        """The step on a global batch; `train=False` is the forward pass of evaluation. Raises CaptureError if it
        cannot be captured."""
        kind = (batch_form(batch), train, precision, normalised)
        self._leaves[kind[0]] = leaves_of(batch)
        numbers = batch_numbers(batch)
        with one_at_a_time:
            variant = self.variant
            for (known, before, _), found in self._found.items():
                if known == kind and before == variant and found.asked.fits(numbers):
                    return found
            return self._capture(batch, kind)

    def _capture(self, batch: Any, kind: _Kind) -> Captured:
        _, train, precision, normalised = kind
        fixed = frozenset().union(*(one.fixed for (known, *_), one in self._found.items() if known == kind))

        def again(reached: Reached | None = None) -> Captured:
            with without_process_group(functools.partial(users_line, self.model, self.loss_fn)):
                return capture(
                    self.model,
                    self.loss_fn,
                    batch,
                    train=train,
                    differentiate=train,
                    device=self.device,
                    precision=precision,
                    normalised=normalised,
                    changing=self.changing,
                    reached=reached or self.watch.walk(),
                    fixed=fixed,
                )

        found = again(self.watch.reached)
        changes = settled(found, self.watch, again)
        if changes.effects:
            self.changes[id(found)] = changes
        self.changing |= found.changing
        self._warn_of_gradients(found)
        self.watch.compare(found.compared)
        variant = self.watch.variant
        for (other, before, _), known in list(self._found.items()):
            fits = other == kind and before != variant and known.asked.fits(batch_numbers(batch))
            if fits and same_step(known, found):
                differing = {place for place, _ in {*before} ^ {*variant} if not is_flag(place)}
                numbers = {place for place in differing if self.watch.number(place) is not None}
                self.watch.ignore(differing - numbers)
                if numbers:
                    examine(self.watch, again, numbers)
                known.asked.answers.update(found.asked.answers)
                kept = [((k, self.watch.stripped(v), str(c.asked)), c) for (k, v, _), c in self._found.items()]
                self._found = Recent(kept)
                variant, found = self.watch.variant, known
                break
        else:
            self._count(kind, variant, found)
        self._found[kind, variant, str(found.asked)] = found
        return found

    def _warn_of_gradients(self, found: Captured) -> None:
        """Warn once of parameters outside the model, which get no gradients, unless another trainer has them."""
        trained = {id(p) for model in _models for p in model.parameters()}
        others = [name for name in found.differentiable if id(found.outside[name]) not in trained]
        if others and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the step reads {others[0]}, which requires gradients and is no parameter of the model: a step gives"
                " it none. Make its module a part of the model to train it, or let it have requires_grad_(False)",
                stacklevel=2,
            )

    def cause(self, captured: Captured) -> str:
        """Why a step was captured, in words; empty for the first capture."""
        return self._causes.get(id(captured), "")

    def _count(self, kind: _Kind, variant: Variant, found: Captured) -> None:
        """Note why a step is captured again, and warn of many captures, with the differences between them."""
        train = kind[1]
        others = [(key, one) for key, one in self._found.items() if key[0][1] == train]
        self._num_captured[train] += 1
        if not others:
            return
        (last, before, _), one = others[-1]
        differs = found.asked.difference(one.asked) if (last, before) == (kind, variant) else ""
        cause = self._causes[id(found)] = differs or self._difference((last, before), (kind, variant))
        if not train or not self._warns:
            return
        self._reasons = [*self._reasons[-2:], cause]
        number = self._num_captured[train] - 1
        if number >= _MANY and number & (number - 1) == 0:
            warnings.warn(
                f"the training step was captured {number + 1} times, which takes seconds each:"
                f" {'; '.join(dict.fromkeys(self._reasons))}. A number that changes from step to step is captured once"
                " if it is a 0-d tensor, or one of the batch that Python does not need to know (no float(n), no shape);"
                " for sequences of many lengths add shapes=bucket:64 to the plan, which pads them to few. The last"
                f" {MOST_KEPT} captures are kept",
                stacklevel=2,
            )

    def _difference(self, one: tuple[_Kind, Variant], other: tuple[_Kind, Variant]) -> str:
        (before, was), (kind, now) = one, other
        if before[0] != kind[0]:
            return difference_of_leaves(self._leaves[before[0]], self._leaves[kind[0]]) or (
                f"a batch {kind[0]} after {before[0]}"
            )
        old, new = dict(was), dict(now)
        place = next((place for place in {**old, **new} if old.get(place) != new.get(place)), None)
        if place is None:
            return "another precision or plan"
        first = self.watch.at_first(place)
        return f"{place} is {_shown(new.get(place, first))} after {_shown(old.get(place, first))}"


def _shown(token: object) -> str:
    text = token[1] if isinstance(token, tuple) and len(token) == 2 else token
    return str(text) if len(str(text)) <= 40 else f"{str(text)[:37]}..."


class Compiler:
    """Compiles the captured steps of a model under a plan, and caches the result by the batch's structure and
    shapes.

    Layouts of parameters are decided with the first batch, and kept from then on. With `shapes=bucket:N` it also knows
    how batches are padded; who gives it a batch has padded it.
    """

    def __init__(self, captures: Captures, plan: Plan, annotations: Annotations | None = None) -> None:
        self.captures = captures
        self.plan = plan
        self.annotations = annotations
        self._found: Recent[tuple[int, bool, int], Compiled] = Recent()
        self._settled = NOTHING_SETTLED
        self._lock = threading.Lock()
        self._rules: dict[tuple[bool, tuple[str, ...]], PaddingRules] = {}
        self._rules_lock = threading.Lock()

    @property
    def model(self) -> nn.Module:
        """The captured model."""
        return self.captures.model

    @property
    def loss_fn(self) -> LossFn:
        """The captured loss function."""
        return self.captures.loss_fn

    @staticmethod
    def names_of(batch: Any) -> tuple[str, ...]:
        """The names of the tensors of a batch, for which there are rules of padding."""
        return tuple(batch_leaves(batch))

    def padding_rules(self, batch: Any, train: bool = True) -> PaddingRules:
        """How batches with these tensors are padded. Raises PlanError if padding changes the step of this batch."""
        key = (train, self.names_of(batch))
        with self._rules_lock:
            if key not in self._rules:
                self._rules[key] = find_rules(self.model, self.loss_fn, batch, self.plan.shapes, train, seed=0)
            return self._rules[key]

    def padded(self, batch: Any) -> Any:
        """A global batch as a step that trains sees it: padded, if the plan has buckets.

        Where the model has no values yet, this does not check that padding changes nothing, as training does.
        """
        if not self.plan.shapes:
            return batch
        has_values = not any(p.is_meta for p in self.model.parameters())
        rules = self.padding_rules(batch) if has_values else likely_rules(self.model, batch, self.plan.shapes)
        return rules.pad(batch, rules.to_multiple(rules.lengths(batch)))

    def captured(self, batch: Any, train: bool = True) -> Captured:
        """The captured step of a global microbatch."""
        precision = Precision(self.plan.precision, self.plan.exceptions)
        return self.captures.captured(batch, train, precision, self.plan.micro == 1 or updates_within(self.plan))

    def compiled(self, batch: Any, train: bool = True, num_micro: int = 1) -> Compiled:
        """The compiled step of a global microbatch; for an evaluation, of the first of `num_micro` microbatches."""
        return self.compiled_from(self.captured(batch, train), train, num_micro)

    def compiled_from(self, captured: Captured, train: bool = True, num_micro: int = 1) -> Compiled:
        """The compiled step of a capture that was made for this plan."""
        plan = self.plan if train else replace(self.plan, micro=num_micro)
        key = (id(captured), train, plan.micro)
        with self._lock:
            if key not in self._found:
                kind = device_type(captured.graph)
                cluster = cluster_of_device(kind, device_name(kind), plan.num_processes)
                found = compile(captured, plan, self.annotations, self._settled, cluster=cluster)
                self._settled = self._settled.after(found.program)
                self._found[key] = found
            return self._found[key]
