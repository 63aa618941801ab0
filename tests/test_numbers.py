"""Python numbers of a batch: inputs of the captured step, whatever Python computes with them."""

from __future__ import annotations

import math
import os
import sysconfig
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain_loops import SGD, net
from torch import Tensor

import plait
from plait.errors import RankFailed

PLANS = ("", "data=2", "data=2 zero=3", "tensor=2", "pipeline=2 micro=2")


def batches(steps: int = 6) -> list[dict[str, Any]]:
    """With numbers that change at each step, as schedules give them."""
    found = []
    for step in range(steps):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(8, 16, generator=g, dtype=torch.float64)
        y = torch.randint(0, 16, (8,), generator=g)
        found.append({"x": x, "y": y, "t": 1 + step / 10, "kl": np.float64(step / 7), "epoch": step, "n": 8 - step % 2})
    return found


def temperature(m: Any, b: Any) -> Tensor:
    return F.cross_entropy(m(b["x"]) / b["t"], b["y"])


def kl_weight(m: Any, b: Any) -> Tensor:
    z = m(b["x"])
    assert isinstance(b["epoch"], int) and isinstance(b["kl"], float)
    return F.cross_entropy(z, b["y"]) + b["kl"] * z.pow(2).mean() - 0.9 ** b["epoch"] * z.abs().mean()


def cosine(m: Any, b: Any) -> Tensor:
    z, w = m(b["x"]), 0.5 * (1 + math.cos(math.pi * b["epoch"] / 10))
    return w * F.cross_entropy(z, b["y"]) + (1 - w) * z.abs().mean() * np.exp(-b["t"])


def constants(m: Any, b: Any) -> Tensor:
    return F.cross_entropy(m(b["x"]) * torch.tensor([b["t"]] * 16), b["y"]).lerp(torch.zeros(()).double(), b["kl"])


def in_place(m: Any, b: Any) -> Tensor:
    z = m(b["x"]) * 1
    z *= b["t"]
    z += b["epoch"]
    return F.cross_entropy(z, b["y"]) * (b["epoch"] > 2)


def logs(m: Any, b: Any) -> Tensor:
    epoch = f"epoch {b['epoch']}"
    print(epoch, b["epoch"], "%.2f" % b["t"], float(b["kl"]))  # noqa: UP031
    return F.cross_entropy(m(b["x"]), b["y"]) + b["t"]


def warms_up(m: Any, b: Any) -> Tensor:
    z = m(b["x"])
    return F.cross_entropy(z, b["y"]) + min(1.0, b["epoch"] / 3) * z.abs().mean()


def branches(m: Any, b: Any) -> Tensor:
    z = m(b["x"])
    if b["epoch"] >= 4:
        z = z * b["t"]
    return F.cross_entropy(z, b["y"])


def slices(m: Any, b: Any) -> Tensor:
    z, n = m(b["x"]), b["n"]
    return F.cross_entropy(z[:, :n], b["y"] % n)


def loops(m: Any, b: Any) -> Tensor:
    z = m(b["x"])
    for _ in range(b["n"] - 5):
        z = z * b["t"]
    return F.cross_entropy(z, b["y"])


def tens_of_epochs(m: Any, b: Any) -> Tensor:
    return F.cross_entropy(m(b["x"]) * (1 + int(b["epoch"] / 3)), b["y"])


def names(m: Any, b: Any) -> Tensor:
    table = {f"e{i}": i / 5 for i in range(6)}
    return F.cross_entropy(m(b["x"]), b["y"]) * table[f"e{b['epoch']}"]


def smooths(m: Any, b: Any) -> Tensor:
    return F.cross_entropy(m(b["x"]) * b["t"], b["y"], label_smoothing=b["n"] / 10)


def plain(loss_fn: Any, micro: int) -> list[float]:
    model = net()
    optimizer, found = SGD(model.parameters()), []
    for rows in batches():
        optimizer.zero_grad()
        parts = [{k: v.chunk(micro)[i] if torch.is_tensor(v) else v for k, v in rows.items()} for i in range(micro)]
        loss = sum(loss_fn(model, part) for part in parts) / micro
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def planned(loss_fn: Any, plan: str) -> tuple[list[float], int]:
    parsed = plait.Plan.parse(plan)
    models = [net() for _ in range(parsed.mesh.size)]

    def rank(world: Any) -> tuple[list[float], int]:
        trainer = plait.Trainer(models[world.rank], loss_fn, SGD, parsed, world=world)
        losses = [float(trainer.step(rows)) for rows in batches()]
        return losses, len(trainer.engine.compiler.captures._found)

    return plait.run_ranks(parsed.mesh, rank)[0]


def check(loss_fn: Any, plan: str, captures: int) -> None:
    losses, found = planned(loss_fn, plan)
    assert losses == pytest.approx(plain(loss_fn, plait.Plan.parse(plan).micro), rel=1e-10)
    assert found == captures


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loss_fn", [temperature, kl_weight, cosine])
def test_numbers_that_change_at_each_step_are_captured_once(loss_fn: Any, plan: str) -> None:
    check(loss_fn, plan, 1)


@pytest.mark.parametrize(
    ("loss_fn", "captures"),
    [
        (constants, 1), (in_place, 1), (logs, 1), (warms_up, 2), (branches, 2), (slices, 2), (loops, 2), (names, 6),
        (tens_of_epochs, 2), (smooths, 2),
    ],
)  # fmt: skip
def test_python_that_needs_a_number_is_captured_for_each_answer(loss_fn: Any, captures: int) -> None:
    check(loss_fn, "", captures)


def test_a_number_is_shown_by_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown_and_used(m: Any, b: Any) -> Tensor:
        print(b["epoch"])
        print(f"{b['t']:.2f}", b["t"])
        return F.cross_entropy(m(b["x"]), b["y"]) + b["t"]

    def used_by_an_argument(m: Any, b: Any) -> Tensor:
        print(library["scaled"](m, b["epoch"]))
        return F.cross_entropy(m(b["x"]), b["y"])

    written: list[str] = []
    library: dict[str, Any] = {"written": written}
    lines = [
        "def print_too(*args): written.append(' '.join(map(str, args)))",
        "def scaled(m, n): m.seen = float(n); return m.seen",
    ]
    file = f"{sysconfig.get_paths()['purelib']}{os.sep}some_library.py"
    exec(compile("\n".join(lines), file, "exec"), library)
    monkeypatch.setattr("builtins.print", library["print_too"])  # as Ray does once it has workers
    check(shown_and_used, "", 1)
    assert written[:2] == ["0", "1.00 1.0"] and len(written) == 2 + 2 * len(batches())
    check(used_by_an_argument, "", len(batches()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_leaves_dtypes_and_is_rounded_as_python_numbers_are(dtype: torch.dtype) -> None:
    found = []

    def loss_fn(m: Any, b: Any) -> Tensor:
        z, n, k = m(b["x"].to(dtype)), b["t"], b["n"]
        all_of = [z * n, n - z, z / k, z + k, z.sum() * n, b["i"] * n, b["i"] * k, b["i"] / k, b["i"] > n, z > n, n * k]
        found.append([t.dtype if isinstance(t, Tensor) else type(n * k) for t in all_of[:-1]])
        return (z * n).float().sum() + (z / k).float().sum()

    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4).to(dtype)
    losses = []
    for step in range(3):
        rows = {"x": torch.randn(4, 16), "i": torch.arange(4), "t": 0.1 + step / 3, "n": 3 + step}
        losses.append(float(plait.Trainer(model, loss_fn, SGD, "").evaluate(rows)))
        with torch.no_grad():
            assert losses[-1] == float(loss_fn(model, rows))
    assert all(one == found[0] for one in found)


def test_what_no_number_gives_is_pythons_own_error() -> None:
    def loss_fn(m: Any, b: Any) -> Tensor:
        return m(b["x"]).pow(2).mean() * (1 / b["n"])

    trainer = plait.Trainer(net(), loss_fn, SGD, "")
    rows = batches(1)[0]
    trainer.step(rows)
    with pytest.raises(plait.errors.PlaitError, match=r"1 / b\[.n.\].*ZeroDivisionError"):
        trainer.step({**rows, "n": 0})
    trainer.step({**rows, "n": 2**70})
    assert float(trainer.evaluate({**rows, "n": 2**70})) == pytest.approx(0, abs=1e-15)


def test_many_captures_name_the_number() -> None:
    def loss_fn(m: Any, b: Any) -> Tensor:
        return m(b["x"]).pow(2).mean() * float(b["epoch"])

    trainer = plait.Trainer(net(), loss_fn, SGD, "")

    def train() -> None:
        for step in range(10):
            trainer.step({**batches(1)[0], "epoch": step})

    with pytest.warns(UserWarning, match=r"captured 9 times.*float\(epoch\) of the batch is 8.0 after 7.0"):
        train()


def test_ranks_with_other_numbers_are_refused() -> None:
    models = [net() for _ in range(2)]

    def rank(world: Any) -> None:
        rows = {k: v[:4] if torch.is_tensor(v) else v for k, v in batches(1)[0].items()}
        trainer = plait.Trainer(models[world.rank], temperature, SGD, "data=2", world=world)
        trainer.step(plait.LocalBatch({**rows, "t": 1.0}, 4, 8, "batch 1"))
        trainer.step(plait.LocalBatch({**rows, "t": 1.0 + world.rank}, 4, 8, "batch 2"))

    with pytest.raises(RankFailed, match="'t': 2.0"):
        plait.run_ranks(plait.Plan.parse("data=2").mesh, rank)
