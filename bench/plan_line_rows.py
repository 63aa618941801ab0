"""Published runs as a stranger says them: a shape, a plan's line, a cluster's name. Nothing was fitted on them.

What `plait simulate` says of the line is what plait would take, with the numbers of the shipped clusters, those of
H100s by the power that the source names. Rows of NeMo are predicted a second time, with what its kernels do. Rows with
a commit were compared with their source; the others are from memory, as their group says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench.blind_rows import BlindGroup, llama_shape, megatron_shape
from plait.cost.transformer import TransformerShape
from plait.cost.transformer_simulation import program_of, simulate_step
from plait.plan.plan import Plan
from plait.spec.cluster_file import find_cluster

Rows = Iterator[tuple[str, float, float]]
MODERN: dict[str, Any] = {
    "biases": False, "tied": False, "learned_positions": False, "dropout": False, "stores_scores": False,
}  # fmt: skip
MIXED = "sequence=yes zero=1 precision=bf16-params"
H100 = "h100-700w"  # "TDP 700W" in the recipes' README; the report's are DGX H100, of 700 W by their data sheet
# cuDNN's attention over the 690 Tflop/s of products: 529 in a causal forward over 8,192 tokens with heads of 128, 518
# in a backward (Shah et al. 2024, FlashAttention-3, figures 5 and 6), which has 2.5 times the operations.
CUDNN = 3.5 / (1 / 529 + 2.5 / 518) / (0.697 * 989.4)
# NeMo's norms, rotary positions, biases, dropouts and cross-entropy are single kernels: each value is written and read
# once. cuDNN has the attention; Grok-1's configuration says FlashAttention (NVTE_FUSED_ATTN=0).
NEMO: dict[str, Any] = {"traffic": 2.0, "attention": CUDNN}
NEMO_WITHOUT_CUDNN: dict[str, Any] = {"traffic": 2.0}


def step_seconds(
    shape: TransformerShape, plan: str, rows: int, kind: str, kernels: dict[str, Any] | None = None
) -> float:
    """The seconds of a line of a plan; with `kernels` those of a program that has them in place of plait's."""
    made = Plan.parse(plan)
    program = replace(program_of(made), **(kernels or {}))
    return simulate_step(shape, made, rows, find_cluster(f"{kind}x{made.num_processes}"), program).seconds


def bucket(data: int) -> str:
    """Megatron-LM's buckets: 40 million elements, or a million for each rank of data if these are more."""
    return f"bucket={4 * max(40, data) * 10**6 // 2**20}MiB"


def nemotron(layers: int, hidden: int, heads: int) -> TransformerShape:
    return TransformerShape(layers, hidden, heads, 256000, 4096, kv_heads=8, **MODERN)


def _recipes(kernels: dict[str, Any] | None = None) -> Rows:
    """Seconds by the number of GPUs; a model has as many rows for each rank of data at all of them."""
    for name, shape, inner, num_micro, times, micro_rows in (
        ("Nemotron-4 340B", nemotron(96, 18432, 96), "tensor=8 pipeline=8 chunks=12", 16,
         {128: 4.61, 256: 4.67, 512: 4.7, 1024: 4.73, 2048: 4.84}, 1),
        ("Nemotron-4 15B", nemotron(32, 6144, 48), "tensor=4", 4,
         {16: 2.83, 32: 2.86, 64: 2.86, 128: 2.89, 256: 2.88, 512: 2.92, 1024: 2.92, 2048: 2.96}, 4),
        ("Llama 3.1 405B", llama_shape("405B", 8192), "tensor=8 context=2 pipeline=9 chunks=7", 63,
         {576: 17.2, 1152: 17.52, 2304: 17.62}, 1),
        ("Llama 3.1 70B", llama_shape("70B", 8192), "tensor=4 context=2 pipeline=4 chunks=5", 64,
         {64: 14.72, 128: 14.73, 256: 14.8, 512: 14.89, 1024: 14.92, 2048: 14.98}, 1),
        ("Llama 3.1 8B", llama_shape("8B", 8192), "context=2", 32,
         {8: 12.91, 16: 13.0, 32: 13.05, 64: 13.08, 128: 13.1}, 1),
        ("GPT-3 175B", megatron_shape(96, 12288, 96, stores_scores=False), "tensor=4 pipeline=8 chunks=12", 64,
         {128: 8.91, 256: 8.95, 512: 9.09, 1024: 9.01, 2048: 9.02}, 1),
    ):  # fmt: skip
        mixed = MIXED if "tensor" in inner else MIXED.removeprefix("sequence=yes ")
        schedule = "schedule=interleaved " if "chunks" in inner else ""
        ranks = Plan.parse(f"{schedule}micro={num_micro} {inner}").num_processes
        for size, seconds in times.items():
            data = size // ranks
            plan = f"data={data} {inner} {schedule}micro={num_micro} {mixed} {bucket(data)}"
            rows = data * num_micro * micro_rows
            yield f"{name} on {size}", seconds, step_seconds(shape, plan, rows, H100, kernels)


def _grok(kernels: dict[str, Any] | None = None) -> Rows:
    shape = TransformerShape(64, 6144, 48, 131072, 8192, 32768, 8, gated=True, num_experts=8, experts_per_token=2,
                             **MODERN | {"tied": True})  # fmt: skip
    for size, seconds in ((512, 20.83), (1024, 21.0), (2048, 21.09)):
        data = size // 64
        plan = (
            f"data={data} expert=8 tensor=4 context=2 pipeline=8 chunks=8 schedule=interleaved micro=128 {MIXED}"
            f" {bucket(data)}"
        )
        yield f"Grok-1 314B on {size}", seconds, step_seconds(shape, plan, 128 * data, H100, kernels)


def _megascale() -> Rows:
    shape = megatron_shape(96, 12288, 96, 64000, stores_scores=False)
    for batch, size, seconds in (
        (768, 256, 40.0), (768, 512, 21.2), (768, 768, 15.2), (768, 1024, 11.9),
        (6144, 3072, 29.02), (6144, 6144, 14.78), (6144, 8192, 12.24), (6144, 12288, 8.57),
    ):  # fmt: skip
        data = size // 64
        plan = (
            f"data={data} tensor=8 pipeline=8 chunks=6 schedule=interleaved micro={batch // data} {MIXED}"
            f" {bucket(data)}"
        )
        yield f"175B on {size}, {batch} rows", seconds, step_seconds(shape, plan, batch, "a100")


def _ptd_p() -> Rows:
    """Seconds from the flop/s of a GPU, of which the layers' forward counts twice."""
    sizes = {174.6: (96, 12288, 96), 529.6: (105, 20480, 128)}
    for billions, size, pipeline, batch, tflops in (
        (174.6, 384, 12, 1536, 153), (174.6, 768, 12, 1536, 149), (174.6, 1536, 12, 1536, 141),
        (529.6, 560, 35, 2240, 171), (529.6, 1120, 35, 2240, 167), (529.6, 2240, 35, 2240, 159),
    ):  # fmt: skip
        shape, data = megatron_shape(*sizes[billions]), size // 8 // pipeline
        plan = (
            f"data={data} tensor=8 pipeline={pipeline} micro={batch // data} recompute=layer precision=fp16-params"
            f" {bucket(data)}"
        )
        published = shape.step_flops(batch, "full") / (tflops * 1e12 * size)
        yield f"{billions}B on {size}", published, step_seconds(shape, plan, batch, "a100")


def _nemotron(kernels: dict[str, Any] | None = None) -> Rows:
    for size, data, num_micro, seconds in ((1536, 16, 48, 10.3), (3072, 32, 48, 10.3), (6144, 64, 36, 8.0)):
        plan = (
            f"data={data} tensor=8 pipeline=12 chunks=8 schedule=interleaved micro={num_micro} {MIXED} {bucket(data)}"
        )
        yield f"on {size}", seconds, step_seconds(nemotron(96, 18432, 96), plan, data * num_micro, H100, kernels)


def plan_line_groups() -> list[BlindGroup]:
    """All groups, predicted."""
    recipes = "NVIDIA/dgxc-benchmarking at commit 143b90d, README files of NeMo's models, bf16"
    return [
        BlindGroup(name, source, checked, "seconds a step", note, first, tuple(rows))
        for name, source, checked, note, first, rows in (
            ("DGX Cloud recipes, dense", recipes, True,
             "DGX H100s of 700 W. As plait would run them: FlashAttention-2, and kernels of torch.",
             (0.208, 0.797), _recipes()),
            ("DGX Cloud recipes, dense, with NeMo's kernels", recipes, True,
             "As NeMo runs them: cuDNN's attention, fused kernels.", (0.026, 0.103), _recipes(NEMO)),
            ("DGX Cloud recipes, Grok-1", recipes, True,
             "In Megatron-LM ranks that split weights send a part of the rows each; in plait each sends all.",
             (0.358, 0.368), _grok()),
            ("DGX Cloud recipes, Grok-1, with NeMo's kernels", recipes, True,
             "Fused kernels, and FlashAttention-2.", (0.246, 0.255), _grok(NEMO_WITHOUT_CUDNN)),
            ("Nemotron-4 340B, table 2", "NVIDIA 2024, arXiv 2406.11704", False, "DGX H100s, of 700 W.",
             (0.019, 0.052), _nemotron()),
            ("Nemotron-4 340B, table 2, with NeMo's kernels", "NVIDIA 2024, arXiv 2406.11704", False,
             "cuDNN's attention, fused kernels.", (0.093, 0.093), _nemotron(NEMO)),
            ("MegaScale, table 2, Megatron-LM", "Jiang et al. 2024, arXiv 2402.15627", False,
             "Scores are not stored, in place of selective recomputation.", (0.109, 0.144), _megascale()),
            ("PTD-P, table 2, both models", "Narayanan et al. 2021, arXiv 2104.04473", False,
             "Seconds follow from the published flop/s.", (0.023, 0.051), _ptd_p()),
        )
    ]  # fmt: skip
