"""op_rule: custom ops of the user's own run on parts of their tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.compile.ops import OP_SPECS, custom
from plait.errors import LayoutError


@torch.library.custom_op("plait_test::gate", mutates_args=())
def gate(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """Normalises the last dim of x, and weighs it with y."""
    return torch.softmax(x * scale, -1) * y


@gate.register_fake
def _(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("plait_test::gate_backward", mutates_args=())
def gate_backward(grad: Tensor, x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    p = torch.softmax(x * scale, -1)
    dp = grad * y
    return (dp - (dp * p).sum(-1, keepdim=True)) * p * scale, grad * p


@gate_backward.register_fake
def _(grad: Tensor, x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(y)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, y, ctx.scale = inputs
    ctx.save_for_backward(x, y)


def _backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    return (*gate_backward(grad, *ctx.saved_tensors, ctx.scale), None)


gate.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("plait_test::total", mutates_args=())
def total(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return (x if weight is None else x * weight).sum(-1)


@total.register_fake
def _(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[:-1])


@torch.library.custom_op("plait_test::put", mutates_args=("x",))
def put(x: Tensor) -> None:
    x.zero_()


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    """Rules of one test are not there for the next."""
    before, texts = dict(OP_SPECS), dict(custom._texts)
    yield
    for table, was in ((OP_SPECS, before), (custom._texts, texts)):
        table.clear()  # type: ignore[attr-defined]
        table.update(was)  # type: ignore[attr-defined]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.side, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        h, y = (layer(x).view(b, s, 4, 4).transpose(1, 2) for layer in (self.up, self.side))
        return self.down(gate(h, y, 0.5).transpose(1, 2).reshape(b, s, 16))  # type: ignore[no-any-return]


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def test_a_custom_op_is_trained_on_parts_without_a_gather() -> None:
    plait.op_rule(gate, "b h s D, b h s D -> b h s D")
    plait.op_rule("plait_test::gate_backward", "b h s D, b h s D, b h s D -> b h s D, b h s D")
    torch.manual_seed(0)
    model, batch = Gated().double(), torch.randn(4, 3, 8, dtype=torch.float64)
    explanation = plait.explain(model, _loss, batch, "data=2 tensor=2")
    assert {c.kind for c in explanation.collectives} == {"all_reduce"}
    assert all(explanation.program.layouts[f"{name}.weight"].placements for name in ("up", "side", "down"))
    assert [i.axis for i in explanation.collectives if i.phase == "forward"].count("tensor") == 1
    report = plait.verify(model, _loss, batch, "data=2 tensor=2", tolerance=1e-12)
    assert report.ok, report


def test_what_an_op_adds_up_is_a_sum_of_terms_and_an_optional_tensor_may_be_missing() -> None:
    plait.op_rule(total, "b k, k -> b")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            with torch.no_grad():
                s = total(y) + total(y, y[0])
            return y * s[:, None]

    torch.manual_seed(0)
    model, batch = Model().double(), torch.randn(4, 8, dtype=torch.float64)
    layouts = {"up.weight": "tensor, -", "up.bias": "tensor"}
    report = plait.verify(model, _loss, batch, "data=2 tensor=2", layouts=layouts, tolerance=1e-12)
    assert report.ok, report


@pytest.mark.parametrize(
    ("op", "text", "said"),
    [
        (gate, "b h s d -> b h s d", "names 1 tensors that each goes in, and plait_test.gate.default has 2"),
        (gate, "b d, b d -> b d, b", "names 2 tensors that each comes out"),
        (gate, "b d, b d", "has no '->'"),
        (gate, "b b, b b -> b b", "names two dims of one tensor b"),
        (gate, "b d, b d -> b e", "e in .* is in no tensor that goes in.*write E"),
        (gate, "b 2, b 2 -> b 2", "'2' in .* is no name of a dim"),
        (put, "b -> b", "writes into its arguments"),
        (torch.ops.aten.mm.default, "m k, k n -> m n", "has a rule already"),
        (torch.ops.aten.rand_like.default, "n -> n", "has a rule already"),
        (torch.ops.aten.add, "n, n -> n", "has several overloads"),
        ("plait_test::nothing", "n -> n", "is no op"),
        (torch.relu, "n -> n", "is no op"),
    ],
)
def test_a_text_that_does_not_fit_is_refused(op: object, text: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        plait.op_rule(op, text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("b h s, b h s -> b h s", r"has b h s where .* a tensor of shape \[4, 4, 3, 4\]"),
        ("b h s D, b s h D -> b h s D", "s in .* is 3 in one tensor .* and 4 in another"),
    ],
)
def test_a_call_that_the_text_does_not_fit_is_refused_before_any_rank_starts(text: str, said: str) -> None:
    plait.op_rule(gate, text)
    plait.op_rule(gate_backward, "B H S D, B H S D, B H S D -> B H S D, B H S D")
    with pytest.raises(LayoutError, match=said):
        plait.explain(Gated(), _loss, torch.randn(4, 3, 8), "tensor=2")


def test_a_rule_may_be_repeated_and_not_changed() -> None:
    plait.op_rule(gate, "b h s D, b h s D -> b h s D")
    plait.op_rule(gate, "b h s D, b h s D -> b h s D")
    with pytest.raises(LayoutError, match="has a rule already, 'b h s D"):
        plait.op_rule(gate, "b H s D, b H s D -> b H s D")


def test_a_custom_op_that_writes_to_what_it_is_given_is_refused_by_its_line() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        h = model(x)
        put(h.detach().clone())
        return h.square().mean()  # type: ignore[no-any-return]

    with pytest.raises(plait.CaptureError, match="test_op_rule.py.*put.default writes to a tensor .* let it return"):
        plait.verify(nn.Linear(4, 2), loss_fn, torch.randn(4, 4), "data=2")
