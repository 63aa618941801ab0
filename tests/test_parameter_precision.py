"""precision=bf16-params: the model computes in bfloat16 as a whole; weights and sums of gradients are float32."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.api.memory import Estimator
from plait.api.trainer import Trainer
from plait.api.verify import Verifier
from plait.backends.eager.passes import eager_graphs
from plait.comm.protocol import World
from plait.compile.ir.node_info import info_of
from plait.engine.compiler import Captures, Compiler
from plait.engine.local_batch import microbatches
from plait.errors import CaptureError, PlanError
from plait.plan.plan import Plan
from plait.report.explanation import Explanation, explanation

pytestmark = pytest.mark.xdist_group("parameter-precision")  # plans share what is captured

ADAM = functools.partial(torch.optim.AdamW, lr=0.01)
HALF = "precision=bf16-params"


class LlamaNorm(nn.Module):
    """The norm as Hugging Face's Llama writes it; PyTorch's accumulates the gradient of its weight in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Block(nn.Module):
    """A layer of Llama: RMS norms, rotary positions, grouped queries, a gated MLP."""

    def __init__(self, width: int, inner: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm, self.post_norm = norm(width), norm(width)
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, 8)).transpose(1, 2) for w in (self.q, self.k, self.v))
        q, k = q * turns.cos() + q.roll(4, -1) * turns.sin(), k * turns.cos() + k.roll(4, -1) * turns.sin()
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.post_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """The frequencies of its positions are a buffer, which stays float32."""

    def __init__(
        self, width: int = 32, inner: int = 48, layers: int = 2, norm: Callable[[int], nn.Module] = nn.RMSNorm
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(64, width)
        self.layers = nn.ModuleList(Block(width, inner, norm) for _ in range(layers))
        self.norm, self.head = norm(width), nn.Linear(width, 64, bias=False)
        self.register_buffer("speeds", 100.0 ** -(torch.arange(8) / 8), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        turns = (torch.arange(words.shape[1])[:, None] * self.speeds).to(x.dtype)
        for layer in self.layers:
            x = layer(x, turns)
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def words(rows: int = 8, length: int = 9, seed: int = 1) -> Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def by_hand(steps: int, micro: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and float32 weights of a loop as FSDP2's: a copy in bfloat16 computes, its gradients are added up in
    float32."""
    master, low = Llama(), Llama()
    optimizer = ADAM(master.parameters(), fused=True)
    losses = []
    for step in range(steps):
        loss = torch.zeros(())
        for part in words(seed=step).chunk(micro):
            for own, one in zip(master.parameters(), low.parameters(), strict=True):
                one.data, one.grad = own.detach().bfloat16(), None
            each = loss_fn(low, part)
            each.backward()
            loss += each.detach()
            for own, one in zip(master.parameters(), low.parameters(), strict=True):
                assert one.grad is not None and one.grad.dtype == torch.bfloat16
                own.grad = one.grad.float() + (0.0 if own.grad is None else own.grad)
        for own in master.parameters():
            assert own.grad is not None
            own.grad /= micro
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss / micro))
    return losses, {name: p.detach() for name, p in master.named_parameters()}


@functools.cache
def captures() -> Captures:
    return Captures(Llama(), loss_fn)


def trained(plan: str, steps: int, model: nn.Module | None = None) -> tuple[list[float], dict[str, Tensor]]:
    compiler = Compiler(captures() if model is None else Captures(model, loss_fn), Plan.parse(plan))

    def rank(world: World) -> tuple[list[float], dict[str, Tensor]]:
        trainer = Trainer(compiler.model, loss_fn, ADAM, compiler.plan, world=world, compiler=compiler)
        losses = [float(trainer.step(words(seed=step))) for step in range(steps)]
        executor = trainer.executor
        return losses, {name: executor.whole(name, executor.local(name)).clone() for name in executor.layouts}

    return plait.run_ranks(compiler.plan.mesh, rank)[0]


def test_one_device_gives_the_very_numbers_of_a_loop_by_hand() -> None:
    mine, hand = trained(HALF, 3), by_hand(3)
    assert mine[0] == hand[0]
    torch.testing.assert_close(mine[1], hand[1], rtol=0, atol=0)
    assert {p.dtype for p in mine[1].values()} == {torch.float32}


@pytest.mark.parametrize("plan", ["data=2 zero=3", "micro=2", "data=2 tensor=2 micro=2 zero=2"])
def test_ranks_give_the_numbers_of_a_loop_by_hand(plan: str) -> None:
    """To the rounding of bfloat16, which a rank's part of a batch and of a sum goes through by itself."""
    (losses, weights), (expected, values) = trained(f"{plan} {HALF}", 1), by_hand(1, Plan.parse(plan).micro)
    assert losses == pytest.approx(expected, rel=2**-9)
    start = dict(Llama().named_parameters())
    for name, value in values.items():  # Adam's first step is the learning rate and the sign of the gradient
        moved, other = value - start[name].detach(), weights[name] - start[name].detach()
        assert (moved * other > 0).float().mean() > 0.9, name


@functools.cache
def verifier() -> Verifier:
    return Verifier(Llama(), loss_fn, words(), optimizer=ADAM)


@pytest.mark.parametrize(
    "plan",
    [
        "data=2", "data=2 tensor=2 zero=1", "data=2 zero=2 micro=2 reduce=bf16", "data=4 zero=3 recompute=layer",
        "pipeline=2 micro=2 data=2 zero=3 schedule=zb-h1", "pipeline=2 micro=2 tensor=2 recompute=layer",
        "stages=[tensor=2|data=2] micro=2", "replica=2 data=2 zero=3 reduce=bf16", "data=2 central=host micro=2",
        "data=2 zero=3 home.parameters=disk home.optimizer=disk home.activations=disk", "data=2 sync=2 outer=nesterov",
        "pipeline=2 micro=4 schedule=pipedream", "workers=2 servers=1 staleness=0",
        "data=2 context=2",
        "data=2 zero=3 precision.norm=fp32 precision.layers.1=fp32",
    ],
)  # fmt: skip
def test_every_kind_of_plan_verifies(plan: str) -> None:
    report = verifier().verify(f"{plan} {HALF}")
    assert report.ok, report


def test_float16_scales_the_loss() -> None:
    report = verifier().verify("data=2 zero=3 micro=2 precision=fp16-params")
    assert report.ok, report


def test_gradients_may_be_sent_in_bfloat16_whatever_computes_them() -> None:
    report = verifier().verify("data=2 zero=2 reduce=bf16 micro=2")
    assert report.ok, report


def test_a_small_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.engine import rank_executor

    joined = rank_executor.joined

    def off(results: Any, scale: Any) -> Any:
        found = joined(results, scale)
        found.gradients["layers.0.up.weight"].mul_(1.25)
        return found

    monkeypatch.setattr(rank_executor, "joined", off)
    report = verifier().verify(f"data=2 {HALF}")
    assert report.first_bad is not None and report.first_bad.name == "layers.0.up.weight"


@functools.cache
def captures_of_a_layer(half: bool = False) -> Captures:
    model = Llama(layers=1)
    return Captures(model.bfloat16() if half else model, loss_fn)


def explain(plan: str, half: bool = False, rows: int = 8) -> Explanation:
    parsed = Plan.parse(plan)
    part = microbatches(words(rows), parsed.micro)[0]
    return explanation(Compiler(captures_of_a_layer(half), parsed).compiled(part))


def num_bytes(plan: str) -> Counter[str]:
    """The bytes of the tensors of a step's collectives by kind."""
    found: Counter[str] = Counter()
    for each in explain(plan).collectives:
        found[each.kind] += each.tensor_bytes
    return found


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_parameters_are_gathered_in_half_the_bytes_and_gradients_scattered_as_reduce_says(zero: int) -> None:
    plan = f"data=2 zero={zero}"
    wide, half, both = num_bytes(plan), num_bytes(f"{plan} {HALF}"), num_bytes(f"{plan} {HALF} reduce=bf16")
    assert half["all_gather"] == both["all_gather"] == wide["all_gather"] // 2
    assert half["reduce_scatter"] == wide["reduce_scatter"] == 2 * both["reduce_scatter"]
    assert half["all_reduce"] == both["all_reduce"] == wide["all_reduce"]  # the loss


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("data=2", ["all_reduce"]),
        ("data=2 zero=1", ["reduce_scatter", "all_gather"]),
        ("data=2 zero=3", ["all_gather", "reduce_scatter"]),
        ("data=2 micro=3", ["all_reduce"]),
        ("replica=2 data=2 zero=2", ["reduce_scatter", "all_reduce", "all_gather"]),
    ],
)
def test_gradients_of_norms_travel_in_the_bucket_of_the_others(plan: str, expected: list[str]) -> None:
    """A kernel accumulates those of norms in float32: they would be sent by themselves, in every microbatch."""
    for text, half in ((plan, True), (f"{plan} {HALF}", False)):
        found = [each.kind for each in explain(text, half, rows=12).collectives if each.phase != "forward"]
        assert found == expected, text


def test_activations_are_half_as_large() -> None:
    with torch.device("meta"):
        model = Llama(width=64, inner=224, norm=LlamaNorm)
    estimator = Estimator(model, loss_fn, words(rows=4, length=65))
    wide, autocast, half = (estimator.estimate(Plan.parse(p)).fullest.saved for p in ("", "precision=bf16", HALF))
    softmax = 4 * 64 * 64 * 4  # bytes, of the loss: float32 under every plan
    assert half - softmax == pytest.approx((wide - softmax) / 2, rel=0.02)
    assert half < 0.9 * autocast


def test_microbatches_add_gradients_in_place_as_they_are_computed() -> None:
    """In float32, without a float32 copy of each."""
    plan = Plan.parse(f"micro=3 {HALF}")
    program = Compiler(captures_of_a_layer(), plan).compiled(words(3)).program
    for name in ("middle", "last"):
        sums = [n for n in eager_graphs(program)[name].nodes if info_of(n).kind == "sum"]
        assert {n.meta["val"].dtype for n in sums} == {torch.float32}
        (readers,) = zip(*(n.users for n in sums), strict=True)
        assert {n.target for n in readers} == {torch.ops.aten.add_.Tensor}
        assert {n.args[1].meta["val"].dtype for n in readers} == {torch.bfloat16}


class Counts(nn.Module):
    """A frozen parameter that the step changes, and one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.inner = nn.Module()
        self.inner.seen = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.inner.seen.add_(x.detach().sum(0))
        return self.up(x)


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def test_a_parameter_that_the_step_changes_is_refused_unless_it_is_kept_wide() -> None:
    given = (Counts(), square, torch.randn(4, 4))
    with pytest.raises(CaptureError, match=r"changes the parameter inner\.seen in place.*precision\.MODULE=fp32"):
        plait.verify(*given, HALF)
    assert plait.verify(*given, f"data=2 {HALF} precision.inner=fp32").ok


def test_modules_under_autocast_are_refused() -> None:
    with pytest.raises(PlanError, match=r"precision\.head=bf16 is PyTorch's autocast.*give the module fp32"):
        Plan.parse(f"{HALF} precision.head=bf16")


class Mixed(nn.Module):
    """A table in float32 that is added to activations, a recurrent layer, a parameter used twice, and a module that
    computes in float32 for itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("places", torch.randn(3, 8))
        self.first, self.again = nn.Linear(8, 8), nn.Linear(8, 8)
        self.again.weight = self.first.weight
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == self.first.weight.dtype  # inputs are cast
        h = torch.tanh(self.first(x) + self.places)  # float32 again
        h, _ = self.recurrent(self.again(h))
        return (h.double() * self.scale).sum(-1)


def test_inputs_of_modules_are_cast_and_buffers_are_not() -> None:
    own = Verifier(Mixed(), square, torch.randn(8, 3, 8), optimizer=ADAM)
    for plan in (f"data=2 zero=3 micro=2 {HALF}", f"pipeline=2 micro=2 {HALF}"):
        report = own.verify(plan)
        assert report.ok, report


def test_the_model_itself_keeps_its_weights_and_its_dtype() -> None:
    model = Llama(layers=1)
    trainer = Trainer(model, loss_fn, ADAM, HALF)
    before = model.head.weight.detach().clone()
    trainer.step(words())
    with trainer.gathered():
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert not torch.equal(model.head.weight, before)
        assert model(words()).dtype == torch.float32
    trainer.close()


class Normed(nn.Module):
    """Batch norm, and a kernel that takes no two dtypes."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6, affine=mixes), nn.Linear(6, 2)
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        assert h.dtype == self.first.weight.dtype
        return h.float() @ self.last.weight.t() if self.mixes else self.last(h)


def test_batch_norm_stays_wide_and_kernels_of_two_dtypes_are_refused() -> None:
    rows = torch.randn(8, 4)
    for model in (Normed(False), Normed(False).double()):
        report = plait.verify(model, square, rows.to(model.last.weight.dtype), f"data=2 zero=3 {HALF}")
        assert report.ok, report
    with pytest.raises(PlanError, match=rf"{HALF} .*compute it in float32: precision\.MODULE=fp32, or cast what it"):
        plait.verify(Normed(True), square, rows, HALF)


class TwoDtypes(nn.Module):
    """Multiplies float32 with weights in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,ij->bj", x.float(), self.weight)


def test_the_module_of_a_kernel_of_two_dtypes_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), TwoDtypes())
    with pytest.raises(PlanError, match=rf"an op of 1 does not take .*{HALF} .*precision\.1=fp32"):
        plait.verify(model, square, torch.randn(4, 4), HALF)


def test_checkpoints_averages_and_evaluation(tmp_path: Path) -> None:
    """Weights are saved, averaged and gathered in float32, and evaluated in bfloat16."""

    def run(plan: str, loads: bool) -> Any:
        compiler = Compiler(Captures(Llama(layers=1), loss_fn), Plan.parse(f"{plan} {HALF}"))

        def rank(world: World) -> Any:
            trainer = Trainer(compiler.model, loss_fn, ADAM, compiler.plan, world=world, compiler=compiler)
            average = trainer.ema(0.5)
            if loads:
                trainer.load(tmp_path)
            else:
                trainer.step(words())
                trainer.save(tmp_path)
            losses = [float(trainer.step(words(seed=6))), float(trainer.evaluate(words(seed=5)))]
            with average.applied():
                losses.append(float(trainer.evaluate(words(seed=5))))
            executor = trainer.executor
            return losses, {n: executor.whole(n, executor.local(n)).clone() for n in executor.layouts}

        return plait.run_ranks(compiler.plan.mesh, rank)[0]

    (losses, values), (others, _) = run("data=2 zero=3", False), run("tensor=2", True)
    assert losses == pytest.approx(others, rel=2**-8)
    assert {value.dtype for value in values.values()} == {torch.float32}
    assert not torch.equal(values["head.weight"], values["head.weight"].bfloat16().float())
    low = Llama(layers=1)
    low.load_state_dict(values, strict=False)
    with torch.no_grad():
        assert losses[1] == pytest.approx(float(loss_fn(low.bfloat16(), words(seed=5))), rel=2**-9)
        assert losses[1] != losses[2]
