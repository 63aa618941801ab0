"""What Python reads of tensors while a step is captured: log lines, assertions, argument checks, constant masks."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait

PLANS = ("data=2", "tensor=2", "data=2 zero=3", "pipeline=2 micro=2")
SGD = functools.partial(torch.optim.SGD, lr=0.1)
KEPT: list[Any] = []
LOG = logging.getLogger(__name__)
Loss = Callable[[Any, Any], Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).double()


def batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(8, 16, generator=g, dtype=torch.float64),
        "y": torch.randint(0, 4, (8,), generator=g),
        "t": torch.randn(8, 4, generator=g, dtype=torch.float64),
        "m": torch.tensor([1, 0, 1, 1, 0, 1, 1, 1]),
    }


def prints(m: Any, b: Any) -> Tensor:
    loss = F.cross_entropy(m(b["x"]), b["y"])
    print("loss", loss.item(), f"{loss:.3f}", "%.3f" % loss.item(), round(loss.item(), 2))  # noqa: UP031
    return loss


def prints_floats(m: Any, b: Any) -> Tensor:
    loss = F.cross_entropy(m(b["x"]), b["y"])
    shown = float(loss.detach())
    print(f"loss {float(loss.detach()):.3f}", int(loss.detach() * 100), loss.tolist(), float(loss.item()))
    if b["m"].ndim:
        LOG.info("loss %.3f", shown)
    return loss


def prints_of_what_is_wrong(m: Any, b: Any) -> Tensor:
    loss = F.cross_entropy(m(b["x"]), b["y"])
    if torch.isnan(loss).any() or not loss.item() < 1e6:
        print("loss", float(loss.detach()))
    elif not torch.isfinite(loss) and b["m"].ndim:
        LOG.warning("loss %s", loss)
    if bool(loss < 1e6):
        loss = loss * 2
    else:
        print("large")
    return loss


def keeps(m: Any, b: Any) -> Tensor:
    loss = F.cross_entropy(m(b["x"]), b["y"])
    KEPT.append(loss.item() * 2)
    return loss


def shows_array(m: Any, b: Any) -> Tensor:
    z = m(b["x"])
    print(z.detach().cpu().numpy())
    return F.cross_entropy(z, b["y"])


def asserts(m: Any, b: Any) -> Tensor:
    z = m(b["x"])
    assert z.isfinite().all(), f"not finite: {z.shape}"
    return F.cross_entropy(z, b["y"])


def raises(m: Any, b: Any) -> Tensor:
    z = m(b["x"])
    if torch.isnan(z).any() or (z > 1e6).any():
        raise ValueError(f"bad {z.shape}" if z.ndim else "bad")
    if not F.mse_loss(z, b["t"]).item() < 1e6:
        raise ValueError("large")
    return F.cross_entropy(z, b["y"])


def divides_by_a_count(m: Any, b: Any) -> Tensor:
    each = F.cross_entropy(m(b["x"]), b["y"], reduction="none")
    return (each * b["m"]).sum() / b["m"].sum().item()


def scales_by_losses(m: Any, b: Any) -> Tensor:
    z = m(b["x"])
    one, two = F.cross_entropy(z, b["y"]), F.mse_loss(z, b["t"])
    return one + 0.5 * (one.item() / (two.item() + 1e-3)) * two


def normal(m: Any, b: Any) -> Tensor:
    z = m(b["x"])
    return -torch.distributions.Normal(z, z.exp()).log_prob(b["t"]).mean()


def is_small(z: Tensor, least: float) -> bool:
    if least < 0:
        return False
    return bool((z.abs() < least).all())


def has_a_check_of_its_own(m: Any, b: Any) -> Tensor:
    z = m(b["x"])
    if not is_small(z, 1e6):
        raise ValueError("large")
    return F.mse_loss(z, b["t"])


def policy_gradient(m: Any, b: Any) -> Tensor:
    policy = torch.distributions.Categorical(logits=m(b["x"]))
    return -(policy.log_prob(policy.sample()) * b["t"][:, 0]).mean()


def gaussian_nll(m: Any, b: Any) -> Tensor:
    z = m(b["x"])
    return F.gaussian_nll_loss(z, b["t"], z.exp())


def shuffles(m: Any, b: Any) -> Tensor:
    z = m(b["x"])
    return F.mse_loss(z, z.detach()[torch.randperm(len(z))] + 1)


def samples(m: Any, b: Any) -> Tensor:
    z = m(b["x"])
    p = z.detach().softmax(-1)
    few = torch.multinomial(p, 2)
    many = torch.multinomial(p, 6, replacement=True)
    return z.gather(1, few).mean() + z.gather(1, many).pow(2).mean()


READ_FOR_THE_EYE = [prints, prints_floats, prints_of_what_is_wrong, keeps, shows_array]
CHECKED = [asserts, raises, has_a_check_of_its_own, normal, gaussian_nll]
COMPUTED = [divides_by_a_count, scales_by_losses, policy_gradient, shuffles, samples]


@pytest.mark.parametrize("loss_fn", READ_FOR_THE_EYE, ids=lambda f: f.__name__)
def test_a_log_line_costs_no_plan_and_is_named_once(loss_fn: Loss) -> None:
    verifier = plait.Verifier(net(), loss_fn, batch())
    with pytest.warns(UserWarning, match=r"test_late.py:\d+.*return \(loss, {"):
        assert verifier.verify("data=2").ok
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verifier.verify("tensor=2").ok


@pytest.mark.parametrize("loss_fn", [*CHECKED, *COMPUTED], ids=lambda f: f.__name__)
def test_checks_and_numbers_of_tensors_are_part_of_the_step(loss_fn: Loss) -> None:
    verifier = plait.Verifier(net(), loss_fn, batch())
    for plan in PLANS:
        assert verifier.verify(plan).ok, plan


@pytest.mark.parametrize("loss_fn", [asserts, raises], ids=lambda f: f.__name__)
def test_a_check_that_fails_later_names_its_line(loss_fn: Loss) -> None:
    trainer = plait.Trainer(net(), loss_fn, SGD, "data=1")
    trainer.step(batch())
    bad = batch()
    bad["x"][3, 3] = math.inf
    with pytest.raises(plait.LossError, match=r"does not hold: .*test_late.py:\d+"):
        trainer.step(bad)


def test_a_check_whose_failure_the_model_handles_is_a_branch() -> None:
    def loss_fn(m: Any, b: Any) -> Tensor:
        z = m(b["x"])
        try:
            if not z.isfinite().all():
                raise ValueError("bad")
        except ValueError:
            z = z.nan_to_num()
        return z.mean()

    with pytest.raises(plait.CaptureError, match="needs the number"):
        plait.verify(net(), loss_fn, batch(), "data=2")


def test_a_number_leaves_the_dtype_as_python_numbers_do() -> None:
    def loss_fn(m: Any, b: Any) -> Tensor:
        z = m(b["x"])
        number, count = z.mean().item(), b["m"].sum().item()
        results = [z.mean() * number, z * number, b["m"] * count, b["m"] * number, b["m"].sum() / count, -number + z]
        assert [r.dtype for r in results] == [torch.float32] * 2 + [torch.int64] + [torch.float32] * 3
        assert type(torch.tensor(number)) is not float
        assert torch.tensor([number, 1.0]).dtype == torch.float32
        return results[0] + results[-1].mean() + torch.tensor(number)

    given = {"x": batch()["x"].float(), "m": batch()["m"]}
    assert plait.verify(net().float(), loss_fn, given, "data=2").ok


def test_a_weight_may_be_a_number_and_a_loss_may_not() -> None:
    def weighted(m: Any, b: Any) -> Any:
        each = F.cross_entropy(m(b["x"]), b["y"], reduction="none")
        return plait.Weighted((each * b["m"]).sum(), b["m"].sum().item())

    assert plait.verify(net(), weighted, batch(), "data=2 micro=2").ok
    with pytest.raises(plait.LossError, match=r"made by .item\(\)"):
        plait.verify(net(), lambda m, b: m(b["x"]).mean().item(), batch(), "data=2")


@pytest.mark.parametrize(
    "use",
    [
        lambda z: z.sum() if z.sum() > 0 else z.mean(),
        lambda z: z.sum() if torch.isnan(z).any() else z.mean(),
        lambda z: (KEPT.append(float(z.sum())), z.sum())[1],
        lambda z: z[: z.argmax().item()].sum(),
        lambda z: z.sum() * math.log(z.sum().item()),
        lambda z: z.sum() * float(z.sum()),
        lambda z: z.sum() * (1.0 if z.sum().item() > 0 else 2.0),
        lambda z: z.sum() * z.detach().numpy().mean(),
        lambda z: sum(z[0, i].sum() for i in range(z.argmax().item())) + z.sum(),
    ],
)  # fmt: skip
def test_what_needs_the_number_itself_is_refused_by_its_line(use: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(plait.CaptureError, match=r"test_late.py:\d+.*needs the number") as caught:
        plait.verify(net(), lambda m, b: use(m(b["x"])), batch(), "data=2")
    assert caught.value.data_dependent


def test_a_mask_made_of_constants_is_known() -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 1)
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            return self.head(self.body(x, mask=mask))

    given = {"x": torch.randn(4, 6, 16, dtype=torch.float64), "y": torch.randint(0, 4, (4, 6))}
    verifier = plait.Verifier(
        Causal().double(), lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["y"].flatten()), given
    )
    for plan in PLANS:
        assert verifier.verify(plan).ok, plan


def test_times_that_are_written_in_place_are_known() -> None:
    """As a solver of fixed steps has them: a grid whose last time is set, and results that are written one by one."""

    def loss_fn(m: Any, b: Any) -> Tensor:
        x = m(b["x"])
        times, grid = torch.tensor([0.0, 0.5, 1.0]), torch.arange(4.0) * 0.3
        grid[-1] = times[-1]
        found, j = torch.empty(3, *x.shape, dtype=x.dtype), 1
        found[0] = x
        for begin, end in itertools.pairwise(grid):
            step = x + (end - begin) * torch.tanh(x)
            while j < len(times) and end >= times[j]:
                found[j] = x + (step - x) * ((times[j] - begin) / (end - begin))
                j += 1
            x = step
        twice = grid * 2
        grid.add_(1.0)
        assert j == len(times) and twice[-1] == 2.0 and grid[-1] == 2.0  # with the first write alone
        return F.cross_entropy(found[1] + found[2], b["y"])

    assert plait.verify(net(), loss_fn, batch(), "data=2 micro=2").ok

    def written(m: Any, b: Any) -> Tensor:
        x, times = m(b["x"]), torch.zeros(4, dtype=torch.float64)
        times[:2] = x[0, :2].detach()
        return x.square().mean() if times[1] > 0 else x.mean()

    with pytest.raises(plait.CaptureError, match=r"test_late.py:\d+: .*times\[1\] > 0"):
        plait.verify(net(), written, batch(), "data=2")


class Speech(nn.Module):
    """Log-probabilities [T, N, C] of features [N, T, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.head = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x.transpose(1, 2)).relu().transpose(1, 2)).log_softmax(-1).transpose(0, 1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc_loss_reads_its_lengths_from_tensors(reduction: str) -> None:
    torch.manual_seed(0)
    given = {
        "x": torch.randn(8, 12, 8, dtype=torch.float64),
        "y": torch.randint(1, 6, (8, 4)),
        "frames": torch.randint(4, 13, (8,)),
        "letters": torch.randint(1, 5, (8,)),
    }
    ctc = functools.partial(F.ctc_loss, reduction=reduction, zero_infinity=True)
    verifier = plait.Verifier(
        Speech().double(), lambda m, b: ctc(m(b["x"]), b["y"], b["frames"], b["letters"]).mean(), given
    )
    for plan in (*PLANS, "data=4 micro=2"):
        report = verifier.verify(plan)
        assert report.ok and not report.without_rule, plan


def test_ctc_loss_under_autocast_is_in_float32() -> None:
    given = {"x": torch.randn(4, 12, 6), "y": torch.randint(1, 5, (4, 3)), "n": torch.full((4,), 12)}
    given["letters"] = torch.full((4,), 3)

    def loss_fn(model: Any, b: Any) -> Tensor:
        found = model(b["x"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(found, b["y"], b["n"], b["letters"], zero_infinity=True)

    report = plait.verify(nn.Linear(6, 5), loss_fn, given, "data=2 precision=bf16")
    assert report.ok, report


def test_ctc_loss_of_targets_without_padding_is_refused_by_its_line() -> None:
    given = {
        "x": torch.randn(2, 12, 8), "y": torch.randint(1, 6, (6,)), "frames": torch.tensor([12, 11]),
        "letters": torch.tensor([2, 4]),
    }  # fmt: skip
    with pytest.raises(plait.CaptureError, match=r"test_late.py:\d+.*pad the targets"):
        plait.verify(Speech(), lambda m, b: F.ctc_loss(m(b["x"]), b["y"], b["frames"], b["letters"]), given, "data=1")


class Tables(nn.Module):
    """Asks for a number in a buffer, as a model does that makes the buffer anew where it was lost."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.net, self.counts = net(), counts
        self.register_buffer("angles", torch.ones(4, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.angles[0, 0] == 0:
            x = x * 2
        found: Tensor = self.net(x) * self.angles[0, 1].clone() * int(self.angles[1, 1].item())
        if self.counts:
            self.angles += 1
        return found


def square(m: nn.Module, b: Any) -> Tensor:
    return m(b["x"]).square().mean()  # type: ignore[no-any-return]


def test_a_number_in_a_buffer_is_known_and_checked_when_the_step_runs() -> None:
    verifier = plait.Verifier(Tables(), square, batch())
    for plan in PLANS:
        assert verifier.verify(plan).ok, plan
    trainer = plait.Trainer(model := Tables(), square, SGD, "data=1")
    trainer.step(batch())
    model.angles.zero_()
    with pytest.raises(plait.LossError, match=r"does not hold: .*test_late.py:\d+: \"if self.angles"):
        trainer.step(batch())


def test_a_number_in_a_buffer_that_the_step_changes_is_refused() -> None:
    with pytest.raises(
        plait.PlaitError, match=r"changes the buffer angles, and .* graph .*test_late.py:\d+: \"if self.angles"
    ):
        plait.verify(Tables(counts=True), square, batch(), "data=2")


def test_arithmetic_with_an_array_that_is_not_known_is_refused_by_its_line() -> None:
    with pytest.raises(plait.PlaitError, match=r"test_late.py:\d+.*Python needs the number in a tensor"):
        plait.verify(net(), lambda m, b: m(b["x"]).mean() * (16 // b["m"].numpy()), batch(), "tensor=2")


def without_source(lines: str) -> Loss:
    """A loss function that `exec` made, of which there is bytecode alone."""
    made: dict[str, Any] = {"F": F, "LOG": LOG}
    inside = "".join(f"    {line}\n" for line in lines.splitlines())
    exec(f"def loss_fn(m, b):\n    loss = F.cross_entropy(m(b['x']), b['y'])\n{inside}    return loss\n", made)
    return made["loss_fn"]


@pytest.mark.filterwarnings("ignore:the step reads the number of a tensor at <string>")
@pytest.mark.parametrize(
    "lines",
    [
        "if loss.isnan(): print('nan')",
        "if not loss.isfinite():\n    print('loss', loss.item(), sep=f'{loss.item()}')\n    LOG.info('%s', loss)",
        "if loss.isnan().any():\n    LOG.root.warning('nan')\nelse:\n    pass",
        "if loss > 1e6: LOG.warning('loss %s', str(loss.item()))",
        "assert loss.isfinite().all()\nif loss.isnan(): print('nan')",
        "for _ in range(2):\n    if loss.isnan(): print('nan')",
        "if loss.isnan():\n    print('nan')\n    return loss",
    ],
)
def test_lines_that_only_show_are_passed_by_without_source(lines: str) -> None:
    assert plait.verify(net(), without_source(lines), batch(), "data=2").ok


@pytest.mark.parametrize(
    "lines",
    [
        "if loss > 1: loss = loss * 2",
        "if loss > 1: b['y'].add_(1)",
        "if loss > 1: print.calls = 1",
        "if loss > 1: LOG.info('high').append(1)",
        "if loss > 1:\n    print('high')\n    LOG.setLevel(1)",
        "if loss > 1: seen = print('high')",
    ],
)
def test_lines_that_do_more_are_named_without_source(lines: str) -> None:
    with pytest.raises(
        plait.CaptureError, match=r"<string>:\d+ \(its source is not available\): Python needs the"
    ) as e:
        plait.verify(net(), without_source(lines), batch(), "data=2")
    assert e.value.line == 3
    assert "only prints or logs" in str(e.value)
