"""What a loss comes with: (loss, aux), put together over ranks, microbatches and batches as on one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.api.trainer import Trainer
from plait.comm.protocol import World
from plait.compile.capture.loss_values import join_outputs, read_loss, results
from plait.engine.compiler import Captures, Compiler
from plait.errors import LossError
from plait.report.explanation import explanation

pytestmark = pytest.mark.xdist_group("outputs")  # plans share what is captured

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3)))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body[0](x)
        return self.head(self.norm(self.body[2](self.body[1](hidden)))), hidden


def batch(rows: int = 16, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, 16, generator=generator, dtype=torch.float64),
        "y": torch.randint(0, 4, (rows,), generator=generator),
    }


def outputs_of(logits: Tensor, hidden: Tensor, y: Tensor, body: Any) -> dict[str, Any]:
    right = logits.argmax(1) == y
    return {
        "predicted": logits.argmax(1),
        "right": right,
        "logits": logits,
        "early": hidden.square().mean(1),  # of the first stage
        "y": y,  # of the batch, as it is
        "accuracy": right.double().mean(),
        "num_right": plait.Sum(right.sum()),
        "confused": plait.Sum(F.one_hot(y, 4).T @ F.one_hot(logits.argmax(1), 4)),
        "largest": plait.Max(logits.amax(0)),
        "least": plait.Min(logits.min()),
        "of_class_0": plait.Weighted((right & (y == 0)).double().sum(), (y == 0).sum()),
        "mean_logits": plait.Mean(logits.mean(0)),
        "bias": plait.Mean(body[0][0].bias),
    }


def mean_loss(model: Any, rows: dict[str, Tensor]) -> Any:
    logits, hidden = model(rows["x"])
    return F.cross_entropy(logits, rows["y"]), outputs_of(logits, hidden, rows["y"], model.body)


def weighted_loss(model: Any, rows: dict[str, Tensor]) -> Any:
    logits, hidden = model(rows["x"])
    keep = (rows["y"] > 0).double()
    losses = F.cross_entropy(logits, rows["y"], reduction="none")
    return plait.Weighted((losses * keep).sum(), keep.sum()), outputs_of(logits, hidden, rows["y"], model.body)


PLANS = [
    "data=4 micro=2", "data=2 tensor=2 zero=1", "data=2 zero=3 micro=2", "replica=2 data=2", "pipeline=2 micro=4",
    "pipeline=2 chunks=2 micro=4 schedule=interleaved", "pipeline=[2,1] micro=4 schedule=zb-h1",
    "data=2 pipeline=2 micro=4 schedule=dualpipe-v", "pipeline=2 micro=4 schedule=pipedream", "data=2 compress=int8",
    "data=2 replica=2 compress=int8 micro=2", "data=2 sync=2", "data=2 batchnorm=local",
    "stages=[tensor=2 | data=2] micro=2",
]  # fmt: skip


@functools.cache
def verifier(loss: Any) -> plait.Verifier:
    torch.manual_seed(0)
    return plait.Verifier(Net(), loss, batch())


@pytest.mark.parametrize("plan", PLANS)
def test_the_same_as_on_one_device(plan: str) -> None:
    report = verifier(mean_loss if "micro=2" in plan else weighted_loss).verify(plan)
    assert report.ok, report
    assert {d.name for d in report.outputs} == set(mean_loss(Net(), batch())[1])


def test_no_weight_stays_whole_for_an_output() -> None:
    """A vocabulary is split also where accuracy is asked for, which needs the logits whole."""
    model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Linear(16, 64))

    def token_loss(m: Any, b: Tensor) -> Any:
        logits = m(b).flatten(0, 1)
        return F.cross_entropy(logits, b.flatten()), {"accuracy": (logits.argmax(1) == b.flatten()).float().mean()}

    ids = torch.randint(64, (4, 6), generator=torch.Generator().manual_seed(0))
    plain = str(plait.explain(model, lambda m, b: token_loss(m, b)[0], ids, "tensor=2")).count("auto sharding: ")
    verifier = plait.Verifier(model, token_loss, ids)
    page = str(explanation(Compiler(verifier.captures, plait.Plan.parse("tensor=2")).compiled(ids)))
    assert page.count("auto sharding: ") == plain > 4
    assert verifier.verify("tensor=2").ok


def test_verify_says_which_output_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.api.verify.results", lambda outputs: {n: p.result() * 2 for n, p in outputs.items()})
    report = plait.verify(Net(), lambda m, b: (m(b["x"])[0].mean(), {"rows": b["x"].sum(1)}), batch(), "data=2")
    assert str(report.first_bad) == "5.00e-01  rows" and "worst output     5.00e-01  rows" in str(report)


def on_ranks(plan: str, steps: Any, loss: Any = mean_loss) -> list[Any]:
    mesh = plait.Plan.parse(plan).mesh
    captures = verifier(loss).captures if loss is mean_loss else Captures(Net(), loss)
    compiler = Compiler(captures, plait.Plan.parse(plan).inner_plan)

    def rank(world: World) -> Any:
        return steps(Trainer(compiler.model, loss, SGD, plan, world=world, compiler=compiler))

    return plait.run_ranks(mesh, rank)


@pytest.mark.parametrize("plan", ["data=1", "data=2 pipeline=2 micro=2", "data=2 sync=4"])
def test_an_evaluation_puts_batches_together(plan: str) -> None:
    """Of 16, 8 and 4 rows; each output is what the definition says of all 28."""
    batches = [batch(rows, seed) for seed, rows in enumerate((16, 8, 4))]

    def evaluated(trainer: Trainer) -> Any:
        trainer.prepare(batches[0])
        return trainer.evaluate(iter(batches))

    model = Net().eval()
    with torch.no_grad():
        each = [mean_loss(model, rows) for rows in batches]
        y = torch.cat([rows["y"] for rows in batches])
        logits = torch.cat([aux["logits"] for _, aux in each])
        expected = outputs_of(logits, model(torch.cat([rows["x"] for rows in batches]))[1], y, model.body)
    expected = {n: getattr(value, "value", getattr(value, "mean", value)) for n, value in expected.items()} | {
        n: value for n, value in expected.items() if isinstance(value, Tensor)
    }
    for loss, aux in on_ranks(plan, evaluated):
        assert isinstance(loss, float) and loss == pytest.approx(float(F.cross_entropy(logits, y)))
        assert aux.keys() == expected.keys() and not any(value.requires_grad for value in aux.values())
        for name, value in expected.items():
            torch.testing.assert_close(aux[name], value.detach(), msg=lambda text, name=name: f"{name}: {text}")


def test_a_step_returns_what_the_loss_function_does() -> None:
    ends: list[plait.StepEnd] = []
    trainer = Trainer(Net(), mean_loss, SGD, callbacks=[ends.append], clip_norm=1.0)
    loss, aux = trainer.forward_backward(batch())
    gradients = trainer.gradients()
    trainer.optimizer_step()
    assert torch.is_tensor(loss) and loss.ndim == 0 and "head.weight" in gradients
    assert ends[0].aux.keys() == aux.keys() and aux["num_right"] == aux["right"].sum()
    assert aux["bias"].data_ptr() != trainer.executor.parameters["body.0.0.bias"].data_ptr()
    plain = Trainer(Net(), lambda m, b: mean_loss(m, b)[0], SGD)
    assert float(plain.step(batch())) == pytest.approx(float(loss)) and isinstance(plain.evaluate(batch()), float)
    empty = Trainer(Net(), lambda m, b: (mean_loss(m, b)[0], {}), SGD)
    assert empty.step(batch())[1] == {} and empty.evaluate(batch())[1] == {}


def test_rows_of_local_batches_come_in_the_order_of_the_global_batch() -> None:
    data = [(batch()["x"][i], i) for i in range(16)]

    def rows(trainer: Trainer) -> list[int]:
        data_loader = plait.loader(data, 16, shuffle=False, plan="data=2 micro=2", world=trainer.world, prefetch=0)
        return trainer.step(next(iter(data_loader)))[1]["index"].tolist()

    found = on_ranks("data=2 micro=2", rows, lambda m, b: (m(b[0])[0].mean(), {"index": b[1]}))
    assert found == [list(range(16))] * 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda y: (y.mean(), y.sum()), r"a pair of Tensor and Tensor.*plait.Weighted\(sum, weight\).*\(loss, \{"),
        (lambda y: [y.mean(), 3], "a pair of Tensor and int"),
        (lambda y: (y.mean(), {"a": 3.0}), "the output 'a' beside the loss is a float, not a tensor"),
        (lambda y: (y.mean(), {"a": y[:2]}), r"'a' beside the loss has shape \[2, 4\], and the batch 8 rows"),
        (lambda y: (y.mean(), {"a": (y > 0).sum()}), "a scalar of torch.int64, which may be a count: write plait.Sum"),
        (lambda y: (y.mean(), {"a": plait.Mean(y > 0)}), "a plait.Mean of torch.bool"),
        (lambda y: (y.mean(), {0: y}), "is called 0; give it a string"),
        (lambda y: (plait.Weighted(y, 2), {}), r"the sum of plait.Weighted\(sum, weight\) has shape"),
    ],
)
def test_what_is_refused(value: Any, message: str) -> None:
    with pytest.raises(LossError, match=message):
        Trainer(nn.Linear(4, 4), lambda m, b: value(m(b)), SGD).step(torch.ones(8, 4))


def test_what_batches_do_not_make_together() -> None:
    one, other = (read_loss((torch.ones(()), {"a": torch.ones(2, n)}), 2).outputs for n in (3, 4))
    assert one is not None and other is not None
    with pytest.raises(LossError, match=r"'a' beside the loss has shapes \[2, 3\] and \[2, 4\] of different batches"):
        join_outputs([one, other])
    with pytest.raises(LossError, match=r"are a \(rows\) of one batch and none of another"):
        join_outputs([one, {}])
    half = {"a": plait.Mean(torch.ones(3, dtype=torch.bfloat16))}
    parts = [read_loss((torch.ones(()), half), rows).outputs for rows in (1, 3)]
    assert results(join_outputs([p for p in parts if p is not None]))["a"].dtype == torch.bfloat16
