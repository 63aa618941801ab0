"""Arguments of the public functions that cannot be taken: named, with the remedy, before anything starts."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait import BatchError, CheckpointError, ConfigError, LayoutError, PlanError, Trainer

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"]).square().mean()


def rows(num: int = 8) -> dict[str, Tensor]:
    return {"x": torch.randn(num, 4, generator=torch.Generator().manual_seed(num))}


def trainer(**given: Any) -> Trainer:
    return Trainer(**{"model": nn.Linear(4, 2), "loss_fn": loss_fn, "optimizer": SGD, "plan": "", **given})


@pytest.mark.parametrize("on_nan", ["RAISE", "raises", None, 3, ["warn"]])
def test_another_word_for_what_a_loss_that_is_not_finite_does_is_refused(on_nan: Any) -> None:
    with pytest.raises(PlanError, match="^on_nan=.*'raise', .* or 'warn'"):
        trainer(on_nan=on_nan)


def no_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return 3


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"plan": 3}, PlanError, "the plan is a int; give a Plan or its text"),
        ({"plan": ["data=1"]}, PlanError, "the plan is a list"),
        ({"plan": {"data": 1}}, PlanError, "the plan is a dict"),
        ({"plan": plait.Plan}, PlanError, "the plan is a type"),
        ({"layouts": 3}, LayoutError, "layouts=3: give a mapping of name patterns to texts"),
        ({"layouts": {"weight": 3}}, LayoutError, "layouts={'weight': 3}"),
        ({"layouts": [("*", "-")]}, LayoutError, "layouts="),
        ({"clip_norm": "x"}, PlanError, "clip_norm='x': give a number above 0"),
        ({"clip_norm": True}, PlanError, "clip_norm=True"),
        ({"seed": "x"}, PlanError, "seed='x': give a whole number"),
        ({"seed": 1.5}, PlanError, "seed=1.5"),
        ({"scheduler": 3}, PlanError, "scheduler=3: give a function from an optimizer"),
        ({"callbacks": None}, PlanError, "callbacks=None: give a list of functions"),
        ({"callbacks": [3]}, PlanError, r"callbacks=\[3\]"),
        ({"allow": 3}, PlanError, "allow=3: give 'local_loss'"),
        ({"allow": None}, PlanError, "allow=None"),
        ({"noise_every": "x"}, PlanError, "noise_every='x': give a whole number of steps"),
        ({"noise_every": 1.5}, PlanError, "noise_every=1.5"),
        ({"trace": 3}, PlanError, "trace=3: give the path of a folder"),
        ({"trace": b"x"}, PlanError, "trace=b'x'"),
        ({"scratch": 3}, PlanError, "scratch=3: give the path of a folder"),
        ({"world": 3}, PlanError, "world=3: give the World"),
    ],
)
def test_what_a_trainer_cannot_take_is_named(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trainer(**given)


def test_a_scheduler_without_a_step_is_named_before_one_is_taken() -> None:
    one = trainer(scheduler=no_scheduler)
    with pytest.raises(PlanError, match=r"scheduler's function returned a int, which has no method step\(\)"):
        one.prepare(rows())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda one: one.save(3), CheckpointError, "path=3: give the path of a folder, or a URL"),
        (lambda one: one.save("x", keep="x"), CheckpointError, "keep='x': give the number of checkpoints"),
        (lambda one: one.save("x", keep=1.5), CheckpointError, "keep=1.5"),
        (lambda one: one.save("x", extra=3), CheckpointError, "extra=3: give a mapping"),
        (lambda one: one.load(None), CheckpointError, "path=None"),
        (lambda one: one.load_weights(3), CheckpointError, "path=3"),
        (lambda one: one.load_state_dict(3), CheckpointError, "state=3: give what a trainer's state_dict"),
        (lambda one: one.ema("x"), PlanError, "decay='x': give a number from 0 to below 1"),
    ],
)
def test_what_a_method_of_a_trainer_cannot_take_is_named(
    call: Callable[[Trainer], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(trainer())


@pytest.mark.parametrize("name", ["verify", "explain", "memory", "simulate", "search"])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"model": 3}, PlanError, "the model is a int, not a torch.nn.Module"),
        ({"loss_fn": 3}, PlanError, "loss_fn is a int"),
        ({"plan": 3}, PlanError, "the plan is a int"),
        ({"layouts": 3}, LayoutError, "layouts=3"),
        ({"cluster": 3}, ConfigError, "cluster=3: give a Cluster, a name such as 'h100x64'"),
        ({"optimizer": 3}, PlanError, "the optimizer is a int"),
        ({"limits": 3}, PlanError, "limits=3: give text"),
        ({"steps": 1.5}, PlanError, "steps=1.5: give a whole number"),
        ({"tolerance": -1}, PlanError, "tolerance=-1: give a number above 0"),
        ({"tolerance": math.nan}, PlanError, "tolerance=nan"),
    ],
)
def test_what_a_function_cannot_take_is_named(
    name: str, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    function = getattr(plait, name)
    right = {"model": nn.Linear(4, 2), "loss_fn": loss_fn, "batch": rows(), "plan": "data=2", "cluster": "h100x2"}
    takes = inspect.signature(function).parameters
    if given.keys() <= takes.keys():
        with pytest.raises(error, match=message):
            function(**{**{key: value for key, value in right.items() if key in takes}, **given})


def test_a_tolerance_of_zero_asks_for_equal_bits() -> None:
    given = (nn.Linear(4, 2), loss_fn, rows())
    same = plait.verify(*given, "", tolerance=0)
    assert same.ok
    assert "rounding" not in str(same)
    apart = plait.verify(*given, "data=2 reduce=bf16", tolerance=0)
    assert not apart.ok


@pytest.mark.parametrize("text", [None, 3])
def test_what_is_no_text_of_a_plan_is_named(text: Any) -> None:
    with pytest.raises(PlanError, match=r"the plan is a \w+; give a Plan or its text"):
        plait.Plan.parse(text)


@pytest.mark.parametrize("axes", ["x", 3, None, {"data": 2}, ("data", 2), (("data", "2"),), ((2, "data"),)])
def test_what_is_no_axes_of_a_mesh_is_named(axes: Any) -> None:
    with pytest.raises(PlanError, match=r"a mesh has pairs of an axis and its size, as \(\('data', 2\)"):
        plait.Mesh(axes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_rows": "x"}, "num_rows='x': a table has a whole number of rows, 1 or more"),
        ({"num_rows": 0}, "num_rows=0"),
        ({"num_rows": -1}, "num_rows=-1"),
        ({"ids": 3}, "ids=3: give the key of the batch"),
        ({"dim": 1.5}, "dim=1.5"),
    ],
)
def test_what_a_table_cannot_take_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plait.SparseTable(**{"num_rows": 8, "dim": 4, "ids": "x", **given})


@pytest.mark.parametrize(
    ("given", "message"),
    [({"plan": 3}, "the plan is a int"), ({"seed": "x"}, "seed='x'"), ({"world": 3}, "world=3")],
)
def test_what_a_loader_cannot_take_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plait.loader(list(range(8)), 4, **given)


WITHOUT_VALUES = [
    ({"x": torch.ones(8, 4, device="meta")}, "x of the batch is on the meta device, and has no values"),
    ({"x": [torch.ones(8, 4, device="meta")]}, "x.0 of the batch is on the meta device"),
]


def nested() -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that the interface may change
        return {"x": torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)])}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("method", ["step", "forward_backward", "evaluate"])
@pytest.mark.parametrize(("batch", "message"), [*WITHOUT_VALUES, (None, "holds no tensor"), (nested, "nested tensor")])
def test_a_batch_that_no_step_can_compute_with_is_named(batch: Any, message: str, method: str, first: bool) -> None:
    one = trainer()
    if not first:
        one.step(rows())
    with pytest.raises(BatchError, match=message):
        getattr(one, method)(batch() if callable(batch) else batch)
    one.step(rows())


@pytest.mark.parametrize("name", ["verify", "explain", "memory", "simulate", "search"])
@pytest.mark.parametrize("batch", [None, 3, {"n": 3}])
def test_a_batch_without_a_tensor_is_named_whatever_the_plan(name: str, batch: Any) -> None:
    function = getattr(plait, name)
    right = {"model": nn.Linear(4, 2), "loss_fn": loss_fn, "batch": batch, "plan": "data=2", "cluster": "h100x2"}
    with pytest.raises(BatchError, match="the batch holds no tensor: it is"):
        function(**{key: value for key, value in right.items() if key in inspect.signature(function).parameters})


@pytest.mark.parametrize(("batch", "message"), WITHOUT_VALUES)
def test_verify_needs_values(batch: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        plait.verify(nn.Linear(4, 2), loss_fn, batch, "data=2")
