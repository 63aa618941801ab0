"""Checkpoints from a device and to it, in every format, under other plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from device_training import DeviceModel, batch, counted, train

import plait

TO = {
    "data=1": "data=2 zero=3", "data=2 zero=3": "tensor=2", "data=2 zero=1 micro=2": "home.optimizer=host micro=2",
    "pipeline=2 micro=2": "data=2 micro=2", "data=2 compress=int8": "data=2 compress=int8",
    "data=2 sync=4 outer=nesterov compress=powersgd:2": "data=2 sync=4 outer=nesterov compress=powersgd:2",
}  # fmt: skip


def go_on(trainer: plait.Trainer, _: Any) -> Any:
    return [float(trainer.step(batch(index))[0]) for index in range(5, 8)], trainer.full_state_dict()


@pytest.mark.parametrize("plan", TO)
def test_training_goes_on_from_a_checkpoint_of_another_plan(plan: str, tmp_path: Path) -> None:
    def save_and_go_on(trainer: plait.Trainer, world: Any) -> Any:
        trainer.save(tmp_path / "run", {"place": 3})
        return go_on(trainer, world)

    def load_and_go_on(trainer: plait.Trainer, world: Any) -> Any:
        assert trainer.load(tmp_path / "run") == {"place": 3}
        return go_on(trainer, world)

    wanted = train(plan, then=save_and_go_on).evaluated
    for device in ("cuda", "cpu"):
        found = train(TO[plan], device, then=load_and_go_on).evaluated
        assert found[0] == pytest.approx(wanted[0], abs=1e-4 if "compress" in plan else 1e-8)


def test_a_save_in_the_background_copies_while_training_goes_on(tmp_path: Path) -> None:
    def save(trainer: plait.Trainer, _: Any) -> Any:
        before = trainer.full_state_dict()
        waits: list[str] = []
        trainer.save(tmp_path / "run", wait=False)
        with counted(waits):
            for index in range(2):
                trainer.step(batch(index))
        trainer.close()
        assert waits == [] and not torch.equal(before["qkv.bias"], trainer.full_state_dict()["qkv.bias"])
        return before

    before = train("data=1", then=save).evaluated
    loaded = train("data=1", "cpu", then=lambda trainer, _: trainer.load(tmp_path / "run") or trainer.full_state_dict())
    assert all(torch.equal(tensor, loaded.weights[name]) for name, tensor in before.items())


def test_states_weights_and_averages_come_from_the_device_and_go_there(tmp_path: Path) -> None:
    def rank(trainer: plait.Trainer, _: Any) -> Any:
        average = trainer.ema(0.9)
        trainer.step(batch())
        trainer.save(tmp_path / "run")
        state = {"model": trainer.full_state_dict()}
        with average.applied():
            of_average = trainer.evaluate(batch())[0]
        with trainer.gathered(ema=True) as model:
            assert {p.device.type for p in model.parameters()} == {"cuda"}
            averaged = {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
        with trainer.gathered() as model, torch.no_grad():
            model.qkv.bias.fill_(0.25)
        assert bool((trainer.full_state_dict()["qkv.bias"] == 0.25).all())
        trainer.load_weights(tmp_path / "run")
        assert all(torch.equal(t, trainer.full_state_dict()[n]) for n, t in state["model"].items())
        trainer.load_state_dict(trainer.state_dict())
        assert of_average != trainer.evaluate(batch())[0] and not torch.equal(
            averaged["qkv.bias"], state["model"]["qkv.bias"]
        )
        return True

    train("zero=3", then=rank)


def test_weights_of_hugging_face_go_to_the_device(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = DeviceModel().state_dict()
    save_file({name: torch.full_like(tensor, 0.5) for name, tensor in weights.items()}, tmp_path / "model.safetensors")

    def rank(trainer: plait.Trainer, _: Any) -> Any:
        trainer.load_weights(tmp_path / "model.safetensors")
        return trainer.full_state_dict()

    found = train("data=2 zero=3", then=rank)
    assert bool((found.evaluated["qkv.bias"] == 0.5).all()) and found.places == {"cuda"}
