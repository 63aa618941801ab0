"""The Trainer among real processes: state, checkpoints, first values, data, fallback, bytes."""

from __future__ import annotations

import functools
import random
import time
from pathlib import Path

import numpy as np
import process_ranks as ranks
import pytest
import torch
from comm_worlds import Script, run, start_scripts

from plait.plan.plan import Plan


def on(plan: str, fn, transport: str = "shm"):
    return run(transport, Plan.parse(plan).mesh, fn)


def one_device_losses(num: int) -> list[float]:
    model = ranks.gpt()
    optimizer = ranks.ADAMW(model.parameters())
    losses = []
    for i in range(num):
        optimizer.zero_grad()
        loss = ranks.loss_fn(model, ranks.batch(seed=i))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_state_is_dtensors_of_global_shape(transport: str) -> None:
    found = on("data=2 tensor=2", ranks.state_is_dtensors, transport)
    for result in found:
        assert result["losses"] == pytest.approx(one_device_losses(2), rel=1e-5)
        assert result["dtensors"]
        assert result["local"] == (64, 32)
        assert result["moments"] == ((128, 32), (64, 32))
        assert result["same"]
        assert result["next"][0] == result["next"][1]
        assert result["whole"]["blocks.0.up.weight"].shape == (128, 32)
    assert set(found[0]["whole"]) == set(ranks.gpt().state_dict())


@pytest.mark.parametrize(("first", "second"), [("data=2 tensor=2", "data=2"), ("data=2", "tensor=4"), ("tensor=2", "")])
def test_a_checkpoint_loads_under_another_plan(first: str, second: str, tmp_path: Path) -> None:
    unbroken = on(first, functools.partial(ranks.save, path=tmp_path))[0]
    resumed = on(second, functools.partial(ranks.resume, path=tmp_path))[0]
    assert resumed == pytest.approx(unbroken, rel=1e-5)


def test_the_same_plan_resumes_bit_for_bit(tmp_path: Path) -> None:
    unbroken = on("data=2", functools.partial(ranks.save, path=tmp_path))[0]
    assert on("data=2", functools.partial(ranks.resume, path=tmp_path))[0] == unbroken


@pytest.mark.parametrize(
    ("first", "second"),
    [("data=4 zero=3", "data=2 tensor=2 zero=1"), ("tensor=2", "data=3 zero=2"), ("replica=2 data=2 zero=3", "")],
)
def test_processes_load_the_bits_that_others_saved(first: str, second: str, tmp_path: Path) -> None:
    saved = on(first, functools.partial(ranks.save_state, plan=first, path=tmp_path / "first"))[0]
    loaded = on(
        second, functools.partial(ranks.load_state, plan=second, path=tmp_path / "first", again=tmp_path / "second")
    )
    back = on(
        "data=2", functools.partial(ranks.load_state, plan="data=2", path=tmp_path / "second", again=tmp_path / "x")
    )
    for found in (*loaded, *back):
        assert found.keys() == saved.keys()
        assert all(np.array_equal(found[name], saved[name]) for name in saved)


def test_a_model_that_cannot_be_captured_is_saved_and_loaded(tmp_path: Path) -> None:
    for first, again in on("data=2", functools.partial(ranks.eager_state, path=tmp_path)):
        assert first == again


STEPS = 24


def start(folder: Path, plan: str) -> list[Script]:
    source = f"import process_ranks; process_ranks.train_until({str(folder)!r}, {plan!r}, {STEPS})"
    return start_scripts(source, 2, folder.parent)


def logged(folder: Path) -> list[dict[int, set[str]]]:
    """By rank, what was written of each step: once more after each kill that undid it."""
    found: list[dict[int, set[str]]] = []
    for rank in range(2):
        found.append({})
        for line in Path(f"{folder}-{rank}.log").read_text().splitlines(keepends=True):
            step, _, rest = line.partition(" ")
            if rest.endswith("\n") and rest.count(" ") == 1:
                found[-1].setdefault(int(step), set()).add(rest)
    return found


@pytest.mark.parametrize("plan", ["data=2 zero=1", "data=2 zero=3"])
def test_killed_at_random_moments_it_goes_on_as_if_it_had_not_been(plan: str, tmp_path: Path) -> None:
    moments = random.Random(plan)
    for script in start(tmp_path / "whole", plan):
        assert script.outcome()[0] == 0, script.outcome()
    expected = logged(tmp_path / "whole")
    for _ in range(3):
        scripts = start(tmp_path / "run", plan)
        for script in scripts:
            script.wait_ready()
        time.sleep(moments.uniform(0, 0.15))
        for script in scripts:
            script.process.kill()
            script.process.join()
    for script in start(tmp_path / "run", plan):
        assert script.outcome()[0] == 0, script.outcome()
    assert logged(tmp_path / "run") == expected
    assert [len(rank) for rank in expected] == [STEPS] * 2


def test_data_parallel_trains_the_users_own_model() -> None:
    assert all(on("data=2", ranks.adopts_the_users_model))


def test_values_from_the_meta_device_are_those_of_every_plan() -> None:
    (one,) = run("threads", Plan().mesh, ranks.from_meta)
    for plan in ("data=2", "tensor=2"):
        for result in on(plan, ranks.from_meta):
            assert result.keys() == one.keys()
            assert all(np.array_equal(result[name], one[name]) for name in one)
    assert one["symbols.weight"].std() > 0.01


def test_a_rank_may_read_its_own_rows_or_the_whole_batch() -> None:
    first, second = on("data=2", ranks.loader_and_global_batches)
    assert first == second


def test_evaluation_has_no_dropout_and_weighs_batches() -> None:
    for one, expected, loop in on("data=2", ranks.evaluates):
        assert one == pytest.approx(expected, rel=1e-5)
        assert 4 < loop < 8


def test_a_second_batch_shape_is_another_capture() -> None:
    first, second = on("data=2", ranks.second_shape)
    assert first == second
    assert all(loss == loss for loss in first)


def test_a_model_that_cannot_be_captured_trains_under_ddp() -> None:
    torch.manual_seed(0)
    model = ranks.Stops()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        total, weight = ranks.stops_loss(model, ranks.stops_batch())
        (total / weight).backward()
        optimizer.step()
        expected.append(float((total / weight).detach()))
    for losses in on("data=2", ranks.under_ddp):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_what_ddp_makes_another_number_of_is_refused() -> None:
    rows = {name: value[:7] for name, value in ranks.stops_batch().items()}
    expected, aux = ranks.alone(ranks.stops().requires_grad_(False), rows)
    for found in on("data=2", ranks.other_numbers_under_ddp):
        for name in ("labelled", "contrasting"):
            assert "couples rows, or it is a mean over some of them. Return plait.Weighted" in found[name]
        loss, outputs = found["alone"]  # of 4 and 3 rows
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
        torch.testing.assert_close(torch.tensor(outputs["errors"]), aux["errors"])
        assert float(outputs["most"]) == pytest.approx(float(aux["errors"].max()))
        assert float(outputs["mean"]) == pytest.approx(float(expected), rel=1e-5)
        assert float(found["stops_loss"]) == pytest.approx(float(ranks.stops_loss(ranks.stops(), rows).mean.detach()))
        assert float(found["random_loss"]) > 0  # of which no two are the same: nothing is known
        assert found["allowed"] > 0
        assert "a step leaves something of its rows in mean (rank 0 has found so)" in found["keeps rows"]
        assert "a step leaves something of its rows in centre (rank 0 has found so)" in found["centred"]
        assert found["keeps"] == pytest.approx(ranks.keeps(rows=False), rel=1e-5)  # the checks leave the copy as it is
        assert "add batchnorm=local to the plan" in found["norm "] and found["norm batchnorm=local"] > 0


def test_a_model_that_cannot_be_captured_is_refused_elsewhere_with_its_line() -> None:
    source = Path(ranks.__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(source, start=1) if "the line that the message must name" in text)
    for message in on("tensor=2", ranks.refused_elsewhere):
        assert f"process_ranks.py:{line}" in message
        assert "data=2" in message


@pytest.mark.parametrize("transport", ["shm", "gloo", "shm-ring"])
def test_bytes_on_the_wire_are_what_the_formula_says(transport: str) -> None:
    for sent, gradients in on("data=2", ranks.wire_bytes, transport):
        assert sent == pytest.approx(2 * (2 - 1) / 2 * gradients, rel=0.03)
