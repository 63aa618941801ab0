"""Shapes that are worked out on the meta device are those of fake tensors on a device that computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rule_samples import all_samples
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from plait.compile.ir import shapes
from plait.compile.ir.shapes import ShapeMemo, fake_of, needs_shapes_only, on_meta, spec_of
from plait.compile.ops import pointwise

# Of the elementwise ops, which share one kernel, some.
SOME = frozenset([*pointwise.OPS][::20])
SAMPLES = {op: samples for op, samples in all_samples().items() if needs_shapes_only(op)}
aten = torch.ops.aten


def test_each_op() -> None:
    """In half precision, of which a norm has its statistics in another dtype on some devices."""
    mode, compared = FakeTensorMode(allow_non_fake_inputs=True), 0

    def fake(tensor: Tensor) -> Tensor:
        shape, stride, dtype, device = spec_of(tensor)
        return fake_of((shape, stride, torch.bfloat16 if dtype == torch.float64 else dtype, device), mode)

    for op, samples in SAMPLES.items():
        for sample in samples[:1] if op in SOME or op not in pointwise.OPS else []:
            args, kwargs = tree_map_only(Tensor, fake, (sample.args, sample.kwargs))
            found = on_meta(op, args, kwargs)
            if found is not None:  # else the mode is asked, and refuses it with its own message
                compared += 1
                assert _geometry(found) == _geometry(op(*args, **kwargs)), sample
    assert compared > 150


def _geometry(result: Any) -> list[Any]:
    """Shapes, dtypes, devices and strides; no strides of dims of size 1, by which no element is found."""
    return [
        (t.shape, [s for s, n in zip(t.stride(), t.shape, strict=True) if n != 1], t.dtype, t.device)
        if isinstance(t, Tensor)
        else t
        for t in tree_leaves(result)
    ]


def test_what_meta_cannot_tell_is_left_to_the_mode() -> None:
    for op in (aten.native_layer_norm.default, aten.convolution.default, aten.nonzero.default, aten.bernoulli.default):
        assert not needs_shapes_only(op), op
    mode = FakeTensorMode()
    with mode:
        here, there = torch.ones(3), torch.ones((), device="meta")
        assert on_meta(aten.add.Tensor, (here, there), {}) is None
        assert on_meta(aten.add.Tensor, (here, torch.ones(4)), {}) is None
        with pytest.raises(RuntimeError, match="broadcast"):
            ShapeMemo().call(aten.add.Tensor, (here, torch.ones(4)), {}, aten.add.Tensor, mode)


def test_the_next_step_is_told_without_the_kernel_and_gets_tensors_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_by_kernel", shapes.ProcessMemo(2))
    found, asked = [], shapes._by_kernel
    for _ in range(2):
        mode = FakeTensorMode()
        with mode:
            one, other = torch.ones(3, 1), torch.ones(4)
        found.append(ShapeMemo().call(aten.add.Tensor, (one, other), {}, aten.add.Tensor))
        assert found[-1].fake_mode is mode and len(asked) == 1
    assert found[0] is not found[1] and _geometry(found[0]) == _geometry(found[1])
    default = torch.get_default_dtype()
    with mode:
        number = torch.ones(3, dtype=torch.int64)
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert ShapeMemo().call(aten.div.Tensor, (number, number), {}, aten.div.Tensor).dtype == dtype
    finally:
        torch.set_default_dtype(default)
    assert len(asked) == 1  # it began anew when it was full
