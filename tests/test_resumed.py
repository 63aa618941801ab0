"""Checkpoints of served runs that somebody has edited: refused by place before a server takes anything over."""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.engine.checkpoint import saved_state
from plait.engine.checkpoint.write import Saver
from plait.errors import CheckpointError
from plait.integrations.ray_servers.full_model import FullModel
from plait.integrations.ray_servers.server import Server, Standing
from plait.integrations.ray_servers.server_job import Job
from tests.served import job_of, make_click, make_clicks

Extra = dict[str, Any]
sgd = functools.partial(torch.optim.SGD, lr=0.05)
JUNK = (None, -1, 1 << 70, 0.5, float("nan"), "x", [], [1], {}, {"x": 1}, torch.ones(3), torch.ones(2, 2).long())


def saved(job: Job) -> FullModel:
    """The checkpoint of a run of one update."""
    whole = FullModel(job)
    servers = [
        Server(job.name, pieces, job.server_optimizer, None, f"{job.out}/{index}", table_specs=job.tables)
        for index, pieces in enumerate(job.shards)
    ]
    for index, (server, pieces) in enumerate(zip(servers, job.shards, strict=True)):
        server.start(whole.values(pieces), whole.state(index), Standing(0))
        for parameter in server.shard.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        server.shard.step()
    for rows in (rows for server in servers for rows in server.tables.rows.values()):
        rows.pull(torch.arange(5).numpy())
    whole.save(2, [server.state() for server in servers], {}, {})
    return whole


@pytest.fixture
def of_tables(tmp_path: Path) -> Job:
    return job_of("workers=2 servers=1", tmp_path, make_model=make_click, make_data=make_clicks, scheduler=None)


@pytest.fixture
def of_rounds(tmp_path: Path) -> Job:
    return job_of("workers=2 servers=1 staleness=0 sync=2 outer=nesterov", tmp_path, scheduler=None, optimizer=sgd)


def resave(whole: FullModel, job: Job, extra: Extra) -> None:
    """The same checkpoint with another `extra`."""
    whole.shard.step_number += 1
    saved_state.save(whole.shard, job.folder, extra, 1, Saver(), True)


def extra_of(whole: FullModel) -> Extra:
    found: Extra = {"data": whole._data(2), "job": whole.job.name}
    return found | {name: kept for name, kept in (("tables", whole.tables), ("outer", whole.outer)) if kept}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    for key in value if isinstance(value, dict) else ():
        found += places(value[key], (*path, key))
    return found


def edited(extra: Extra, path: tuple[Any, ...], value: Any) -> Extra:
    found = copy.deepcopy(extra)
    at: Any = found
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return found


@pytest.mark.parametrize("which", ["of_tables", "of_rounds"])
def test_whatever_is_edited_only_a_checkpoint_error_comes_of_it(
    which: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = request.getfixturevalue(which)
    whole = saved(job)
    extra = extra_of(whole)
    monkeypatch.setattr("plait.integrations.ray_servers.full_model.load.load", lambda held, place: given)
    taken, said = 0, set[str]()
    for path in [one for one in places(extra) if one[0] in ("data", "tables", "outer")]:
        for junk in JUNK:
            given = edited(extra, path, junk)
            new = FullModel(dataclasses.replace(job, resume=True))
            try:
                new.load()
            except CheckpointError as error:
                said.add(str(error))
                continue
            taken += 1
            server = Server(job.name, job.shards[0], job.server_optimizer, None, f"{job.out}/x", table_specs=job.tables)
            server.snapshot = lambda wait=False: None  # type: ignore[method-assign]
            server.start(new.values(job.shards[0]), new.state(0), Standing(2))
            for parameter in server.shard.parameters.values():
                parameter.grad = torch.ones_like(parameter)
            server.shard.step()
    assert taken and len(said) > 20 and max(map(len, said)) < 400


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("tables", "table", "ids"), torch.zeros(5, dtype=torch.int64), "tables.table.ids are int64[5], not ids that"),
        (("tables", "table", "values"), torch.ones(5, 3), "tables.table.values is float32[5, 3], not float32[5, 4]"),
        (("tables", "table", "means"), torch.ones(5, 4), "optimizer of rows than adagrad: 'means' is not of it"),
        (
            ("tables", "other"),
            {},
            "the table 'other' (tables), and the model has no such table; it has table",
        ),
        (("tables",), 5, "tables is a int, not a table of names"),
        (("data", "epoch"), -1, "data.epoch is -1, not a count"),
    ],
)
def test_an_edited_table_is_refused_with_its_place(
    path: tuple[str, ...], value: Any, message: str, of_tables: Job
) -> None:
    whole = saved(of_tables)
    resave(whole, of_tables, edited(extra_of(whole), path, value))
    with pytest.raises(CheckpointError) as caught:
        FullModel(of_tables).load()
    assert message in str(caught.value)


def test_what_an_outer_optimizer_kept_has_the_shape_of_its_variable(of_rounds: Job) -> None:
    whole = saved(of_rounds)
    extra = extra_of(whole)
    (name, kept) = next((name, kept) for name, kept in extra["outer"].items() if kept)
    key = next(iter(kept))
    resave(whole, of_rounds, edited(extra, ("outer", name, key), torch.ones(7)))
    with pytest.raises(
        CheckpointError, match=rf"outer.{name}.'{key}': it is float32\[7\], and the variable is float32"
    ):
        FullModel(of_rounds).load()
    resave(whole, of_rounds, extra)
    assert FullModel(of_rounds).load() == 2
