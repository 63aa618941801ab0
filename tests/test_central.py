"""Central storage: one copy of the variables on each host, and the numbers of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import ADAMW, batch, on, trainer_of
from comm_worlds import run
from process_ranks import central_storage
from torch import nn

import plait
from plait.api.job.gpt import BytesGPT
from plait.api.job.gpt import loss_fn as gpt_loss
from plait.api.memory import Estimator
from plait.comm import sharing
from plait.comm.thread_transport import ThreadComm
from plait.comm.thread_world import run_ranks
from plait.cost.memory_model import OPTIMIZER, PARAMETERS
from plait.engine.compiler import Captures, Compiler
from plait.errors import PlanError, RankFailed
from plait.report.explanation import explanation
from plait.spec.mesh import Mesh

pytestmark = pytest.mark.xdist_group("checkpoints")  # trainers of tests/checkpointing.py share what is compiled


def parts_and_wholes(world: Any) -> list[tuple[str, int, int, int, int, int]]:
    """By parameter: where the whole lies and its bytes, where this rank's part lies and its bytes, and those of its
    state."""
    trainer = trainer_of("data=2 tensor=2 central=host", world)
    trainer.step(batch(1))
    rank_parameters = trainer.executor.rank_parameters  # type: ignore[union-attr]
    found = []
    for name, parameter in rank_parameters.parameters.items():
        whole = rank_parameters.inputs[name]
        state = sum(value.nbytes for value in trainer.optimizer.state[parameter].values() if value.ndim)  # type: ignore[union-attr]
        found.append((name, whole.data_ptr(), whole.nbytes, parameter.data_ptr(), parameter.nbytes, state))
    return found


def test_there_is_one_copy_of_parameters_and_state() -> None:
    ranks = on("data=2 tensor=2 central=host", parts_and_wholes)
    for first, second in ((ranks[0], ranks[2]), (ranks[1], ranks[3])):  # two groups of data ranks
        for mine, theirs in zip(first, second, strict=True):
            name, whole, num_bytes, part, part_bytes, state = mine
            if name in ("qkv.bias", "up.bias"):  # `tensor` cuts their only dim, so they are each rank's own
                continue
            assert whole == theirs[1], name
            assert whole <= part < whole + num_bytes, name
            assert whole < theirs[3] < whole + num_bytes, name
            assert part_bytes + theirs[4] == num_bytes, name
            assert state + theirs[5] == 2 * num_bytes, name  # Adam's two moments
    assert {each[1] for each in ranks[0]}.isdisjoint(each[1] for each in ranks[1])


def test_two_processes_train_one_copy(tmp_path: Path) -> None:
    """What the graph reads and the model has is one file in memory for both, also if they exchange through Gloo."""
    found = {transport: run(transport, 2, central_storage) for transport in ("shm", "gloo")}
    expected = on("", central_storage)[0]
    for first, second in found.values():
        assert first["places"] and first["places"] == second["places"]
        assert all("memfd" in place for place in first["places"].values())
        assert first["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        for name, value in expected["whole"].items():
            for each in (first, second):
                assert torch.allclose(torch.tensor(each["whole"][name]), torch.tensor(value), atol=2e-5), name
                assert (each["whole"][name] == each["model"][name]).all(), name
    sent = {key: found[key][0]["bytes"] for key in found}
    assert sent["shm"] == sent["gloo"]


def test_gradients_are_all_that_is_sent() -> None:
    """Half of what zero=2 sends: parts of gradients leave, and no parameters come."""
    torch.manual_seed(0)
    model = BytesGPT(layers=2, width=32, heads=4, sequence=16)
    symbols = torch.randint(0, 256, (8, 17))
    rows = {"x": symbols[:, :-1].contiguous(), "y": symbols[:, 1:].contiguous()}
    captures, plans = Captures(model, gpt_loss), ("data=2 central=host", "data=2 zero=2")
    central, zero = (explanation(Compiler(captures, plait.Plan.parse(p)).compiled(rows)) for p in plans)
    assert {one.kind for one in central.collectives if one.sent_bytes > 100} == {"reduce_scatter"}
    assert central.sent_bytes["data"] == pytest.approx(zero.sent_bytes["data"] / 2, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_counts_each_rank_its_part(precision: str) -> None:
    torch.manual_seed(0)
    model = BytesGPT(layers=2, width=64, heads=4, sequence=8)
    rows = {key: torch.randint(0, 256, (8, 8)) for key in "xy"}
    estimator = Estimator(model, gpt_loss, rows, ADAMW)
    found = {
        more: estimator.estimate(plait.Plan.parse(f"data=2 precision={precision} {more}"))
        for more in ("zero=2", "central=host")
    }
    central, zero = (found[more].rank(0).most for more in ("central=host", "zero=2"))
    num = sum(p.numel() for p in model.parameters())
    assert central[OPTIMIZER] == zero[OPTIMIZER]
    assert central[PARAMETERS] == pytest.approx(2 * num if precision == "fp32" else (2 + 1) * num, rel=0.05)
    assert zero[PARAMETERS] - central[PARAMETERS] == pytest.approx((2 if precision == "fp32" else 1) * num, rel=0.15)
    assert "1 / 2" in str(found["central=host"])


def test_state_on_disk_beside_parameters_in_common(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 256 * 16), nn.Linear(256 * 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.tanh(self.up(x)))

    def train(plan: str) -> list[float]:
        def rank(world: Any) -> list[float]:
            trainer = plait.Trainer(
                model, lambda m, x: m(x).square().mean(), ADAMW, plan, world=world, scratch=tmp_path
            )
            return [float(trainer.step(torch.ones(4, 8))) for _ in range(3)]

        torch.manual_seed(0)
        model = Wide()
        return run_ranks(plait.Plan.parse(plan).mesh, rank)[0]

    assert train("data=2 central=host home.optimizer=disk") == train("data=2 central=host")


def test_where_ranks_have_no_memory_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadComm, "shared", lambda self, num_bytes: None)
    with pytest.raises(PlanError, match=r"ranks of data=2 share, but they share none.*replica=HOSTS.*zero=2"):
        on("data=2 central=host", lambda world: trainer_of("data=2 central=host", world))


def share(world: Any) -> torch.Tensor | None:
    return sharing.share_file(world.comm("data"), 64, torch.device("cpu"))


def test_ranks_of_different_hosts_share_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh((("data", 3),))
    assert all(piece is not None for piece in run_ranks(mesh, share))
    hosts = iter(range(10))
    monkeypatch.setattr(sharing, "_host_number", lambda: next(hosts))
    assert run_ranks(mesh, share) == [None] * 3


def test_a_model_that_cannot_be_captured() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return (y if y.sum() > 0 else -y).mean()

    def rank(world: Any) -> None:
        plait.Trainer(Branches(), lambda m, x: m(x), ADAMW, "data=2 central=host", world=world).step(torch.ones(4, 8))

    with pytest.raises(RankFailed, match=r"needs the graph of the step for central=host"):
        run_ranks(Mesh((("data", 2),)), rank)
