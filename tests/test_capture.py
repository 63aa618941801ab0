"""The captured step is the eager step, for every family; and what else capture promises."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import linecache

import pytest
import torch
import transformers
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo import ZOO

import plait
from plait.compile.capture.batch import batch_leaves, batch_numbers, batch_signature
from plait.compile.capture.capture import capture
from plait.compile.capture.captured import Captured
from plait.compile.capture.loss_values import Weighted
from plait.compile.ir.node_info import info_of
from plait.compile.ops.draw import draw
from plait.compile.ops.random import GlobalRandom
from plait.errors import BatchError, CaptureError, LossError, PlanError

KEY = 11


def run(captured: Captured, model, batch):
    """What the graph gives for these values: (kind, name) -> tensor."""
    numbers = {name: fed.tensor(batch_numbers(batch)) for name, fed in captured.numbers.items()}
    sources = {
        "parameter": dict(model.named_parameters()), "buffer": {**dict(model.named_buffers()), **captured.outside},
        "batch": {**batch_leaves(batch), **numbers}, "constant": captured.constants, "key": {"key": KEY},
    }  # fmt: skip
    with torch.no_grad():
        values = GraphModule({}, captured.graph)(*(sources[i.kind][i.name] for i in captured.inputs))
    return {(o.kind, o.name): v for o, v in zip(captured.outputs, values, strict=True)}


def eager(model, loss_fn, batch):
    """The same from autograd; changes the model's buffers and gradients."""
    before = {name: b.clone() for name, b in model.named_buffers()}
    with GlobalRandom(KEY):
        loss = loss_fn(model, batch)
        found = {("sum", "sum"): loss[0], ("weight", "weight"): loss[1]} if isinstance(loss, tuple) else {}
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        loss.backward()
    found[("loss", "loss")] = loss
    found |= {("gradient", n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found | {("buffer", n): b for n, b in model.named_buffers() if not torch.equal(b, before[n])}


def same(got, expected, tolerance=1e-5):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].shape == value.shape and got[name].dtype == value.dtype, name
        assert torch.isfinite(value).all(), name
        limit = tolerance * max(value.double().abs().max().item(), 1e-12)
        assert (got[name].double() - value.double()).abs().max().item() <= limit, name


def check(model, loss_fn, batch, tolerance=1e-5) -> Captured:
    captured = capture(model, loss_fn, batch)
    same(run(captured, model, batch), eager(model, loss_fn, batch), tolerance)
    return captured


def linear_loss(model, x):
    return model(x).square().mean()


def test_nodes_know_the_module_that_made_them():
    model, loss_fn, batch = ZOO["llama"].make()
    nodes = capture(model, loss_fn, batch).graph.nodes
    of = [n for n in nodes if info_of(n).module == "model.layers.1.mlp.up_proj" and "mm" in str(n.target)]
    assert [info_of(n).phase for n in of] == ["forward", "backward", "backward"]
    assert all(info_of(n).module for n in nodes if "rsqrt" in str(n.target))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.spare, self.fixed = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("history", torch.zeros(4, 8))
        self.table = torch.arange(8.0)

    def forward(self, ids):
        x = self.fixed(self.embed(ids)) + self.table
        self.steps += 1
        with torch.no_grad():
            self.history[1:] = self.history[:-1].clone()
            self.history[0] = x.mean((0, 1))
        self.cache = x
        return self.head(x)


def ids_loss(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def test_tied_unused_frozen_buffers_and_constants():
    model, ids = Tied(), torch.randint(0, 16, (4, 6))
    captured = check(model, ids_loss, ids)
    assert captured.tied == {"head.weight": "embed.weight"}
    assert captured.unused == ("spare.weight", "spare.bias")
    assert captured.frozen == ("fixed.weight", "fixed.bias")
    assert [o.name for o in captured.outputs if o.kind == "gradient"] == ["embed.weight"]
    assert [o.name for o in captured.outputs if o.kind == "buffer"] == ["steps", "history"]
    assert [i.name for i in captured.inputs if i.kind == "batch"] == ["batch"]
    assert captured.outside.keys() == {"model:table"} and captured.outside["model:table"] is model.table


def test_the_model_is_as_before():
    model, ids = Tied(), torch.randint(0, 16, (4, 6))
    lstm, loss_fn, tokens = ZOO["lstm"].make()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    parameters, weights = dict(model.named_parameters()), list(lstm.lstm._flat_weights)
    capture(model, ids_loss, ids, train=False, differentiate=False)
    capture(lstm, loss_fn, tokens)
    assert torch.equal(torch.get_rng_state(), state) and model.training and not hasattr(model, "cache")
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert all(p is parameters[n] and p.grad is None for n, p in model.named_parameters())
    assert model.head.weight is model.embed.weight and not model.fixed.weight.requires_grad
    assert all(a is b for a, b in zip(lstm.lstm._flat_weights, weights, strict=True))
    with pytest.raises(CaptureError):
        capture(model, lambda m, b: float(m(b).sum()), ids)
    assert all(p is parameters[n] for n, p in model.named_parameters())


Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Batch:
    inputs: dict
    scale: float = 2.0


def structured(x, y):
    return {
        "tensor": (x, lambda b: b, ["batch"]),
        "dict": ({"x": x, "n": 3, "none": None}, lambda b: b["x"] * b["n"], ["x"]),
        "tuple": ((x, [y, "word"]), lambda b: b[0] + b[1][0], ["0", "1.0"]),
        "named": (Pair(x, y), lambda b: b.x + b.y, ["x", "y"]),
        "dataclass": (Batch({"a": x, "b": [y]}), lambda b: b.scale * b.inputs["a"], ["inputs.a", "inputs.b.0"]),
        "encoding": (transformers.BatchEncoding({"x": x, "y": y}), lambda b: b.x + b["y"], ["x", "y"]),
        "ordered": (collections.OrderedDict(x=x), lambda b: b["x"], ["x"]),
    }


@pytest.mark.parametrize("kind", structured(None, None))
def test_batches(kind):
    batch, read, names = structured(torch.randn(4, 8), torch.randn(4, 8))[kind]
    captured = check(nn.Linear(8, 8), lambda m, b: linear_loss(m, read(b)), batch)
    found = [i.name for i in captured.inputs if i.kind == "batch" and i.name not in captured.numbers]
    assert found == names == list(batch_leaves(batch))


def test_signatures():
    x, y = torch.zeros(2, 3), torch.ones(2, 3)
    assert batch_signature({"x": x, "n": 1}) == batch_signature({"n": 1, "x": y}) == "dict(n=1, x=float32[2, 3])"
    others = [{"x": x}, {"x": x, "n": 2}, {"x": x.int(), "n": 1}, {"x": x[:1], "n": 1}, (x, 1), [x, 1]]
    assert len({batch_signature(b) for b in [*others, {"x": x, "n": 1}]}) == 7
    with pytest.raises(BatchError, match="inputs.n of the batch is a numpy.ndarray"):
        capture(nn.Linear(3, 3), linear_loss, {"inputs": {"x": x, "n": x.numpy()}})


def test_sum_and_weight():
    x, mask = torch.randn(6, 8), torch.tensor([1, 1, 0, 1, 0, 1])

    def loss_fn(model, batch):
        return Weighted((model(batch[0]).square().sum(1) * batch[1]).sum(), batch[1].sum())

    captured = check(nn.Linear(8, 8), loss_fn, (x, mask))
    assert [o.kind for o in captured.outputs] == ["loss", "sum", "weight", "gradient", "gradient"]
    captured = capture(nn.Linear(8, 8), lambda m, b: Weighted(m(b).sum(), b.shape[0]), x)
    assert run(captured, nn.Linear(8, 8), x)[("weight", "weight")] == 6


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y: y, r"the loss has shape \[4, 8\]"),
        (lambda y: None, "the loss is a NoneType"),
        (lambda y: {"loss": y.mean()}, "the loss is a dict"),
        (lambda y: Weighted(y.sum(), y), r"the weight of plait.Weighted\(sum, weight\) has shape \[4, 8\]"),
        (lambda y: (y.sum(), y.sum(), y.sum()), "the loss is a tuple of 3 elements"),
        (lambda y: y.argmax(), "dtype torch.int64"),
        (lambda y: y.detach().mean(), "does not depend on any parameter"),
    ],
)
def test_wrong_losses(loss, message):
    with pytest.raises(LossError, match=message):
        capture(nn.Linear(8, 8), lambda m, b: loss(m(b)), torch.randn(4, 8))


class Branches(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.linear, self.what = nn.Linear(8, 8), what

    def forward(self, x):
        y = self.linear(x)
        if self.what == "if":
            return y if y.sum() > 0 else -y
        if self.what == "nonzero":
            return y[y > 0].median()
        return y @ torch.ones(7, 7)


@pytest.mark.parametrize(
    ("what", "line", "reason"),
    [
        ("if", "return y if y.sum() > 0 else -y", "the number in a tensor"),
        ("nonzero", "return y[y > 0].median()", "the shape of a result depends on"),
        ("shape", "return y @ torch.ones(7, 7)", "RuntimeError"),
    ],
)
def test_a_model_that_cannot_be_captured_is_named_with_its_line(what, line, reason):
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(Branches(what), linear_loss, torch.randn(4, 8))
    assert caught.value.file == __file__ and linecache.getline(__file__, caught.value.line).strip() == line
    assert f'{__file__}:{caught.value.line}: "{line}"' in str(caught.value)


def test_a_library_model_is_named_with_the_line_of_the_library():
    config = transformers.JetMoeConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_key_value_heads=2, kv_channels=4, intermediate_size=16,
        num_local_experts=2, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    model = transformers.JetMoeForCausalLM._from_config(config).train()
    ids = torch.randint(16, (2, 4))
    with pytest.raises(CaptureError, match="modeling_jetmoe.py") as caught:
        capture(model, lambda m, b: m(input_ids=b, labels=b).loss, ids)
    assert caught.value.file.endswith("modeling_jetmoe.py") and caught.value.line


def test_a_loop_over_the_experts_that_are_hit_is_captured():
    model, loss_fn, batch = ZOO["mixtral"].make()
    model.set_experts_implementation("eager")
    check(model, loss_fn, batch, tolerance=1e-5)


def test_a_model_without_storage_is_captured_without_allocating():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 17, 1 << 17), nn.BatchNorm1d(1 << 17), nn.Linear(1 << 17, 4))
    gc.collect()
    captured = capture(model, linear_loss, torch.empty(8, 1 << 17, device="meta"))
    assert len([o for o in captured.outputs if o.kind == "gradient"]) == 6 and model[0].weight.is_meta
    values = [n.meta["val"] for n in captured.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert all(v.device.type == "cpu" for v in values)


def test_dtypes():
    model, loss_fn, batch = ZOO["gpt2"].make()
    captured = check(model.bfloat16(), loss_fn, batch, tolerance=1e-2)
    assert all(p.dtype == torch.bfloat16 for (kind, _), p in run(captured, model, batch).items() if kind == "gradient")

    def loss_fn(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().mean()

    captured = check(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), loss_fn, torch.randn(4, 8), 1e-2)
    products = [n.meta["val"].dtype for n in captured.graph.nodes if "mm" in str(n.target)]
    assert set(products) == {torch.bfloat16}


def test_evaluation():
    for name in ("resnet", "bert"):
        model, loss_fn, batch = ZOO[name].make()
        captured = capture(model, loss_fn, batch, train=False, differentiate=False)
        assert [o.kind for o in captured.outputs] == ["loss"] and model.training
        assert not any(i.kind == "key" for i in captured.inputs)
        with torch.no_grad():
            expected = loss_fn(model.eval(), batch)
        same(run(captured, model, batch), {("loss", "loss"): expected})
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    captured = capture(encoder, linear_loss, torch.randn(2, 4, 16), train=False, differentiate=False)
    assert not any("_transformer_encoder_layer_fwd" in str(n.target) for n in captured.graph.nodes)


def test_submodules_keep_their_mode_and_batch_norm_is_functional():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4).eval(), nn.BatchNorm2d(4, track_running_stats=False)
    )
    captured = check(model, linear_loss, torch.randn(4, 3, 8, 8))
    names = [str(n.target) for n in captured.graph.nodes if "batch_norm" in str(n.target)]
    names = [name for name in names if "backward" not in name]
    assert names == [
        "aten._native_batch_norm_legit_functional.default", "aten._native_batch_norm_legit_no_training.default",
        "aten._native_batch_norm_legit.no_stats",
    ]  # fmt: skip
    changed = {o.name for o in captured.outputs if o.kind == "buffer"}
    assert changed == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


class InPlace(nn.Module):
    """Views that change in place, one after the other."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = self.linear(x)
        y[:, :4] *= self.scale
        y.t()[2].add_(1.0)
        z = torch.zeros_like(y)
        z[1:, ::2] = y[:-1, 1::2]
        z.unsqueeze_(0)
        return F.dropout(z.view(-1, 4), 0.3) + y.flatten().view(-1, 4).relu_()


def test_mutated_views():
    check(InPlace(), linear_loss, torch.randn(4, 8))


def test_clean_ups():
    model, loss_fn, batch = ZOO["gpt2"].make()
    nodes = list(capture(model, loss_fn, batch).graph.nodes)
    aten = torch.ops.aten
    assert not [n for n in nodes if n.target in (aten.detach.default, aten.alias.default, aten._unsafe_view.default)]
    assert not [n for n in nodes if n.target is aten.t.default and n.args[0].target is aten.t.default]
    assert not [n for n in nodes if n.op == "call_function" and not n.users]
    draws = [n.args[1] for n in nodes if n.target is draw]
    assert draws == list(range(7))


def test_the_cost_of_a_layer_is_constant():
    def size(num_layers):
        config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=num_layers, n_head=2, n_positions=8)
        ids = torch.randint(0, 32, (2, 8))
        captured = capture(transformers.GPT2LMHeadModel(config), lambda m, b: m(b, labels=b).loss, ids)
        return len(captured.graph.nodes)

    one, two, four = size(1), size(2), size(4)
    assert four - two == 2 * (two - one)


class Recomputed(nn.Module):
    """Checkpoints its own activations, with dropout among them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False).mean()


def test_masks_that_would_be_drawn_twice_are_refused() -> None:
    batch = torch.randn(4, 8)
    capture(Recomputed(0.0), lambda m, b: m(b), batch)
    with pytest.raises(CaptureError, match="draws random numbers anew"):
        capture(Recomputed(0.5), lambda m, b: m(b), batch)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(10, 8, sparse=True), nn.Linear(8, 1))
    with pytest.raises(PlanError, match=r"gradient of 0.weight is sparse.*without sparse=True"):
        capture(model, lambda m, b: m(b).mean(), torch.randint(0, 10, (4, 3)))


class Square(torch.autograd.Function):
    """Its backward pass writes in place, by ops whose counterparts have overloads of other names."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.pow(2)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (2 * x).pow_(3).float_power_(2).pow_(1 / 6).mul_(x.sign())


def test_powers_in_place():
    class Model(nn.Linear):
        def forward(self, x):
            return Square.apply(super().forward(x))

    report = plait.verify(Model(4, 4).double(), lambda m, b: m(b).mean(), torch.randn(4, 4).double(), "data=2")
    assert report.ok, report


@pytest.mark.parametrize("check_nan", [True, False])
def test_a_step_is_captured_alike_while_torch_looks_for_anomalies(check_nan: bool) -> None:
    """Anomaly mode reads the numbers of gradients, which fake tensors do not have."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    batch = torch.randn(8, 4)

    def losses() -> list[float]:
        trainer = plait.Trainer(copy.deepcopy(model), linear_loss, functools.partial(torch.optim.SGD, lr=0.1), "")
        return [float(trainer.step(batch)) for _ in range(2)]

    expected = losses()
    with torch.autograd.set_detect_anomaly(True, check_nan):
        assert losses() == expected
        assert torch.is_anomaly_enabled()
        assert torch.is_anomaly_check_nan_enabled() is check_nan
        assert plait.verify(model, linear_loss, batch, "tensor=2").ok
