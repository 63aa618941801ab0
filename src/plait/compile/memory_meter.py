"""The bytes of memory that live while a rank runs its program. Each storage counts once, until it is freed.

The program itself runs on tensors without memory (`FakeTensorMode`). A meter counts each storage that a call allocates,
and subtracts it when Python frees it. So views, buckets and updates in place are counted as they are, and a new op
needs no line here. The workspace of a kernel is not counted.

    meter = Meter(device)
    world.meter = meter                    # any World with this attribute
    with FakeTensorMode(allow_non_fake_inputs=True), meter:
        ... run the program of with_memory_marks(graph, gradients)
    meter.peak, meter.most, meter.saved
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from plait.compile.ops import op_spec
from plait.cost.memory_model import ACTIVATIONS, PARAMETERS

aten = torch.ops.aten


class Meter(TorchDispatchMode):
    """Counts the bytes of tensors on one type of device while the mode is on, by class (cost/memory_model.py).

    A number that the program reads from a tensor without memory is 0.5, or 0 for integers.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.label = PARAMETERS  # the class of tensors from now on
        self.moment = ""
        self.live: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.at_peak: dict[str, int] = {}
        self.peak = 0
        self.peak_moment = ""
        self.saved = 0  # bytes of activations when backward began
        self.total = 0
        self._counting = True
        self._held: dict[int, tuple[int, str, Any]] = {}  # storage -> (bytes, class, weak reference)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return 0.5 if args[0].is_floating_point() else 0
        result = (op_spec(func).fake or func)(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self._count(value)
        return result

    def at(self, moment: str, label: str) -> None:
        """Set the moment (such as "forward 0") and the class of tensors from now on."""
        if moment.startswith("backward") and self.moment.startswith("forward"):
            self.saved = max(self.saved, self.live[ACTIVATIONS])
        self.moment, self.label = moment, label

    def claim(self, values: object, label: str) -> None:
        """Count the storages of these tensors under the class `label` from now on."""
        for value in pytree.tree_leaves(values):
            if isinstance(value, Tensor):
                key = value.untyped_storage()._cdata
                if key in self._held:
                    num_bytes, old, reference = self._held[key]
                    self._held[key] = (num_bytes, label, reference)
                    self.live[old] -= num_bytes
                    self._add(label, num_bytes)

    def count(self, values: object, label: str) -> None:
        """Count these tensors under the class `label`, also if they were made while the mode was off."""
        for value in pytree.tree_leaves(values):
            if isinstance(value, Tensor):
                self._count(value)
        self.claim(values, label)

    def claim_all(self, label: str) -> None:
        """Count all that lives under the class `label` from now on."""
        self._held = {key: (num_bytes, label, reference) for key, (num_bytes, _, reference) in self._held.items()}
        self.live = Counter({label: self.total})

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Count what is made in the context under the class `label`."""
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what is made in the context."""
        self._counting = False
        try:
            yield
        finally:
            self._counting = True

    def begin(self) -> None:
        """Begin to measure peaks anew, from what lives now."""
        self.most, self.at_peak = Counter(self.live), dict(self.live)
        self.peak, self.peak_moment, self.saved = self.total, self.moment, 0

    def _count(self, value: Tensor) -> None:
        if value.device.type != self.device.type:
            return
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return
        num_bytes = storage.nbytes() if self._counting else 0
        self._held[key] = (num_bytes, self.label, weakref.ref(storage, lambda _: self._let_go(key)))
        self.total += num_bytes
        self._add(self.label, num_bytes)
        if self.total > self.peak:
            self.peak, self.peak_moment, self.at_peak = self.total, self.moment, dict(self.live)

    def _add(self, label: str, num_bytes: int) -> None:
        self.live[label] += num_bytes
        self.most[label] = max(self.most[label], self.live[label])

    def _let_go(self, key: int) -> None:
        num_bytes, label, _ = self._held.pop(key)
        self.live[label] -= num_bytes
        self.total -= num_bytes
