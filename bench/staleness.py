"""What stale weights cost: the loss of the byte GPT after as many updates under 1f1b, pipedream and pipedream-2bw.

python -m bench.staleness [--write]
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness import Group, Variant, arguments, publish
from bench.workloads import GLOBAL_BATCH, SEQUENCE, WORKLOADS, loss_fn, optimizer
from plait import Trainer

NUM_UPDATES = 300
PER_CALL = 10  # updates that one call of Trainer.step makes under an asynchronous schedule
PLANS = {
    "1f1b": "pipeline=2 micro=8 schedule=1f1b",
    "pipedream": f"pipeline=2 micro={PER_CALL} schedule=pipedream",
    "pipedream-2bw": f"pipeline=2 micro={2 * PER_CALL} schedule=pipedream-2bw",
}
TEXT = """The small GPT on Python's own source text, 2 stages on 2 processes, AdamW, batches of 8 sequences of 128
bytes: {updates} updates from the same start with the same batches in the same order. Under 1f1b a batch is 8
microbatches; under pipedream it is one of {calls} microbatches that one call of `Trainer.step` sends through without a
flush; under pipedream-2bw two microbatches of 4 sequences make an update. Evaluated on 64 sequences that none has
seen."""


def symbols() -> Tensor:
    """Python's own library as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:80])
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch(text: Tensor, first: int, rows: int) -> dict[str, Tensor]:
    """Rows of a fixed random order."""
    found = []
    for row in range(first, first + rows):
        generator = torch.Generator().manual_seed(row)
        start = int(torch.randint(len(text) - SEQUENCE - 1, (), generator=generator))
        found.append(text[start : start + SEQUENCE + 1])
    both = torch.stack(found)
    return {"x": both[:, :-1].contiguous(), "y": both[:, 1:].contiguous()}


class Training:
    def __init__(self, name: str) -> None:
        self.name = name
        self.trainer = Trainer(WORKLOADS["small"].model(), loss_fn, optimizer, PLANS[name])
        self.text = symbols()

    def __call__(self) -> None:
        raise AssertionError("this benchmark trains as a whole")


def build(name: str) -> Any:
    return Training(name)


def train(training: Training) -> tuple[list[float], float, float]:
    """Losses by update (means of a call's), seconds without the first call, and the loss on what was not seen."""
    per_call = 1 if training.name == "1f1b" else PER_CALL
    losses: list[float] = []
    begin = 0.0
    for call in range(NUM_UPDATES // per_call):
        rows = GLOBAL_BATCH * per_call
        loss = training.trainer.step(batch(training.text, call * rows, rows))
        losses += [float(loss)] * per_call
        if call == 0:
            begin = time.perf_counter()
    seconds = (time.perf_counter() - begin) / (NUM_UPDATES - per_call) * NUM_UPDATES
    return losses, seconds, training.trainer.evaluate(batch(training.text, 10**6, 64))


def main() -> None:
    given: argparse.Namespace = arguments(__doc__)
    rows = [
        "| schedule | loss, updates 91-100 | 191-200 | 291-300 | unseen | seconds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in PLANS:
        group = Group(Variant(name, build, (name,)))
        try:
            losses, seconds, unseen = group.call(train)[0]
        finally:
            group.close()
        means = [f"{statistics.fmean(losses[end - 10 : end]):.3f}" for end in (100, 200, 300)]
        rows.append(f"| {name} | {' | '.join(means)} | {unseen:.3f} | {seconds:.1f} |")
        print(rows[-1], flush=True)
    body = TEXT.format(updates=NUM_UPDATES, calls=PER_CALL) + "\n\n" + "\n".join(rows)
    publish("Stale weights", body, "staleness", given.write)


if __name__ == "__main__":
    main()
