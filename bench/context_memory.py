"""Memory of a rank whose sequence is cut over `context`: predicted by `plait memory`, and counted while ranks run.

    python -m bench.context_memory [--write]

The ranks are threads of this process. Each counts the storages that its own calls allocate (compile/memory_meter.py),
as `plait memory` does of fake tensors. Parameters and the optimizer's state, which context does not cut, are left out.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from bench.harness import arguments, publish
from plait import Plan, Trainer
from plait.api.job.gpt import BytesGPT, loss_fn
from plait.comm.protocol import World
from plait.comm.thread_world import run_ranks
from plait.compile.memory_meter import Meter
from plait.cost.memory_model import ACTIVATIONS, OPTIMIZER, PARAMETERS, RankMemory
from plait.engine.compiler import Captures, Compiler
from plait.engine.dry_run import dry_run

LAYERS, WIDTH, HEADS, SEQUENCE = 4, 128, 8, 8192
PLANS = ("", "context=2 context.kind=ring", "context=4 context.kind=ring", "context=8 context.kind=ring",
         "context=8 context.kind=ulysses")  # fmt: skip
OPTIMIZER_OF = functools.partial(torch.optim.AdamW, lr=1e-3)


def ring_bytes(num_ranks: int, sequence: int = SEQUENCE, width: int = WIDTH) -> int:
    """What a ring holds beside a rank's own keys and values, in float32: those that arrive, the gradients of those that
    it computes with, and the gradients that arrive."""
    return 6 * (sequence // num_ranks) * width * 4 if num_ranks > 1 else 0


def model(sequence: int = SEQUENCE, width: int = WIDTH, layers: int = LAYERS, vocab: int = 256) -> BytesGPT:
    torch.manual_seed(0)
    return BytesGPT(layers, width, HEADS, sequence, vocab)


def batch(sequence: int = SEQUENCE, vocab: int = 256) -> dict[str, torch.Tensor]:
    """One row."""
    symbols = torch.randint(vocab, (1, sequence + 1), generator=torch.Generator().manual_seed(1))
    return {"x": symbols[:, :-1].contiguous(), "y": symbols[:, 1:].contiguous()}


def predicted(captures: Captures, tokens: dict[str, torch.Tensor], plan: Plan) -> RankMemory:
    """The memory of rank 0, of ranks that do not exchange through shared memory."""
    program = Compiler(captures, plan).compiled(tokens).program
    return dry_run(program, captures.model, tokens, OPTIMIZER_OF, torch.device("cpu"), 0, shared_memory=False)


def counted(captures: Captures, tokens: dict[str, torch.Tensor], plan: Plan) -> list[int]:
    """The most bytes on each rank in its second step, less parameters and state."""
    compiler = Compiler(captures, plan)

    def rank(world: World) -> int:
        own = copy.deepcopy(captures.model)
        trainer = Trainer(own, loss_fn, OPTIMIZER_OF, plan, world=world, compiler=compiler)
        trainer.step(tokens)
        meter = Meter(torch.device("cpu"))
        meter.count(_held(trainer), PARAMETERS)
        before = meter.total
        with meter:
            trainer.step(tokens)
        return meter.peak - before

    return run_ranks(plan.mesh, rank)


def _held(trainer: Trainer) -> list[Any]:
    executor, optimizer = trainer.executor, trainer.optimizer
    assert optimizer is not None
    held = [executor.parameters, executor.rank_parameters.inputs, executor.buffers, *optimizer.state.values()]
    return [value for values in held for value in values.values()]


def step_bytes(found: RankMemory) -> int:
    """The peak without parameters and state."""
    return found.step_peak - found.at_peak[PARAMETERS] - found.at_peak[OPTIMIZER]


def main() -> None:
    given = arguments(__doc__)
    tokens = batch()
    captures = Captures(model(), loss_fn)
    mib: Callable[[float], str] = lambda number: f"{number / 2**20:.2f}"  # noqa: E731
    one = 0.0
    rows = []
    for plan in map(Plan.parse, PLANS):
        size = plan.mesh.size
        found = predicted(captures, tokens, plan)
        activations = found.at_peak[ACTIVATIONS]
        one = one or activations
        ring = ring_bytes(size) if plan.context_kind == "ring" else 0
        cells = [mib(activations), f"{activations / (one / size):.3f}", mib(ring)]
        cells += [f"{activations / (one / size + ring):.3f}", mib(step_bytes(found))]
        ranks = counted(captures, tokens, plan)
        cells += [f"{mib(each)} ({each / step_bytes(found):.3f})" for each in (min(ranks), max(ranks))]
        rows.append(f"| {plan.title} | {' | '.join(cells)} |")
    head = (
        "| plan | activations | / one device's / N | ring's buffers | / (one device's / N + ring's) | and buckets of"
        " gradients | counted, least (/ predicted) | counted, most |\n|---|---|---|---|---|---|---|---|"
    )
    text = (
        f"A GPT of {LAYERS} layers of width {WIDTH} and {HEADS} heads on one row of {SEQUENCE} bytes; MiB of a rank at"
        " the peak of a step, parameters and state of the optimizer left out. To reach: activations within 5% of 1/N"
        " and the ring's buffers. Of ranks that are threads, the last one to join a collective holds its result for all"
        " others, and one that is ahead holds copies of what it has sent: the most that is counted."
    )
    publish(
        "Memory of a sequence over several ranks", "\n".join([text, "", head, *rows]), "context_memory", given.write
    )


if __name__ == "__main__":
    main()
