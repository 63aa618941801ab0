"""Rows that a boolean mask selects, under every plan: the numbers of plain PyTorch, or a refusal by line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.errors import CaptureError, LossError

PLANS = ("data=2", "tensor=2", "data=2 zero=3", "pipeline=2 micro=2")
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).double()


def batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    found = {
        "x": torch.randn(8, 16, generator=g, dtype=torch.float64),
        "y": torch.randint(0, 4, (8,), generator=g),
        "t": torch.randn(8, 4, generator=g, dtype=torch.float64),
        "k": torch.tensor([1, 0, 1, 1, 0, 1, 1, 1]) > 0,
    }
    found["t"][1, 2] = found["t"][5, 0] = torch.nan
    return found


Use = Callable[[Tensor, dict[str, Tensor]], Tensor]


def labelled(z: Tensor, b: dict[str, Tensor]) -> Tensor:
    ok = ~torch.isnan(b["t"])
    return F.mse_loss(z[ok], b["t"][ok])


def twice(z: Tensor, b: dict[str, Tensor]) -> Tensor:
    z, y = z[b["k"]], b["y"][b["k"]]
    return F.cross_entropy(z[y > 0], y[y > 0])


def changed(z: Tensor, b: dict[str, Tensor]) -> Tensor:
    z = z.clone()
    z[b["k"]] = z[b["k"]] * 2
    return z.square().mean()


def routed(z: Tensor, b: dict[str, Tensor]) -> Tensor:
    out = torch.zeros_like(z)
    for expert in range(2):
        rows, which = torch.where((b["y"] % 2 == expert).unsqueeze(1) & (torch.arange(3) < 2))
        out.index_add_(0, rows, z[rows] * (expert + 1) * (which + 1).unsqueeze(-1))
    return out.square().mean()


def capacity(z: Tensor, b: dict[str, Tensor]) -> Tensor:
    """The first two rows of each expert are computed, the others pass by."""
    out = torch.zeros_like(z)
    for expert in range(2):
        rows = (b["y"] % 2 == expert).nonzero(as_tuple=True)[0]
        out[rows[:2]] = z[rows[:2]].tanh() * (expert + 1)
        out.index_add_(0, rows[2:], z[rows][2:])
    return out.square().mean()


def mean_by_hand(z: Tensor, b: dict[str, Tensor]) -> Tensor:
    chosen = z[b["k"]]
    return chosen.sum() / chosen.numel() + chosen.sum() / chosen.shape[0] + chosen.sum() / b["k"].sum()


USES: dict[str, Use] = {
    "cross_entropy": lambda z, b: F.cross_entropy(z[b["k"]], b["y"][b["k"]]),
    "weights": lambda z, b: F.cross_entropy(z[b["k"]], b["y"][b["k"]], weight=WEIGHT, label_smoothing=0.1),
    "sum": lambda z, b: F.cross_entropy(z[b["k"]], b["y"][b["k"]], reduction="sum"),
    "labelled": labelled,
    "where": lambda z, b: F.cross_entropy(z[torch.where(b["k"])[0]], b["y"][torch.where(b["k"])[0]]),
    "nonzero": lambda z, b: z[b["k"].nonzero().squeeze(-1)].square().mean(),
    "masked_select": lambda z, b: z.masked_select(b["t"].nan_to_num(-1) > 0).square().mean(),
    "linear": lambda z, b: F.layer_norm(F.linear(z[b["k"]], WEIGHT.diag()), (4,)).log_softmax(-1)[:, 0].mean(),
    "mask of two dims": lambda z, b: z[b["x"][:, :4] > 0].log1p().nan_to_num().mean(),
    "extremes": lambda z, b: z[b["k"]].max() - z[b["k"]].amin() + z[b["k"]].sum(0).square().mean(),
    "spread": lambda z, b: z[b["k"]].std() + z[b["k"]].var(0, unbiased=False).sum() + z[b["k"]].var(1).std(),
    "spread of dims": lambda z, b: z[b["k"]].std(dim=0, keepdim=True).sum() + torch.var(z[b["k"]], correction=2),
    "gather": lambda z, b: -z[b["k"]].log_softmax(-1).gather(1, b["y"][b["k"]].unsqueeze(1)).mean(),
    "cat": lambda z, b: torch.cat([z[b["k"]], z[~b["k"]] * 2, z]).square().mean(),
    "twice": twice,
    "changed": changed,
    "routed": routed,
    "capacity": capacity,
    "mean_by_hand": mean_by_hand,
}


@pytest.mark.parametrize("name", USES)
def test_selected_rows_are_those_of_plain_pytorch(name: str) -> None:
    verifier = plait.Verifier(net(), lambda m, b: USES[name](m(b["x"]), b), batch())
    for plan in PLANS:
        assert verifier.verify(plan).ok, plan


def test_a_selection_is_a_tensor_to_a_model_that_asks() -> None:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        found = {"logits": m(b["x"])[b["k"]], "name": "net"}
        return torch.stack([v.square().mean() for v in found.values() if isinstance(v, Tensor)]).sum()

    assert plait.verify(net(), loss, batch(), "data=2", steps=1).ok


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / 2


@pytest.mark.parametrize(
    "use", [torch.tensor, torch.as_tensor, torch.zeros, lambda x: Halved.apply(x)], ids=["tensor", "as", "zeros", "own"]
)
def test_what_takes_the_memory_of_a_tensor_takes_no_selection(use: Any) -> None:
    """They ask in C++ whether it is a tensor. An autograd.Function would have left out its backward."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        found = m(b["x"])
        return use(found[b["k"]]).sum() + found.square().mean()

    with pytest.raises(CaptureError, match="the shape of a result depends on the numbers"):
        plait.verify(net(), loss, batch(), "data=2", steps=1)


def test_a_selection_is_no_buffer() -> None:
    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        found = m(b["x"])
        m.register_buffer("kept", found[b["k"]])
        return found.square().mean()

    with pytest.raises(CaptureError, match="the buffer kept of rows that a mask selects"):
        plait.verify(net(), loss, batch(), "data=2", steps=1)


def test_the_loss_of_a_batch_without_a_selected_row_is_that_of_pytorch() -> None:
    def loss_fn(m: Any, b: Any) -> Tensor:
        return F.mse_loss(m(b["x"])[b["k"]], b["t"].nan_to_num()[b["k"]], reduction="sum") + 0 * m(b["x"]).sum()

    given = batch()
    given["k"] = torch.zeros(8, dtype=torch.bool)
    report = plait.verify(net(), loss_fn, given, "data=2")
    assert report.ok


@pytest.mark.parametrize(
    "use",
    [
        lambda z, b: torch.zeros(len(z[b["k"]])).sum() + z.mean(),
        lambda z, b: (z[b["k"]] * z[b["y"] > 0]).mean(),
        lambda z, b: (z[b["k"]] * z).mean(),
        lambda z, b: (z[b["k"]] @ z[b["k"]].t()).mean(),
        lambda z, b: F.batch_norm(z[b["k"]], None, None, training=True).square().mean(),
        lambda z, b: F.dropout(z[b["k"]], 0.5).mean(),
        lambda z, b: z[b["k"]][0].mean(),
        lambda z, b: z[b["k"]][:-1].mean(),
        lambda z, b: z[b["k"]].softmax(0).square().mean(),
        lambda z, b: z[:, torch.zeros_like(z[0], dtype=torch.bool)].sum() + z.mean(),
        lambda z, b: torch.unique(b["y"]).double().mean() * z.mean(),
    ],
)  # fmt: skip
def test_what_needs_the_number_of_rows_is_refused_by_its_line(use: Use) -> None:
    with pytest.raises(plait.CaptureError, match=r"test_selection.py:\d+.*depends on the numbers") as caught:
        plait.verify(net(), lambda m, b: use(m(b["x"]), b), batch(), "data=2")
    assert caught.value.data_dependent


class Merged(nn.Linear):
    """LoRA of some columns of a fused projection, padded by a mask that the module keeps (loralib's MergedLinear)."""

    def __init__(self, how: str, in_buffer: bool) -> None:
        super().__init__(16, 12)
        self.how = how
        self.one, self.two = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.randn(8, 2))
        mask = torch.tensor([True, False, True])[:, None].expand(3, 4).reshape(-1)
        if in_buffer:
            self.register_buffer("mask", mask)
        else:
            self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        change = self.two @ self.one
        if self.how == "rows":
            whole = change.new_zeros((len(self.mask), change.shape[1]))
            whole[self.mask] = change
            return F.linear(x, self.weight + whole, self.bias)
        if self.how == "scatter":
            whole = torch.zeros_like(self.weight).masked_scatter(self.mask[:, None].expand(12, 16), change)
            return F.linear(x, self.weight + whole, self.bias)
        added = x.new_zeros((len(x), len(self.mask)))
        added[:, self.mask] = F.linear(x, change)
        return super().forward(x) + added + added[:, self.mask].sum(1, keepdim=True)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.filterwarnings("ignore:plait has no rule")
@pytest.mark.parametrize("in_buffer", [True, False])
@pytest.mark.parametrize("how", ["rows", "columns", "scatter"])
def test_masks_that_the_model_keeps(how: str, in_buffer: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Merged(how, in_buffer), nn.Linear(12, 4)).double()
    report = plait.verify(model, squares, batch()["x"], "data=2 zero=3")
    assert report.ok, report


def test_a_mask_is_known_beside_tensors_that_change_in_place_and_if_it_does() -> None:
    torch.manual_seed(0)

    def loss_fn(model: nn.Module, x: Tensor, turned: bool) -> Tensor:
        h = model[0](x[:, None])
        h[0] += 1  # a view's write stays as it is in the graph till the capture ends
        mask = model[0].mask.clone()
        if turned:
            mask[:8].logical_not_()
        whole = h.new_zeros(12)
        whole[mask] = model[0].two[:, 0]
        return model[1](h + whole).square().mean()

    model = nn.Sequential(Merged("rows", False), nn.Linear(12, 4)).double()
    for turned in (False, True):
        report = plait.verify(model, functools.partial(loss_fn, turned=turned), batch()["x"], "data=2")
        assert report.ok, report


def test_a_mask_that_the_user_changes() -> None:
    """An attribute's is another step; a buffer's is told of."""
    torch.manual_seed(0)
    x, other = batch()["x"], torch.tensor([False, True, True])[:, None].expand(3, 4).reshape(-1)
    for in_buffer in (False, True):
        model, same = (nn.Sequential(Merged("rows", in_buffer), nn.Linear(12, 4)).double() for _ in range(2))
        same.load_state_dict(model.state_dict())
        trainer = plait.Trainer(model, squares, lambda p: torch.optim.SGD(p, lr=0.0), "")
        trainer.step(x)
        for each in (model, same):
            each[0].mask = other.clone()
        if in_buffer:
            with pytest.raises(LossError, match=r"whole\[self.mask\] = change"):
                trainer.step(x)
        else:
            assert float(trainer.step(x)) == pytest.approx(squares(same, x).item())
        trainer.close()
