"""What the fuzzer found: each case is a model and plans that were once wrong, or crashed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import plait
from plait.comm.protocol import World
from plait.comm.thread_world import run_ranks
from plait.engine.local_sgd.exchange import MeanExchange
from plait.engine.optimizer_trials import depends_on_the_cut
from plait.errors import CaptureError, LossError, PlanError
from plait.integrations.ray_servers.optimizer_shard import OptimizerShard
from plait.plan.compression import NO_COMPRESSION
from plait.plan.plan import Plan


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def mlp(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, width))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 sync=2",
        "data=2 sync=2 outer=nesterov streaming=2 overlap=1",
        "data=2 sync=2 outer=sgd overlap=1 allreduce=naive",  # its messages are in flight after the last step
        "data=2 compress=int8",
    ],
)
def test_replicas_of_a_model_that_is_not_float32_agree(dtype: torch.dtype, plan: str) -> None:
    report = plait.verify(mlp().to(dtype), square, torch.randn(8, 8, dtype=dtype), plan, steps=4)
    assert report.ok, report


def test_the_mean_of_float64_is_float64() -> None:
    def rank(world: World) -> Tensor:
        value = torch.tensor([1.0 + world.rank * 2.0**-40], dtype=torch.float64)
        return MeanExchange(world.comm("data"), NO_COMPRESSION).mean({"w": value})["w"]

    assert run_ranks(Plan.parse("data=2").mesh, rank)[0].item() == 1.0 + 2.0**-41


def test_a_frozen_parameter_with_servers() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    report = plait.verify(model, square, torch.randn(8, 8), "workers=2 servers=1")
    assert report.ok, report
    assert len(report.parameters) == 4


class Ordered(nn.Module):
    """Pairs of rows in their right order: the bias of the score has no effect, and its gradient is zero but for
    rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x).mean(1)


def test_a_gradient_that_is_exactly_zero_on_one_device() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        score, right = model(batch[:, :8]), batch[:, 8]
        return nn.functional.softplus(-(score[:, None] - score) * (right[:, None] - right).sign()).mean()

    torch.manual_seed(0)
    verifier = plait.Verifier(Ordered().double(), loss, torch.randn(8, 9, dtype=torch.float64))
    for plan in ("data=2", "data=4", "data=2 micro=2"):
        report = verifier.verify(plan)
        assert report.ok, report


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("plan", ["data=4 sync=2", "data=4 compress=bf16", "workers=4 servers=1"])
def test_replicas_whose_loss_is_not_finite_cannot_be_compared(plan: str) -> None:
    """A spread over rows, of which each replica has one; it was said that the plan's numbers differ."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).std(0).mean()

    with pytest.raises(LossError, match="is nan on one device"):
        plait.verify(mlp(), loss, torch.randn(4, 8), plan)


def test_a_gradient_that_is_not_finite_cannot_be_compared() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) * 0).abs().sqrt().mean()

    with pytest.raises(LossError, match=r"the gradient of 0\.weight is not finite on one device"):
        plait.verify(mlp(), loss, torch.randn(4, 8), "data=2", steps=1)


class MovingMean(nn.Module):
    """A parameter that does not train, and that the step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.mean = nn.Parameter(torch.zeros(16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0) * 0.1)
        return self.down(h - self.mean)


@pytest.mark.parametrize("plan", ["data=2 sync=2", "data=2 sync=2 outer=sgd", "data=2 compress=bf16"])
def test_replicas_agree_on_parameters_that_the_step_changes(plan: str) -> None:
    report = plait.verify(MovingMean(), square, torch.randn(8, 8), plan)
    assert report.ok, report
    assert {d.name for d in report.buffers} == {"mean"}


class Centred(nn.Module):
    """A layer that moves a buffer, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.std(0), 0.1)
        return (x - self.mean) * self.scale


@pytest.mark.parametrize("plan", ["pipeline=2 recompute=1", "pipeline=2 micro=2 recompute=layer"])
def test_a_stage_works_out_again_with_the_buffers_of_then(plan: str) -> None:
    """Values that were dropped came from the buffer as the forward pass had left it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Centred(), nn.Linear(8, 4)).double()
    report = plait.verify(model, square, torch.randn(8, 8, dtype=torch.float64), plan)
    assert report.ok, report


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.inner, self.head = (
            nn.Linear(6, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 8),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(2):
            x = x + torch.sigmoid(self.inner(self.norm(x))) * x
        return self.head(x)  # type: ignore[no-any-return]


def test_the_statistics_of_norms_in_half_precision_are_sent_as_they_are() -> None:
    """They are float32 on a CPU; a stage expected bfloat16 of another."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        fast = {n: p for n, p in model.named_parameters() if n.startswith("head.")}
        inner = torch.func.functional_call(model, fast, (batch,)).square().mean()
        slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), slopes, strict=True)}
        return torch.func.functional_call(model, fast, (batch,)).square().mean()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    report = plait.verify(Normed(), loss, torch.randn(4, 6), "pipeline=2 precision=bf16")
    assert report.ok, report


@pytest.mark.parametrize("plan", ["data=2 precision.0=fp32", "precision=bf16 precision.2=fp32"])
def test_a_module_of_a_float64_model_in_full_precision(plan: str) -> None:
    report = plait.verify(mlp().double(), square, torch.randn(8, 8, dtype=torch.float64), plan)
    assert report.ok, report


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("data=2 precision.0=fp32", r"0\.weight is bfloat16; leave it out, or make the weights float32"),
        ("precision=fp16", "mixed dtype.*give the model float32 weights"),
    ],
)
def test_precision_of_weights_in_half_precision_is_refused(plan: str, said: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16()
    with pytest.raises(PlanError, match=said):
        plait.verify(model, square, torch.randn(8, 8, dtype=torch.bfloat16), plan)


def test_workers_of_a_model_that_cannot_be_captured() -> None:
    """They ran it as it is, and changed it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        found = model(batch).square().mean()
        return found * 2 if found > 0 else found

    with pytest.raises(CaptureError, match="verify compares what the graph computes"):
        plait.verify(model, loss, torch.randn(8, 8), "workers=1 servers=1")
    assert torch.equal(model[1].running_mean, torch.zeros(8))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_of_bfloat16_is_tried_without_its_rounding(make: type, fused: bool) -> None:
    for ndim in range(5):
        optimizer = make([nn.Parameter(torch.ones((4,) * ndim, dtype=torch.bfloat16))], lr=0.05, fused=fused)
        assert depends_on_the_cut(optimizer, optimizer.param_groups[0], ndim) == ""


def test_trials_are_shared_by_torchs_optimizers_with_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    class AdamW(torch.optim.AdamW):
        """Another of the same name, which updates each element by all."""

        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.data.sub_(p.grad.mean())

    def why(make: Any, **options: Any) -> str:
        optimizer = make([nn.Parameter(torch.ones(4, 6))], **options)
        return depends_on_the_cut(optimizer, optimizer.param_groups[0], 2)

    num_steps, step = 0, torch.optim.AdamW.step

    def counted(self: Any, closure: Any = None) -> Any:
        nonlocal num_steps
        num_steps += 1
        return step(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    found = []
    for eps in (1.25e-3, 1.25e-3, 1.5e-3):
        why(torch.optim.AdamW, eps=eps)
        found.append(num_steps)
    assert 0 < found[0] == found[1] < found[2]
    assert why(AdamW, eps=1e-3) and not why(torch.optim.AdamW, eps=1e-3)


class Following:
    """A loss with a centre of its own that follows the outputs."""

    def __init__(self) -> None:
        self.centre = torch.zeros(8)

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        found = (out - self.centre).square().mean()
        with torch.no_grad():
            self.centre.mul_(0.9).add_(out.mean(0), alpha=0.1)
        return found


@pytest.mark.parametrize("plan", ["data=2 sync=2", "replica=2 compress=bf16", "workers=2 servers=1"])
def test_replicas_that_agree_later_have_no_tensors_outside_the_model_to_themselves(plan: str) -> None:
    with pytest.raises(PlanError, match=r"changes loss_fn:centre, a tensor outside the model.*register_buffer"):
        plait.verify(mlp(), Following(), torch.randn(8, 8), plan)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(torch.relu(self.a(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["a.bias", "b.weight", "norm.weight", "b.*"])
@pytest.mark.parametrize("plan", ["tensor=2", "data=2 tensor=2", "tensor=2 pipeline=2 micro=2"])
def test_a_parameter_on_one_rank_beside_some_that_are_cut(name: str, plan: str) -> None:
    """What was broadcast and cut again, only the rank that had sent it took."""
    torch.manual_seed(0)
    batch = torch.randn(4, 8, dtype=torch.float64)
    report = plait.verify(Small().double(), square, batch, plan, layouts={name: "only:tensor=1"})
    assert report.ok, report


@pytest.mark.parametrize(
    "actions",
    [
        "0: F1 F0 F2 F3 B0 B1 B2 B3\n1: F0 F1 B1 B0 F2 F3 B3 B2",
        "0: F0 F1 B1 B0 F2 F3 STEP1 B2 B3 STEP3\n1: F0 F1 B1 B0 STEP1 F2 F3 B3 B2 STEP3",
        "0: F0 F1 F2 F3 B0 B2 B1 STEP1 B3 STEP3\n1: F0 F1 F2 F3 B0 B2 B1 STEP1 B3 STEP3",
    ],
)
def test_microbatches_in_an_order_of_the_users(actions: str, tmp_path: Path) -> None:
    """Backward of a later microbatch comes first: its gradients begin the sum of their update."""
    (tmp_path / "mine.txt").write_text(f"name=mine micro=4 stages=0|1\n{actions}\n")
    plan = f"pipeline=2 micro=4 schedule={tmp_path}/mine.txt"
    batch = torch.randn(8, 8, dtype=torch.float64)
    report = plait.verify(mlp().double(), square, batch, plan)
    assert report.ok, report
    if "F1 F0" in actions:
        normed = nn.Sequential(nn.BatchNorm1d(8), *mlp()).double()
        with pytest.raises(PlanError, match=r"as F1, F0, F2, F3, and each of them changes its buffer 0\.running_mean"):
            plait.verify(normed, square, batch, plan)


@pytest.mark.parametrize("plan", ["precision.0=bf16", "pipeline=2 precision.0=fp16", "data=2 precision.2=bf16"])
def test_a_module_in_half_precision_gives_the_others_float32(plan: str) -> None:
    report = plait.verify(mlp(), square, torch.randn(8, 8), plan)
    assert report.ok, report


class RunAgain(nn.Module):
    """Activation checkpointing around a layer that moves a buffer: backward moves it a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Centred()

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_a_pipeline_of_buffers_that_backward_changes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), RunAgain(), nn.Linear(8, 4)).double()
    verifier = plait.Verifier(model, square, torch.randn(8, 8, dtype=torch.float64))
    for plan in ("data=2 micro=2", "pipeline=2"):
        report = verifier.verify(plan)
        assert report.ok, report
    with pytest.raises(PlanError, match=r"the backward pass changes the buffer 1\.inner\.mean"):
        verifier.verify("pipeline=2 micro=2")


class Summary(nn.Module):
    """Two positions and a learned one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.token, self.head = nn.Embedding(8, 8), nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.cat([self.embed(ids), self.token.expand(len(ids), -1, -1)], 1))


def test_a_piece_that_is_shorter_than_the_blocks_beside_it() -> None:
    torch.manual_seed(0)
    report = plait.verify(Summary().double(), square, torch.randint(0, 8, (4, 2)), "tensor=2")
    assert report.ok, report


def no_decay_of_biases(parameters: Any) -> torch.optim.Optimizer:
    listed = list(parameters)
    parts = ([p for p in listed if p.ndim > 1], 0.1), ([p for p in listed if p.ndim < 2], 0.0)
    return torch.optim.AdamW([{"params": some, "weight_decay": decay} for some, decay in parts if some], lr=0.01)


def test_a_server_whose_variables_are_of_some_groups_only() -> None:
    torch.manual_seed(0)
    model = nn.Linear(32, 8).double()
    x = torch.randn(8, 32, dtype=torch.float64)
    report = plait.verify(model, square, x, "workers=2 servers=2", optimizer=no_decay_of_biases)
    assert report.ok, report


def test_a_server_takes_the_schedule_of_its_own_groups() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def rates(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        each = [lambda step: 0.5**step, lambda step: 0.1**step]
        weights = [group["weight_decay"] > 0 for group in optimizer.param_groups]
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [each[0] if heavy else each[1] for heavy in weights])

    whole = OptimizerShard(dict(model.named_parameters()), no_decay_of_biases, rates, Plan(), 0)
    server = OptimizerShard({"bias": model.bias}, no_decay_of_biases, rates, Plan(), 0)
    whole.advance(2)
    server.set_options(whole.options(), whole.scheduler.state_dict())
    assert server.options() == [whole.options()[1]]
    server.advance(1)
    assert server.rate == pytest.approx(0.01 * 0.1**3)


def test_the_spread_of_equal_values_is_exactly_zero() -> None:
    """As by PyTorch's kernels: the gradient of a standard deviation is 0 there, and that of a tiny one is not."""
    torch.manual_seed(0)
    rows = torch.cat([torch.rand(1, 8).expand(6, 8), torch.randn(6, 8)], 1)  # half of the columns are equal in all rows

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        first, second = model(x).chunk(2, 1)
        return first.square().mean() + second.std(0).mean()

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 16), nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.one(x[:, 8:]), torch.exp(3 * self.other(x[:, :8]))], 1)

    for plan in ("data=2", "data=3"):
        report = plait.verify(Apart(), loss_fn, rows, plan)
        assert report.ok, report
        gradient = next(each for each in report.gradients if each.name == "other.weight")
        assert gradient.relative == 0, report


class Read(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))  # type: ignore[no-any-return]


def test_the_loss_of_the_next_step_has_the_rounding_of_gradients_in_half_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients that were added in bf16 had changed the weights, and the loss was held to float64."""
    from plait.comm import thread_transport

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    torch.manual_seed(0)
    batch = {"x": torch.randint(0, 8, (8, 4)), "y": torch.randn(8, 4, 4, dtype=torch.float64)}
    factory = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    verifier = plait.Verifier(Read().double(), loss, batch, optimizer=factory)
    report = verifier.verify("replica=2 reduce=bf16")
    assert report.ok, report
    (_, (one, plan)) = report.losses
    assert abs(plan - one) > report.tolerance * one  # which is more than equal numbers would differ by
    exact = thread_transport.reduce_terms
    monkeypatch.setattr(
        thread_transport, "reduce_terms", lambda terms, op: exact(terms, op) * (1.02 if terms[0].numel() > 8 else 1)
    )
    wrong = verifier.verify("replica=2 reduce=bf16")
    assert wrong.loss > wrong.tolerance, wrong


def test_terms_in_bf16_of_a_gradient_that_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch norm takes the mean of a bias away: the terms of its gradient are far larger than their sum."""
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32, affine=False), nn.Linear(32, 4)).double()
    batch = (torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64))

    def loss(model: nn.Sequential, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    verifier = plait.Verifier(model, loss, batch, steps=1)
    for plan in ("data=4 reduce=bf16", "data=2 zero=2 reduce=bf16"):
        report = verifier.verify(plan)
        assert report.ok, report
    true = verifier._run_plan

    def wrong(*args: Any) -> Any:
        found, *rest = true(*args)
        found.gradients["2.weight"] += found.gradients["2.weight"].abs().max() * 0.1
        return found, *rest

    monkeypatch.setattr(verifier, "_run_plan", wrong)
    assert verifier.verify("data=4 reduce=bf16").first_bad.name == "2.weight"


def test_the_largest_terms_of_a_gradient_that_is_zero_but_for_rounding() -> None:
    """The error of topk is kept in the order of its numbers, and a gradient may have another."""
    layer = nn.Linear(64, 64)
    layer.weight = nn.Parameter(torch.randn(64, 64).t())
    report = plait.verify(layer, square, torch.randn(8, 64), "data=2 compress=topk:0.1", steps=3)
    assert report.ok, report


class Spectrum(nn.Module):
    """Half of a spectrum as the conjugate of the other half, which one stage of a pipeline gives to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        z = torch.complex(h, h.roll(1, -1)) * 1j
        if self.writes:
            z.conj().mul_(2 + 1j)
        return self.down(z.conj().real) + self.down(z.conj().imag)


def test_a_view_of_conjugates() -> None:
    """Torch only sets a flag for it: a write through it was taken for one of the same numbers, and of a value that came
    from another rank the flag was gone."""
    torch.manual_seed(0)
    model = Spectrum().double()
    verifier = plait.Verifier(model, square, torch.randn(8, 4, dtype=torch.float64))
    for plan in ("data=2", "pipeline=2 micro=2"):
        report = verifier.verify(plan)
        assert report.ok and not report.without_rule, report
    model.writes = True
    with pytest.raises(CaptureError, match=r"test_found.py:.*write to the tensor itself, as x\.mul_\(2 - 1j\)"):
        plait.verify(model, square, torch.randn(8, 4, dtype=torch.float64), "data=2")


def test_weights_with_a_norm_of_their_own() -> None:
    """The op had no rule: gradients were summed before it, and it ran on whole weights."""
    torch.manual_seed(0)
    norm = torch.nn.utils.parametrizations.weight_norm
    model = nn.Sequential(norm(nn.Linear(8, 16)), nn.Tanh(), norm(nn.Linear(16, 8), dim=1)).double()
    verifier = plait.Verifier(model, square, torch.randn(8, 8, dtype=torch.float64))
    layouts = {"0.*.original*": "tensor, -", "0.bias": "tensor", "2.*.original*": "-, tensor"}
    for plan, given in (("data=2 zero=3", None), ("data=2 tensor=2", layouts)):
        report = verifier.verify(plan, layouts=given)
        assert report.ok and not report.without_rule, report


class Reentrant(nn.Module):
    """Checkpoints of the older kind: one of a value with a gradient, and one of the batch, which has none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), mlp(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        def inner(h: Tensor, scale: float) -> Tensor:
            return nn.functional.dropout(self.second(h), 0.2, self.training) * scale

        h = torch.utils.checkpoint.checkpoint(inner, self.first(x), 2.0, use_reentrant=True)
        return h + torch.utils.checkpoint.checkpoint(self.third, x, use_reentrant=True)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoints_of_the_older_kind() -> None:
    """Torch refuses them in what a capture asks of autograd. A layer whose input has no gradient gets none."""
    torch.manual_seed(0)
    model, batch = Reentrant().double(), torch.randn(8, 8, dtype=torch.float64)
    for plan in ("data=2", "pipeline=2 micro=2 recompute=layer"):
        report = plait.verify(model, square, batch, plan)
        assert report.ok, report
        assert not any(d.name.startswith("third") for d in report.gradients)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (lambda x, n: nn.utils.rnn.pack_padded_sequence(x, n, enforce_sorted=False).data, r"lengths - 1\]"),
        (lambda x, n: torch.bincount(n, minlength=9) * x.sum(), r"zeros\(n\)\.index_add"),
    ],
)
def test_what_to_write_instead_of_an_op_that_no_graph_holds(line: Any, said: str) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return line(model(batch["x"]), batch["n"]).square().mean()  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=said):
        plait.verify(mlp(), loss, {"x": torch.randn(4, 4, 8), "n": torch.tensor([4, 2, 3, 1])}, "data=2")
