"""Sparse tables: rows by id, made at first touch, and equal to a dense table with the same arrival order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import PlanError
from plait.integrations.ray_servers.tables.table_shard import (
    RowIndex,
    TableShard,
    TableSpec,
    by_server,
    first_values,
    server_of,
)

NUM_IDS, DIM, FIELDS, BATCH = 500, 8, 3, 16


@given(st.lists(st.lists(st.integers(-(2**62), 2**62), max_size=300, unique=True), max_size=8))
def test_an_id_keeps_its_place(asked: list[list[int]]) -> None:
    index, known = RowIndex(), {}
    for some in asked:
        ids = np.array(some, dtype=np.int64)
        places, new = index.find_or_insert(ids)
        assert {some[i] for i in new} == set(some) - set(known)
        for i in new:
            known[some[i]] = int(places[i])
        assert [known[one] for one in some] == places.tolist()
    assert sorted(known.values()) == list(range(index.num_rows))
    assert index.find(np.array([2**62 + 1])).tolist() == [-1]
    assert index.ids().tolist() == [one for one, _ in sorted(known.items(), key=lambda pair: pair[1])]


def test_an_index_grows() -> None:
    index, ids = RowIndex(), np.random.default_rng(0).permutation(200_000).astype(np.int64)
    for part in np.split(ids, 20):
        index.find_or_insert(part)
    assert (index.find(ids) == np.arange(len(ids))).all()


def test_rows_are_shared_out_evenly_and_begin_alike_anywhere() -> None:
    ids = np.arange(30_000, dtype=np.int64)
    counts = np.bincount(server_of(ids, 3))
    assert counts.min() > 9_700
    assert sorted(np.concatenate(by_server(ids, 3)).tolist()) == ids.tolist()
    rows = first_values(ids, DIM, 0.5, seed=3)
    assert (rows[17:18] == first_values(ids[17:18], DIM, 0.5, seed=3)).all()
    assert abs(rows.mean()) < 2e-3 and 0.49 < np.abs(rows).max() <= 0.5 and abs(rows.std() - 0.5 / 3**0.5) < 2e-3


class Click(torch.nn.Module):
    """A small click model on rows that it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.top = torch.nn.Sequential(torch.nn.Linear(FIELDS * DIM, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, rows: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(self.top(rows.flatten(1))[:, 0], clicked)


def dense_update(optimizer: str, table: torch.Tensor, state: dict[str, torch.Tensor], gradient: torch.Tensor) -> None:
    """Both optimizers on a whole table, row by row, as they are defined."""
    for row in gradient.abs().sum(1).nonzero()[:, 0].tolist():
        g = gradient[row]
        if optimizer == "adagrad":
            state["v"][row] += (g * g).mean()
            table[row] -= 0.1 * g / (state["v"][row].sqrt() + 1e-8)
        else:
            state["n"][row] += 1
            n = float(state["n"][row])
            state["m"][row] = 0.9 * state["m"][row] + 0.1 * g
            state["v"][row] = 0.999 * state["v"][row] + 0.001 * (g * g).mean()
            root = (state["v"][row] / (1 - 0.999**n)).sqrt()
            table[row] -= 0.1 * (state["m"][row] / (1 - 0.9**n)) / (root + 1e-8)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_a_click_model_has_the_losses_of_a_dense_table(optimizer: str) -> None:
    spec = TableSpec("ads", DIM, optimizer, lr=0.1)
    servers = [TableShard(spec), TableShard(spec)]
    table = torch.from_numpy(first_values(np.arange(NUM_IDS), DIM, spec.scale, spec.seed))
    state = {"m": torch.zeros(NUM_IDS, DIM), "v": torch.zeros(NUM_IDS), "n": torch.zeros(NUM_IDS)}
    model, draw = Click(), np.random.default_rng(0)
    for step in range(12):
        batch = np.minimum(draw.zipf(1.3, (BATCH, FIELDS)), NUM_IDS - 1)
        clicked = torch.from_numpy((batch.sum(1) % 2).astype(np.float32))
        ids, where = np.unique(batch, return_inverse=True)
        parts = by_server(ids, 2)
        rows = np.empty((len(ids), DIM), dtype=np.float32)
        for server, places in zip(servers, parts, strict=True):
            rows[places] = server.pull(ids[places])
        ours = torch.from_numpy(rows).requires_grad_()
        loss = model(torch.nn.functional.embedding(torch.from_numpy(where.reshape(batch.shape)), ours), clicked)
        dense = table.clone().requires_grad_()
        expected = model(torch.nn.functional.embedding(torch.from_numpy(batch), dense), clicked)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        (gradient,) = torch.autograd.grad(loss, ours)
        dense_update(optimizer, table, state, torch.autograd.grad(expected, dense)[0])
        for server, places in zip(servers, parts, strict=True):
            server.push(ids[places], gradient.numpy()[places])
        if step == 6:  # what comes back from its state goes on as it was
            kept, servers[0] = servers[0].state(), TableShard(spec)
            servers[0].load(kept)
    touched = sum(server.num_rows for server in servers)
    assert touched < NUM_IDS and servers[0].num_bytes < NUM_IDS * DIM * 8
    assert all(abs(server.num_rows - touched / 2) < touched / 4 for server in servers)


def test_a_table_grows() -> None:
    rows, ids = TableShard(TableSpec("ads", 4, "adam")), np.arange(9_000)
    first = rows.pull(ids[:700]).copy()
    assert (rows.pull(ids) == first_values(ids, 4, 0.05, 0)).all() and (rows.pull(ids[:700]) == first).all()
    assert rows.num_rows == 9_000 and len(rows.state()["means"]) == 9_000


def test_what_a_table_refuses() -> None:
    with pytest.raises(PlanError, match="optimizer='sgd'; rows are updated by adagrad or adam"):
        TableSpec("ads", 4, "sgd")
    with pytest.raises(PlanError, match=r"table ads is pushed float32\[2, 3\] for 2 rows of float32\[4\]"):
        TableShard(TableSpec("ads", 4)).push(np.arange(2), np.zeros((2, 3), dtype=np.float32))
