"""Step time of expert=N on a Mixtral of `transformers`, against data=N, DDP and an expert-parallel layer by hand.

    python -m bench.experts [grouped-2 grouped-4 loop-2 loop-4] [--rounds 9] [--write]

All have the same model, batch and numbers, which the benchmark checks before it times them. The bytes of the
all-to-alls are those that the links count, against the rows that routers send to other ranks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.expert_layers import exchange_experts
from bench.harness import Variant, arguments, compare, publish, table
from plait import Plan, Trainer

Step = Callable[[], Tensor]
GLOBAL_BATCH, SEQUENCE, WIDTH, INNER, LAYERS, EXPERTS, TOP = 8, 128, 256, 512, 4, 8, 2
FORMS = {"grouped": "grouped_mm", "loop": "eager"}  # of the experts of `transformers`
WORKLOADS = [f"{form}-{size}" for form in FORMS for size in (2, 4)]
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


def losses(step: Step) -> list[float]:
    """Of this rank, or of all, in the first steps."""
    return [float(step()) for _ in range(3)]


def main() -> None:
    given = arguments(__doc__, WORKLOADS)
    parts = []
    for workload in given.workloads:
        variants = contenders(workload)
        results = compare(variants, given.rounds, given.steps)
        parts.append(f"## {workload}\n\n{table(results, [v.name for v in variants[:3]])}")
    publish("Experts on different ranks", "\n\n".join(parts), "experts", given.write)


if __name__ == "__main__":
    main()
