"""Memory formats: kernels that read memory get it as at capture, whatever a stage or a rank makes of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import run_whole
from rule_samples import all_samples
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

import plait
from plait.compile.ops import OP_SPECS, View
from plait.compile.ops.comm_ops import in_format
from plait.compile.sharding.formats import format_of

aten = torch.ops.aten
REWRITTEN = {op for op, row in OP_SPECS.items() if row.view is View.RESHAPE or row.reads == "memory"}


def lying_otherwise(x: Tensor) -> Iterator[Tensor]:
    """The same numbers: dims in the reverse order in memory, and with holes."""
    back = list(reversed(range(x.ndim)))
    yield x.permute(back).contiguous().permute(back)
    wide = x.new_empty([2 * n for n in x.shape])
    yield wide[tuple(slice(0, 2 * n, 2) for n in x.shape)].copy_(x)


@pytest.mark.filterwarnings("ignore:.*non-contiguous")
def test_kernels_that_follow_strides_are_told_from_those_that_do_not() -> None:
    wrong = set()
    for op, samples in all_samples().items():
        if getattr(op, "namespace", "") != "aten" or op in REWRITTEN or OP_SPECS[op].formats:
            continue
        for sample in samples[:3]:
            leaves, tree = tree_flatten((sample.args, sample.kwargs))
            places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.ndim > 1]
            if sample.shapes_only or not places:
                continue
            wanted = run_whole(sample)
            for place in places:
                for other in lying_otherwise(leaves[place]):
                    args, kwargs = tree_unflatten([*leaves[:place], other, *leaves[place + 1 :]], tree)
                    result = sample.run(*args, **kwargs)
                    found = result if isinstance(result, (tuple, list)) else (result,)
                    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if isinstance(b, Tensor)]
                    if not all(torch.allclose(a, b, 1e-4, 1e-5, equal_nan=True) for a, b in pairs):
                        wrong.add(str(op))
    assert not wrong, f"give these ops formats=True in their rows: {sorted(wrong)}"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 4, 1), (0, 3, 4, 5)])
def test_a_format_is_kept_or_made(shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    back = sorted(range(4), key=order.__getitem__)
    made = torch.empty([shape[d] for d in order]).permute(back)
    repeated = torch.randn(shape[0], 1, *shape[2:]).expand(shape)
    for given in (torch.randn(shape), *lying_otherwise(torch.randn(shape)), repeated):
        found = in_format(given, order, True)
        assert found.equal(given) and found.stride() == made.stride()
        assert in_format(found, order, True) is found
    holes = torch.randn(2, 4, 6)[:, :2]
    assert in_format(holes, (0, 1, 2), False) is holes
    assert in_format(holes, (1, 0, 2), False).stride() == (6, 12, 1)


class Pixels(nn.Module):
    """Linear over pixels, whose result lies channels-last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.silu(self.norm(x)))  # type: ignore[no-any-return]


class Groups(nn.GroupNorm):
    def __init__(self, width: int) -> None:
        super().__init__(4, width)


class Channels(nn.Module):
    """A norm over channels, which lie last for it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.silu(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)))  # type: ignore[no-any-return]


class Overlapping(nn.Module):
    """Reads memory itself."""

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        windows = x.contiguous().as_strided((n, c, h, w - 1, 2), (c * h * w, h * w, w, 1, 1))
        return x + F.pad(windows.mean(-1), (0, 1))


class Resized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(F.adaptive_max_pool2d(x, 4), scale_factor=2, mode="bilinear") + F.max_pool2d(x, 3, 1, 1)


def image_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["x"])


@functools.cache
def images(channels_last: bool, *kinds: Any) -> plait.Verifier:
    torch.manual_seed(0)
    middle = [kind() if kind in (Overlapping, Resized) else kind(8) for kind in kinds]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *middle, nn.Conv2d(8, 3, 3, padding=1)).double()
    lie = torch.channels_last if channels_last else torch.contiguous_format
    batch = {"x": torch.randn(8, 3, 8, 8, dtype=torch.float64).contiguous(memory_format=lie)}
    return plait.Verifier(model.to(memory_format=lie), image_loss, batch, steps=1)


@pytest.mark.parametrize(
    ("channels_last", "kinds", "plan"),
    [
        (False, (Pixels, Residual), "pipeline=2 micro=4 cut=2.conv"),
        (False, (Pixels, Residual), "data=2 pipeline=2 micro=4 cut=2"),  # one row a rank: strides of that dim are free
        (True, (Residual, Residual), "pipeline=2 micro=4"),
        (True, (Residual, Residual), "pipeline=2 micro=2 schedule=zb-v recompute=layer"),
        (True, (Residual, Resized, Residual), "pipeline=3 micro=2 home.activations=host"),
        (True, (Groups, Channels), "tensor=4"),  # of one group a rank the statistics are one column
        (True, (Residual, nn.BatchNorm2d, Residual), "tensor=2"),
        (True, (Residual, Pixels, Residual), "data=2 tensor=2 pipeline=2 micro=2 zero=3"),
        (False, (Residual, Overlapping, Pixels, Overlapping), "pipeline=3 micro=2"),
        (True, (Overlapping, Resized, Overlapping), "data=2 zero=3 recompute=layer"),
    ],
)
def test_images_in_both_formats(channels_last: bool, kinds: Any, plan: str) -> None:
    report = images(channels_last, *kinds).verify(plan)
    # In front of a batch norm a bias has a gradient of nothing but rounding.
    assert report.ok and report.worst_gradient.relative < 1e-5, report


@pytest.mark.parametrize("plan", ["data=4", "data=2 micro=2"])
def test_one_row_whose_channels_lie_last(plan: str) -> None:
    """Its strides fit both formats, and batch norm's kernels go by one for the input and the other for its gradient."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.conv, self.head = nn.Linear(3, 8), nn.Conv3d(8, 16, 3, padding=1), nn.Conv3d(16, 4, 1)
            self.norm = nn.InstanceNorm3d(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.silu(self.norm(self.conv(self.mix(x.movedim(1, -1)).movedim(-1, 1)))))

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):  # whose convolutions choose the format of what they give
            return F.mse_loss(model(batch["x"]).float(), batch["y"])

    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 3, 4, 4, 4), "y": torch.randn(4, 4, 4, 4, 4)}
    report = plait.verify(Net(), loss_fn, batch, plan)
    assert report.ok, report


@pytest.mark.parametrize("lie", [torch.contiguous_format, torch.channels_last_3d])
def test_a_reshape_of_a_volume_copies_where_it_does_on_one_device(lie: torch.memory_format) -> None:
    """The result of a convolution lies as the library writes it that computes it, and that decides whether what the
    model changes in place is the result or a copy."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv3d(2, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x.contiguous(memory_format=lie))
            y.flatten(1).mul_(3.0)
            return y

    torch.manual_seed(0)
    model, batch = Net(), torch.randn(4, 2, 3, 3, 3)
    report = plait.verify(model, lambda model, x: model(x).square().mean(), batch, "data=2")
    assert report.ok, report


@pytest.mark.parametrize("plan", ["data=2", "pipeline=2"])
def test_a_volume_of_one_channel_padded_in_circles(plan: str) -> None:
    """The strides of its result fit both formats, and ops in place have the step read a second time."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv3d(2, 1, 2, padding=1, padding_mode="circular")
            self.mix, self.head = nn.Linear(1, 1), nn.Conv3d(1, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            mixed = self.mix(self.conv(x).permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3)
            return self.head(mixed).flatten(1)

    torch.manual_seed(0)
    report = plait.verify(Net(), lambda model, x: model(x).square().mean(), torch.randn(4, 2, 2, 2, 2), plan)
    assert report.ok, report


def test_rows_of_a_mask_begin_evenly_and_repeat_in_place() -> None:
    """As the memory-efficient attention of GPUs needs them, wherever a mask was in between."""
    once = F.pad(torch.randn(1, 1, 4, 6), (0, 10))[..., :6]
    mask = once.expand(2, 3, 4, 6)
    how = dataclasses.astuple(format_of(mask, strided=True))
    assert in_format(mask, *how) is mask
    sent = in_format(once.contiguous().expand(2, 3, 4, 6), *how)
    assert sent.equal(mask) and sent.stride()[:2] == (0, 0) and sent.stride(2) % 4 == 0
    whole = in_format(mask.contiguous(), *how)
    assert whole.equal(mask) and all(step % 4 == 0 for step in whole.stride()[:-1])
    assert in_format(whole, *how) is whole
    assert not dataclasses.astuple(format_of(mask))[-1]  # other kernels get repeated elements one by one
