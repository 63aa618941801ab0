"""verify: plans equal one device, on models nobody prepared and on every part of a plan."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import ZOO

import plait
from plait.api.job.gpt import BytesGPT, loss_fn
from plait.engine.compiler import Compiler
from plait.errors import LayoutError, LossError, PlanError, RankFailed
from plait.reference.differences import LAST_BITS, Report, RunResult, compare
from plait.reference.one_device import one_device_step
from plait.report.explanation import explanation

SHARED = pytest.mark.xdist_group("verify")  # plans share what is captured; families are apart


def gpt_batch(rows: int = 8, sequence: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    symbols = torch.randint(0, 256, (rows, sequence + 1), generator=generator)
    return {"x": symbols[:, :-1].contiguous(), "y": symbols[:, 1:].contiguous()}


def gpt(**options: float) -> BytesGPT:
    torch.manual_seed(0)
    return BytesGPT(**{"layers": 2, "width": 64, "heads": 4, "sequence": 16, **options})  # type: ignore[arg-type]


def masked_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum over bytes below 100 and their number: very uneven over the rows."""
    logits = model(batch["x"])
    keep = (batch["y"] < 100) & (torch.arange(batch["y"].shape[0])[:, None] > 2)
    losses = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="none")
    return plait.Weighted((losses * keep.flatten()).sum(), keep.sum())


class Tied(BytesGPT):
    def __init__(self) -> None:
        super().__init__(layers=2, width=64, heads=4, sequence=16, dropout=0.1)
        self.head.weight = self.symbols.weight


@pytest.mark.parametrize(
    "plan", ["data=4", "tensor=4", "data=2 tensor=4", "data=2 tensor=2 allreduce=ring bucket=4KiB"]
)
@SHARED
def test_dropout_draws_by_global_position(plan: str) -> None:
    report = of_dropout().verify(plan)
    assert report.ok, report


@functools.cache
def of_dropout() -> plait.Verifier:
    return plait.Verifier(gpt(dropout=0.2), loss_fn, gpt_batch(), steps=3)


@pytest.mark.parametrize("plan", ["data=2 tensor=2", "data=8 allreduce=naive"])
@SHARED
def test_a_weighted_loss_is_exact_over_uneven_parts(plan: str) -> None:
    report = of_masked().verify(plan)
    assert report.ok, report


@functools.cache
def of_masked() -> plait.Verifier:
    return plait.Verifier(gpt(), masked_loss, gpt_batch())


@functools.cache
def of_gpt() -> plait.Verifier:
    return plait.Verifier(gpt(), loss_fn, gpt_batch())


@pytest.mark.parametrize("plan", ["data=2", "tensor=2", "data=2 tensor=2"])
@SHARED
def test_tied_weights(plan: str) -> None:
    report = of_tied().verify(plan)
    assert report.ok, report


@functools.cache
def of_tied() -> plait.Verifier:
    torch.manual_seed(0)
    return plait.Verifier(Tied(), loss_fn, gpt_batch())


@pytest.mark.parametrize("plan", ["data=2", "tensor=4", "data=2 tensor=2"])
@SHARED
def test_global_norm_clipping(plan: str) -> None:
    report = of_clipping().verify(plan)
    assert report.ok, report


@functools.cache
def of_clipping() -> plait.Verifier:
    return plait.Verifier(gpt(), loss_fn, gpt_batch(), clip_norm=0.05, steps=3)


def test_adamw_and_annotations() -> None:
    report = plait.verify(
        gpt(), loss_fn, gpt_batch(), "tensor=2",
        layouts={"blocks.0.*": "-", "*.up.weight": "tensor, -", "*.up.bias": "tensor", "*.down.weight": "-, tensor"},
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4),
    )  # fmt: skip
    assert report.ok, report


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def image_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(8, 3, 12, 12, generator=generator), "y": torch.randint(0, 5, (8,), generator=generator)}


def image_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


@pytest.mark.parametrize(
    "plan", ["data=4", "data=2 tensor=2", "data=4 batchnorm=local", "data=2 tensor=2 batchnorm=local"]
)
@SHARED
def test_batch_norm_over_all_ranks_or_each_alone(plan: str) -> None:
    report = of_batch_norm().verify(plan)
    assert report.ok, report


@functools.cache
def of_batch_norm() -> plait.Verifier:
    torch.manual_seed(0)
    return plait.Verifier(BatchNorm(), image_loss, image_batch(), steps=3)


class Branches(nn.Module):
    """Two branches of different shape, joined by concatenation, as in an Inception block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.narrow = nn.Sequential(nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6), nn.ReLU())
        self.wide = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 10, 5, padding=2), nn.ReLU())
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        stem = F.relu(self.stem(x))
        return self.head(torch.cat([self.narrow(stem), self.wide(stem)], dim=1).mean((2, 3)))


@functools.cache
def of_branches() -> plait.Verifier:
    torch.manual_seed(0)
    return plait.Verifier(Branches(), image_loss, image_batch())


@pytest.mark.parametrize("plan", ["tensor=2", "data=2 tensor=2", "tensor=3"])
@SHARED
def test_branches_run_on_different_ranks(plan: str) -> None:
    layouts = {"narrow.*": "only:tensor=0", "wide.*": "only:tensor=1", "head.*": "-"}
    report = of_branches().verify(plan, layouts=layouts)
    assert report.ok, report
    compiler = Compiler(of_branches().captures, plait.Plan.parse(plan), layouts)
    page = str(explanation(compiler.compiled(image_batch())))
    assert "f32[10, 4, 5, 5] only:tensor=1" in page


@SHARED
def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: an all-reduce that forgets to add is caught, and the tensor named."""
    from plait.backends.eager.rewrites import bucket_gradients

    monkeypatch.setattr(bucket_gradients, "bucket_wait", bucket_gradients.bucket_wait)
    right = of_gpt().verify("data=2")
    assert right.ok
    from plait.comm import group

    monkeypatch.setitem(group.REDUCERS, "sum", torch.maximum)
    wrong = of_gpt().verify("data=2")
    assert not wrong.ok
    assert "NOT EQUAL" in str(wrong)


def test_sums_in_half_precision_that_stand_still_are_rounding() -> None:
    """The gradient of Swin's first normalisation is a sum of which bf16 loses a third on one device."""
    model, loss, batch = ZOO["swin"].make()
    report = plait.verify(model, loss, batch, "data=2 zero=1 micro=2 precision=bf16")
    assert report.ok, report


@pytest.mark.parametrize("plan", ["data=2 precision=bf16", "data=2 zero=2 micro=2 precision=bf16"])
@SHARED
def test_a_small_error_is_found_in_half_precision(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of gradients over ranks that are 12% too large."""
    from plait.comm import thread_transport

    assert of_gpt().verify(plan).ok
    reduce = thread_transport.reduce_terms

    def wrong(terms: list[Tensor], op: str) -> Tensor:
        return reduce(terms, op) * (1.12 if terms[0].numel() > 8 else 1)

    monkeypatch.setattr(thread_transport, "reduce_terms", wrong)
    assert not of_gpt().verify(plan).ok


def test_gradients_that_are_zero_but_for_rounding_may_differ() -> None:
    """A bias that cancels in differences of scores, whose terms are far larger than any gradient."""
    ones, zeros = {"weight": torch.full((2,), 1e-3).double()}, {"bias": torch.zeros(2).double()}

    def run(bias: float, weight: float = 1e-3) -> RunResult:
        gradients = {"weight": torch.full((2,), weight).double(), "bias": torch.full((2,), bias).double()}
        return RunResult([1.0], gradients, {**ones, **zeros}, {})

    def found(mine: RunResult) -> Report:
        return compare(run(1e-19), mine, [run(2e-19)], plait.Plan.parse("data=2"), 1e-4)

    assert found(run(5e-17)).ok
    assert not found(run(2e-15)).ok
    assert not found(run(0.0, weight=1.001e-3)).ok
    # Where all gradients are, the bias on one device exactly, and in its repetition.
    noise = compare(run(0.0, 1e-9), run(5e-9, 3e-9), [run(0.0, 2e-9)], plait.Plan.parse("data=2"), 1e-4)
    assert noise.ok
    # Not where some are more than rounding: then one that is zero on one device is zero.
    solid = compare(run(0.0), run(1e-8), [run(0.0, 1e-3 * (1 + 1e-6))], plait.Plan.parse("data=2"), 1e-4)
    assert not solid.ok
    assert not compare(run(0.0, 1e-9), run(5e-8, 3e-9), [run(0.0, 2e-9)], plait.Plan.parse("data=2"), 1e-4).ok


def test_a_gradient_that_a_repetition_lacks_is_zero_there() -> None:
    """That of an expert to which a router with other rounding sends no row."""

    def run(**gradients: float) -> RunResult:
        return RunResult([1.0], {name: torch.tensor([value]) for name, value in gradients.items()}, {}, {})

    def found(mine: RunResult) -> Report:
        return compare(run(gate=1.0, expert=0.1), mine, [run(gate=1.0)], plait.Plan.parse("data=2"), 1e-4)

    assert found(run(gate=1.0)).ok and not found(run(gate=0.5)).ok and not found(run(gate=1.0, expert=100.0)).ok


def test_what_rounds_a_gradient_rounds_all_that_comes_after_an_update() -> None:
    """A running mean before experts in bf16: their rounding reaches it by the weights, from the second step on."""

    def run(mean: float, steps: int, rounding: float = 0.0) -> RunResult:
        ones, buffers = {"weight": torch.ones(4)}, {"mean": torch.tensor([mean])}
        return RunResult([1.0] * steps, ones, ones, buffers, rounding=rounding)

    def found(mean: float, steps: int) -> Report:
        again = [run(0.1, steps, LAST_BITS["fp32"]), run(0.11, steps, LAST_BITS["bf16"])]
        bits = {"weight": LAST_BITS["bf16"], "mean": LAST_BITS["fp32"]}
        return compare(run(0.1, steps), run(mean, steps), again, plait.Plan.parse("data=2"), 1e-4, bits=bits)

    assert found(0.102, steps=2).ok
    assert not found(0.102, steps=1).ok
    assert not found(0.5, steps=2).ok


def test_a_precision_that_kernels_do_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a grouped matrix product of rows that are no multiple of 16 bytes: fake tensors do not know."""

    refused = {"bf16"}

    def refuse(*given: Any) -> object:
        if given[3].precision in refused:
            raise RuntimeError("strides should be multiple of 16 bytes")
        return one_device_step(*given)

    monkeypatch.setattr("plait.api.verify.one_device_step", refuse)
    given = (nn.Linear(8, 4), lambda m, x: m(x).pow(2).mean(), torch.randn(4, 8))
    with pytest.raises(PlanError, match=r"precision=bf16: on one device the model does not run in it \(strides should"):
        plait.verify(*given, "data=2 precision=bf16")
    refused.add("fp32")
    for plan in ("data=2", "data=2 precision=bf16"):  # it does not run at all
        with pytest.raises(RuntimeError, match="^strides should"):
            plait.verify(*given, plan)


@pytest.mark.filterwarnings("ignore:std")
def test_a_buffer_that_is_nan_on_one_device_is_nan_under_a_plan() -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("spread", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            with torch.no_grad():
                self.spread.lerp_(y.std(0), 0.1)
            return y

    report = plait.verify(Spread(), lambda m, x: m(x).pow(2).mean(), torch.randn(4, 4), "data=2 micro=2")
    assert report.ok, report  # a microbatch has two rows
    report = plait.verify(Spread(), lambda m, x: m(x).pow(2).mean(), torch.randn(2, 4), "micro=2")
    assert report.ok, report


def test_the_logits_are_never_gathered() -> None:
    rows, sequence, vocab = 8, 16, 256
    found = plait.explain(gpt(), loss_fn, gpt_batch(rows, sequence), "tensor=2")
    assert "f32[256@tensor, 64]" in found.tensor("head.weight")
    largest = max(c.tensor_bytes for c in found.collectives)
    assert largest == rows * sequence * 64 * 4  # the stream; logits have 256 where it has 64
    assert largest < rows * sequence * vocab * 4


def test_megatron_pattern_costs_four_all_reduces_a_block() -> None:
    found = plait.explain(gpt(layers=3), loss_fn, gpt_batch(), "tensor=2")
    stream = [c for c in found.collectives if c.tensor_bytes == 8 * 16 * 64 * 4]
    assert {c.kind for c in stream} == {"all_reduce"}
    assert len(stream) == 4 * 3 + 2  # and the embedding's rows, and the head's gradient


def test_data_parallel_sends_what_the_formula_says() -> None:
    model = gpt()
    found = plait.explain(model, loss_fn, gpt_batch(), "data=4")
    gradients = 4 * sum(p.numel() for p in model.parameters())
    assert found.sent_bytes["data"] == pytest.approx(2 * 3 / 4 * gradients, rel=0.03)


@pytest.mark.parametrize(
    ("plan", "layouts", "error", "text"),
    [
        ("data=3", None, PlanError, "data=3 does not divide the batch of 8"),
        ("tensor=3", None, PlanError, "tensor=3 splits no pair of weights"),
        ("tensor=8", None, PlanError, r"tensor=8 does not divide .*use tensor=4"),
        ("tensor=2", {"*.querry.weight": "tensor, -"}, LayoutError, "matches no parameter; did you mean"),
        (
            "tensor=3",
            {"*.query.weight": "tensor, -"},
            LayoutError,
            r"tensor=3 does not divide dim 0 of blocks.0.query.weight: 64",
        ),
    ],
)
@SHARED
def test_bad_plans_are_refused_before_anything_runs(plan, layouts, error, text) -> None:
    with pytest.raises(error, match=text):
        of_gpt().verify(plan, layouts=layouts)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_half_precision_parameters_move_as_they_do_in_torch(make) -> None:
    torch.manual_seed(0)
    mine, theirs = nn.Linear(64, 64).bfloat16(), nn.Linear(64, 64).bfloat16()
    theirs.load_state_dict(mine.state_dict())
    batch = torch.randn(8, 64).bfloat16()
    trainer = plait.Trainer(mine, lambda m, b: m(b).square().mean(), functools.partial(make, lr=0.1), "")
    optimizer = make(theirs.parameters(), lr=0.1)
    for _ in range(3):
        trainer.step(batch)
        optimizer.zero_grad()
        theirs(batch).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(mine.weight, theirs.weight)


def test_what_is_not_a_factory_is_refused() -> None:
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match=r"the optimizer is a SGD, .* such as functools\.partial"):
        plait.Trainer(model, loss_fn, optimizer)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="loss_fn is a NoneType"):
        plait.Trainer(model, None, torch.optim.SGD)  # type: ignore[arg-type]


def test_a_loss_that_is_nan_on_one_device_cannot_be_compared() -> None:
    with pytest.raises(LossError, match="nan on one device"):
        plait.verify(gpt(), lambda m, b: loss_fn(m, b) * float("nan"), gpt_batch(), "data=2")


@pytest.mark.parametrize("plan", ["micro=2", "pipeline=2 micro=4", "data=2 sync=2"])
def test_a_model_made_for_the_whole_batch_is_refused_where_it_runs_on_fewer_rows(plan: str) -> None:
    last = torch.tensor([7, 7])
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(PlanError, match="fewer rows at a time, which fails .IndexError.*leave micro and sync out"):
        plait.verify(layers, lambda m, b: m(b)[last].square().mean(), torch.randn(8, 4), plan)


def test_fewer_rows_are_blamed_where_they_fail_and_nowhere_else() -> None:
    """A shape that only the whole batch has stops the capture; an index that is out of range fails on all rows too."""
    square = torch.ones(8, 8)
    with pytest.raises(PlanError, match="'micro=2'.*fewer rows at a time, which fails .*test_verify.py"):
        plait.verify(nn.Linear(4, 8), lambda m, b: (m(b) * square).mean(), torch.randn(8, 4), "micro=2")
    with pytest.raises(IndexError, match="out of range"):
        plait.verify(nn.Embedding(5, 4), lambda m, b: m(b).mean(), torch.full((8, 4), 7), "micro=2")


def test_a_loss_that_is_not_a_scalar() -> None:
    with pytest.raises(LossError, match="scalar"):
        plait.verify(gpt(), lambda m, b: m(b["x"]), gpt_batch(), "data=2")


def test_nan_names_the_step_and_the_tensor() -> None:
    model = gpt()
    with torch.no_grad():
        model.blocks[1].up.weight[0, 0] = float("nan")
    make = functools.partial(torch.optim.SGD, lr=0.1)
    trainer = plait.Trainer(model, loss_fn, make, "")
    with pytest.raises(LossError, match=r"loss of step 1 is nan: parameter blocks\.1\.up\.weight is not finite"):
        trainer.step(gpt_batch())
    assert trainer.step_number == 0
    with pytest.warns(UserWarning, match="loss of step 1 is nan"):
        plait.Trainer(model, loss_fn, make, "", on_nan="warn").step(gpt_batch())


def test_one_rank_raising_stops_all() -> None:
    from plait.spec.mesh import Mesh

    def rank(world) -> None:
        trainer = plait.Trainer(gpt(), loss_fn, functools.partial(torch.optim.SGD, lr=0.1), "data=4", world=world)
        trainer.step(gpt_batch())
        if world.rank == 2:
            raise RuntimeError("out of luck")
        trainer.step(gpt_batch())

    with pytest.raises(RankFailed, match="rank 2 failed: RuntimeError: out of luck"):
        plait.run_ranks(Mesh((("data", 4), ("tensor", 1))), rank)


def test_a_batch_whose_shape_changes_on_one_rank_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.spec.mesh import Mesh

    def rank(world) -> None:
        trainer = plait.Trainer(gpt(), loss_fn, functools.partial(torch.optim.SGD, lr=0.1), "data=2", world=world)
        trainer.step(gpt_batch(8, 8 if world.rank == 1 else 16))

    with pytest.raises(RankFailed, match="do not agree on the shape of batch"):
        plait.run_ranks(Mesh((("data", 2), ("tensor", 1))), rank)
