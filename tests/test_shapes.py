"""shapes=bucket:N: batches of many lengths padded to few shapes, with the numbers of the batches as they were given."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import plait
from plait.api.trainer import Trainer
from plait.comm.protocol import World
from plait.engine.compiler import difference_of_leaves
from plait.engine.local_batch import LocalBatch
from plait.engine.padding_rules import PaddingRules, find_rules
from plait.errors import BatchError, PlanError
from plait.plan.legality import refusals
from plait.plan.plan import Plan
from plait.plan.step_facts import StepFacts
from plait.spec.batch_spec import BatchSpec

pytestmark = pytest.mark.xdist_group("shapes")
VOCABULARY = 16


class Causal(nn.Module):
    """A layer of causal attention over tokens, with a key mask if it is given."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.qkv, self.dropout = nn.Linear(8, 24), dropout

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(2, (6, 4)).transpose(1, 2).chunk(3, 1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(F.dropout(x, self.dropout, self.training))  # type: ignore[no-any-return]


def made(kind: Callable[..., nn.Module] = Causal, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**options).double()


def ids(rows: int = 4, length: int = 13, seed: int = 1) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def labelled(rows: int = 4, length: int = 13, seed: int = 1) -> dict[str, Tensor]:
    found = ids(rows, length, seed)
    return {"input_ids": found, "labels": found.roll(-1, 1)}


def language(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


# The key


def test_the_key_is_read_and_printed() -> None:
    plan = Plan.parse("data=2 shapes=bucket:64 shapes.limit=4")
    assert (plan.shapes, plan.shapes_limit) == (64, 4)
    assert str(plan) == "data=2 shapes=bucket:64 shapes.limit=4" and Plan.parse("shapes=exact") == Plan()


@pytest.mark.parametrize("text", ["shapes=64", "shapes=bucket", "shapes=bucket:", "shapes=bucket:0", "shapes=bucket:x"])
def test_other_values_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="it is exact, or bucket:N with a whole number of positions"):
        Plan.parse(text)


def test_the_limit_needs_buckets() -> None:
    with pytest.raises(PlanError, match="shapes.limit=4 is for batches that are padded to few shapes; give shapes="):
        Plan.parse("shapes.limit=4")


def test_a_multiple_that_the_ranks_of_a_sequence_do_not_divide() -> None:
    (found,) = refusals(Plan.parse("context=4 shapes=bucket:6"), StepFacts())
    assert "lengths that context=4 does not divide" in str(found) and found.instead.endswith("such as bucket:12")
    assert not refusals(Plan.parse("context=4 shapes=bucket:64"), StepFacts())


# Numbers: the reference is the batch as it was given


@pytest.fixture(scope="module")
def causal() -> plait.Verifier:
    return plait.Verifier(made(), language, labelled())


@pytest.mark.parametrize(
    "plan",
    [
        "shapes=bucket:8", "data=2 zero=3 shapes=bucket:8", "tensor=2 sequence=yes shapes=bucket:8",
        "context=2 context.kind=ring shapes=bucket:8", "pipeline=2 micro=2 cut=head shapes=bucket:16",
        "data=2 sync=2 shapes=bucket:8", "workers=2 servers=1 shapes=bucket:8", "data=2 shapes=bucket:13",
    ],
)  # fmt: skip
def test_numbers_are_those_of_the_batch_without_padding(plan: str, causal: plait.Verifier) -> None:
    report = causal.verify(plan, tolerance=1e-9)
    assert report.ok, report


def test_a_sequence_that_ranks_do_not_divide_is_made_one_that_they_do(causal: plait.Verifier) -> None:
    with pytest.raises(PlanError, match="context=2 does not divide the sequence of 13"):
        causal.verify("context=2")


def test_random_numbers_are_those_of_the_padded_batch() -> None:
    report = plait.verify(made(dropout=0.2), language, labelled(), "data=2 shapes=bucket:8", tolerance=1e-9)
    assert report.ok, report


SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


def transformer(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch = labelled() | {"attention_mask": (torch.arange(13) < torch.tensor([13, 9, 13, 5])[:, None]).long()}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SMALL, num_attention_heads=2)).double(), batch
    if kind == "bert":
        config = BertConfig(**SMALL, num_attention_heads=2, max_position_embeddings=20)
        return BertForMaskedLM(config).double(), batch
    config = T5Config(vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config).double(), batch | {"labels": batch["labels"][:, :6].contiguous()}


@pytest.mark.parametrize("kind", ["llama", "bert", "t5"])
def test_models_of_transformers(kind: str) -> None:
    """BERT takes 20 positions, to which 13 are padded with bucket:32; T5 has two sequences, each padded for itself."""
    model, batch = transformer(kind)
    report = plait.verify(model, own_loss, batch, "data=2 shapes=bucket:32", steps=1, tolerance=1e-6)
    assert report.ok, report


def squares(model: nn.Module, batch: Any) -> Any:
    each = (model(batch["frames"]) - batch["wanted"]).square().sum(2) * batch["real"]
    return plait.Weighted(each.sum(), batch["real"].sum())


@pytest.mark.parametrize(
    ("batch", "loss", "values"),
    [
        ((ids(), ids().roll(-1, 1)), lambda m, b: F.cross_entropy(m(b[0]).mT, b[1]), {"0": 0, "1": -100}),
        (
            {"x": ids(), "y": ids()[:, 1:]},  # one position less, also when padded
            lambda m, b: F.cross_entropy(m(b["x"])[:, :-1].mT, b["y"]), {"x": 0, "y": -100},
        ),
        (ids(), lambda m, b: F.cross_entropy(m(b[:, :-1]).mT, b[:, 1:], ignore_index=0), {"batch": 0}),
        (
            {"x": ids(), "many": torch.ones(4, 3).long(), "y": ids()},  # `many` is no sequence
            lambda m, b: language(m, {"input_ids": b["x"], "labels": b["y"]}) + b["many"].double().mean(),
            {"x": 0, "y": -100},
        ),
    ],
)  # fmt: skip
def test_values_are_found(batch: Any, loss: Any, values: dict[str, float]) -> None:
    rules = find_rules(made(), loss, batch, 8, True, 0)
    assert {name: rule.value for name, rule in rules.leaves.items()} == values
    assert PaddingRules.from_text(rules.to_text()) == rules
    assert plait.verify(made(), loss, batch, "data=2 shapes=bucket:8", tolerance=1e-9).ok


def test_floats_with_a_mask_and_a_weighted_loss() -> None:
    model = made(functools.partial(nn.LSTM, 3, 5, batch_first=True))
    batch = {"frames": torch.randn(4, 13, 3).double(), "wanted": torch.randn(4, 13, 5).double()}
    batch["real"] = (torch.arange(13) < torch.tensor([13, 9, 13, 5])[:, None]).double()
    loss = lambda m, b: squares(lambda x: m(x)[0], b)  # noqa: E731
    assert plait.verify(model, loss, batch, "data=2 micro=2 shapes=bucket:8", tolerance=1e-9).ok


class Documents(dict[str, Tensor]):
    batch_spec = BatchSpec({"*": "rows, sequence"}, pad={"labels": -1})


def test_values_may_be_given() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["input_ids"]).mT, batch["labels"], ignore_index=-1)

    assert find_rules(made(), loss, Documents(labelled()), 8, True, 0).leaves["labels"].value == -1
    assert plait.verify(made(), loss, Documents(labelled()), "data=2 shapes=bucket:8", tolerance=1e-9).ok
    with pytest.raises(BatchError, match="the padding value of labels is 'no'; give a number"):
        BatchSpec(pad={"labels": "no"})  # type: ignore[dict-item]


# What padding changes is refused


class Bidirectional(Causal):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + x.mean(1, keepdim=True))  # type: ignore[no-any-return]


class Normed(nn.Module):
    """Its loss is masked, but its running statistics see padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCABULARY, 8), nn.BatchNorm1d(8), nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids) + 0 * self.norm(self.embed(ids).mT).mT)  # type: ignore[no-any-return]


class Nan(Causal):
    """The square root of what padding makes 0 has no gradient, though no label reads it."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids) * (ids != 0)[..., None].double().add(self.head.bias.sum() * 0).sqrt())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "loss", "text"),
    [
        (Bidirectional, language, "the loss is .*, and .* with padding"),
        (Causal, lambda m, b: F.cross_entropy(m(b["input_ids"]).mT, b["labels"], reduction="none").mean(), "the loss"),
        (Causal, lambda m, b: (language(m, b), {"share": (m(b["input_ids"]).argmax(2) > 3).double().mean()}),
         "the output 'share' is"),
        (Normed, language, "the buffer norm.running_mean differs"),
        (Nan, language, "the gradient of"),
        (Causal, lambda m, b: language(m, b) + m.embed(torch.arange(b["labels"].shape[1])).sum() * 0,
         "padded it raises IndexError"),
    ],
    ids=["attention", "mean", "output", "buffer", "gradient", "length"],
)  # fmt: skip
def test_padding_that_changes_the_step_is_refused(model: Any, loss: Any, text: str, request: Any) -> None:
    multiple = 32 if "length" in request.node.name else 8
    with pytest.raises(PlanError, match=rf"(?s)shapes=bucket:{multiple} changes the step: {text}") as caught:
        plait.verify(made(model), loss, labelled(), f"data=2 shapes=bucket:{multiple}")
    assert caught.value.refusal is not None and "input_ids with 0, labels with -100" in caught.value.refusal.why


def test_a_mask_of_each_position_for_each_other_is_named() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return language(model, batch) + (batch["mask"][:, 0] @ model(batch["input_ids"])).sum() * 0

    batch = labelled() | {"mask": torch.ones(4, 1, 13, 13, dtype=torch.float64)}
    with pytest.raises(
        PlanError, match=r"bucket:8 does not pad mask, whose shape \[4, 1, 13, 13\] has positions in two"
    ):
        plait.verify(made(Causal), loss, batch, "data=2 shapes=bucket:8")


def test_a_batch_without_sequences_is_refused() -> None:
    with pytest.raises(PlanError, match="shapes=bucket:8 finds no sequence in the batch"):
        plait.verify(nn.Conv2d(3, 4, 3), lambda m, b: m(b).mean(), torch.randn(4, 3, 8, 8), "data=2 shapes=bucket:8")


def test_a_step_that_gives_no_loss_is_refused() -> None:
    batch = labelled() | {"labels": torch.full((4, 13), -100)}
    with pytest.raises(PlanError, match="without it the step gives no loss: the loss is not finite"):
        plait.verify(made(), language, batch, "data=2 shapes=bucket:8")


# A run


def losses(plan: str, lengths: list[int], **options: Any) -> tuple[list[float], Trainer]:
    trainer = Trainer(made(), language, functools.partial(torch.optim.SGD, lr=0.1), plan, **options)
    return [float(trainer.step(labelled(length=n, seed=n))) for n in lengths], trainer


def test_a_run_meets_few_shapes(caplog: pytest.LogCaptureFixture) -> None:
    lengths = [5, 9, 16, 12, 7, 3, 11, 17, 14]
    with caplog.at_level(logging.INFO, "plait"), warnings.catch_warnings():
        warnings.simplefilter("error")
        found, trainer = losses("shapes=bucket:8", lengths)
    trainer.close()
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for length, loss in zip(lengths, found, strict=True):
        wanted = language(model, labelled(length=length, seed=length))
        assert abs(float(wanted.detach()) - loss) < 1e-12
        optimizer.zero_grad()
        wanted.backward()
        optimizer.step()
    report = trainer.captures
    assert [each.cause for each in report] == [
        "the first batch", "input_ids, labels: dim 1 from 8 to 16", "input_ids, labels: dim 1 from 16 to 24",
    ]  # fmt: skip
    assert len(report) == 3 and report.again == 2 and report.seconds == sum(each.seconds for each in report) > 0
    assert str(report).startswith("captured 3 times, in ") and "dim 1 from 16 to 24" in str(report)
    assert "the step was captured again in" in caplog.text


def test_beyond_the_limit_lengths_are_padded_to_what_was_captured() -> None:
    found, trainer = losses("shapes=bucket:2 shapes.limit=2", [6, 10, 3, 8, 12, 30, 17, 1])
    causes = [each.cause.rpartition(" ")[2] for each in trainer.captures]
    trainer.close()
    assert causes == ["batch", "10", "20", "40"]  # 3 and 8 as 6 and 10; 12 as 20, 30 as 40, 17 as 20, 1 as 6
    assert found == pytest.approx(losses("", [6, 10, 3, 8, 12, 30, 17, 1])[0], rel=1e-12)


def test_without_buckets_many_lengths_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"captured 9 times.*labels: dim 1 from 8 to 9.*add shapes=bucket:64 to the"):
        _, trainer = losses("", [*range(1, 10)])
    assert len(trainer.captures) == 9
    trainer.close()


def test_ranks_whose_rows_have_other_lengths_pad_to_the_longest() -> None:
    """Each rank has read its own two rows of each of these batches, and padded them to the longest of the two."""
    batches = [(labelled(2, one, one), labelled(2, other, other)) for one, other in ((5, 13), (9, 6), (3, 30))]

    def joined(parts: Any) -> dict[str, Tensor]:
        longest = max(part["labels"].shape[1] for part in parts)
        pads = {"input_ids": 0, "labels": -100}
        wide = [
            {k: F.pad(t, (0, longest - t.shape[1]), value=pads[k]) for k, t in part.items()} for part in parts
        ]  # fmt: skip
        return {key: torch.cat([part[key] for part in wide]) for key in pads}

    models = [made(), made()]  # here: the seed is that of all threads

    def rank(world: World) -> list[Any]:
        trainer = Trainer(models[world.rank], with_outputs, torch.optim.SGD, "data=2 shapes=bucket:8", world=world)
        here = [LocalBatch(parts[world.rank], 2, 4, str(n)) for n, parts in enumerate(batches)]
        return [trainer.step(batch) for batch in here] + [trainer.evaluate(here[1])]

    found, _ = plait.run_ranks(Plan.parse("data=2").mesh, rank)
    trainer = Trainer(made(), with_outputs, torch.optim.SGD, "")
    wanted = [trainer.step(joined(parts)) for parts in batches]
    wanted.append(trainer.evaluate(joined(batches[1])))
    for (loss, outputs), (right, others) in zip(found, wanted, strict=True):
        assert abs(float(loss) - float(right)) < 1e-12
        torch.testing.assert_close(outputs, others, rtol=1e-9, atol=1e-12)
    trainer.close()


def with_outputs(model: nn.Module, batch: Any) -> Any:
    out = model(batch["input_ids"])
    right = (out.argmax(2) == batch["labels"]).sum()
    return language(model, batch), {"out": out, "best": out.argmax(2)[:, :-1], "right": plait.Sum(right)}


def test_outputs_have_no_padding() -> None:
    trainer = Trainer(made(), with_outputs, torch.optim.SGD, "micro=2 shapes=bucket:8")
    whole = Trainer(made(), with_outputs, torch.optim.SGD, "")
    for length in (13, 6):
        (loss, outputs), (right, others) = (t.step(labelled(length=length)) for t in (trainer, whole))
        assert abs(float(loss) - float(right)) < 0.1 and outputs["best"].shape == (4, length - 1)
        torch.testing.assert_close(outputs, others, rtol=1e-9, atol=1e-12)
    (loss, outputs), (right, others) = (t.evaluate(labelled(length=7)) for t in (trainer, whole))
    assert loss == pytest.approx(right, rel=1e-12)
    torch.testing.assert_close(outputs, others, rtol=1e-9, atol=1e-12)
    trainer.close()
    whole.close()


def test_a_model_without_values_is_checked_with_those_that_it_begins_with() -> None:
    class Embedded(nn.Sequential):
        pass

    with torch.device("meta"):
        model = Embedded(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
    trainer = Trainer(model, language, torch.optim.SGD, "shapes=bucket:8")
    trainer.step(labelled())
    assert trainer.captures.captures[0].seconds > 0
    trainer.close()
    with torch.device("meta"):
        model = Embedded(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
    loss = lambda m, b: m(b["input_ids"]).mean()  # noqa: E731
    with pytest.raises(PlanError, match="shapes=bucket:8 changes the step"):
        Trainer(model, loss, torch.optim.SGD, "shapes=bucket:8").step(labelled())


def test_explain_and_memory_see_the_padded_batch() -> None:
    text = str(plait.explain(made(), language, labelled(), "data=2 shapes=bucket:8"))
    assert "data=2 shapes=bucket:8" in text
    little, much = (
        plait.memory(made(), language, labelled(), f"shapes=bucket:{n}").peak for n in (16, 1024)
    )  # fmt: skip
    assert much > 10 * little


def test_differences_of_batches_in_words() -> None:
    one = {"x": ("int64", (4, 8)), "m": ("bool", (4, 8))}
    assert difference_of_leaves(one, {"x": ("int64", (4, 9)), "m": ("bool", (4, 9))}) == "x, m: dim 1 from 8 to 9"
    assert difference_of_leaves(one, {"x": ("int64", (2, 8)), "m": ("bool", (4, 9))}) == (
        "x: dim 0 from 4 to 2; m: dim 1 from 8 to 9"
    )
    assert difference_of_leaves(one, {"x": ("int32", (4, 8)), "m": ("bool", (4, 8))}) == "x is int32 after int64"
    assert difference_of_leaves(one, {"x": ("int64", (4,)), "m": ("bool", (4, 8))}) == "x has shape [4] after [4, 8]"
    assert difference_of_leaves(one, {"x": ("int64", (4, 8))}) == "the batch has no m, which the one before had"
    assert difference_of_leaves({}, {"x": ("int64", (4,))}) == "the batch has x, which the one before had not"


def test_padding_is_tried_with_more_than_one_position() -> None:
    """Of which places as shares of the length say nothing: the first is 0 of any length."""

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        places = torch.linspace(0, 1, batch["x"].shape[1], dtype=torch.float64)[:, None]
        each = (model(batch["x"]) * (1 + places)).square().mean(-1) * batch["mask"]
        return plait.Weighted(each.sum(), batch["mask"].sum())

    batch = {"x": torch.rand(4, 5, 8, dtype=torch.float64), "mask": torch.ones(4, 5)}
    with pytest.raises(PlanError, match="shapes=bucket:8 changes the step"):
        plait.verify(nn.Linear(8, 8).double(), loss_fn, batch, "data=2 shapes=bucket:8")
