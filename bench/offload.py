"""Training with all homes on disk under a limit on the process's memory that is a third of the optimizer's state.

python -m bench.offload [--write]

The limit is RLIMIT_DATA, set after the model is placed: what the process has then, and a third of the state beside.
"""

from __future__ import annotations

import functools
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench.harness import arguments, publish
from bench.workloads import Workload, loss_fn
from plait import Trainer

PLAN = "home.parameters=disk home.optimizer=disk home.activations=disk"
MODEL = Workload(1024, 12)
NUM_STEPS = 3


def train(plan: str, limited: bool) -> None:
    """Print what three steps gave, and how long each took after the first, as JSON."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = MODEL.model()
    batch = {name: rows[:2, :16].contiguous() for name, rows in MODEL.batch().items()}
    trainer = Trainer(model, loss_fn, functools.partial(torch.optim.AdamW, lr=1e-4), plan)
    trainer.prepare(batch)
    state = 8 * sum(parameter.numel() for parameter in model.parameters())
    room = 0
    if limited:
        found = re.search(r"VmData:\s*(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        room = state // 3
        resource.setrlimit(resource.RLIMIT_DATA, ((int(found[1]) << 10) + room,) * 2)
    losses, seconds = [], []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        losses.append(float(trainer.step(batch)))
        seconds.append(time.perf_counter() - start)
    trainer.close()
    print(json.dumps({"losses": losses, "seconds": min(seconds[1:]), "state": state, "room": room}))


def run(plan: str, limited: bool) -> tuple[dict[str, object], str]:
    """Of a fresh process: what it printed, and the last line of its errors."""
    command = [sys.executable, "-m", "bench.offload", "--child", plan, str(int(limited))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    error = (done.stderr.strip().splitlines() or [""])[-1]
    return (json.loads(lines[-1]) if done.returncode == 0 else {}), error


def main() -> None:
    given = arguments(__doc__)
    free, _ = run("", False)
    away, error = run(PLAN, True)
    refused, why = run("", True)
    state = int(free["state"])  # type: ignore[call-overload]
    lines = [
        f"GPT of 12 layers, width 1024; AdamW's state is {state >> 20} MiB, the limit leaves {state // 3 >> 20} MiB.",
        "",
        "| plan | limit | losses | s/step |",
        "|---|---|---|---|",
        f"| all in memory | no | {free['losses']} | {free['seconds']:.2f} |",
        f"| all in memory | yes | {'trained' if refused else 'out of memory: ' + why[:60]} | |",
        f"| `{PLAN}` | yes | {away.get('losses', error)} | {away.get('seconds', 0):.2f} |",
    ]
    publish("Homes on disk", "\n".join(lines), "offload", given.write)


if __name__ == "__main__":
    if "--child" in sys.argv:
        at = sys.argv.index("--child")
        train(sys.argv[at + 1], sys.argv[at + 2] == "1")
    else:
        main()
