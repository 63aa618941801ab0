"""Which tensors of a batch have its rows, and how those are cut."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import plait
from plait.compile.capture.batch import batch_form, count_rows, join_rows
from plait.engine.compiler import Captures, Compiler
from plait.engine.local_batch import LocalBatch, batch_part, global_like, microbatches
from plait.errors import BatchError, CaptureError
from plait.spec.batch_spec import BatchSpec


def batch() -> dict[str, Tensor]:
    """Eight rows, and a weight for each of three classes, which both halves of the rows need whole."""
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 6, generator=draws), torch.randint(3, (8,), generator=draws)
    return {"x": x, "y": y, "weights": torch.tensor([1.0, 2.0, 0.5])}


def detections(rows: int = 8, targets: int = 0) -> dict[str, Any]:
    """Rows, and for each of them a mapping of its own, with one target or more; 0 for another number in each row."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, generator=draws, dtype=torch.float64)
    boxes = [torch.randn(targets or i % 3 + 1, 4, generator=draws, dtype=torch.float64) for i in range(rows)]
    return {"x": x, "targets": [{"boxes": each} for each in boxes]}


def detection_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    pairs = zip(model(batch["x"]), batch["targets"], strict=False)  # as many lines of users' code do
    return torch.stack([(row - each["boxes"]).square().mean() for row, each in pairs]).sum() / len(batch["x"])


def test_a_list_with_a_mapping_for_each_row_is_cut_with_the_rows() -> None:
    """It was given whole to each part, so that rows met the targets of other rows."""
    whole = detections()
    assert count_rows(whole) == 8
    assert [len(each["boxes"]) for each in batch_part(whole, 1, 2)["targets"]] == [2, 3, 1, 2]
    again = join_rows([batch_part(whole, index, 2) for index in range(2)])
    assert torch.equal(again["x"], whole["x"])
    assert [id(each["boxes"]) for each in again["targets"]] == [id(each["boxes"]) for each in whole["targets"]]
    views = {"x": torch.zeros(2, 3), "views": [{"a": torch.zeros(2)}, {"a": torch.zeros(2)}]}
    assert len(batch_part(views, 0, 2)["views"]) == 2  # two inputs with a row each, not two rows
    equal, model = detections(targets=2), nn.Linear(4, 4).double()
    trainer = plait.Trainer(model, detection_loss, functools.partial(torch.optim.SGD, lr=0.0), "micro=2")
    one_device = detection_loss(model, equal).item()
    assert trainer.step(equal).item() == pytest.approx(one_device, rel=1e-12)


def test_lists_of_rows_that_no_graph_can_cut_are_refused() -> None:
    with pytest.raises(BatchError, match="targets of the batch is a list with an entry for each row.*other shapes"):
        plait.verify(nn.Linear(4, 4).double(), detection_loss, detections(), "micro=2")
    with pytest.raises(CaptureError, match="a loader's batch holds this rank's rows alone"):
        global_like(LocalBatch(detections(4), 4, 8))


def test_a_list_that_could_be_rows_or_inputs_is_not_cut() -> None:
    unclear = {"x": torch.zeros(2, 3), "t": [{"b": torch.zeros(2, 4)}, {"b": torch.zeros(2, 4)}]}
    assert microbatches(unclear, 1) == [unclear]
    with pytest.raises(BatchError, match="t of the batch is a list of 2 mappings.*give several inputs as a mapping"):
        microbatches(unclear, 2)


def test_only_what_has_the_batchs_rows_is_cut() -> None:
    whole = {**batch(), "scale": torch.tensor(2.0), "n": 3}
    for parts in ([batch_part(whole, index, 2) for index in range(2)], microbatches(whole, 2)):
        for name in ("x", "y"):
            assert torch.equal(torch.cat([part[name] for part in parts]), whole[name]), name
            assert len(parts[0][name]) == 4, name
        for part in parts:
            assert all(part[name] is whole[name] for name in ("weights", "scale", "n"))


def test_the_last_part_may_be_smaller_but_not_empty() -> None:
    five = {"x": torch.arange(5), "y": torch.arange(5)}
    assert [batch_part(five, index, 3)["x"].tolist() for index in range(3)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(BatchError, match="5 rows does not make 4 parts"):
        batch_part(five, 0, 4)
    boxes = {"x": torch.zeros(4, 3), "boxes": [torch.zeros(1, 4), torch.zeros(1, 4)]}  # a list of what each image has
    with pytest.raises(BatchError, match=r"of 1 rows, counted by .* 4 of x\) does not make 2 parts.*batch_spec"):
        batch_part(boxes, 0, 2)


@pytest.mark.parametrize("plan", ["data=2", "data=2 batchnorm=local", "data=2 micro=2 batchnorm=local"])
def test_class_weights_of_a_batch_stay_whole(plan: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    report = plait.verify(model, _weighted, batch(), plan)
    assert report.ok, report


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor


class Named(NamedTuple):
    x: Tensor
    y: Tensor


class Registered:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


pytree.register_pytree_node(
    Registered, lambda one: ([one.x, one.y], None), lambda values, _: Registered(*values),
    serialized_type_name="plait.tests.Registered",
)  # fmt: skip
KINDS: dict[str, Callable[..., Any]] = {
    "BatchEncoding": lambda **data: transformers.BatchEncoding(data),
    "ModelOutput": lambda x, y: transformers.utils.ModelOutput(x=x, y=y),
    "UserDict": lambda **data: collections.UserDict(data),
    "MappingProxy": lambda **data: types.MappingProxyType(data),
    "frozen dataclass": Frozen,
    "namedtuple": Named,
    "registered": Registered,
    "nested": lambda x, y: {"inputs": [Frozen(x, x)], "y": (y,)},
}


def _of_any_kind(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, dict) and "inputs" in batch:
        x, y = batch["inputs"][0].x, batch["y"][0]
    else:
        x, y = (batch["x"], batch["y"]) if hasattr(batch, "keys") else (batch.x, batch.y)
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("kind", KINDS)
def test_any_tree_of_tensors_is_a_batch(kind: str) -> None:
    """Cut in microbatches, over ranks and replicas, read by a loader, and weighed by its rows in an evaluation."""
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(10, 6, generator=draws), torch.randint(3, (10,), generator=draws)
    model = nn.Linear(6, 3)
    whole, rest = KINDS[kind](x=x[:8], y=y[:8]), KINDS[kind](x=x[8:], y=y[8:])
    parts = microbatches(whole, 2)
    assert type(parts[0]) is type(whole)
    assert plait.verify(model, _of_any_kind, whole, "data=2 micro=2", steps=1).ok
    assert plait.verify(model, _of_any_kind, whole, "data=2 sync=2", steps=2).ok
    trainer = plait.Trainer(model, _of_any_kind, functools.partial(torch.optim.SGD, lr=0.0), "data=1")
    trainer.prepare(whole)
    assert trainer.evaluate(iter([whole, rest])) == pytest.approx(float(F.cross_entropy(model(x), y).detach()))
    data_loader = plait.loader(
        [(x[i], y[i]) for i in range(8)], 8, shuffle=False, plan="data=1",
        collate=lambda rows: KINDS[kind](**dict(zip("xy", torch.utils.data.default_collate(rows), strict=True))),
    )  # fmt: skip
    assert float(trainer.step(next(iter(data_loader)))) == pytest.approx(
        float(F.cross_entropy(model(x[:8]), y[:8]).detach())
    )


def _weighted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    weights = batch["weights"][batch["y"]]
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return plait.Weighted((losses * weights).sum(), weights.sum())


@dataclasses.dataclass(frozen=True)
class TimeFirst:
    """Sequences of as many steps as there are rows, which are dim 1; of a mask of time no dim is rows."""

    tokens: Tensor
    mask: Tensor
    y: Tensor
    batch_spec = BatchSpec({"tok*": "-, rows", "mask": "-"})


def _time_first(rows: int = 8) -> TimeFirst:
    torch.manual_seed(0)
    tokens = torch.randn(8, rows, 4, dtype=torch.float64)
    return TimeFirst(tokens, torch.rand(8, dtype=torch.float64), torch.randn(rows, 5, dtype=torch.float64))


def _of_sequences(model: nn.Module, batch: TimeFirst) -> Tensor:
    found, _ = model[0](batch.tokens)
    return F.mse_loss(model[1]((found * batch.mask[:, None, None]).sum(0)), batch.y)


class _Scan(nn.Module):
    """One layer over time, which is dim 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states = [torch.zeros(x.shape[1], 6, dtype=x.dtype)]
        for each in x:
            states.append(torch.tanh(self.w(each) + self.u(states[-1])))
        return torch.stack(states[1:]), states[-1]


def test_a_batch_says_which_dim_its_rows_are() -> None:
    whole = _time_first()
    for parts in ([batch_part(whole, index, 2) for index in range(2)], microbatches(whole, 2)):
        assert torch.equal(torch.cat([part.tokens for part in parts], 1), whole.tokens)
        assert torch.equal(torch.cat([part.y for part in parts]), whole.y)
        assert all(part.mask is whole.mask and type(part) is TimeFirst for part in parts)
    assert count_rows(dataclasses.replace(whole, tokens=whole.tokens[:3])) == 8
    local = LocalBatch(batch_part(whole, 1, 4), 2, 8)
    assert global_like(local).tokens.shape == (8, 8, 4) and global_like(local).y.shape == (8, 5)
    assert batch_form(whole) != batch_form({f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)})


@pytest.mark.parametrize(
    "plan", ["data=2", "data=2 micro=2 zero=2", "stages=[data=2|tensor=2] micro=2", "data=4 sync=2"]
)
def test_rows_that_are_not_dim_0_train(plan: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Scan(), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))).double()
    report = plait.verify(model, _of_sequences, _time_first(), plan)
    assert report.ok, report


def test_rows_that_are_not_dim_0_of_each_rank_alone() -> None:
    """The graph of one rank has its rows of every tensor, and the memory is counted so."""
    model = nn.Sequential(_Scan(), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))).double()
    program = Compiler(Captures(model, _of_sequences), plait.Plan.parse("data=4")).compiled(_time_first()).program
    assert {name: str(program.layouts[name]) for name in ("tokens", "mask", "y")} == {
        "tokens": "f64[8, 8@data, 4]", "mask": "f64[8]", "y": "f64[8@data, 5]",
    }  # fmt: skip
    small = plait.memory(model, _of_sequences, _time_first(), "data=4").peak
    assert small < plait.memory(model, _of_sequences, _time_first(), "").peak


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"x": "-, row"}, "'-, row' for x: 'row' is no kind of dim"),
        ({"x": "rows, rows"}, "says of two dims"),
        ({"y": "-, -, rows"}, "has 3 words, and y of the batch 1 dims"),
        ({"x": "-, rows", "y": "rows"}, "different numbers of rows by its batch_spec .*: 6 of x, 8 of y"),
    ],
)
def test_what_a_batch_cannot_say(dims: dict[str, str], message: str) -> None:
    class Batch(dict[str, Tensor]):
        pass

    def count() -> int:
        said = Batch(batch())
        said.batch_spec = BatchSpec(dims)  # type: ignore[attr-defined]
        return count_rows(said)

    with pytest.raises(BatchError, match=message):
        count()
