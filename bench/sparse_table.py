"""Rows a second that are pulled from and pushed to a table of 10 million rows of 64 numbers on two servers.

python -m bench.sparse_table [--write]

A worker trains a small click model on batches of 4096 examples with 26 fields, whose ids are zipf-distributed: it pulls
the rows of a batch, runs forward and backward, and pushes their gradients, which row-wise Adagrad takes in.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.harness import arguments, publish
from plait.integrations.ray_servers.ray_cluster import load_ray, started_here
from plait.integrations.ray_servers.tables.sparse_table import unique_ids
from plait.integrations.ray_servers.tables.table_shard import TableShard, TableSpec, by_server

NUM_ROWS, DIM, BATCH, FIELDS, NUM_SERVERS = 10_000_000, 64, 4096, 26, 2
NUM_STEPS, NUM_ROUNDS = 10, 5
EXPONENTS = (1.05, 1.2)
TEXT = """To reach: 200,000 row pulls and pushes a second on 2 cores. Two servers and a worker, each a process of one
thread; the table has all of its rows ({rows:,} of {dim} float32, {gib:.1f} GiB with the optimizer's sums) before
anything is timed. *Rows of the batch* counts every id that an example looks up, once for its pull and once for its
push; *different rows* what travels, as a batch has an id only once on the wire. *Tables alone* is without the model.
Medians over {rounds} rounds of {steps} batches, spread in brackets."""


class TableServer:
    """A server's rows in an actor."""

    def __init__(self, spec: TableSpec) -> None:
        torch.set_num_threads(1)
        self._rows = TableShard(spec)

    def fill(self, server: int) -> int:
        """Touch every row that this server has; returns their bytes."""
        for part in np.array_split(np.arange(NUM_ROWS, dtype=np.int64), 100):
            self._rows.pull(part[by_server(part, NUM_SERVERS)[server]])
        return self._rows.num_bytes

    def pull(self, ids: np.ndarray) -> np.ndarray:
        return self._rows.pull(ids)

    def push(self, ids: np.ndarray, gradient: np.ndarray) -> None:
        self._rows.push(ids, gradient)


class Clicks:
    """The worker."""

    def __init__(self, servers: list[Any], exponent: float) -> None:
        torch.set_num_threads(1)
        self._servers, self._exponent = servers, exponent
        self._draw = np.random.default_rng(0)
        self._model = nn.Sequential(nn.Linear(FIELDS * DIM, 64), nn.ReLU(), nn.Linear(64, 1))
        self._batches = [self._batch() for _ in range(NUM_STEPS)]

    def turn(self, model: bool) -> tuple[float, int]:
        """Seconds of all batches, and how many different rows they have."""
        import ray

        different, last, begun = 0, [], time.perf_counter()
        for ids in self._batches:
            own, places = unique_ids(ids)
            parts = by_server(own, NUM_SERVERS)
            coming = [server.pull.remote(own[part]) for server, part in zip(self._servers, parts, strict=True)]
            rows = torch.empty(len(own), DIM)
            for part, found in zip(parts, ray.get(coming), strict=True):
                rows.numpy()[part] = found
            gradient = self._gradient(rows, places) if model else rows
            ray.get(last)  # at most a batch of pushes is under way
            last = [
                server.push.remote(own[part], gradient.numpy()[part])
                for server, part in zip(self._servers, parts, strict=True)
            ]
            different += len(own)
        ray.get(last)
        return time.perf_counter() - begun, different

    def _gradient(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        rows.requires_grad_()
        clicked = (places[:, 0] % 2).float()
        scores = self._model(nn.functional.embedding(places, rows).flatten(1))[:, 0]
        nn.functional.binary_cross_entropy_with_logits(scores, clicked).backward()
        assert rows.grad is not None
        return rows.grad

    def _batch(self) -> torch.Tensor:
        """Ids whose ranks are zipf-distributed, spread over the table."""
        ranks = self._draw.zipf(self._exponent, (BATCH, FIELDS)) % NUM_ROWS
        return torch.from_numpy((ranks * 7_368_787) % NUM_ROWS)


def main() -> None:
    given = arguments(__doc__)
    with started_here(load_ray(), 4, 1 << 30) as ray:
        spec = TableSpec("ads", DIM, lr=0.05)
        servers = [ray.remote(TableServer).remote(spec) for _ in range(NUM_SERVERS)]
        size = sum(ray.get([server.fill.remote(index) for index, server in enumerate(servers)]))
        lines = [["ids", "different rows a batch", "with the click model, rows of the batch / s", "different rows / s"]]
        lines[0] += ["tables alone, rows of the batch / s", "different rows / s"]
        lines.append(["---"] * len(lines[0]))
        for exponent in EXPONENTS:
            worker = ray.remote(Clicks).remote(servers, exponent)
            ray.get(worker.turn.remote(True))
            row = [f"zipf, exponent {exponent}", ""]
            for model in (True, False):
                turns = [ray.get(worker.turn.remote(model)) for _ in range(NUM_ROUNDS)]
                row[1] = f"{turns[0][1] / NUM_STEPS:,.0f} of {BATCH * FIELDS:,}"
                for count in (NUM_STEPS * BATCH * FIELDS, turns[0][1]):
                    rates = [2 * count / seconds for seconds, _ in turns]
                    row.append(f"{statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})")
            ray.kill(worker)
            lines.append(row)
    text = TEXT.format(rows=NUM_ROWS, dim=DIM, gib=size / 2**30, rounds=NUM_ROUNDS, steps=NUM_STEPS)
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    publish(
        "Sparse table", f"{text}\n\nLoad at the end: {os.getloadavg()[0]:.1f}\n\n{table}", "sparse_table", given.write
    )


if __name__ == "__main__":
    main()
