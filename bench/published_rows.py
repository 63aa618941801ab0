"""The rows of published tables (tests/published/tables.csv), and what plait's closed forms and simulator say of each.

Numbers of measured tables depend on how fast hardware and kernels are in practice. At most four such numbers for each
kind of hardware are fitted, on half of the runs; the other half is what counts. A run belongs to a half by the hash of
its description, so that all numbers of one run are in the same half, and nobody chooses.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from plait.cost.costs import Costs
from plait.cost.memory_model import StateBytes, model_state_bytes
from plait.cost.simulate import simulate
from plait.cost.transformer import TransformerShape
from plait.cost.transformer_program import TransformerProgram
from plait.cost.transformer_step import StepEstimate, estimate_step
from plait.plan.parallelism import ALTERNATE, FULL, NONE, SELECTIVE, Parallelism
from plait.plan.sharding_plan import ZERO_STAGES
from plait.schedule.families import make_schedule
from plait.schedule.zero_bubble_rules import StageSeconds, alternating, search_zero_bubble
from plait.spec.cluster import Cluster, EfficiencyCurve
from plait.spec.cluster_file import find_cluster

TABLES = Path(__file__).resolve().parent.parent / "tests" / "published" / "tables.csv"
CURVE = ((1e9, 0.4), (1e10, 0.7), (1e11, 0.93), (1e12, 1.0))  # of what the largest products reach; assumed, not fitted

# What single kernels of a layer of Llama read and write more than fused ones, in what the layer keeps: of 41 bytes per
# token and column of the width, norms 72 for 12, rotary positions 25 for 5, the gated MLP 35 for 21, sums 12 for 8.
UNFUSED_LLAMA = 98 / 41
# Ring attention of torchtitan: its Attention repeats key-value heads, and torch sums gradients in float32.
TORCH_RING: Mapping[str, Any] = {"repeats_heads": True, "ring_gradient_bytes": 4}

Numbers = Mapping[str, float]
# Where the fits begin, and what holds them where rows say nothing; by kind of hardware.
BEGIN: Mapping[str, Numbers] = {
    "A100": {"products": 0.75, "memory": 0.85, "links": 0.78, "gathers": 0.2},
    "H100": {"products": 0.65, "attention": 0.5, "traffic": 2.0},
    "Cloud TPU": {"split": 0.8},
}
# As fitted by `fit`, which tests/test_published.py repeats.
FITTED: Mapping[str, Numbers] = {
    "A100": {"products": 0.754, "memory": 0.614, "links": 0.727, "gathers": 0.105},
    "H100": {"products": 0.663, "attention": 0.391, "traffic": 5.75},
    "Cloud TPU": {"split": 0.615},
}


@dataclass(frozen=True)
class PublishedRow:
    """One published number: the run that it is of, and where it is from."""

    paper: str
    table: str
    setup: Mapping[str, Any]
    metric: str
    value: float
    unit: str
    kind: str

    @property
    def family(self) -> str:
        return self.paper.partition(" (")[0].partition(" bench")[0]

    @property
    def is_measured(self) -> bool:
        return self.kind == "measured"

    @property
    def hardware(self) -> str:
        """The kind of hardware that the numbers are fitted for; empty for a closed form."""
        text = str(self.setup.get("hardware", ""))
        return next((kind for kind in BEGIN if kind in text), "") if self.is_measured else ""

    @property
    def is_fitted(self) -> bool:
        """Whether the run belongs to the half on which numbers are fitted."""
        run = json.dumps([self.paper, self.table, self.setup], sort_keys=True)
        return bool(self.hardware) and hashlib.sha256(run.encode()).digest()[0] % 2 == 0


def published_rows(path: Path = TABLES) -> list[PublishedRow]:
    """All rows, in the order of the file."""
    with path.open() as file:
        return [
            PublishedRow(**{key: row[key] for key in ("paper", "table", "metric", "unit", "kind")},
                         setup=json.loads(row["setup"]), value=float(row["value"]))
            for row in csv.DictReader(file)
        ]  # fmt: skip


def predicted(row: PublishedRow, numbers: Mapping[str, Numbers] = FITTED) -> float:
    """What plait says of a row, in the row's unit."""
    return {
        "ZeRO": _zero, "PTD-P": _megatron, "Reducing Activation Recomputation": _megatron, "torchtitan": _torchtitan,
        "GPipe": _gpipe, "Zero Bubble PP": _zero_bubble,
    }[row.family](row, numbers.get(row.hardware, {}))  # fmt: skip


def _zero(row: PublishedRow, _: Numbers) -> float:
    stage = {"P_os": 1, "P_os+g": 2, "P_os+g+p": 3}[row.setup["stage"]]
    states = StateBytes(2, 2, row.setup["K"])
    return model_state_bytes(row.setup["psi"], stage, row.setup["dp"], states) / 1e9


def gpipe_throughput(model: str, ranks: int, num_micro: int, split: float) -> float:
    """Mini-batches of one size per unit of time, with nothing but the bubble.

    A stage takes 1 for a forward, 1 for its repetition and 2 for the backward; a rank repeats the first microbatch
    while it waits for its gradient, as section 3.2 says. So the slowest stage takes 4 M times its part, and the others
    3 times theirs. Stages have whole layers: of AmoebaNet-D(18, .) 18 cells. Convolutions of a batch that is split run
    at `split` of the speed.
    """
    convolves = "Amoeba" in model
    layers = int(re.findall(r"\d+", model)[0])
    slowest = -(-layers // ranks) / layers
    speed = split if convolves and num_micro > 1 else 1.0
    return speed * num_micro / (4 * num_micro * slowest + 3 * (1 - slowest))


def _gpipe(row: PublishedRow, numbers: Numbers) -> float:
    model, split = row.setup["model"], numbers["split"]
    return gpipe_throughput(model, row.setup["pp"], row.setup["microbatches"], split) / gpipe_throughput(
        model, 2, 1, split
    )


SCHEDULES = {"1F1B": ("1f1b",), "1F1B-I": ("interleaved",), "ZB-H1": ("zb-h1",), "ZB-H2": ("zb-h2",),
             "ZB-1p": ("zb-h1", 1), "ZB-2p": ("zb-h2", 2)}  # fmt: skip


def _zero_bubble(row: PublishedRow, _: Numbers) -> float:
    """Simulated with the paper's profiled times. ZB-1p and ZB-2p are searched by the paper's rules in the memory of one
    and two times 1F1B."""
    setup = row.setup
    ranks, num_micro = setup["pp"], setup["microbatches"]
    name, *times = SCHEDULES[setup["schedule"]]
    chunks = (setup["layers"] + 2) // ranks if name == "interleaved" else None
    schedule = make_schedule(name, ranks, num_micro, chunks)
    parts = [setup[key] for key in ("T_F_ms", "T_B_ms", "T_W_ms")]
    if times:
        kept = 32 / (34 + 5 * setup["heads"] * setup["seq"] / setup["hidden"])  # by the paper's table 1
        stages = [StageSeconds(*parts)] * ranks
        limit, rules = times[0] * ranks, (alternating,)
        schedule = search_zero_bubble(stages, setup["T_comm_ms"], num_micro, limit, kept, rules)
    each = schedule.num_stages // ranks
    costs = Costs.equal(ranks * each, *(part / each for part in parts), setup["T_comm_ms"])
    return simulate(schedule, costs).bubble()


def with_numbers(cluster: Cluster, products: float = 0.0, memory: float = 0.0, links: float = 0.0) -> Cluster:
    """A cluster with fitted numbers."""
    device, inner = cluster.device, cluster.links[0]
    if products:
        device = replace(device, matmul_efficiency=EfficiencyCurve(tuple((at, part * products) for at, part in CURVE)))
    if memory:
        device = replace(device, memory_efficiency=EfficiencyCurve(((1.0, memory),)))
    if links:
        inner = replace(inner, efficiency=EfficiencyCurve(((1.0, links),)))
    return replace(cluster, device=device, links=(inner, *cluster.links[1:]))


@cache
def _step(setup: str, numbers: tuple[tuple[str, float], ...]) -> StepEstimate:
    """The step of a run of Megatron-LM, or of its ZeRO-3 baseline, on A100s."""
    run, found = json.loads(setup), dict(numbers)
    shape = TransformerShape(run["layers"], run["hidden"], run.get("heads", 96), run["vocab"], run["seq"])
    if run.get("scheme") == "ZeRO-3":
        how = Parallelism(run["gpus"], cuts=ZERO_STAGES[3], sharded=run["gpus"], recompute=FULL)
    else:
        how = Parallelism(
            batch=run["dp"], weights=run["tp"], pipeline=run["pp"], chunks=run.get("virtual_stages", 1),
            num_micro=run["global_batch"] // (run["dp"] * run["microbatch"]),
            recompute={"full": FULL, "selective": SELECTIVE, None: NONE}[
                run.get("activation_recompute") or run.get("recompute")
            ],
            sequence=run.get("sequence_parallel", False),
        )  # fmt: skip
    cluster = with_numbers(find_cluster(f"a100x{run['gpus']}"), found["products"], found["memory"], found["links"])
    program = TransformerProgram("float16", gather_efficiency=found["gathers"])
    return estimate_step(shape, how, run["global_batch"], cluster, program)


def _megatron(row: PublishedRow, numbers: Numbers) -> float:
    run, key = dict(row.setup), tuple(sorted(numbers.items()))
    if row.metric.startswith("throughput increase"):
        full = _step(json.dumps(run | {"recompute": "full", "sequence_parallel": False}), key).seconds
        return 100 * (
            full / _step(json.dumps(run | {"recompute": "selective", "sequence_parallel": True}), key).seconds - 1
        )
    step, ranks = _step(json.dumps(run), key), run["gpus"]
    rate = step.hardware_flops / step.seconds / ranks
    peak = find_cluster("a100").device.peak_of("float16")
    metric = row.metric.partition(" ")[0]
    if metric == "training":
        # with full recomputation: 8 T P / (n X), Narayanan et al. 2021, equation 4
        return 8 * 300e9 * run["params_b"] * 1e9 / (ranks * rate) / 86400
    return {
        "throughput": rate / 1e12,
        "percent": 100 * rate / peak,
        "aggregate": rate * ranks / 1e15,
        "iteration": step.seconds,
        "MFU": 100 * step.model_flops / step.seconds / ranks / peak,
        "HFU": 100 * rate / peak,
    }[metric]


def _torchtitan(row: PublishedRow, numbers: Numbers) -> float:
    run = row.setup
    shape = TransformerShape(
        layers=32, hidden=4096, heads=32, vocab=128256, sequence=run["seq"], ffn=14336, kv_heads=8, gated=True,
        biases=False, tied=False, learned_positions=False, dropout=False, stores_scores=False,
    )  # fmt: skip
    ranks, context = run["gpus"], run.get("cp", 1)
    how = Parallelism(
        batch=run["fsdp"], context=context, cuts=ZERO_STAGES[3], sharded=ranks,
        recompute={"selective": ALTERNATE, "full": FULL}[run["ac"]], context_kind="ring",
    )  # fmt: skip
    machine = find_cluster("h100")
    device = replace(machine.device, memory=96e9, memory_bandwidth=2.4e12)  # as the table says, at 500 W
    program = TransformerProgram(
        "float8" if "Float8" in run["tech"] else "bfloat16",
        states=StateBytes(4, 4, 8),
        traffic=numbers["traffic"] + (0.0 if "compile" in run["tech"] else UNFUSED_LLAMA),
        causal=0.5,
        attention=numbers["attention"],
        loss_bytes=14,  # bf16 logits, and in float32 a copy, log-softmax and gradient
        **TORCH_RING,
    )
    rows = run["local_batch"] * run["fsdp"]
    step = estimate_step(shape, how, rows, with_numbers(replace(machine, device=device), numbers["products"]), program)
    if row.unit == "GiB":
        return step.peak_memory / 2**30
    return rows * run["seq"] / step.seconds / ranks


# The primary number of each run; others of the same run follow from it.
PRIMARY = ("throughput per GPU", "iteration time", "tokens/s/GPU", "normalized throughput")


def fit(kind: str, rows: Sequence[PublishedRow]) -> dict[str, float]:
    """The numbers of a kind of hardware with which the fitted half of its runs is met best, in logarithms."""
    begin = BEGIN[kind]
    half = [row for row in rows if row.hardware == kind and row.is_fitted and row.metric.startswith(PRIMARY)]

    def residuals(logarithms: np.ndarray[Any, Any]) -> list[float]:
        numbers = {kind: dict(zip(begin, map(float, np.exp(logarithms)), strict=True))}
        held = 0.05 * (logarithms - start)
        return [*(float(np.log(predicted(row, numbers) / row.value)) for row in half), *map(float, held)]

    start = np.log(list(begin.values()))
    highest = np.log([1.0 if value < 1 else 100.0 for value in begin.values()])  # efficiencies are fractions
    found = least_squares(residuals, start, bounds=(start - 4, highest + 1e-9))
    return dict(zip(begin, map(float, np.exp(found.x)), strict=True))


def errors(rows: Sequence[PublishedRow], numbers: Mapping[str, Numbers] = FITTED) -> tuple[float, float]:
    """The median and the largest relative error, as fractions."""
    found = [abs(predicted(row, numbers) / row.value - 1) for row in rows]
    return (median(found), max(found)) if found else (0.0, 0.0)
