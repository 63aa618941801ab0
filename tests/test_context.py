"""The sequence of a batch cut over ranks: context=N through the whole model, sequence=yes between split weights."""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from bench import context
from plait.api.memory import Estimator
from plait.backends.eager import ring_attention
from plait.comm.protocol import World
from plait.engine.compiler import Captures, Compiler
from plait.errors import BatchError, PlanError
from plait.plan.plan import Plan
from plait.report.explanation import Explanation, explanation
from plait.spec.batch_spec import BatchSpec

pytestmark = pytest.mark.xdist_group("context")  # plans share what is captured

LENGTH, VOCABULARY = 24, 32


class Block(nn.Module):
    """One layer of a GPT; with fewer key heads than heads if so many are given."""

    def __init__(self, width: int, heads: int, key_heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.key_heads, self.causal, self.each = heads, key_heads, causal, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key, self.value = (nn.Linear(width, key_heads * self.each) for _ in range(2))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        seen = self.norm1(x)
        q, k, v = (
            layer(seen).unflatten(2, (-1, self.each)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        causal, several = self.causal and mask is None, self.heads != self.key_heads
        found = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=several)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1, self.training)


class Model(nn.Module):
    def __init__(self, layers: int = 1, heads: int = 4, key_heads: int = 4, causal: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(LENGTH, 16)
        self.layers = nn.ModuleList(Block(16, heads, key_heads, causal) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).double()


def shifted_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of the next token, of tokens with one position more than the model sees."""
    found = model(tokens[:, :-1])
    return F.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())


def masked_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of tokens that are not padding; no query sees padding, nor keys that are 8 positions away."""
    at = torch.arange(batch["tokens"].shape[1])
    near = ((at[:, None] - at) >= 0) & ((at[:, None] - at) < 8)
    mask = near & batch["real"][:, None, None, :]
    found = model(batch["tokens"], mask)
    return F.cross_entropy(found.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def tokens(length: int = LENGTH + 1) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(0, VOCABULARY, (2, length))


def padded() -> dict[str, Tensor]:
    found = tokens(LENGTH)
    real = torch.arange(LENGTH) < torch.tensor([LENGTH, 15])[:, None]
    return {"tokens": found, "real": real, "labels": found.masked_fill(~real, -100)}


@pytest.fixture(scope="module")
def causal() -> plait.Verifier:
    return verifier_of()


@functools.cache
def verifier_of(**options: Any) -> plait.Verifier:
    return plait.Verifier(model(**options), shifted_loss, tokens())


def explained(plan: str, captures: Captures | None = None, batch: Tensor | None = None) -> Explanation:
    found = Compiler(captures or verifier_of().captures, Plan.parse(plan))
    return explanation(found.compiled(tokens() if batch is None else batch))


@pytest.mark.parametrize(
    "plan",
    [
        "context=2", "context=2 context.kind=ulysses recompute=layer",
        "context=4 context.kind=ring", "context=2 context.kind=ring", "context=3 context.kind=gather",
        "context=2 data=2 zero=3", "context=2 tensor=2 context.kind=ring", "tensor=2 sequence=yes",
        "tensor=2 sequence=yes recompute=gathers", "tensor=2 sequence=yes context=2 context.kind=ring",
        "tensor=2 sequence=yes context=2 context.kind=gather recompute=layer",
        "pipeline=2 cut=layers.0 micro=2 context=2 tensor=2 sequence=yes",
    ],
)  # fmt: skip
def test_numbers_are_those_of_one_device(plan: str, causal: plait.Verifier) -> None:
    report = causal.verify(plan, tolerance=1e-9)
    assert report.ok, report


def test_causal_parts_of_a_ring_in_smaller_products(causal: plait.Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's kernel computes what a mask hides; tests have too few positions for it to matter."""
    monkeypatch.setattr(ring_attention, "_FEWEST_KEYS", 2)
    blocks = [*ring_attention._triangle(1, 0, 5, 2)]
    assert [(b.causal, b.queries.start, b.queries.stop, b.keys.start, b.keys.stop) for b in blocks] == [
        (True, 1, 3, 0, 2), (True, 3, 6, 2, 5), (False, 3, 6, 0, 2),
    ]  # fmt: skip
    report = causal.verify("context=2 context.kind=ring", tolerance=1e-9)
    assert report.ok, report


def test_a_ring_hides_no_nan() -> None:
    out, sums = torch.zeros(1, 1, 3, 2), torch.full((1, 1, 3), -math.inf)
    logs = torch.tensor([[[0.0, -math.inf, math.nan]]])
    ring_attention._add(out, sums, torch.tensor([1.0, 0.0, math.nan])[None, None, :, None].expand_as(out), logs)
    assert torch.equal(out.isnan().any(-1), torch.tensor([[[False, False, True]]])) and out[0, 0, 0, 0] == 1
    assert sums[0, 0, :2].tolist() == [0.0, -math.inf] and sums[0, 0, 2].isnan()


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ({"key_heads": 1}, "context=2"),
        ({"key_heads": 1}, "context=4 context.kind=ring"),
        ({"causal": False}, "context=3 context.kind=ring"),
    ],
)
def test_few_key_heads_and_no_causal_mask(options: dict[str, Any], plan: str) -> None:
    report = verifier_of(**options).verify(plan)
    assert report.ok, report


def biased_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of a model with a bias of the distance on the scores of each head: ALiBi (Press et al. 2022)."""
    at = torch.arange(tokens.shape[1] - 1)
    slopes = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 16], dtype=torch.float64)[:, None, None]
    away = (at[:, None] - at).double()
    found = model(tokens[:, :-1], (-slopes * away).masked_fill(away < 0, float("-inf"))[None])
    return F.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize(("loss", "batch"), [(masked_loss, padded), (biased_loss, tokens)])
def test_masks_and_biases_of_heads_are_cut_with_the_queries_or_the_heads(loss: Any, batch: Any) -> None:
    verifier = plait.Verifier(model(), loss, batch())
    for kind in ("ring", "ulysses", "gather"):
        report = verifier.verify(f"context=4 context.kind={kind}", tolerance=1e-9)
        assert report.ok, report


class WrittenOut(Model):
    """Attention as products and a softmax, with a bias of the distance that is learned, as that of T5."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(LENGTH, 4)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x, (layer,) = self.tokens(tokens), self.layers
        q, k, v = (
            each(x).unflatten(2, (4, -1)).transpose(1, 2)
            for each in (layer.query, layer.key, layer.value)  # type: ignore
        )
        at = torch.arange(tokens.shape[1])
        scores = q @ k.mT + self.bias((at[:, None] - at).abs()).permute(2, 0, 1)
        x = x + layer.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[operator]
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def test_attention_that_is_written_out_sees_gathered_keys_and_values() -> None:
    torch.manual_seed(0)
    made = WrittenOut().double()
    verifier = plait.Verifier(made, shifted_loss, tokens())
    report = verifier.verify("context=4", tolerance=1e-9)
    assert report.ok, report
    found = explained("context=4", verifier.captures)
    sent = Counter(item.kind for item in found.collectives if item.phase == "forward" and item.tensor_bytes > 64)
    assert sent == {"all_gather": 2}
    with pytest.raises(PlanError, match="context.kind=ring finds no fused attention"):
        verifier.verify("context=2 context.kind=ring")


def collectives(plan: str, layers: int) -> Counter[tuple[str, str]]:
    """The number of collectives of activations of a step, by phase and kind."""
    found = explained(plan, verifier_of(layers=layers).captures).collectives
    return Counter((item.phase, item.kind) for item in found if not item.value[0].isdigit())


@pytest.mark.parametrize(
    ("plan", "of_a_layer"),
    [
        ("tensor=2 sequence=yes", {("forward", "all_gather"): 2, ("forward", "reduce_scatter"): 2,
                                   ("backward", "all_gather"): 2, ("backward", "reduce_scatter"): 2}),
        ("tensor=2 sequence=yes recompute=gathers",
         {("forward", "all_gather"): 2, ("forward", "reduce_scatter"): 2,
          ("backward", "all_gather"): 4, ("backward", "reduce_scatter"): 2}),
        ("context=2", {("forward", "all_to_all"): 4, ("backward", "all_to_all"): 4}),
        ("context=2 context.kind=gather", {("forward", "all_gather"): 2, ("backward", "reduce_scatter"): 2}),
        ("context=2 context.kind=ring", {("forward", "ring"): 1, ("backward", "ring"): 1}),
    ],
)  # fmt: skip
def test_what_a_layer_sends(plan: str, of_a_layer: dict[tuple[str, str], int]) -> None:
    """As Korthikanti et al. (2022) and Jacobs et al. (2023) have it; no activation is all-reduced."""
    assert collectives(plan, 2) - collectives(plan, 1) == Counter(of_a_layer)


@pytest.mark.parametrize("plan", ["context=2 context.kind=ring", "context=4", "context=2 context.kind=gather"])
def test_the_bytes_that_are_explained_are_sent(plan: str) -> None:
    batch, compiler = tokens(), Compiler(verifier_of().captures, Plan.parse(plan))
    sgd = functools.partial(torch.optim.SGD, lr=0.1)

    def rank(world: World) -> int:
        trainer = plait.Trainer(compiler.model, shifted_loss, sgd, plan, world=world, compiler=compiler)
        trainer.step(batch)
        world.comm("context").links.reset()
        trainer.step(batch)
        return world.comm("context").links.total()

    loss = 8 * 2  # summed once more for the result
    assert abs(plait.run_ranks(Plan.parse(plan).mesh, rank)[0] - explained(plan).sent_bytes["context"]) <= loss


@pytest.mark.parametrize("plan", ["context=2 zero=1", "data=2 context=2 zero=2", "data=2 context=2 zero=3"])
def test_zero_cuts_states_over_all_ranks_that_have_them(plan: str, causal: plait.Verifier) -> None:
    """Ranks with parts of the same sequences have the same weights, as ranks with other rows do."""
    report = causal.verify(plan)
    assert report.ok, report
    found = explained(plan)
    mesh = found.program.plan.mesh
    for name, each in found.program.sharding.parameters.items():
        assert math.prod(each.state.local_shape(mesh)) * mesh.size == math.prod(each.state.shape), name
    sums = {(item.kind, item.axis) for item in found.collectives if item.value.endswith("gradients")}
    assert sums == {("reduce_scatter", "data*context" if "data" in plan else "context")}


@pytest.mark.parametrize("kind", ["ulysses", "ring", "gather"])
def test_bytes_of_activations_are_those_of_the_formula(kind: str) -> None:
    assert context.sent_bytes("long", kind, 4) == pytest.approx(context.formula_bytes("long", kind, 4), rel=0.02)


@pytest.mark.parametrize(
    ("plan", "parts"),
    [("tensor=2 sequence=yes recompute=gathers", 2), ("tensor=4 sequence=yes recompute=gathers", 4),
     ("context=2", 2), ("context=4 context.kind=ring", 4)],
)  # fmt: skip
def test_activations_of_a_layer_are_cut(plan: str, parts: int) -> None:
    """What a layer keeps for backward is 1/N of what it keeps on one device: all is cut over N ranks. With ulysses the
    output of attention is kept twice, as its backward and as the next product's read it."""

    twice = 2 * LENGTH * 16 * 8 if plan == "context=2" else 0
    assert saved_by_a_layer(plan) == pytest.approx((saved_by_a_layer("") + twice) / parts, rel=0.02)


@functools.cache
def saved_by_a_layer(plan: str) -> int:
    least, most = (estimator(layers).estimate(Plan.parse(plan)).fullest.saved for layers in (1, 2))
    return most - least


@functools.cache
def estimator(layers: int) -> Estimator:
    return Estimator(model(layers=layers), shifted_loss, tokens())


def test_explain_says_what_is_cut_of_the_batch() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return shifted_loss(model, batch["tokens"]) + model(batch["others"]).square().mean()

    batch = {"tokens": tokens(), "others": tokens(LENGTH - 1)}
    lines = str(plait.explain(model(), loss, batch, "context=2")).splitlines()
    (cut,) = (line for line in lines if line.split()[:1] == ["tokens"])
    (whole,) = (line for line in lines if line.split()[:1] == ["others"])
    assert cut.endswith("24 positions over context") and whole.endswith("int64[2, 23]")


def test_sequences_are_named_by_a_spec() -> None:
    class Transposed(dict[str, Tensor]):
        batch_spec = BatchSpec({"tokens": "sequence, rows"})

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return shifted_loss(model, batch["tokens"].T)

    report = plait.verify(model(), loss, Transposed(tokens=tokens().T.contiguous()), "context=2 data=2")
    assert report.ok, report
    with pytest.raises(BatchError, match="says of two dims that they are the sequence"):
        BatchSpec({"tokens": "sequence, sequence"})
    with pytest.raises(BatchError, match="'length' is no kind of dim; write 'rows', 'sequence' or '-'"):
        BatchSpec({"tokens": "rows, length"})


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lstm, self.head = nn.Embedding(32, 4), nn.LSTM(4, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0])  # type: ignore[no-any-return]


class WithClass(nn.Module):
    """Puts a position of its own before those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.own, self.head = nn.Embedding(32, 8), nn.Parameter(torch.ones(1, 1, 8)), nn.Linear(8, 32)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.cat([self.own.expand(len(tokens), -1, -1), self.tokens(tokens)], 1)
        return self.head(self.layer(x)[:, 1:])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "plan", "batch", "why"),
    [
        (WithClass, "context=2", tokens() % 32, "aten.cat.*a CLS token is, have them in the batch instead"),
        (model, "context=7", tokens(), "context=7 does not divide the sequence of 25 positions.*pad it to 28"),
        (lambda: model(key_heads=1), "context=2 context.kind=ulysses", tokens(), "heads.*use context.kind=ring"),
        (model, "context=2 context.kind=ring data=2", tokens(8), "does not divide the sequence of 8|cannot split"),
        (model, "context.kind=ring", tokens(), "give context=N"),
        (model, "sequence=yes data=2", tokens(), "give tensor=N"),
        (Recurrent, "context=2", tokens() % 4, "splits .*% of the floating-point operations.* in lstm"),
        (Recurrent, "context=2 context.kind=ring", tokens() % 4, "finds no fused attention"),
        (model, "context=2", tokens(24), "give it one position more; .*not dim 1 of batch, name it with a batch_spec"),
    ],
)
def test_what_cannot_be_cut_is_refused(make: Any, plan: str, batch: Tensor, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        plait.verify(make(), shifted_loss, batch, plan)


def late_shift(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of the next token, of a model that sees the last one too."""
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def old_shift(model: nn.Module, tokens: Tensor) -> Tensor:
    """As transformers had it: copies of both slices, a sum, and a weight of classes."""
    found, weight = model(tokens)[..., :-1, :].contiguous().float(), torch.linspace(0.5, 1.5, VOCABULARY)
    targets = tokens[..., 1:].contiguous().view(-1)
    return F.cross_entropy(found.view(-1, VOCABULARY) * 0.5, targets, weight, reduction="sum") / 100


@pytest.mark.parametrize("loss", [late_shift, old_shift])
def test_a_shift_after_the_model_sends_no_logits(loss: Any) -> None:
    batch = tokens(LENGTH)
    verifier = plait.Verifier(model(), loss, batch)
    report = verifier.verify("context=2", tolerance=1e-9 if loss is late_shift else 1e-6)
    assert report.ok, report
    found = explained("context=2", verifier.captures, batch).collectives
    assert "all_gather" not in {item.kind for item in found}
    with pytest.raises(PlanError, match="context=2 does not divide the sequence of 23 positions.*pad it to 24"):
        plait.verify(model(), loss, tokens(LENGTH - 1), "context=2")


def right_share(model: nn.Module, tokens: Tensor) -> Tensor:
    """A loss that reads the shifted logits in another way too."""
    found = model(tokens)[:, :-1].flatten(0, 1)
    right = (found.argmax(-1) == tokens[:, 1:].flatten()).double().mean()
    return F.cross_entropy(found, tokens[:, 1:].flatten()) * (1 + right)


def smoothed(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=0.1)


@pytest.mark.parametrize("loss", [right_share, smoothed])
def test_a_shift_that_is_read_otherwise_is_gathered(loss: Any) -> None:
    report = plait.verify(model(), loss, tokens(LENGTH), "context=2", tolerance=1e-9)
    assert report.ok, report


class Sink(Model):
    """Attention to a learned key beside those of the sequence."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens)
        keys = torch.cat([self.places.weight[:1].expand(len(x), 1, -1), x], 1)
        q, k = (each.unflatten(2, (4, 4)).transpose(1, 2) for each in (x, keys))
        found = F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)
        return self.head(self.norm(found))  # type: ignore[no-any-return]


def shifted_labels(model: nn.Module, labels: Tensor) -> Tensor:
    """The loss of a decoder that gets its labels one position later, as those of transformers."""
    given = torch.zeros(labels.shape, dtype=labels.dtype)
    given[:, 1:] = labels[:, :-1].clone()
    given[:, 0] = 1
    found = model(given.masked_fill(given == 2, 3))
    return F.cross_entropy(found.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("plan", "kinds"),
    [
        ("context=2 context.kind=ring", {"ring"}), ("context=4", {"all_to_all"}),
        ("tensor=2 sequence=yes", {"all_gather", "reduce_scatter"}),
    ],
)  # fmt: skip
def test_labels_that_are_the_inputs_too_are_cut_behind_their_shift(plan: str, kinds: set[str]) -> None:
    batch = tokens(LENGTH)
    verifier = plait.Verifier(model(), shifted_labels, batch)
    report = verifier.verify(plan, tolerance=1e-9)
    assert report.ok, report
    found = explained(plan, verifier.captures, batch).collectives
    sent = {item.kind for item in found if not item.value[0].isdigit() and item.tensor_bytes >= LENGTH * 16 * 4}
    assert sent == kinds, sent


def test_a_kind_that_no_attention_can_have_is_refused() -> None:
    torch.manual_seed(0)
    made = Sink().double()
    with pytest.raises(PlanError, match=r"context.kind=ring cannot split the attention in the loss"):
        plait.verify(made, shifted_loss, tokens(), "context=2 context.kind=ring")


def test_an_evaluation_of_another_length() -> None:
    batch, other = tokens(), tokens(LENGTH)
    compilers = {size: Compiler(verifier_of().captures, Plan.parse(f"context={size}")) for size in (1, 2)}

    def rank(world: World) -> tuple[float, float]:
        make, compiler = functools.partial(torch.optim.SGD, lr=0.0), compilers[world.mesh.size]
        options: dict[str, Any] = {"world": world, "compiler": compiler}
        trainer = plait.Trainer(compiler.model, shifted_loss, make, compiler.plan, **options)
        trainer.step(batch)
        return float(trainer.evaluate(other)), float(trainer.evaluate(batch))

    (alone,) = plait.run_ranks(Plan.parse("context=1").mesh, rank)
    for found in plait.run_ranks(Plan.parse("context=2").mesh, rank):
        assert found == pytest.approx(alone, rel=1e-12)


def test_a_spec_that_names_nothing_is_refused() -> None:
    class Misspelt(dict[str, Tensor]):
        batch_spec = BatchSpec({"token": "rows, sequence"})

    with pytest.raises(BatchError, match="names no tensor of the batch; these are tokens"):
        plait.verify(model(), lambda m, b: shifted_loss(m, b["tokens"]), Misspelt(tokens=tokens()), "data=2")


def test_a_batch_without_a_sequence_is_refused() -> None:
    with pytest.raises(PlanError, match="context=2 finds no sequence in the batch.*batch_spec"):
        plait.verify(nn.Linear(4, 4), lambda m, x: m(x).square().mean(), torch.randn(4, 4), "context=2")


class Halves(nn.Module):
    """Products that read a part of what one product gave."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(gate) + self.down(value)  # type: ignore[no-any-return]


def test_products_of_parts_of_a_product_without_a_sequence() -> None:
    batch = torch.randn(6, 8, dtype=torch.float64)
    report = plait.verify(Halves().double(), lambda m, x: m(x).square().mean(), batch, "tensor=2 sequence=yes")
    assert report.ok, report
