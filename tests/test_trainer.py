"""The Trainer on ranks that are threads: what it refuses before it starts, and what its ranks must agree on."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.api.trainer import Trainer
from plait.comm.process_world import process_world
from plait.comm.protocol import World
from plait.engine.compiler import Captures, Compiler
from plait.engine.ddp_fallback import refuse_unless_data_only
from plait.engine.local_batch import LocalBatch
from plait.errors import BatchError, CaptureError, DeviceMemoryError, LossError, PlanError, RankFailed
from plait.plan.plan import Plan

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"]).square().mean()


def rows(num: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(num, 8, generator=torch.Generator().manual_seed(num))}


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"optimizer": functools.partial(torch.optim.LBFGS, lr=1.0)}, "LBFGS runs the model several times a step"),
        ({"optimizer": lambda parameters: list(parameters)}, "returned a list, not a torch.optim.Optimizer"),
        ({"optimizer": SGD, "scheduler": plateau}, "ReduceLROnPlateau steps by a metric"),
    ],
)
def test_refuses_what_cannot_step(more: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Trainer(mlp(), loss_fn, plan="", **more).step(rows())


@pytest.mark.parametrize("batch", [None, [], {"n": 3}])
def test_a_batch_without_a_tensor_is_named(batch: Any) -> None:
    trainer = Trainer(mlp(), loss_fn, SGD, "")
    with pytest.raises(BatchError, match="the batch holds no tensor"):
        trainer.step(batch)
    with pytest.raises(BatchError, match="the batch holds no tensor"):
        trainer.evaluate(batch)


def test_ranks_that_read_different_batches_are_stopped() -> None:
    def rank(world: World) -> None:
        trainer = Trainer(mlp(), loss_fn, SGD, "data=2", world=world)
        for number in range(4):
            skipped = number + (world.rank == 1 and number > 0)
            trainer.step(LocalBatch(rows(), 4, 8, f"batch {skipped} of epoch 0"))

    with pytest.raises(RankFailed, match="do not agree on the place in the data: rank 0: batch 1 .* rank 1: batch 2"):
        plait.run_ranks(plait.Plan.parse("data=2").mesh, rank)


def test_a_shape_of_one_rank_only_names_the_shapes() -> None:
    def rank(world: World) -> None:
        trainer = Trainer(mlp(), loss_fn, SGD, "data=2", world=world)
        for _ in range(3):
            trainer.step(rows(4))
        trainer.step(rows(6 + 2 * world.rank))

    with pytest.raises(RankFailed, match=r"shape of batch.*\[6, 8\].*\[8, 8\].*so far: .*\[4, 8\]"):
        plait.run_ranks(plait.Plan.parse("data=2").mesh, rank)


class Branches(nn.Module):
    """Cannot be captured."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return y if y.sum() > 0 else -y


def test_verify_says_that_it_cannot_check_what_it_cannot_capture() -> None:
    with pytest.raises(CaptureError, match=r"test_trainer.py:\d+: (?s:.*)verify compares what the graph computes"):
        plait.verify(Branches(), loss_fn, rows(), "data=2")


def test_a_loss_of_three_is_counted() -> None:
    with pytest.raises(LossError, match="a tuple of 3 elements"):
        Trainer(mlp(), lambda m, b: (m(b["x"]).sum(), 4, {}), SGD, "").step(rows())


def test_explains_one_parameter() -> None:
    page = plait.explain(mlp(), loss_fn, rows(), "data=2").tensor("0.weight")
    assert "the whole tensor on every rank" in page
    assert "read by   0" in page
    assert "gradient  summed over data in a bucket of" in page
    page = plait.explain(mlp(), loss_fn, rows(), "tensor=2").tensor("0.weight")
    assert "f32[8, 8] on each rank" in page and "not summed over any axis" in page


def test_commas_in_a_plan_and_empty_batches_of_a_loader() -> None:
    with pytest.raises(PlanError, match="separate the words of a plan with spaces"):
        plait.Plan.parse("data=2,tensor=2")
    with pytest.raises(BatchError, match="batch_size=0"):
        plait.loader([1, 2, 3], 0)


class Average(nn.Module):
    """Keeps a running average by assigning the buffer, not in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("average", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y * self.average


def test_a_buffer_that_is_assigned_keeps_its_new_value() -> None:
    torch.manual_seed(0)
    report = plait.verify(Average(), loss_fn, rows(), "data=2", steps=3)
    assert report.ok and [d.name for d in report.buffers] == ["average"], report


class Counter(nn.Module):
    def __init__(self, count: Any) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(8, 4), count

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        y: Tensor = self.linear(x) * self.count
        return y


def test_python_state_that_a_step_changes_and_computes_with_is_named() -> None:
    with pytest.raises(CaptureError, match="changes model:count from 0 to 1 and computes with it"):
        plait.verify(Counter(0), loss_fn, rows(), "")
    assert plait.verify(Counter(torch.zeros(4)), loss_fn, rows(), "data=2", steps=3).ok


def test_hooks_on_parameters_change_gradients() -> None:
    model = mlp()
    model[0].weight.register_hook(lambda gradient: gradient * 5)
    assert plait.verify(model, loss_fn, rows(), "data=2").ok
    trainer = Trainer(model, loss_fn, SGD, "")
    trainer.forward_backward(rows())
    found = trainer.gradients()
    without = Trainer(mlp(), loss_fn, SGD, "")
    without.forward_backward(rows())
    plain = without.gradients()
    torch.testing.assert_close(found["0.weight"], plain["0.weight"] * 5)


def test_ranks_that_are_given_different_global_batches_are_stopped() -> None:
    def rank(world: World) -> None:
        trainer = Trainer(mlp(), loss_fn, SGD, "data=2", world=world)
        trainer.step({"x": rows()["x"] + world.rank})

    with pytest.raises(RankFailed, match="do not agree on the numbers of the global batch.*plait.loader"):
        plait.run_ranks(plait.Plan.parse("data=2").mesh, rank)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm=0.0: a norm to clip to is more than 0"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"steps": 0}, "steps=0: verify takes 1 step or more"),
        ({"plan": None}, "the plan is a NoneType"),
        ({"model": lambda x: x}, "the model is a function, not a torch.nn.Module"),
        ({"loss_fn": 3}, "loss_fn is a int"),
    ],
)
def test_what_verify_is_given_is_checked(given: dict[str, Any], message: str) -> None:
    right = {"model": mlp(), "loss_fn": loss_fn, "batch": rows(), "plan": "data=2"}
    with pytest.raises(PlanError, match=message):
        plait.verify(**{**right, **given})


def test_a_batch_of_no_rows_is_named() -> None:
    with pytest.raises(BatchError, match=r"the batch has 0 rows: x has shape \[0, 8\]"):
        plait.verify(mlp(), loss_fn, {"x": torch.zeros(0, 8)}, "data=2")


def contrastive(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(model(x) @ model(x).T, dim=1).mean()


@pytest.mark.parametrize(
    ("norm", "loss", "advice"),
    [
        (False, lambda model, x: model(x).square().mean(), "the nearest plan that works is data=2, which runs the"),
        (False, contrastive, "works is data=1, which runs the model as it is; with data=2 PyTorch's DDP would compute"),
        (False, lambda model, x: (model(x), 1.0), "the nearest plan that works is data=2"),
        (True, lambda model, x: model(x).square().mean(), "works is data=1, which .* with data=2 batchnorm=local the"),
    ],
)
def test_the_plan_that_is_advised_for_a_model_without_a_graph_works(norm: bool, loss: Any, advice: str) -> None:
    model, world = Branches(norm), process_world(Plan().mesh, device="cpu")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    compiler = Compiler(Captures(model, loss, world.device), Plan.parse("tensor=2"))
    with pytest.raises(PlanError, match=advice):
        refuse_unless_data_only(CaptureError("why"), Plan.parse("tensor=2"), world, compiler, batch)
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_when_the_hosts_memory_ends_the_message_has_each_class_and_what_would_take_less() -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch).mean() * torch.ones(2**50)).mean()

    def rank(world: World) -> None:
        Trainer(nn.Linear(4, 4), loss_fn, torch.optim.SGD, "data=2", world=world).step(torch.ones(8, 4))

    message = r"of the host ran out on rank \d in forward and backward of step 1: it held parameters 80 B, .*"
    message += r"activations, buffers .* in all; add .*micro=2.* \(plait memory tells .* can't allocate memory"
    with pytest.raises(RankFailed, match=message) as caught:
        plait.run_ranks(Plan.parse("data=2").mesh, rank)
    assert isinstance(caught.value.__cause__, DeviceMemoryError)


def branching(model: nn.Module, batch: Any) -> Tensor:
    loss = loss_fn(model, batch)
    return loss if loss > 0 else -loss


@pytest.mark.filterwarnings("ignore:the model runs as it is")
@pytest.mark.parametrize("loss", [loss_fn, branching])
def test_inference_mode_changes_nothing(loss: Any, tmp_path: Path) -> None:
    def trained(trainer: Trainer, batch: Any) -> list[float]:
        found = [float(trainer.step(batch)), trainer.evaluate(batch)]
        trainer.ema(0.9)
        trainer.save(tmp_path)
        found.append(float(trainer.step(batch)))
        trainer.load(tmp_path)
        return found

    def continued(trainer: Trainer) -> list[float]:
        trainer.save(tmp_path)
        return [float(trainer.step(rows())) for _ in range(2)]

    model, adam = mlp(), functools.partial(torch.optim.Adam, lr=0.01)
    one = Trainer(copy.deepcopy(model), loss, adam, "", clip_norm=1.0)
    expected = trained(one, rows())
    with torch.inference_mode():
        other = Trainer(model, loss, adam, "", clip_norm=1.0)
        assert trained(other, {"x": rows()["x"].clone()}) == expected
        assert torch.is_inference_mode_enabled()
    assert continued(other) == continued(one)


def test_plans_are_verified_and_predicted_in_inference_mode() -> None:
    given = (mlp(), loss_fn)
    with torch.inference_mode():
        batch = {"x": rows()["x"].clone()}
        assert plait.verify(*given, batch, "data=2").ok
        assert plait.memory(*given, batch, "data=2").peak == plait.memory(*given, rows(), "data=2").peak
        assert str(plait.explain(*given, batch, "data=2")) == str(plait.explain(*given, rows(), "data=2"))


def test_a_model_that_was_made_in_inference_mode_is_named() -> None:
    with torch.inference_mode():
        model = mlp()
    with pytest.raises(PlanError, match=r"0.weight was made under torch.inference_mode\(\), .*copy.deepcopy\(model\)"):
        Trainer(model, loss_fn, SGD, "")
    Trainer(copy.deepcopy(model), loss_fn, SGD, "").step(rows())
