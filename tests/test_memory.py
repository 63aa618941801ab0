"""Memory: the ZeRO paper's table, and predictions against what processes allocate."""

from __future__ import annotations

import functools
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import memory_ranks as ranks
import pytest
import torch
from comm_worlds import run
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import plait
from bench import context_memory
from plait.api.job.gpt import BytesGPT, loss_fn
from plait.api.memory import Estimator
from plait.compile.memory_meter import Meter
from plait.compile.rank_program import RankProgram
from plait.cost.memory_model import ACTIVATIONS, GRADIENTS, RankMemory, StateBytes, model_state_bytes, single_changes
from plait.cost.transformer import TransformerShape
from plait.cost.transformer_states import Owned, held_states
from plait.engine.compiler import Captures, Compiler
from plait.engine.dry_run import dry_run
from plait.engine.local_batch import microbatches
from plait.plan.parallelism import SELECTIVE, Parallelism
from plait.plan.plan import Plan
from plait.report.memory_table import verdict

pytestmark = pytest.mark.xdist_group("memory")  # plans share what is captured

# Table 1 of the ZeRO paper (arXiv 1910.02054): GB of model state per device, for three models and three stages each.
MIXED_ADAM = StateBytes(2, 2, 12)  # half-precision weights and gradients; float32 weights and two moments
MODELS = (7.5e9, 128e9, 1e12)
TABLE = {
    1: "120 120 120 2048 2048 2048 16000 16000 16000",
    4: "52.5 41.3 30 896 704 512 7000 5500 4000",
    16: "35.6 21.6 7.5 608 368 128 4750 2875 1000",
    64: "31.4 16.6 1.88 536 284 32 4187 2218 250",
    256: "30.4 15.4 0.47 518 263 8 4046 2054 62.5",
    1024: "30.1 15.1 0.12 513 257 2 4011 2013 15.6",
}
CELLS = [
    (num_ranks, MODELS[i // 3], 1 + i % 3, printed)
    for num_ranks, row in TABLE.items()
    for i, printed in enumerate(row.split())
]


def test_the_table_has_54_cells() -> None:
    assert len(CELLS) == 54


@pytest.mark.parametrize(("num_ranks", "size", "stage", "printed"), CELLS)
def test_the_zero_papers_table(num_ranks: int, size: float, stage: int, printed: str) -> None:
    found = Decimal(model_state_bytes(size, stage, num_ranks, MIXED_ADAM)) / 10**9
    # The paper cuts whole numbers and rounds the others.
    cut = "." not in printed
    assert found.quantize(Decimal(printed), ROUND_DOWN if cut else ROUND_HALF_UP) == Decimal(printed)


def test_full_precision_takes_16_bytes_a_parameter_and_bad_stages_are_refused() -> None:
    assert model_state_bytes(10, 0, 4, StateBytes(4, 4, 8)) == 160
    assert model_state_bytes(10, 3, 4, StateBytes(4, 4, 8)) == 40
    with pytest.raises(ValueError, match="stage 4 over 2 ranks"):
        model_state_bytes(10, 4, 2, MIXED_ADAM)


def test_the_plans_to_try_when_memory_is_short() -> None:
    found = [str(plan) for plan in single_changes(Plan.parse("data=2 zero=1"), num_rows=8)]
    assert found == [
        "data=2 zero=2", "data=2 zero=3", "data=2 zero=1 recompute=layer", "data=2 zero=1 micro=2",
        "data=2 zero=1 micro=4",
    ]  # fmt: skip
    found = [str(plan) for plan in single_changes(Plan.parse("recompute=layer micro=4"), num_rows=8)]
    assert found == ["micro=8 recompute=layer"]


def test_a_memory_is_counted_once_and_for_as_long_as_anything_lies_in_it() -> None:
    meter = Meter(torch.device("cpu"))
    with FakeTensorMode(), meter:
        base = torch.empty(4, 64)
        assert meter.total == 1024
        view = base.t()[3:]
        view.add_(1.0)
        assert meter.total == 1024
        del base
        assert meter.total == 1024
        meter.at("later", "buffers")
        copy = view.reshape(-1)
        assert meter.live == {"parameters": 1024, "buffers": 976}
        del view
        parts = torch.var_mean(copy, 0)
        del copy
        assert meter.live == {"parameters": 0, "buffers": 8}
        del parts
    assert meter.total == 0
    assert (meter.peak, meter.peak_moment) == (2000, "later")


SGD = functools.partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "num_states"),
    [
        (SGD, 0),
        (functools.partial(SGD, momentum=0.9), 1),
        (functools.partial(torch.optim.RMSprop, centered=True, momentum=0.9), 3),
        (ranks.ADAMW, 2),
        (functools.partial(torch.optim.Adam, amsgrad=True, fused=False), 3),
        (torch.optim.NAdam, 2),
    ],
)
def test_the_state_of_any_optimizer_is_found_by_letting_it_step(optimizer, num_states: int) -> None:
    found = dry_runs(["data=2 zero=1"], optimizer=optimizer)[0]
    assert found.updated == sum(p.numel() for p in ranks.gpt().parameters()) / 2
    assert found.most.get("optimizer", 0) == pytest.approx(4 * num_states * found.updated, rel=0.001)


def test_what_the_optimizer_takes_while_it_steps_counts() -> None:
    fused, plain = (dry_runs([""], optimizer=functools.partial(ranks.ADAMW, fused=f))[0] for f in (True, False))
    assert fused.most.get("buffers", 0) == 0
    largest = max(p.numel() for p in ranks.gpt().parameters())
    assert plain.most["buffers"] >= 4 * largest


class Uneven(nn.Module):
    """Seven rows over two ranks: four and three."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_the_page() -> None:
    found = plait.memory(Uneven(), squares, torch.ones(4, 5), "data=2 zero=3")
    assert [ranks for ranks, _ in found.ranks] == [(0,), (1,)]
    assert found.rank(0).most["optimizer"] > found.rank(1).most["optimizer"]
    assert found.peak == found.rank(0).peak and found.fits(found.peak) and not found.fits(found.peak - 1)
    page = str(found)
    assert page.startswith("plan data=2 zero=3, 42 parameters\n")
    assert "rank 0: the peak of a step is in " in page
    assert "(4 + 4 + 8" in page and "1024" in page


def test_a_model_that_is_built_on_every_rank_starts_whole() -> None:
    with torch.device("meta"):
        without_values = ranks.gpt()
    whole = 4 * sum(p.numel() for p in without_values.parameters())
    plan = Plan.parse("data=4 zero=3")
    built = Estimator(without_values, loss_fn, ranks.batch(), built=True).estimate(plan).fullest
    assert built.start == whole + built.most["parameters"]
    assert plait.memory(without_values, loss_fn, ranks.batch(), plan).fullest.start == 0


def dry_runs(
    plans: list[str],
    shared_memory: bool = True,
    optimizer=ranks.ADAMW,
    rank: int = 0,
    captures: Captures | None = None,
) -> list[RankMemory]:
    found, captures, device = [], captures or gpt_captures(), torch.device("cpu")
    for plan in plans:
        program = program_of(plan, captures)
        found.append(dry_run(program, captures.model, ranks.batch(), optimizer, device, rank, shared_memory))
    return found


@functools.cache
def program_of(plan: str, captures: Captures) -> RankProgram:
    compiler = Compiler(captures, Plan.parse(plan))
    return compiler.compiled(microbatches(ranks.batch(), compiler.plan.micro)[0]).program


@functools.cache
def gpt_captures() -> Captures:
    return Captures(ranks.gpt(), loss_fn)


@functools.cache
def estimator() -> Estimator:
    return Estimator(ranks.gpt(), loss_fn, ranks.batch(), ranks.ADAMW)


@pytest.mark.parametrize(
    ("precision", "recomputes"),
    [("fp32", ("none", "layer")), ("bf16", ("layer", "none")), ("bf16-params", ("none", "layer"))],
)
def test_the_prediction_is_what_processes_allocate(precision: str, recomputes: tuple[str, ...]) -> None:
    """Each stage of ZeRO with each precision, each of the two with and without recomputation."""
    plans = [f"data=2 zero={zero} recompute={recomputes[zero % 2]} precision={precision}" for zero in range(4)]
    measured = run("shm", Plan.parse(plans[0]).mesh, functools.partial(ranks.peaks, plans=plans))
    for plan, expected, *found in zip(plans, dry_runs(plans), *measured, strict=True):
        assert_as_predicted(max(found), expected, plan)


def assert_as_predicted(measured: tuple[int, int], expected: RankMemory, plan: str) -> None:
    """What is allocated is the same in every run; of shared memory more is used the farther the others are behind."""
    allocated, shared = measured
    assert allocated == pytest.approx(expected.step_peak - expected.shared, rel=0.05), plan
    assert 0 < shared <= 2 * expected.shared, plan


def test_over_torch_distributed_it_is_exact() -> None:
    plans = ["data=2 zero=1", "data=2 zero=1 micro=2", "data=2 zero=2 micro=2", "data=2 recompute=layer"]
    measured = run("gloo", Plan.parse(plans[0]).mesh, functools.partial(ranks.peaks, plans=plans))
    expected = [each.step_peak for each in dry_runs(plans, shared_memory=False)]
    assert [allocated for allocated, _ in measured[0]] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        ("data=4", (1, 1, 1)),
        ("data=4 zero=1", (1, 4, 4)),  # gradients are scattered as they come
        ("data=4 zero=1 micro=2", (1, 1, 4)),  # sums of the first microbatch are whole
        ("data=4 zero=2 micro=2", (1, 4, 4)),
        ("data=4 zero=3 micro=2", (4, 4, 4)),
    ],
)
def test_the_closed_form_of_states_is_what_ranks_hold(plan: str, parts: tuple[int, int, int]) -> None:
    """Of the bytes that a walk through the step has found, which are those that processes allocate. A later microbatch
    has its parts beside the sums, when most of its activations are gone."""
    walked = dry_runs([plan])[0]
    elements = sum(p.numel() for p in gpt_captures().model.parameters())
    closed = held_states(Owned(elements), Parallelism.of(Plan.parse(plan)), StateBytes(4, 4, 8))
    assert list(closed.values()) == [elements * size / part for size, part in zip((4, 4, 8), parts, strict=True)]
    for kind, num_bytes in closed.items():
        later = elements if kind == GRADIENTS and "micro" in plan else 0
        assert 0.99 * num_bytes <= walked.most[kind] <= 1.01 * (num_bytes + later), kind


def test_experts_that_get_the_same_number_of_rows_take_what_is_predicted() -> None:
    plans = ["expert=2", "expert=2 expert.capacity=1.5 recompute=layer"]
    measured = run("gloo", Plan.parse(plans[0]).mesh, functools.partial(ranks.peaks, plans=plans, model=ranks.mixture))
    expected = dry_runs(plans, shared_memory=False, captures=Captures(ranks.mixture(), loss_fn))
    assert [allocated for allocated, _ in measured[0]] == pytest.approx([each.step_peak for each in expected], rel=0.01)


def test_pipelines_take_what_is_predicted_of_every_rank() -> None:
    plans = ["pipeline=2 micro=8", "pipeline=2 micro=8 schedule=gpipe", "pipeline=2 micro=4 schedule=zb-v"]
    measured = run("shm", Plan.parse(plans[0]).mesh, functools.partial(ranks.peaks, plans=plans))
    found = [estimator().estimate(Plan.parse(plan)) for plan in plans]
    for rank in range(2):
        for plan, memory, each in zip(plans, measured[rank], found, strict=True):
            assert_as_predicted(memory, each.rank(rank), plan)
    assert found[1].rank(0).saved > 3 * found[0].rank(0).saved  # gpipe holds all 8 microbatches, 1f1b 2


def test_pipelines_over_torch_distributed_let_go_of_what_is_taken() -> None:
    plans = ["pipeline=2 micro=8", "pipeline=2 micro=8 schedule=gpipe", "pipeline=2 micro=4 schedule=zb-v"]
    measured = run("gloo", Plan.parse(plans[0]).mesh, functools.partial(ranks.peaks, plans=plans))
    for rank in range(2):
        expected = [each.step_peak for each in dry_runs(plans, shared_memory=False, rank=rank)]
        assert [allocated for allocated, _ in measured[rank]] == pytest.approx(expected, rel=0.01)


def test_a_ring_of_eight_takes_an_eighth_and_its_buffers() -> None:
    """docs/bench/context_memory.md has 8,192 positions."""
    length, width, vocab = 1024, 64, 16
    tokens = context_memory.batch(length, vocab)
    captures = Captures(context_memory.model(length, width, 3, vocab), loss_fn)
    one, ring = (
        context_memory.predicted(captures, tokens, Plan.parse(plan)) for plan in ("", "context=8 context.kind=ring")
    )
    most = one.at_peak[ACTIVATIONS] / 8 + context_memory.ring_bytes(8, length, width)
    assert ring.at_peak[ACTIVATIONS] == pytest.approx(most, rel=0.05)
    found = context_memory.counted(captures, tokens, Plan.parse("context=8 context.kind=ring"))
    # Ranks that are threads send copies; the last one to join a collective holds its result for all.
    copies = context_memory.ring_bytes(8, length, width) * 2 / 3
    least = context_memory.step_bytes(ring)
    assert 0.95 * least <= min(found) <= 1.05 * (least + copies)


class Dropout(nn.Module):
    """As on a GPU, where dropout keeps a mask of bytes for backward; on a CPU it is of floats."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, 0.1, True)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("heads", "hidden", "rows", "sequence"), [(64, 6144, 4, True), (64, 6144, 4, False), (128, 20480, 1, True)]
)
def test_activations_of_a_layer_of_korthikanti_et_al(heads: int, hidden: int, rows: int, sequence: bool) -> None:
    """The 22B and 530B models of table 5 over 8 ranks, with selective recomputation, as fused attention has it."""
    length, ranks = 2048, 8
    split = " sequence=yes recompute=gathers" if sequence else ""

    plan = Plan.parse(f"tensor={ranks}{split} precision=bf16-params")
    least, most = (deep(layers, heads, hidden, rows, length).estimate(plan).fullest.saved for layers in (1, 2))
    published = TransformerShape(2, hidden, heads, 256, length).activation_bytes(rows, ranks, sequence, SELECTIVE)
    assert most - least == pytest.approx(published, rel=0.002)


@functools.cache
def deep(layers: int, heads: int, hidden: int, rows: int, length: int) -> Estimator:
    with torch.device("meta"):
        model = BytesGPT(layers, hidden, heads, length)
    for block in model.blocks:
        block.drop = Dropout()
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    return Estimator(model, loss_fn, {"x": tokens, "y": tokens})


def test_a_stage_that_is_too_large_is_named_with_a_cut_that_fits() -> None:
    plan = Plan.parse("pipeline=2 micro=4 cut=head")
    found = estimator().estimate(plan)
    limit = found.peak - 200_000
    tried = estimator().until_it_fits(plan, limit)
    text = verdict(found, limit, tried)
    assert "(pipeline=0 195.3 KiB too much)" in text
    assert "with cut=" in text and tried[-1].fits(limit)
