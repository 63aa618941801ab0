"""Step time of expert=N on a Mixtral of `transformers`, against data=N, DDP and an expert-parallel layer by hand.

    python -m bench.experts [grouped-2 grouped-4 loop-2 loop-4] [--rounds 9] [--write]

All have the same model, batch and numbers, which the benchmark checks before it times them. The bytes of the
all-to-alls are those that the links count, against the rows that routers send to other ranks.
"""

from __future__ import annotations

import functools
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.expert_layers import exchange_experts
from bench.harness import Group, Variant, arguments, compare, publish, table
from plait import Plan, Trainer, run_ranks
from plait.comm.group import Done
from plait.comm.protocol import World

Step = Callable[[], Tensor]
GLOBAL_BATCH, SEQUENCE, WIDTH, INNER, LAYERS, EXPERTS, TOP = 8, 128, 256, 512, 4, 8, 2
FORMS = {"grouped": "grouped_mm", "loop": "eager"}  # of the experts of `transformers`
WORKLOADS = [f"{form}-{size}" for form in FORMS for size in (2, 4)]
ABOUT = (
    "A Mixtral of `transformers` (4 layers of width 256, 8 experts of 512, 2 for each token; 8 sequences of 128,"
    " float32) whose experts are multiplied in groups (grouped_mm) or one by one in a loop. By hand: DDP of all but the"
    " experts, and uneven all-to-alls of `torch.distributed` over Gloo (bench/expert_layers.py). CPU ms are of all"
    " threads of a rank: they say more than the clock where other work shares the cores. To reach: plait expert=N at"
    " most 1.00 of each."
)
optimizer = functools.partial(torch.optim.AdamW, lr=3e-4, fused=True)


def model(form: str) -> nn.Module:
    """The same on every rank."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=4, num_local_experts=EXPERTS, num_experts_per_tok=TOP, max_position_embeddings=SEQUENCE,
        use_cache=False,
    )  # fmt: skip
    made = MixtralForCausalLM(config)
    made.set_experts_implementation(FORMS[form])
    return made


def batch(rank: int = 0, size: int = 1) -> dict[str, Tensor]:
    """A rank's rows of the global batch."""
    tokens = torch.randint(256, (GLOBAL_BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens.chunk(size)[rank]}


def loss_fn(module: nn.Module, given: dict[str, Tensor]) -> Tensor:
    return module(input_ids=given["tokens"], labels=given["tokens"]).loss  # type: ignore[no-any-return]


def torch_step(form: str, by_hand: bool) -> Step:
    """Under torch's DDP: the model as it is, or its experts with all-to-alls written by hand."""
    dist.init_process_group("gloo")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    whole, part = model(form), batch(int(os.environ["RANK"]), size)
    is_experts = lambda child: type(child).__name__ == "MixtralExperts"  # noqa: E731
    each = exchange_experts(whole, rank, size, is_experts) if by_hand else DistributedDataParallel(whole)
    updates = optimizer(each.parameters())

    def step() -> Tensor:
        loss = loss_fn(each, part)
        loss.backward()
        updates.step()
        updates.zero_grad()
        return loss.detach()

    return step


class PlaitStep:
    """A step of plait's Trainer; every rank gives the global batch."""

    def __init__(self, form: str, plan: str) -> None:
        self.trainer = Trainer(model(form), loss_fn, optimizer, Plan.parse(plan))
        self.batch = batch()

    def __call__(self) -> Tensor:
        return self.trainer.step(self.batch)


def plait_step(form: str, plan: str) -> Step:
    return PlaitStep(form, plan)


def contenders(workload: str) -> list[Variant]:
    form, size = workload.split("-")
    num = int(size)
    return [
        Variant("DDP", torch_step, (form, False), num),
        Variant("by hand", torch_step, (form, True), num),
        Variant(f"plait data={num}", plait_step, (form, f"data={num}"), num),
        Variant(f"plait expert={num}", plait_step, (form, f"expert={num}"), num),
        Variant("plait expert.capacity=1.5", plait_step, (form, f"expert={num} expert.capacity=1.5"), num),
    ]


def first_steps(step: Step) -> list[float]:
    """The losses of three steps, of this rank or of all."""
    return [float(step()) for _ in range(3)]


def count_all_to_alls(comm: Any) -> Callable[[], int]:
    """Count the bytes that the all-to-alls of a group of threads send from now on. Returns a function that gives their
    number."""
    sent = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal sent
            before = comm.links.total()
            found = function(*args).wait()
            sent += comm.links.total() - before
            return Done(found)

        return call

    for name in ("all_to_all", "all_to_all_rows"):
        setattr(comm, name, counted(getattr(comm, name)))
    return lambda: sent


def sent_bytes(form: str, size: int) -> int:
    """The bytes of all ranks in all-to-alls of a step."""
    models = [model(form) for _ in range(size)]
    plan = Plan.parse(f"expert={size}")

    def rank(world: World) -> int:
        trainer = Trainer(models[world.rank], loss_fn, optimizer, plan, world=world)
        sent = count_all_to_alls(world.comm("expert"))
        trainer.step(batch())
        return sent()

    return sum(run_ranks(plan.mesh, rank))


def formula(form: str, size: int) -> int:
    """The bytes of all ranks in all-to-alls: four times the rows whose experts are on another rank, in each layer, and
    the numbers of rows."""
    found = 0

    def count(_: nn.Module, given: tuple[Tensor, ...], __: Any) -> None:
        nonlocal found
        for rank, ids in enumerate(given[1].chunk(size)):
            found += int((ids // (EXPERTS // size) != rank).sum()) * WIDTH * 4 * 4
        found += EXPERTS * 8 * (size - 1)

    whole = model(form)
    for module in whole.modules():
        if type(module).__name__ == "MixtralExperts":
            module.register_forward_hook(count)
    with torch.no_grad():
        loss_fn(whole, batch())
    return found


def check(variants: list[Variant]) -> None:
    """Assert that all variants have the same losses."""
    found = {}
    for variant in variants:
        if "capacity" in variant.name:
            continue
        group = Group(variant)
        try:
            ranks = group.call(first_steps)
        finally:
            group.close()
        found[variant.name] = [statistics.fmean(each) for each in zip(*ranks, strict=True)]
    first, *others = found.values()
    assert all(abs(a - b) < 1e-4 * a for other in others for a, b in zip(first, other, strict=True)), found


def main() -> None:
    given = arguments(__doc__, WORKLOADS)
    parts = [ABOUT]
    for workload in given.workloads:
        form, size = workload.split("-")
        variants = contenders(workload)
        check(variants)
        expected, sent = formula(form, int(size)), sent_bytes(form, int(size))
        even = 4 * LAYERS * GLOBAL_BATCH * SEQUENCE * TOP * WIDTH * 4 * (int(size) - 1) // int(size)
        results = compare(variants, given.rounds, given.steps)
        said = (
            f"All-to-alls of the first step, all ranks: {sent / 1e6:.3f} MB counted by link; {expected / 1e6:.3f} by"
            f" the experts that routers chose ({sent / expected - 1:+.2%}); {even / 1e6:.3f} if all experts got the"
            " same."
        )
        parts.append(f"## {workload}\n\n{table(results, [v.name for v in variants[:3]])}\n\n{said}")
    publish("Experts on different ranks", "\n\n".join(parts), "experts", given.write)


if __name__ == "__main__":
    main()
