"""Tokens a second and model FLOPs utilisation of Llama on GPUs, against plain PyTorch, torch.compile and FSDP2.

python -m bench.device [1B 8B] [--rounds 3] [--steps 10] [--write]

Variants take turns, each turn in processes of its own, one for each GPU: together they would not fit. What does not
fit, or cannot run here, has its reason in the table. Then the largest model that trains with its optimizer's state on
the host, and with state and parameters on disk.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if os.environ.get("PLAIT_TEST_HOST_GPU"):  # tests/host_gpu.py: on the path where it is asked for
    import host_gpu  # noqa: F401  # before torch

import torch
from torch import Tensor

from bench.harness import free_port, publish
from bench.llama import SHAPES, Llama, LlamaShape, llama_loss

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)
TURN_SECONDS = 1200
OFFLOADED = ("home.optimizer=host", "home.parameters=disk home.optimizer=disk")


def plain(shape: LlamaShape, compiled: bool = False) -> Callable[[dict[str, Tensor]], Any]:
    """A loop in plain PyTorch on one GPU, under autocast."""
    with torch.device("cuda"):
        model: Any = Llama(shape)
    model = torch.compile(model) if compiled else model
    updates = ADAMW(model.parameters())

    def step(batch: dict[str, Tensor]) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = llama_loss(model, batch)
        loss.backward()
        updates.step()
        updates.zero_grad()

    return step


def fsdp2(shape: LlamaShape) -> Callable[[dict[str, Tensor]], Any]:
    """torch's fully_shard of each block and of the whole, in bfloat16 with float32 sums."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with torch.device("cuda"):
        model = Llama(shape)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    updates = ADAMW(model.parameters())

    def step(batch: dict[str, Tensor]) -> None:
        llama_loss(model, batch).backward()
        updates.step()
        updates.zero_grad()

    return step


def plait(shape: LlamaShape, plan: str) -> Callable[[dict[str, Tensor]], Any]:
    """A Trainer under this plan. Each rank gives its own rows, as plait.loader would."""
    from plait import Trainer
    from plait.engine.local_batch import LocalBatch

    where = "cpu" if "home" in plan else "cuda"
    with torch.device(where):
        model = Llama(shape)
    factory = functools.partial(torch.optim.AdamW, lr=1e-4)
    trainer = Trainer(model, llama_loss, factory, plan)
    num = int(os.environ["WORLD_SIZE"])
    return lambda batch: trainer.step(LocalBatch(batch, shape.rows, shape.rows * num))


def predicted(shape: LlamaShape, plan: str) -> int:
    """The most bytes on a GPU within a step, as `plait memory` has them; 0 for a plan that keeps some elsewhere."""
    from plait import memory
    from plait.plan.plan import Plan

    if "home" in plan:
        return 0
    with torch.device("meta"):
        model = Llama(shape)
    rows = shape.rows * Plan.parse(plan).num_processes
    batch = {key: torch.zeros(rows, shape.length, dtype=torch.int64) for key in ("x", "y")}
    estimate = memory(model, llama_loss, batch, plan, optimizer=functools.partial(torch.optim.AdamW, lr=1e-4))
    return estimate.fullest.step_peak


def variants(num_gpus: int) -> dict[str, tuple[int, Callable[[LlamaShape], Callable[[dict[str, Tensor]], Any]]]]:
    """By name: the number of processes, and what makes the step."""
    many = f"data={num_gpus}"
    found: dict[str, tuple[int, Any]] = {
        "PyTorch": (1, plain),
        "torch.compile": (1, functools.partial(plain, compiled=True)),
        "plait": (1, functools.partial(plait, plan="precision=bf16")),
        "plait compile=inductor": (1, functools.partial(plait, plan="precision=bf16 compile=inductor")),
        "FSDP2": (num_gpus, fsdp2),
        f"plait {many} zero=3": (num_gpus, functools.partial(plait, plan=f"{many} zero=3 precision=bf16")),
    }
    for home in OFFLOADED:
        found[f"plait {home}"] = (1, functools.partial(plait, plan=f"precision=bf16 recompute=layer {home}"))
    return found


def turn(name: str, shape_name: str, num_steps: int) -> None:
    """One rank of a turn, in a process of its own: prints seconds a step and the peak of its memory, or why not."""
    shape = SHAPES[shape_name]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    draw = functools.partial(torch.randint, 0, shape.vocabulary, (shape.rows, shape.length), generator=generator)
    batch = {key: draw().to(device) for key in ("x", "y")}
    try:
        make = variants(int(os.environ["WORLD_SIZE"]))[name][1]
        step = make(shape)
        for _ in range(3):
            step(batch)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(num_steps):
            step(batch)
        torch.cuda.synchronize()
        found: dict[str, Any] = {
            "seconds": (time.perf_counter() - start) / num_steps, "memory": torch.cuda.max_memory_allocated(),
        }  # fmt: skip
        if isinstance(make, functools.partial) and "plan" in make.keywords:
            found["predicted"] = predicted(shape, make.keywords["plan"])
    except Exception as error:  # what cannot run here is a row of the table
        found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]}
    print(json.dumps(found), flush=True)


def run_turn(name: str, shape: str, num_steps: int, num_gpus: int) -> dict[str, Any]:
    """Start the processes of a turn. Returns what the slowest of them found."""
    num, port = variants(num_gpus)[name][0], free_port()
    command = [sys.executable, "-m", "bench.device", "--turn", name, "--steps", str(num_steps), shape]
    started = []
    for rank in range(num):
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num, "MASTER_PORT": port}
        given = os.environ | {key: str(value) for key, value in env.items()} | {"MASTER_ADDR": "127.0.0.1"}
        started.append(subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    found = []
    for each in started:
        try:
            out, err = each.communicate(timeout=TURN_SECONDS)
            lines = [line for line in out.splitlines() if line.startswith("{")]
            last = (err.strip().splitlines() or [f"ended with {each.returncode}"])[-1]
            found.append(json.loads(lines[-1]) if lines else {"error": last[:200]})
        except subprocess.TimeoutExpired:
            found.append({"error": f"no answer in {TURN_SECONDS} s"})
            for other in started:
                other.kill()
    return max(found, key=lambda one: one.get("seconds", float("inf")))


def table(shape_name: str, names: list[str], num_rounds: int, num_steps: int, num_gpus: int, peak: float | None) -> str:
    """Markdown: a row for each variant, alternating by rounds."""
    shape = SHAPES[shape_name]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(num_rounds):
        for name in names:
            if not found[name] or "error" not in found[name][-1]:
                found[name].append(run_turn(name, shape_name, num_steps, num_gpus))
    lines = ["| variant | GPUs | tokens/s a GPU | MFU | time / PyTorch | peak GiB | predicted / peak |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, turns in found.items():
        num = variants(num_gpus)[name][0]
        if "error" in turns[-1]:
            lines.append(f"| {name} | {num} | {turns[-1]['error']} | | | | |")
            continue
        rates = [shape.rows * shape.length / one["seconds"] for one in turns]
        rate = statistics.median(rates)
        mfu = f"{rate * shape.flops_per_token / peak:.1%}" if peak else "of an unknown peak"
        ratios = [
            a["seconds"] / b["seconds"] for a, b in zip(turns, found["PyTorch"], strict=False) if "error" not in b
        ]
        ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})" if ratios else ""
        memory, expected = max(one["memory"] for one in turns), turns[-1].get("predicted", 0)
        of_peak = f"{expected / memory:.3f}" if expected else ""
        lines.append(
            f"| {name} | {num} | {rate:.0f} ({min(rates):.0f}-{max(rates):.0f}) | {mfu} | {ratio}"
            f" | {memory / 2**30:.1f} | {of_peak} |"
        )
    size = f"{shape.num_parameters / 1e9:.2f}B parameters, {shape.rows} x {shape.length} tokens a GPU, bf16"
    return f"## Llama {shape_name}: {size}\n\n" + "\n".join(lines)


def largest(shapes: list[str], num_gpus: int, peak: float | None) -> str:
    """Markdown: the largest model that one GPU trains with each home."""
    lines = ["| plan | largest | tokens/s | MFU | GPU GiB | the next one |", "|---|---|---|---|---|---|"]
    for home in OFFLOADED:
        best, reason = ("none", {"seconds": 0.0, "memory": 0}), "no larger one was tried"
        for name in shapes:
            found = run_turn(f"plait {home}", name, 2, num_gpus)
            if "error" in found:
                reason = f"{name}: {found['error']}"
                break
            best = (name, found)
        name, found = best
        if found["seconds"]:
            rate = SHAPES[name].rows * SHAPES[name].length / found["seconds"]
            mfu = f"{rate * SHAPES[name].flops_per_token / peak:.1%}" if peak else ""
            lines.append(f"| `{home}` | {name} | {rate:.0f} | {mfu} | {found['memory'] / 2**30:.1f} | {reason} |")
        else:
            lines.append(f"| `{home}` | none | | | | {reason} |")
    return "## The largest model on one GPU\n\n" + "\n".join(lines)


def gpus() -> tuple[str, float | None]:
    """The GPUs in words, and the peak of one in bfloat16, if it is known."""
    from plait.spec.cluster_file import cluster_of_device

    num, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    spec = cluster_of_device("cuda", name, num).device
    peak = spec.peak.get("bfloat16") if any(text in name.lower() for text in spec.matches) else None
    known = f"{peak / 1e12:.0f} TFLOP/s in bfloat16" if peak else "of a peak that plait has no file of"
    return f"{num} x {name} of {memory:.0f} GiB, {known}; CUDA {torch.version.cuda}", peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["1B", "8B"], help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=10, help="steps a turn")
    parser.add_argument("--only", action="append", metavar="VARIANT", help="take this variant, and others so named")
    parser.add_argument("--turn", default="", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="keep the tables in docs/bench/device.md")
    given = parser.parse_args()
    if given.turn:
        turn(given.turn, given.shapes[0], given.steps)
        return
    if not torch.cuda.is_available():
        print("bench.device: skipped, because torch sees no GPU here")
        return
    words, peak = gpus()
    num = torch.cuda.device_count() if not os.environ.get("PLAIT_TEST_HOST_GPU") else 1
    names = given.only or [name for name in variants(num) if "home" not in name]
    parts = [words, *(table(shape, names, given.rounds, given.steps, num, peak) for shape in given.shapes)]
    if not given.only:
        parts.append(largest(["1B", "3B", "8B", "13B"], num, peak))
    publish("Llama on GPUs", "\n\n".join(parts), "device", given.write)


if __name__ == "__main__":
    assert Path.cwd().joinpath("bench").is_dir(), "run it in the repository's root"
    main()
