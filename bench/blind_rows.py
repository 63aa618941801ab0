"""Published runs that nothing was fitted on, predicted with the numbers of bench/published_rows.py as they are.

A row was added with its prediction, and no form was made to meet it. Where a source does not say what a run used, the
row's setup is what the program of that time did by default, and the note of the group says so. `checked` are rows that
were compared with their source; the others are from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bench.published_rows import (
    FITTED,
    TORCH_RING,
    UNFUSED_LLAMA,
    gpipe_throughput,
    predicted,
    published_rows,
    with_numbers,
)
from plait.cost.memory_model import StateBytes
from plait.cost.transformer import TransformerShape
from plait.cost.transformer_program import TransformerProgram
from plait.cost.transformer_step import StepEstimate, estimate_step, layer_time
from plait.plan.parallelism import ALTERNATE, FULL, NONE, SELECTIVE, Parallelism
from plait.plan.sharding_plan import ZERO_STAGES
from plait.spec.cluster import Cluster
from plait.spec.cluster_file import find_cluster

A100, H100 = FITTED["A100"], FITTED["H100"]
# How fast attention is beside products, which no fitted row of an A100 tells: of 312 Tflop/s FlashAttention reaches 25
# to 50%, FlashAttention-2 63 to 73% (Dao 2023, "FlashAttention-2", sections 1 and 4), and products 75%.
FLASH_1, FLASH_2 = 0.46, 0.88


@dataclass(frozen=True)
class BlindGroup:
    """Rows of one source.

    Attributes:
        name: of the source.
        source: where the numbers are.
        checked: whether they were compared with it; if not, they are from memory.
        metric: what they are, with their unit.
        note: what the source leaves open.
        first: the median and the worst error of the first predictions, before what they showed was mended.
        rows: (the run, the published number, the predicted number).
    """

    name: str
    source: str
    checked: bool
    metric: str
    note: str
    first: tuple[float, float]
    rows: tuple[tuple[str, float, float], ...]


def megatron_shape(layers: int, hidden: int, heads: int, vocab: int = 51200, **more: Any) -> TransformerShape:
    return TransformerShape(layers, hidden, heads, vocab, 2048, **more)


def llama_shape(size: str, sequence: int, vocab: int = 128256) -> TransformerShape:
    layers, hidden, heads, kv_heads, ffn = {
        "8B": (32, 4096, 32, 8, 14336), "13B": (40, 5120, 40, 40, 13824), "70B": (80, 8192, 64, 8, 28672),
        "405B": (126, 16384, 128, 8, 53248),
    }[size]  # fmt: skip
    return TransformerShape(
        layers, hidden, heads, vocab, sequence, ffn, kv_heads, gated=True, biases=False, tied=False,
        learned_positions=False, dropout=False, stores_scores=False,
    )  # fmt: skip


def mpt_shape(size: str, sequence: int) -> TransformerShape:
    layers, hidden, heads = {
        "1b": (24, 2048, 16), "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56),
        "70b": (80, 8192, 64),
    }[size]  # fmt: skip
    return TransformerShape(
        layers, hidden, heads, 50368, sequence, biases=False, dropout=False, stores_scores=False
    )  # fmt: skip


def a100(ranks: int, links: bool = True) -> Cluster:
    return with_numbers(
        find_cluster(f"a100x{ranks}"), A100["products"], A100["memory"], A100["links"] if links else 0.0
    )


def megatron(shape: TransformerShape, how: Parallelism, rows: int) -> StepEstimate:
    return estimate_step(shape, how, rows, a100(how.num_ranks), TransformerProgram("float16"))


def hardware_tflops(step: StepEstimate, ranks: int) -> float:
    return step.hardware_flops / step.seconds / ranks / 1e12


def torch_program(dtype: str, attention: float, traffic: float) -> TransformerProgram:
    """FSDP2 or FSDP: float32 parameters that are gathered in half precision, Adam in float32."""
    return TransformerProgram(
        dtype, states=StateBytes(4, 4, 8), traffic=traffic, causal=0.5, attention=attention, loss_bytes=14, **TORCH_RING
    )


def _ptd_p() -> BlindGroup:
    sizes = (
        (3.6, 30, 3072, 32, 64, 2, 1, 512, 16, 138), (18.4, 40, 6144, 48, 256, 8, 1, 1024, 4, 135),
        (76.1, 60, 10240, 80, 1024, 8, 4, 1792, 2, 140), (310.1, 96, 16384, 128, 1920, 8, 16, 2160, 1, 155),
        (1008.0, 128, 25600, 160, 3072, 8, 64, 3072, 1, 163),
    )  # fmt: skip
    rows = []
    for billions, layers, hidden, heads, ranks, tensor, pipeline, batch, micro, value in sizes:
        data = ranks // tensor // pipeline
        num_micro = max(batch // data // micro, 1)
        how = Parallelism(batch=data, weights=tensor, pipeline=pipeline, num_micro=num_micro, recompute=FULL)
        step = megatron(megatron_shape(layers, hidden, heads), how, data * num_micro * micro)
        rows.append((f"{billions:g}B on {ranks}: tensor {tensor}, pipeline {pipeline}", value,
                     hardware_tflops(step, ranks)))  # fmt: skip
    return BlindGroup(
        "PTD-P, table 1, the other sizes", "Narayanan et al. 2021, arXiv 2104.04473", False, "Tflop/s a GPU",
        "The microbatches are not in the table: 16, 4, 2, 1 and 1 rows.", (0.025, 0.043), tuple(rows),
    )  # fmt: skip


def _korthikanti() -> BlindGroup:
    rows = []
    for name, layers, hidden, heads, ranks, pipeline, chunks, batch, full, selective in (
        ("175B", 96, 12288, 96, 64, 8, 3, 64, 18.13, 13.75), ("1T", 128, 25600, 160, 512, 64, 1, 512, 94.42, 71.49),
    ):  # fmt: skip
        shape = megatron_shape(layers, hidden, heads)
        for kind, sequence, value in ((FULL, False, full), (SELECTIVE, True, selective)):
            how = Parallelism(
                weights=8, pipeline=pipeline, chunks=chunks, num_micro=batch, recompute=kind, sequence=sequence
            )
            assert how.num_ranks == ranks
            rows.append((f"{name} on {ranks}, {kind} recomputation", value, megatron(shape, how, batch).seconds))
    return BlindGroup(
        "Reducing Activation Recomputation, table 5", "Korthikanti et al. 2022, arXiv 2205.05198", False,
        "seconds a step", "Microbatches of one row, as in table 3.", (0.027, 0.047), tuple(rows),
    )  # fmt: skip


def _gpipe() -> BlindGroup:
    split, rows = FITTED["Cloud TPU"]["split"], []
    for model, values in (("AmoebaNet-D(18,128)", (1.7, 2.7)), ("Transformer-48", (1.8, 3.3))):
        least = gpipe_throughput(model, 2, 32, split)
        for ranks, value in zip((4, 8), values, strict=True):
            rows.append((f"{model} on {ranks}", value, gpipe_throughput(model, ranks, 32, split) / least))
    return BlindGroup(
        "GPipe, table 3, GPUs without fast links", "Huang et al. 2019, arXiv 1811.06965", False,
        "throughput over that of 2", "32 microbatches.", (0.042, 0.066), tuple(rows),
    )  # fmt: skip


def _layer_of_22b() -> BlindGroup:
    """The forward and the backward of one layer."""
    shape, rows = megatron_shape(48, 6144, 64), []
    for kind, sequence, forward, backward in (
        (NONE, False, 7.7, 11.9), (NONE, True, 7.2, 11.8), (FULL, False, 7.7, 19.5), (SELECTIVE, False, 7.7, 13.2),
        (SELECTIVE, True, 7.2, 13.1),
    ):  # fmt: skip
        how = Parallelism(weights=8, recompute=kind, sequence=sequence)
        found = layer_time(shape, how, 4 * shape.sequence, a100(8), TransformerProgram("float16"))
        name = f"{kind} recomputation{', sequence parallelism' if sequence else ''}"
        rows.append((f"forward, {name}", forward, 1e3 * (found.forward + found.forward_sent)))
        rows.append((f"backward, {name}", backward, 1e3 * (found.inputs + found.weight + found.backward_sent)))
    return BlindGroup(
        "Reducing Activation Recomputation, table 4", "Korthikanti et al. 2022, arXiv 2205.05198", False,
        "milliseconds a layer of 22B", "Four rows over 8 GPUs.", (0.062, 0.075), tuple(rows),
    )  # fmt: skip


def _zero_bubble() -> BlindGroup:
    """Throughputs that were measured, from the bubbles that are simulated with the profiled times of table 9."""
    measured = {
        ("1.5B", 24): (11.8, 13.1, 12.9, 14.5), ("1.5B", 32): (12.5, 13.4, 13.4, 14.8),
        ("1.5B", 64): (13.6, 13.9, 14.2, 14.9), ("14.6B", 48): (1.40, 1.54, 1.61, 1.81),
        ("14.6B", 64): (1.49, 1.59, 1.67, 1.83), ("14.6B", 128): (1.64, 1.66, 1.76, 1.85),
    }  # fmt: skip
    names, rows = ("1F1B", "1F1B-I", "ZB-1p", "ZB-2p"), []
    for row in published_rows():
        run = row.setup
        if row.family == "Zero Bubble PP" and run["schedule"] in names:
            num_micro = run["microbatches"]
            work = num_micro * (run["T_F_ms"] + run["T_B_ms"] + run["T_W_ms"]) / 1e3
            rate = num_micro * run["microbatch"] * (1 - predicted(row)) / work / run["pp"]
            value = measured[run["model"], num_micro][names.index(run["schedule"])]
            rows.append((f"{run['model']}, {num_micro} microbatches, {run['schedule']}", value, rate))
    return BlindGroup(
        "Zero Bubble PP, table 4", "Qi et al. 2024, arXiv 2401.10241", False, "samples/s a GPU",
        "Updates and the sums of norms are not in the profiled times; messages of each chunk may take ranks' time too.",
        (0.088, 0.171), tuple(rows),
    )  # fmt: skip


def _others_on_a100() -> BlindGroup:
    rows = []
    bloom = TransformerShape(70, 14336, 112, 250880, 2048, learned_positions=False)
    how = Parallelism(batch=8, weights=4, pipeline=12, num_micro=128, recompute=FULL)
    rows.append(("BLOOM 176B on 384, Tflop/s a GPU", 150.0, hardware_tflops(megatron(bloom, how, 2048), 384)))
    neox = TransformerShape(44, 6144, 64, 50432, 2048, learned_positions=False, tied=False)
    how = Parallelism(batch=12, weights=2, pipeline=4, num_micro=32, recompute=FULL)
    rows.append(("GPT-NeoX 20B on 96, Tflop/s a GPU", 117.0, hardware_tflops(megatron(neox, how, 1536), 96)))
    for servers, seconds in ((280, 60.1), (350, 50.2), (420, 44.4)):
        data = servers * 8 // 280
        how = Parallelism(batch=data, weights=8, pipeline=35, num_micro=1920 // data, recompute=FULL)
        step = megatron(megatron_shape(105, 20480, 128), how, 1920)
        rows.append((f"MT-NLG 530B on {servers * 8}, seconds a step", seconds, step.seconds))
    for ranks, seconds in ((256, 40.0), (512, 21.2), (768, 15.2), (1024, 11.9)):
        data = ranks // 64
        how = Parallelism(
            batch=data, weights=8, pipeline=8, chunks=6, num_micro=768 // data, recompute=SELECTIVE, sequence=True
        )
        step = megatron(megatron_shape(96, 12288, 96, 64000), how, 768)
        rows.append((f"Megatron-LM in MegaScale, 175B on {ranks}, seconds a step", seconds, step.seconds))
    return BlindGroup(
        "Other runs of Megatron-LM on A100s",
        "BLOOM: bigscience.notion.site, Le Scao et al. 2022 (checked); Black et al. 2022; Smith et al. 2022; Jiang et"
        " al. 2024, table 2", False, "as said",
        "MegaScale does not say how Megatron-LM recomputes: selectively, with sequence parallelism.", (0.107, 0.346),
        tuple(rows),
    )  # fmt: skip


def _titan(
    shape: TransformerShape,
    how: Parallelism,
    rows: int,
    tech: str = "compile float8",
) -> StepEstimate:
    """A run of torchtitan at the end of 2024 on H100s of 96 GB at 500 W. Under a pipeline its FSDP gathers parameters
    once a step and keeps them and their gradients whole."""
    machine = find_cluster("h100" if how.num_ranks <= 8 else f"h100x{how.num_ranks}")
    machine = replace(machine, device=replace(machine.device, memory=96e9, memory_bandwidth=2.4e12))
    program = torch_program(
        "float8" if "float8" in tech else "bfloat16", H100["attention"],
        H100["traffic"] + (0.0 if "compile" in tech else UNFUSED_LLAMA),
    )  # fmt: skip
    if how.pipeline > 1:
        how, program = how.having(cuts=ZERO_STAGES[1]), replace(program, states=StateBytes(2, 4, 12))
    return estimate_step(shape, how, rows, with_numbers(machine, H100["products"]), program)


def _titan_groups() -> list[BlindGroup]:
    source = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
    speeds, sizes = [], []

    def add(
        name: str, shape: TransformerShape, how: Parallelism, rows: int, tech: str, speed: float, size: float
    ) -> None:
        step = _titan(shape, how, rows, tech)
        speeds.append((name, speed, rows * shape.sequence / step.seconds / how.num_ranks))
        sizes.append((name, size, step.peak_memory / 2**30))

    zero3: Any = {"cuts": ZERO_STAGES[3]}
    for tech, speed, size in (("", 5605, 67.0), ("compile", 6514, 62.0), ("compile float8", 8380, 61.8)):
        how = Parallelism(batch=128, sharded=128, recompute=ALTERNATE, **zero3)
        add(f"table 3: 8B on 128, {tech or 'eager'}", llama_shape("8B", 8192), how, 256, tech, speed, size)
    for tech, speed, size in (("compile float8", 829, 71.9), ("compile float8 async", 876, 67.6)):
        how = Parallelism(batch=32, weights=8, sharded=32, recompute=FULL, sequence=True, **zero3)
        add(f"table 4: 70B on 256, {tech}", llama_shape("70B", 8192), how, 512, tech, speed, size)
    for chunks, speed, size in ((1, 100, 82.5), (2, 128, 72.7)):
        how = Parallelism(batch=8, weights=8, pipeline=8, chunks=chunks, num_micro=8, sharded=8, recompute=FULL,
                          sequence=True, **zero3)  # fmt: skip
        name = f"table 5: 405B on 512, {'interleaved' if chunks > 1 else '1F1B'}"
        add(name, llama_shape("405B", 8192), how, 256, "compile float8 async", speed, size)
    for context, speed, size in ((1, 76, 75.3), (2, 47, 75.9), (4, 31, 77.1), (8, 16, 84.9)):
        data = 8 // context
        how = Parallelism(batch=data, weights=8, context=context, pipeline=8, num_micro=8, sharded=8, recompute=FULL,
                          sequence=True, context_kind="ring", **zero3)  # fmt: skip
        name = f"table 6: 405B on 512, context {context}, {32768 * context} tokens"
        add(name, llama_shape("405B", 32768 * context), how, 8 * data, "compile float8 async", speed, size)
    note = "Microbatches are as many as ranks of the pipeline, torchtitan's default; interleaved has two chunks."
    return [
        BlindGroup("torchtitan, tables 3 to 6", source, True, "tokens/s a GPU", note, (0.286, 0.425), tuple(speeds)),
        BlindGroup("torchtitan, tables 3 to 6, memory", source, True, "GiB", note, (0.931, 1.914), tuple(sizes)),
    ]


def _titan_a100() -> BlindGroup:
    rows = []
    for name, size, sequence, vocab, batch, recompute, value in (
        ("Llama 3 8B, every other product", "8B", 8192, 128256, 1, ALTERNATE, 2973),
        ("Llama 3 70B, layers repeated", "70B", 8192, 128256, 1, FULL, 331),
        ("Llama 2 13B, nothing repeated", "13B", 4096, 32000, 2, NONE, 2162),
        ("Llama 2 13B, every other product", "13B", 4096, 32000, 2, ALTERNATE, 1904),
        ("Llama 2 70B, every other product", "70B", 4096, 32000, 1, ALTERNATE, 355),
        ("Llama 2 70B, layers repeated", "70B", 4096, 32000, 2, FULL, 353),
    ):
        shape = llama_shape(size, sequence, vocab)
        how = Parallelism(batch=64, cuts=ZERO_STAGES[3], sharded=64, recompute=recompute)
        program = torch_program("bfloat16", FLASH_2, H100["traffic"])
        step = estimate_step(shape, how, 64 * batch, a100(64, links=False), program)
        rows.append((name, float(value), batch * sequence / step.seconds))
    return BlindGroup(
        "torchtitan on 64 A100s", "torchtitan at commit 0413364, docs/performance.md", True, "tokens/s a GPU",
        "With torch.compile, and the traffic between products that was fitted on H100s.", (0.042, 0.164), tuple(rows),
    )  # fmt: skip


def _llama3() -> BlindGroup:
    rows = []
    for ranks, context, data, sequence, num_micro, value in (
        (8192, 1, 64, 8192, 32, 430), (16384, 1, 128, 8192, 16, 400), (16384, 16, 8, 131072, 16, 380),
    ):  # fmt: skip
        shape = llama_shape("405B", sequence)
        how = Parallelism(
            batch=data, weights=8, context=context, pipeline=16, chunks=7, num_micro=num_micro, cuts=ZERO_STAGES[1],
            sharded=data, sequence=True, bucket=shape.layer_parameters // 8 * 4, context_kind="gather",
        )  # fmt: skip
        program = replace(  # keys and values are gathered, as few heads as there are (section 3.3.2)
            torch_program("bfloat16", 0.0, H100["traffic"]),
            repeats_heads=False, ring_gradient_bytes=0, ring_traffic=(0.0, 0.0), hides_sums=True,
        )  # fmt: skip
        total = data * num_micro
        step = estimate_step(shape, how, total, find_cluster(f"h100-700wx{ranks}"), program)
        attention = 3 * shape.layers * shape.attention_flops(total * sequence)
        flops = step.model_flops - attention / 2  # what the mask hides is not counted
        rows.append((f"{ranks} GPUs, context {context}, {sequence} tokens", float(value),
                     flops / step.seconds / ranks / 1e12))  # fmt: skip
    return BlindGroup(
        "Llama 3 405B, table 4", "Llama Team 2024, arXiv 2407.21783; by P. Balaji's slide, on glennklockwood.com", True,
        "Tflop/s a GPU",
        "The GPUs have 700 W (section 3.3.1): `h100-700w`. Assumed are chunks of one layer, gradients that are summed"
        " once a step, and that flops under the mask count.",
        (0.599, 0.719), tuple(rows),
    )  # fmt: skip


def _foundry() -> list[BlindGroup]:
    """Rows of all sizes from 1b at 2,048 tokens, and of longer sequences of three sizes."""
    source = "llm-foundry at commit 061f2c7, scripts/train/benchmarking/README.md"
    h100 = (
        ("70b", 2048, 64, 8, 4, True, 1039), ("70b", 2048, 32, 2, 16, True, 882), ("30b", 2048, 32, 14, 3, True, 2308),
        ("30b", 2048, 8, 3, 21, True, 2002), ("30b", 8192, 8, 1, 21, True, 1384), ("13b", 2048, 64, 2, 1, False, 4800),
        ("13b", 2048, 8, 2, 1, False, 4792), ("13b", 16384, 8, 3, 3, True, 2985), ("7b", 2048, 8, 6, 1, False, 10643),
        ("7b", 8192, 8, 8, 2, True, 6935), ("7b", 32768, 8, 2, 2, True, 3318), ("3b", 2048, 64, 6, 3, False, 22525),
        ("1b", 2048, 64, 20, 1, False, 44402), ("1b", 8192, 8, 3, 4, False, 29157),
    )  # fmt: skip
    a100_rows = (
        ("70b", 2048, 64, 8, 4, True, 410), ("70b", 2048, 32, 2, 16, True, 373), ("30b", 2048, 8, 3, 21, True, 916),
        ("30b", 8192, 8, 1, 21, True, 574), ("13b", 2048, 8, 2, 3, False, 2262), ("13b", 16384, 8, 3, 3, True, 1431),
        ("7b", 2048, 8, 6, 2, False, 4641), ("7b", 8192, 8, 8, 2, True, 3206), ("7b", 32768, 8, 2, 2, True, 1672),
        ("3b", 2048, 8, 10, 2, False, 10811), ("1b", 2048, 8, 14, 4, False, 20513), ("1b", 8192, 8, 3, 4, False, 13814),
    )  # fmt: skip

    def predict(kind: str, cluster: Callable[[int], Cluster], attention: float) -> tuple[tuple[str, float, float], ...]:
        rows = []
        for size, sequence, ranks, micro, num_micro, repeats, value in h100 if kind == "H100" else a100_rows:
            how = Parallelism(batch=ranks, num_micro=num_micro, cuts=ZERO_STAGES[3], sharded=ranks,
                              recompute=FULL if repeats else NONE)  # fmt: skip
            program = torch_program("bfloat16", attention, H100["traffic"])
            step = estimate_step(mpt_shape(size, sequence), how, ranks * micro * num_micro, cluster(ranks), program)
            name = f"{size} on {ranks}, {sequence} tokens{', layers repeated' if repeats else ''}"
            rows.append((name, float(value), micro * num_micro * sequence / step.seconds))
        return tuple(rows)

    def h100s(ranks: int) -> Cluster:
        return with_numbers(find_cluster(f"h100x{ranks}"), H100["products"])

    note = "FSDP that cuts everything, Triton's FlashAttention, no torch.compile."
    return [
        BlindGroup("llm-foundry, MPT on H100s", source, True, "tokens/s a GPU", note,
                   (0.115, 0.203), predict("H100", h100s, H100["attention"])),
        BlindGroup("llm-foundry, MPT on A100s", source, True, "tokens/s a GPU", note,
                   (0.181, 0.287), predict("A100", lambda ranks: a100(ranks, links=False), FLASH_1)),
    ]  # fmt: skip


def blind_groups() -> list[BlindGroup]:
    """All groups, predicted."""
    megatron_runs = [_gpipe(), _ptd_p(), _layer_of_22b(), _korthikanti(), _zero_bubble(), _others_on_a100()]
    return [*megatron_runs, *_titan_groups(), _titan_a100(), _llama3(), *_foundry()]
