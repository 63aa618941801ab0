"""Kernels of cuDNN and MIOpen that a model calls by name: a capture records PyTorch's own ops in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

import plait
from plait.compile.capture.capture import capture
from plait.compile.ops import OP_SPECS
from plait.engine.compiler import Captures, Compiler

aten = torch.ops.aten


class Net(nn.Module):
    """Convolutions and a batch norm, by the ops of a library, or plainly."""

    def __init__(self, library: str) -> None:
        super().__init__()
        self.library = library
        self.down, self.up = nn.Conv2d(4, 8, 3, 2, 1, groups=2), nn.ConvTranspose2d(8, 4, 3, 2, 1, 1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        stats = norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.training, 0.1, 1e-5
        two, one = [2, 2], [1, 1]
        if self.library == "cudnn":
            tail = False, False, False  # benchmark, deterministic, allow TF32
            h = aten.cudnn_convolution(x, self.down.weight, one, two, one, 2, *tail) + self.down.bias[:, None, None]
            h, *_ = aten.cudnn_batch_norm(h, *stats)
            up = aten.cudnn_convolution_transpose(F.relu(h), self.up.weight, one, one, two, one, 1, *tail)
            return up + self.up.bias[:, None, None]
        if self.library == "miopen":
            h = aten.miopen_convolution(x, self.down.weight, self.down.bias, one, two, one, 2, False, False)
            h, *_ = aten.miopen_batch_norm(h, *stats)
            return aten.miopen_convolution_transpose(
                F.relu(h), self.up.weight, self.up.bias, one, one, two, one, 1, False, False
            )
        return self.up(F.relu(F.batch_norm(self.down(x), *stats[2:4], *stats[:2], *stats[4:])))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch), batch)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("library", ["cudnn", "miopen"])
def test_a_capture_has_ops_of_its_own_for_them(library: str, train: bool) -> None:
    torch.manual_seed(0)
    model, plain, batch = Net(library).double(), Net("").double(), torch.randn(4, 4, 8, 8, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    captured = capture(model, loss_fn, batch, train=train)
    assert not any(library in str(node.target) for node in captured.graph.nodes)
    given = {
        "parameter": dict(model.named_parameters()),
        "buffer": dict(model.named_buffers()),
        "batch": {"batch": batch},
    }
    results = GraphModule({}, captured.graph)(*(given[i.kind][i.name] for i in captured.inputs))
    found = {(o.kind, o.name): value for o, value in zip(captured.outputs, results, strict=True)}
    plain.train(train)
    loss = loss_fn(plain, batch)
    loss.backward()
    wanted = {("loss", "loss"): loss} | {("gradient", name): p.grad for name, p in plain.named_parameters()}
    wanted |= {("buffer", n): b for n, b in plain.named_buffers() if train and b.is_floating_point()}
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[key], value, 1e-10, 1e-10) for key, value in wanted.items())


def test_plans_cut_them() -> None:
    compiler = Compiler(Captures(Net("cudnn"), loss_fn), plait.Plan.parse("data=2 tensor=2"))
    compiled = compiler.compiled(torch.randn(8, 4, 8, 8))
    assert not compiled.without_rule
    assert str(compiled.program.layouts["norm.weight"]) == "f32[8@tensor]"


def test_no_row_has_both_a_rule_for_its_op_and_another_op_in_its_place() -> None:
    """But the one that PyTorch's CPU takes, which is in graphs that no capture has made."""
    both = {str(op) for op, row in OP_SPECS.items() if row.instead is not None and row.known}
    assert both == {"aten.native_batch_norm.default"}
