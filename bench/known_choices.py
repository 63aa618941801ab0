"""The planner's choice beside what teams chose: GPT-3, Llama-3, 13B on one V100, Mixtral 8x7B, 7B over two sites.

    python -m bench.known_choices [NAME ...] [--write]

Nothing is run on the hardware. Both plans are simulated on the same cluster; the difference is of these predictions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.harness import arguments, publish
from plait.cost.found_plans import Candidate, FoundPlans, main_difference
from plait.cost.memory_model import human_bytes
from plait.cost.plan_search import search
from plait.cost.shape_evaluator import ShapeEvaluator
from plait.cost.transformer import TransformerShape
from plait.plan.plan import Plan
from plait.plan.plan_space import Limits
from plait.spec.cluster_file import find_cluster

NOTES = """These are predictions for both, as plait would run them, of forms that meet published runs within 20% or say
where they do not ([published.md](published.md)), and no better. One thing favours the planner's: schedules with split
backwards (zb-v, dualpipe-v) are newer than the runs of GPT-3. The microbatches, chunks and recomputation of the teams
are what their papers say, as far as they do.
"""


@dataclass(frozen=True)
class KnownChoice:
    """A training run, and the plan of the team that made it.

    Attributes:
        name: of the case.
        shape: of the model.
        cluster: where it ran.
        rows: sequences of a step.
        theirs: what they chose, in plait's words.
        source: where that is from, and what of it plait has no words for.
        limits: of the search: what they could not choose either, or what changes the numbers.
        published: tokens per second that they had; 0 if that is not known.
    """

    name: str
    shape: TransformerShape
    cluster: str
    rows: int
    theirs: str
    source: str
    limits: str = "sync=1 precision=bf16-params"
    published: float = 0.0


def llama(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    sequence: int,
    num_experts: int = 1,
    experts_per_token: int = 1,
) -> TransformerShape:
    return TransformerShape(
        layers, hidden, heads, vocab, sequence, ffn, kv_heads, gated=True, biases=False, tied=False,
        learned_positions=False, dropout=False, stores_scores=False, num_experts=num_experts,
        experts_per_token=experts_per_token,
    )  # fmt: skip


CASES = {
    "gpt3": KnownChoice(
        "GPT-3 175B on 1,024 A100s", TransformerShape(96, 12288, 96, 51200, 2048), "a100x1024", 1536,
        "pipeline=16 data=8 tensor=8 micro=192 schedule=interleaved chunks=3 recompute=layer precision=fp16-params",
        "Narayanan et al. 2021, section 5.1: 1,024 GPUs, batch 1536, 140 Tflop/s each, which is a step of 30.6 s. The"
        " degrees for 1,024 are not in the paper: its 175B has tensor 8 and pipeline 12 on 384 to 1,536 GPUs (table 2),"
        " and 12 does not divide 1,024. Full recomputation, scores kept in memory; the number of chunks is not said"
        " (from memory, but for the table)",
        "sync=1 precision=fp16-params home.activations=device", 102_800,
    ),
    "llama3": KnownChoice(
        "Llama-3 405B on 16,384 H100s", llama(126, 16384, 128, 8, 53248, 128256, 8192), "h100-700wx16384", 2048,
        "pipeline=16 data=128 tensor=8 sequence=yes zero=1 micro=16 schedule=interleaved chunks=7"
        " precision=bf16-params bucket=400MiB",
        "Llama Team 2024, table 4: GPUs of 700 W, tensor 8, pipeline 16, data 128, 16 million tokens a step, 400"
        " Tflop/s each, which is 2.6 million tokens/s (checked with P. Balaji's slide at SC'24, on glennklockwood.com);"
        " FSDP that cuts"
        " optimizer states and gradients, a layer at a time, as the bucket has it; chunks of one layer (from memory)",
        "sync=1 precision=bf16-params home.parameters=device home.activations=device home.optimizer=device", 2.59e6,
    ),
    "v100": KnownChoice(
        "13B on one 32 GB V100", TransformerShape(40, 5120, 40, 50257, 1024), "v100x1", 32,
        "micro=4 recompute=layer precision=fp16-params home.parameters=host home.optimizer=host",
        "Ren et al. 2021, ZeRO-Offload: 13B on one V100 (checked with its abstract); it keeps parameters in fp16"
        " on the device, and their float32 copies with the optimizer. plait keeps float32 parameters where parameters"
        " are, so that its nearest plan has both on the host",
        "precision=fp16-params",
    ),
    "mixtral": KnownChoice(
        "Mixtral 8x7B on 8 H100s", llama(32, 4096, 32, 8, 14336, 32000, 4096, 8, 2), "h100x8", 64,
        "data=8 expert=8 expert.capacity=1.25 zero=1 micro=8 recompute=layer precision=bf16-params",
        "Megatron Core's recipe for Mixtral 8x7B: experts over the 8 GPUs of a node, tensor 1, but 64 GPUs with"
        " pipeline 4. On 8 the 16 bytes a parameter of float32 weights, gradients and moments are 93 GB of each GPU's"
        " 80, so that some are on the host in any plan",
        "sync=1 precision=bf16-params expert.capacity=1.25",
    ),
    "mixtral64": KnownChoice(
        "Mixtral 8x7B on 64 H100s", llama(32, 4096, 32, 8, 14336, 32000, 4096, 8, 2), "h100x64", 256,
        "pipeline=4 data=16 expert=8 expert.capacity=1.0 zero=1 micro=16 schedule=interleaved chunks=8"
        " precision=bf16-params",
        "Megatron Core: tensor 1, pipeline 4, experts 8 on 64 H100s, and 468 Tflop/s each for Mixtral 8x7B in bf16 with"
        " version 0.9, which is 361,000 tokens/s on 64 (checked with docs.nvidia.com/megatron-core); 8 chunks and"
        " microbatches of one row are from memory",
        "sync=1 precision=bf16-params expert.capacity=1.0 home.parameters=device home.activations=device"
        " home.optimizer=device", 361_000,
    ),
    "sites": KnownChoice(
        "7B over two sites at 1 Gbit/s", llama(32, 4096, 32, 32, 11008, 32000, 4096), "two-sites", 256,
        "replica=2 data=8 zero=3 micro=8 precision=bf16-params sync=100 outer=nesterov compress=int8",
        "Jaghouar et al. 2024, INTELLECT-1 (10B): DiLoCo every 100 steps in int8, FSDP2 within a site (checked with"
        " arXiv 2412.01152, which has 36.2 to 41.4% MFU); its microbatches are not in the paper",
        "precision=bf16-params compress=none,int8",
    ),
}  # fmt: skip


def compare(case: KnownChoice) -> list[str]:
    """Rows of the planner's plan and of the team's, and why they differ."""
    begin = time.perf_counter()
    cluster = find_cluster(case.cluster)
    evaluator = ShapeEvaluator(case.shape, cluster)
    found = search(evaluator, cluster, (case.rows,), Limits.parse(case.limits))
    took = time.perf_counter() - begin
    plan = Plan.parse(case.theirs)
    theirs = Candidate(plan, case.rows, evaluator.simulate(plan, case.rows))
    lines = [f"## {case.name}", "", f"Theirs: {case.source}.", ""]
    lines += ["| who | plan | step | tokens/s | MFU | memory |", "|---|---|---|---|---|---|"]
    best = found.best[0] if found.best else found.nearest
    assert best is not None
    lines += [_row("the planner", best), _row("the team", theirs), ""]
    if case.published:
        off = theirs.step.tokens_per_second / case.published - 1
        how = "slower" if off < 0 else "faster"
        lines.append(f"The team had {case.published:,.0f} tokens/s: its plan is predicted {abs(off):.0%} {how}.")
    missing = theirs.step.misses_by(found.memory)
    if missing > 0:
        lines.append(f"The team's plan, with what plait keeps, takes {human_bytes(missing)} more than there is.")
    lines += [_why(best, theirs), "", *_others(found)]
    return [*lines, f"{found.num_rough:,} plans, {found.num_simulated} simulated, {took:.0f} s.", ""]


def _row(who: str, each: Candidate) -> str:
    step = each.step
    return (
        f"| {who} | `{each.plan}` | {step.seconds:.3g} s | {step.tokens_per_second:,.0f} | {step.mfu:.1%} |"
        f" {human_bytes(each.memory)} |"
    )


def _why(best: Candidate, theirs: Candidate) -> str:
    gain = best.step.tokens_per_second / theirs.step.tokens_per_second - 1
    if gain >= 0:
        return f"The planner's has {gain:.0%} more tokens/s: the team's {main_difference(theirs.step, best.step)}."
    return f"The team's has {-gain:.0%} more tokens/s: the planner's {main_difference(best.step, theirs.step)}."


def _others(found: FoundPlans) -> Sequence[str]:
    rows = [f"- `{each.plan}`: {each.step.seconds:.3g} s, {human_bytes(each.memory)}" for each in found.best[1:4]]
    return ["Next best:", "", *rows, ""] if rows else []


def main() -> None:
    given = arguments(__doc__, CASES)
    parts = [line for name in given.workloads for line in compare(CASES[name])]
    publish("Known choices", "\n".join([NOTES, *parts]), "known-choices", given.write)


if __name__ == "__main__":
    main()
