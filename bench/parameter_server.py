"""Step time of workers=2 servers=1, asynchronous, against other parameter servers and against no server at all.

python -m bench.parameter_server [small wide] [--rounds 7] [--steps 8] [--write]

Two workers and a server: plait's; a plain Ray actor that holds the model and its optimizer, as in Ray's own examples;
torch.distributed.rpc, as in PyTorch's tutorial of a batch-updating parameter server, its batch being one; and two
independent processes that train their halves of the batch alone, which is the ideal.
"""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from bench import variants
from bench.harness import Group, Variant, arguments, publish
from bench.workloads import GLOBAL_BATCH, WORKLOADS, loss_fn, optimizer
from plait.integrations.ray_servers.coordinator import CoordinatorActor
from plait.integrations.ray_servers.ray_cluster import load_ray, started_here
from plait.integrations.ray_servers.server import ServerActor
from plait.integrations.ray_servers.server_job import Job, make_job
from plait.integrations.ray_servers.worker import Worker
from plait.plan.plan import Plan

NUM_WORKERS = 2
PLANS = [f"workers={NUM_WORKERS} servers=1", f"workers={NUM_WORKERS} servers=1 overlap=1"]
TARGETS = """To reach, on `small`: plait at least 95% of the throughput of two independent processes, which is a time of
at most 1.053 of theirs; plait / plain Ray actor at most 0.93; plait / torch.distributed.rpc at most 0.4; bytes per step
within 5% of twice the parameters. Milliseconds a step of each worker; a worker's batch is half of the global batch.
Processor ms are what all processes of a variant together spend on a worker's step: on a machine that is busy with other
things they say more than the time.

The independent processes have their optimizers, PyTorch's default AdamW; the other row of them has the fused one, as
plait's server chooses it, which is the ideal of all that a server can do. The plain servers have the fused one too."""


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The rows of a workload's global batch, again and again."""

    def __init__(self, workload: str) -> None:
        self._batch = WORKLOADS[workload].batch()

    def __len__(self) -> int:
        return GLOBAL_BATCH * 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: rows[index % GLOBAL_BATCH] for key, rows in self._batch.items()}


def make_model(workload: str) -> tuple[torch.nn.Module, Any]:
    return WORKLOADS[workload].model(), loss_fn


def make_data(workload: str) -> tuple[Any, Any]:
    return Rows(workload), None


def job_of(workload: str, out: str, plan: str) -> Job:
    return make_job(
        Plan.parse(plan), make_model=functools.partial(make_model, workload), optimizer=optimizer,
        make_data=functools.partial(make_data, workload), num_items=GLOBAL_BATCH * 1000, batch_size=GLOBAL_BATCH,
        steps=10**6, out=out, folder=out + "/checkpoints",
    )  # fmt: skip


class TurnWorker(Worker):
    """A worker that pauses between turns."""

    def ready(self, coordinator: Any, worker: int) -> None:
        self.begin()
        assert self.join(coordinator, worker) is None

    def turn(self, num_steps: int) -> float:
        """Seconds a step."""
        begun = time.perf_counter()
        for _ in range(num_steps):
            assert self.once()
        return (time.perf_counter() - begun) / num_steps


class Plait:
    """plait's own actors, driven turn by turn."""

    def __init__(self, ray: Any, workload: str, plan: str) -> None:
        self._ray, self._out = ray, tempfile.mkdtemp(prefix="plait-bench-")
        job = job_of(workload, self._out, plan)
        self._server = ray.remote(name=job.server_names[0])(ServerActor).remote(
            job.name, job.shards[0], job.optimizer, None, self._out + "/servers/0"
        )
        self._coordinator = ray.remote(CoordinatorActor).remote(job, job.server_names)
        ray.get(self._coordinator.begin.remote())
        self._workers = [ray.remote(TurnWorker).remote(job) for _ in range(NUM_WORKERS)]
        ray.get([worker.ready.remote(self._coordinator, index) for index, worker in enumerate(self._workers)])

    def turn(self, num_steps: int) -> float:
        return statistics.fmean(self._ray.get([worker.turn.remote(num_steps) for worker in self._workers]))

    def close(self) -> None:
        for actor in (*self._workers, self._coordinator, self._server):
            self._ray.kill(actor)
        shutil.rmtree(self._out, ignore_errors=True)


class PlainServer:
    """The model and its optimizer in an actor: gradients go in, weights come out, as Ray pickles arrays."""

    def __init__(self, workload: str) -> None:
        torch.set_num_threads(1)
        self.model = WORKLOADS[workload].model()
        self.optimizer = optimizer(self.model.parameters(), fused=True)

    def weights(self) -> dict[str, Any]:
        return {name: p.detach().numpy() for name, p in self.model.named_parameters()}

    def apply(self, gradients: dict[str, Any]) -> dict[str, Any]:
        for name, p in self.model.named_parameters():
            p.grad = torch.from_numpy(gradients[name].copy())
        self.optimizer.step()
        return self.weights()


class PlainWorker:
    def __init__(self, workload: str, rank: int, server: Any) -> None:
        torch.set_num_threads(1)
        self.model, self.server = WORKLOADS[workload].model(), server
        self.batch = WORKLOADS[workload].batch(rank, NUM_WORKERS)

    def turn(self, num_steps: int) -> float:
        import ray

        begun = time.perf_counter()
        weights = ray.get(self.server.weights.remote())
        for _ in range(num_steps):
            for name, p in self.model.named_parameters():
                p.data.copy_(torch.from_numpy(weights[name].copy()))
                p.grad = None
            loss_fn(self.model, self.batch).backward()
            gradients = {name: p.grad.numpy() for name, p in self.model.named_parameters() if p.grad is not None}
            weights = ray.get(self.server.apply.remote(gradients))
        return (time.perf_counter() - begun) / num_steps


class Plain:
    """A parameter server as one writes it with Ray alone."""

    def __init__(self, ray: Any, workload: str) -> None:
        self._ray = ray
        self._server = ray.remote(PlainServer).remote(workload)
        self._workers = [ray.remote(PlainWorker).remote(workload, r, self._server) for r in range(NUM_WORKERS)]
        ray.get([worker.turn.remote(1) for worker in self._workers])

    def turn(self, num_steps: int) -> float:
        return statistics.fmean(self._ray.get([worker.turn.remote(num_steps) for worker in self._workers]))

    def close(self) -> None:
        for actor in (*self._workers, self._server):
            self._ray.kill(actor)


class RpcServer:
    """The tutorial's: trainers send gradients and get the model back."""

    here: RpcServer  # in the process that serves

    def __init__(self, workload: str) -> None:
        self.model = WORKLOADS[workload].model()
        self.optimizer = optimizer(self.model.parameters(), fused=True)
        self.lock = threading.Lock()

    @staticmethod
    def fetch() -> torch.nn.Module:
        return RpcServer.here.model

    @staticmethod
    def update(gradients: list[torch.Tensor]) -> torch.nn.Module:
        self = RpcServer.here
        with self.lock:
            for p, gradient in zip(self.model.parameters(), gradients, strict=True):
                p.grad = gradient
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return self.model


def rpc_rank(workload: str) -> Callable[[], Any]:
    """Rank 0 serves, the others train; a step of theirs is a round trip."""
    from torch.distributed import rpc

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        RpcServer.here = RpcServer(workload)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size)
    if rank == 0:
        return lambda: None
    batch = WORKLOADS[workload].batch(rank - 1, NUM_WORKERS)
    state = {"model": rpc.rpc_sync("rank0", RpcServer.fetch)}

    def step() -> None:
        model = state["model"]
        loss_fn(model, batch).backward()
        gradients = [p.grad for p in model.parameters()]
        state["model"] = rpc.rpc_sync("rank0", RpcServer.update, args=(gradients,))

    return step


class Processes:
    """Groups of the harness."""

    def __init__(self, variant: Variant, first: int = 0) -> None:
        self._group, self._first = Group(variant), first
        self._group.turn(2)

    def turn(self, num_steps: int) -> float:
        return statistics.fmean(turn.seconds for turn in self._group.turn(num_steps)[self._first :])

    def close(self) -> None:
        self._group.close()


def contenders(ray: Any, workload: str) -> dict[str, Any]:
    return {
        "two independent processes": Processes(Variant("independent", variants.independent, (workload,))),
        "two independent, fused AdamW": Processes(Variant("fused", variants.independent, (workload, True))),
        "plain Ray actor server": Plain(ray, workload),
        "torch.distributed.rpc server": Processes(Variant("rpc", rpc_rank, (workload,), 3), 1),
        **{f"plait {plan}": Plait(ray, workload, plan) for plan in PLANS},
    }


def main() -> None:
    given = arguments(__doc__, WORKLOADS)
    parts = [TARGETS]
    with started_here(load_ray(), 16, 2 << 30) as ray:
        for workload in given.workloads:
            parts.append(f"## {workload}\n\n{_table(ray, workload, given.rounds, given.steps)}")
    publish("Parameter server, 2 workers and 1 server", "\n\n".join(parts), "parameter_server", given.write)


def _table(ray: Any, workload: str, num_rounds: int, num_steps: int) -> str:
    found = contenders(ray, workload)
    try:
        for one in found.values():
            one.turn(2)
        rounds: list[dict[str, float]] = []
        spent: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(num_rounds):
            rounds.append({})
            for name, one in found.items():
                before = _processor_seconds()
                rounds[-1][name] = one.turn(num_steps)
                spent[name].append((_processor_seconds() - before) / num_steps / NUM_WORKERS)
    finally:
        for one in found.values():
            one.close()
    bases = ["two independent processes", "plain Ray actor server", "torch.distributed.rpc server"]
    lines = [["variant", "ms/step", "processor ms/step", *(f"time / {base}" for base in bases)]]
    lines.append(["---"] * len(lines[0]))
    for name in found:
        ratios = {base: [turns[name] / turns[base] for turns in rounds] for base in bases}
        lines.append([
            name,
            f"{statistics.median(turns[name] for turns in rounds) * 1e3:.1f}",
            f"{statistics.median(spent[name]) * 1e3:.1f}",
            *(f"{statistics.median(r):.3f} ({min(r):.3f}-{max(r):.3f})" for r in ratios.values()),
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _processor_seconds() -> float:
    """That this process and all that it started, and those started, have used so far."""
    parents, used = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = stat.parent.name, stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[pid], used[pid] = rest[1], (int(rest[11]) + int(rest[12])) / os.sysconf("SC_CLK_TCK")
    ours = {str(os.getpid())}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(used.get(pid, 0.0) for pid in ours)


if __name__ == "__main__":
    main()
