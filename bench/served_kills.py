"""Random kills of workers, servers and coordinator in one run with parameter servers: it ends, and all loss is said.

python -m bench.served_kills [--kills 50] [--seed 0] [--plan "workers=3 servers=2 overlap=1"] [--write]

Every update takes exactly 1 from every number of the model, so that what the model is at the end says how many updates
each server has made of those that were ordered. The others must all be in the run's log.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from bench.harness import publish
from plait.integrations.ray_servers.full_model import FullModel
from plait.integrations.ray_servers.messages import Progress
from plait.integrations.ray_servers.ray_cluster import load_ray, started_here
from plait.integrations.ray_servers.server_job import make_job
from plait.integrations.ray_servers.supervisor import RunSupervisor
from plait.plan.plan import Plan

STEPS_BETWEEN = 3
SIZE = 4096


class Ones(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(1)}


class Counters(nn.Module):
    """One tensor for each server."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(SIZE))
        self.second = nn.Parameter(torch.zeros(SIZE))


def make_model() -> tuple[nn.Module, Any]:
    return Counters(), lambda model, batch: (model.first.sum() + model.second.sum()) * batch["x"].mean()


def make_data() -> tuple[Any, Any]:
    return Ones(), None


class Killer:
    """Kills somebody every few steps."""

    def __init__(self, ray: Any, running: RunSupervisor, num: int, seed: int) -> None:
        self._ray, self._running, self._left = ray, running, num
        self._draw, self._mark = random.Random(seed), 0
        self.killed: collections.Counter[str] = collections.Counter()

    def __call__(self, progress: Progress) -> None:
        if not self._left or progress.step < self._mark + STEPS_BETWEEN:
            return
        kind = self._draw.choices(["worker", "server", "coordinator"], [5, 4, 1])[0]
        groups = self._running.workers
        actor = {
            "worker": lambda: groups[self._draw.choice(sorted(groups))][0],
            "server": lambda: self._draw.choice(self._running.servers),
            "coordinator": lambda: self._running.coordinator,
        }[kind]()
        try:
            os.kill(self._ray.get(actor.pid.remote(), timeout=20), signal.SIGKILL)
        except (self._ray.exceptions.RayError, ProcessLookupError):  # it is just being started
            return
        self.killed[kind] += 1
        self._mark, self._left = progress.step, self._left - 1

    def over(self) -> bool:
        return not self._left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", default="workers=3 servers=2 overlap=1", type=Plan.parse)
    parser.add_argument("--write", action="store_true", help="keep the result in docs/bench/")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as out:
        job = make_job(
            given.plan, make_model=make_model, make_data=make_data, num_items=600, batch_size=6, steps=10**6,
            optimizer=functools.partial(torch.optim.SGD, lr=1.0), out=out, folder=f"{out}/checkpoints",
        )  # fmt: skip
        with started_here(load_ray(), 16, 256 << 20) as ray:
            begun = time.monotonic()
            running = RunSupervisor(ray, job)
            try:
                killer = Killer(ray, running, given.kills, given.seed)
                end = running.wait(killer, killer.over)
            finally:
                running.close()
        seconds = time.monotonic() - begun
        events = [json.loads(line) for line in (Path(out) / "events.jsonl").read_text().splitlines()]
        whole = FullModel(job)
        whole.load()
        made = [-float(whole.shard.parameters[name].detach()[0]) for name in ("first", "second")]
    ordered = end.step * job.plan.workers
    lost = [sum(e["updates_lost"] for e in events if e.get("server") == index) for index in range(2)]
    refused = [sum(index in e.get("servers", ()) for e in events) for index in range(2)]
    rows = [
        "| server | updates ordered | lost with a server | refused | made, by the model's values |",
        "|---|---|---|---|---|",
    ]
    rows += [f"| {i} | {ordered} | {lost[i]} | {refused[i]} | {made[i]:.0f} |" for i in range(2)]
    missing = [ordered - lost[i] - refused[i] - made[i] for i in range(2)]
    kills = ", ".join(f"{number} of a {kind}" for kind, number in sorted(killer.killed.items()))
    verdict = "Every update is accounted for." if not any(missing) else f"NOT ACCOUNTED FOR: {missing}"
    kills = f"{sum(killer.killed.values())} kills ({kills}) in {seconds:.0f} s"
    text = f"{given.plan}: {kills}; the run ended at step {end.step}."
    publish(
        "Kills in a run with parameter servers", "\n".join([text, "", *rows, "", verdict]), "served_kills", given.write
    )


if __name__ == "__main__":
    main()
