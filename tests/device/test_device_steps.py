"""Steps on a device under every kind of plan: the CPU's numbers, all tensors there, and a host that does not wait."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from device_training import ADAMW, DeviceModel, ReadsValues, batch, counted, loss_fn, on_cpu, train

import plait
from plait.engine import optimizer_step
from plait.optim import Lamb
from plait.plan import sharding_plan

PLANS = {  # each with the plan of one rank that has its numbers
    "data=1": "data=1",
    "data=2": "data=1",
    "data=2 zero=1 micro=2": "micro=2",
    "data=2 zero=2 micro=2": "micro=2",
    "data=2 zero=3": "data=1",
    "tensor=2": "data=1",
    "data=2 recompute=layer": "data=1",
    "pipeline=2 micro=4 schedule=1f1b": "micro=4",
    "pipeline=2 data=2 zero=3 micro=4 schedule=interleaved": "micro=4",
    "pipeline=2 tensor=2 micro=2 schedule=zb-h1": "micro=2",
    "data=2 sync=2": "data=2 sync=2",
    "data=2 sync=2 outer=nesterov streaming=2 overlap=1": "data=2 sync=2 outer=nesterov streaming=2 overlap=1",
    "data=2 compress=bf16": "data=2 compress=bf16",
    "data=2 compress=int8": "data=2 compress=int8",
    "data=2 compress=topk:0.1": "data=2 compress=topk:0.1",
    "data=2 compress=powersgd:2": "data=2 compress=powersgd:2",
}
COARSE = ("bf16", "int8")  # codes round what is computed in another order to other numbers


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_has_the_numbers_of_a_cpu_and_the_host_does_not_wait(plan: str) -> None:
    found, wanted = train(plan), on_cpu(PLANS[plan])
    assert found.apart(wanted) < (1e-3 if plan.endswith(COARSE) else 1e-6)
    assert (found.places, found.waits) == ({"cuda"}, [])
    assert found.evaluated[0] == pytest.approx(wanted.evaluated[0], abs=1e-3 if plan.endswith(COARSE) else 1e-6)
    assert len([each for each in found.waits_of_evaluation if not each.startswith("an event")]) <= 1, "at its end"


HOMES = {
    "home.optimizer=host": "data=1",
    "data=2 zero=3 micro=2 home.parameters=host home.optimizer=host home.activations=host": "micro=2",
    "home.parameters=disk home.optimizer=disk": "data=1",
    "home.activations=disk": "data=1",
    "pipeline=2 micro=4 home.activations=host": "micro=4",
    "data=2 central=host": "data=1",
}


@pytest.mark.parametrize("plan", HOMES)
def test_what_is_kept_on_host_or_disk_comes_and_goes_by_streams(plan: str, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(sharding_plan, "SMALL", 1)
    monkeypatch.setattr(optimizer_step, "_CHUNK_BYTES", 1 << 14)
    found = train(plan, scratch=tmp_path)
    assert found.apart(on_cpu(HOMES[plan])) < 1e-6
    on_host = "home.optimizer" in plan or "central" in plan
    assert ("cpu" in found.places) == on_host and "cuda" in found.places
    assert on_host or found.waits == []  # an optimizer on the host waits for its gradients


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_near_single_and_the_host_does_not_wait_for_the_loss_scale(precision: str) -> None:
    scheduler = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    found = train(f"data=2 precision={precision}", dtype=torch.float32, scheduler=scheduler)
    wanted = train("data=1", "cpu", dtype=torch.float32, scheduler=scheduler)
    assert found.losses == pytest.approx(wanted.losses, rel=2e-2) and found.waits == []


def test_an_overflow_leaves_weights_average_and_scheduler_as_they_were() -> None:
    def overflow(trainer: plait.Trainer, _: Any) -> Any:
        average, scale = trainer.ema(0.5), trainer.state.loss_scale
        assert scale is not None
        trainer.step(batch())
        scale.value = 2.0**60
        before = {n: t.clone() for n, t in trainer.full_state_dict().items() if "batch_norm" not in n}
        kept = {n: t.clone() for n, t in average.tensors.items()}
        trainer.engine.settle()
        rate = trainer.scheduler.get_last_lr()[0]
        waits: list[str] = []
        with counted(waits):
            trainer.step(batch())
        trainer.engine.settle()
        same = all(torch.equal(t, trainer.full_state_dict()[n]) for n, t in before.items())
        same = same and all(torch.equal(t, average.tensors[n]) for n, t in kept.items())
        assert (waits, same, scale.value, trainer.scheduler.get_last_lr()[0]) == ([], True, 2.0**59, rate)
        scale.value = 2.0**10
        trainer.step(batch())
        assert not torch.equal(before["qkv.bias"], trainer.full_state_dict()["qkv.bias"])
        return True

    scheduler = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    train("data=2 precision=fp16", dtype=torch.float32, scheduler=scheduler, then=overflow, on_nan="warn")


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(Lamb, lr=1e-2), functools.partial(torch.optim.Adafactor, lr=1e-2),
        functools.partial(torch.optim.SGD, lr=1e-1, momentum=0.9), [("*weight", ADAMW), ("*", torch.optim.SGD)],
    ],
    ids=["lamb", "adafactor", "sgd", "several"],
)  # fmt: skip
def test_an_optimizer_steps_on_the_device(optimizer: Any) -> None:
    found, wanted = train("data=2 zero=1", optimizer=optimizer), train("data=1", "cpu", optimizer=optimizer)
    assert found.apart(wanted) < 1e-4 and found.waits == []


def test_a_model_that_is_not_captured_trains_on_the_device() -> None:
    with pytest.warns(UserWarning, match="runs as it is"):
        found, wanted = train("data=1", model=ReadsValues()), train("data=1", "cpu", model=ReadsValues())
    assert found.evaluated[0] == pytest.approx(wanted.evaluated[0], rel=0.2)  # its dropout is the device's own
    assert found.places == {"cuda"} and all("device_training" in each for each in found.waits)


def test_a_callback_that_reads_the_loss_waits_and_no_other_does() -> None:
    read: list[float] = []
    assert train("data=1", callbacks=[lambda end: None]).waits == []
    found = train("data=1", callbacks=[lambda end: read.append(end.loss)])
    assert read == found.losses and len(found.waits) == len(found.losses) - 1


def test_verify_runs_where_the_model_is() -> None:
    report = plait.verify(DeviceModel().cuda(), loss_fn, {n: t.cuda() for n, t in batch().items()}, "data=2 tensor=2")
    assert report.ok
