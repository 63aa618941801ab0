"""Loops over experts: rounds that are not independent, and experts that are modules of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.compile.capture.capture import capture
from plait.compile.ops.experts import EXPERT_ADDMM, EXPERT_MM
from plait.errors import CaptureError, PlanError

WIDTH, EXPERTS = 8, 4
Loop = Callable[["Layer", Tensor, Callable[[Any], tuple[Tensor, Tensor]], Tensor], Tensor]
seen = 0


class Layer(nn.Module):
    """Runs a loop, with a function that gives the tokens of an expert and their rows, and the experts that are hit."""

    def __init__(self, loop: Loop, routers: int = 1) -> None:
        super().__init__()
        self.loop = loop
        self.gates = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(routers))
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3)
        self.total: Any = 0

    def forward(self, x: Tensor) -> Tensor:
        scores = [gate(x).softmax(-1) for gate in self.gates]
        if len(scores) == 1:
            top, ids = scores[0].topk(2, -1)
        else:
            top, ids = torch.stack(scores, 1).max(-1)
        mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)

        def rows(expert: Any) -> tuple[Tensor, Tensor]:
            place, token = torch.where(mask[expert[0]])
            return token, F.linear(x[token], self.weight[expert[0]]) * top[token, place, None]

        return self.loop(self, torch.zeros_like(x), rows, mask.sum((1, 2)).nonzero())


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def made(loop: Loop, **options: Any) -> tuple[Layer, Tensor]:
    torch.manual_seed(0)
    return Layer(loop, **options).double(), torch.randn(8, WIDTH, dtype=torch.float64)


def faded(m: Layer, out: Tensor, rows: Any, hit: Any) -> Tensor:
    for expert in hit:
        out = out * 0.5
        out.index_add_(0, *rows(expert))
    return out


def last_alone(m: Layer, out: Tensor, rows: Any, hit: Any) -> Tensor:
    for expert in hit:
        found = out.index_add(0, *rows(expert))
    return found


def aliased(m: Layer, out: Tensor, rows: Any, hit: Any) -> Tensor:
    found = out
    for expert in hit:
        found = out.index_add(0, *rows(expert))
    return found


def one_behind(m: Layer, out: Tensor, rows: Any, hit: Any) -> Tensor:
    for expert in hit:
        before = out.index_add(0, *rows(expert))
        out = before.index_add(0, *rows(expert))
    return before


def in_attribute(m: Layer, out: Tensor, rows: Any, hit: Any) -> Tensor:
    for expert in hit:
        m.total = out.index_add(0, *rows(expert))
    return m.total  # type: ignore[no-any-return]


def collected(m: Layer, out: Tensor, rows: Any, hit: Any) -> Tensor:
    return torch.stack([out.index_add_(0, *rows(expert)) for expert in hit]).sum(0)


def generated(m: Layer, out: Tensor, rows: Any, hit: Any) -> Tensor:
    def each() -> Any:
        for expert in hit:
            yield rows(expert)

    num = 0
    for token, found in each():
        out.index_add_(0, token, found)
        num += 1
    return out / num


def counted_in_attribute(m: Layer, out: Tensor, rows: Any, hit: Any) -> Tensor:
    m.total = 0
    for expert in hit:
        out.index_add_(0, *rows(expert))
        m.total += 1
    return out / m.total


def counted_in_list(m: Layer, out: Tensor, rows: Any, hit: Any) -> Tensor:
    num = [0]

    def count() -> None:
        num[0] += 1

    for expert in hit:
        out.index_add_(0, *rows(expert))
        count()
    return out / num[0]


def counted_globally(m: Layer, out: Tensor, rows: Any, hit: Any) -> Tensor:
    global seen
    seen = 0
    for expert in hit:
        out.index_add_(0, *rows(expert))
        seen += 1
    return out / seen


def added_after(m: Layer, out: Tensor, rows: Any, hit: Any) -> Tensor:
    for expert in hit:
        token, found = rows(expert)
        out.index_add_(0, token, found)
    return out.index_add_(0, token, found)


def written(m: Layer, out: Tensor, rows: Any, hit: Any) -> Tensor:
    for expert in hit:
        token, found = rows(expert)
        out[token] += found
    return out


DEPENDENT = [
    faded, last_alone, aliased, one_behind, in_attribute, collected, generated, counted_in_attribute, counted_in_list,
    counted_globally, added_after,
]  # fmt: skip


def refused(loop: Loop, **options: Any) -> None:
    with pytest.raises(CaptureError, match=r"test_expert_loops.py:\d+.*depends on the numbers"):
        capture(made(loop, **options)[0], loss_fn, made(loop)[1])


@pytest.mark.parametrize("loop", DEPENDENT)
def test_rounds_that_are_not_independent_are_named_with_their_line(loop: Loop) -> None:
    refused(loop)


def test_a_token_that_has_an_expert_twice_is_written_once() -> None:
    refused(written, routers=2)


def in_dict(m: Layer, out: Tensor, rows: Any, hit: Any) -> Tensor:
    m.total = {"out": out}
    other = torch.ones_like(out)
    for expert in hit:
        token, found = rows(expert)
        m.total["out"] = m.total["out"].index_add(0, token, found)
        other = other.index_add(0, token, found * 2)
    return m.total["out"] - 0.3 * other  # type: ignore[no-any-return]


@pytest.mark.parametrize("loop", [in_dict, written])
def test_rounds_that_go_on_from_each_other(loop: Loop) -> None:
    model, x = made(loop)
    report = plait.verify(model, loss_fn, x, "data=2")
    assert report.ok, report


class Counted(nn.Module):
    """A router that is balanced by a bias, by counts of the tokens of each expert."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.least = least
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).sigmoid()
        ids = (scores + self.bias).topk(2, -1)[1]
        counts = torch.bincount(ids.flatten(), minlength=self.least)[:EXPERTS].to(x.dtype)
        self.bias += 0.1 * torch.sign(counts.mean() - counts)
        return scores.gather(1, ids) * counts[ids]


def test_counts_of_the_experts_of_a_topk() -> None:
    torch.manual_seed(0)
    report = plait.verify(Counted(EXPERTS).double(), loss_fn, made(faded)[1], "data=2")
    assert report.ok, report
    with pytest.raises(CaptureError, match="bincount"):  # has as many elements as the largest number says
        capture(Counted(EXPERTS - 1).double(), loss_fn, made(faded)[1])


# ---- experts that are modules of their own ----


class Modules(nn.Module):
    """A router and a list of MLPs."""

    def __init__(self, loop: Callable[..., Tensor]) -> None:
        super().__init__()
        self.loop = loop
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        top, ids = self.gate(x).softmax(-1).topk(2, -1)
        return self.loop(self, x, top, ids, torch.zeros_like(x))


def hit(m: Modules, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """As transformers wrote it."""
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    for number in (mask.sum((-1, -2)) > 0).nonzero():
        expert = m.experts[number]
        place, token = torch.where(mask[number].squeeze(0))
        current = x[None, token].reshape(-1, WIDTH)
        out.index_add_(0, token, (expert(current) * top[token, place, None]).to(x.dtype))
    return out


def every(m: Modules, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """As Mistral writes it."""
    for number, expert in enumerate(m.experts):
        token, place = torch.where(ids == number)
        out[token] += top[token, place, None] * expert(x[token])
    return out


def by_mask(m: Modules, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """As transformers wrote it before."""
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    for number in range(EXPERTS):
        place, token = torch.where(mask[number])
        out = out.index_add(0, token, m.experts[number](x[token]) * top[token, place, None])
    return out


def by_number(m: Modules, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """By the number of each expert that is hit."""
    for each in (F.one_hot(ids, EXPERTS).sum((0, 1)) > 0).nonzero():
        number = each.item()
        place, token = torch.where(ids.t() == number)
        out.index_add_(0, token, m.experts[number](x[token]) * top[token, place, None])
    return out


def by_tokens(m: Modules, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """By the numbers of tokens, and the scores that a mask selects."""
    for number, expert in enumerate(m.experts):
        mask = ids == number
        token = mask.any(-1).nonzero().flatten()
        out.index_add_(0, token, expert(x[token]) * top[mask].view(-1, 1))
    return out


def by_column(m: Modules, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        token = torch.nonzero((ids == number).any(-1)).squeeze(-1)
        out[token] += expert(x[token]) * top[ids == number].unsqueeze(1)
    return out


def each_in_its_place(m: Modules, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """As DeepSeek writes it for training."""
    flat, rows = ids.view(-1), x.repeat_interleave(2, dim=0)
    found = torch.empty_like(rows)
    for number, expert in enumerate(m.experts):
        found[flat == number] = expert(rows[flat == number])
    return (found.view(*top.shape, -1) * top.unsqueeze(-1)).sum(1)


def num_products(loop: Callable[..., Tensor]) -> int:
    """The number of products of rows with the weights of all experts, in the forward pass."""
    torch.manual_seed(0)
    captured = capture(Modules(loop).double(), loss_fn, made(faded)[1], differentiate=False)
    return sum(node.target in (EXPERT_MM, EXPERT_ADDMM) for node in captured.graph.nodes)


def assert_verified(loop: Callable[..., Tensor], *plans: str) -> None:
    torch.manual_seed(0)
    verifier = plait.Verifier(Modules(loop).double(), loss_fn, made(faded)[1])
    for plan in plans:
        report = verifier.verify(plan)
        assert report.ok, (plan, report)


@pytest.mark.parametrize("loop", [hit, every, by_mask, by_number, by_tokens, by_column, each_in_its_place])
def test_experts_that_are_modules_are_computed_together(loop: Callable[..., Tensor]) -> None:
    assert num_products(loop) == 2
    assert_verified(loop, "data=2", "data=2 zero=3 micro=2", "expert=2")


class OneEach(Modules):
    def forward(self, x: Tensor) -> Tensor:
        top, ids = self.gate(x).softmax(-1).topk(1, -1)
        return self.loop(self, x, top, ids, torch.zeros_like(x))


def test_no_stage_begins_between_tokens_and_their_experts() -> None:
    """The way back of gradients was in the stage before, which took as many rows as without an exchange."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), OneEach(hit), nn.Linear(WIDTH, 4)).double()
    model[1].gate.bias.data[0] += 1  # so that ranks have unequal numbers of rows
    verifier = plait.Verifier(model, loss_fn, torch.randn(8, WIDTH, dtype=torch.float64))
    report = verifier.verify("pipeline=2 expert=2")
    assert report.ok, report
    with pytest.raises(PlanError, match=r"cut=1.experts.0 begins a stage between calls that must be on one"):
        verifier.verify("pipeline=2 expert=2 cut=1.experts.0")


def test_inside_experts_that_are_modules_columns_and_rows_are_split() -> None:
    plans = "tensor=2", "expert=2 tensor=2", "data=2 tensor=2 zero=3"
    assert_verified(each_in_its_place, *plans)
    page = str(plait.explain(Modules(every).double(), loss_fn, made(faded)[1], "tensor=2"))
    for number in range(EXPERTS):
        for layout in ("0.weight f64[12@tensor, 8]", "0.bias f64[12@tensor]", "2.weight f64[8, 12@tensor]"):
            assert f"experts.{number}.{layout}" in " ".join(page.split())


class Normed(nn.Module):
    """A dropout before a router and experts with norms of their own."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.drop, self.moe = nn.Dropout(0.1), Modules(each_in_its_place)
        for expert in self.moe.experts:
            expert.insert(1, norm(12))  # type: ignore[operator]
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.drop(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_experts_may_have_norms(norm: Callable[[int], nn.Module]) -> None:
    torch.manual_seed(0)
    report = plait.verify(Normed(norm).double(), loss_fn, made(faded)[1], "expert=2")
    assert report.ok, report


def with_one_bias(m: Modules, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """A bias that all experts have in common."""
    for number, expert in enumerate(m.experts):
        token, place = torch.where(ids == number)
        inner = expert[1](expert[0](x[token]))  # type: ignore[index,operator]
        rows = F.linear(inner, expert[2].weight, m.gate.weight[0])  # type: ignore[index,union-attr]
        out[token] += top[token, place, None] * rows
    return out


@pytest.mark.parametrize(("loop", "precision"), [(hit, "bf16"), (every, "bf16-params"), (with_one_bias, "bf16")])
def test_a_bias_is_added_before_a_product_is_rounded(loop: Callable[..., Tensor], precision: str) -> None:
    """As one device adds it: all numbers of a step in half precision are the same to the last bit."""
    torch.manual_seed(0)
    model = Modules(loop)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    report = plait.verify(model, loss_fn, torch.randn(16, WIDTH), f"precision={precision}", steps=1)
    assert report.loss == report.worst_gradient.relative == 0, report
    assert num_products(loop) == 2


def read_between(m: Modules, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    total = x.new_zeros(())
    for number, expert in enumerate(m.experts):
        token, place = torch.where(ids == number)
        out.index_add_(0, token, expert(x[token]) * top[token, place, None])
        total = total + out.sum()
    return out * total


def of_others(m: Modules, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, acts in enumerate((F.relu, F.silu, torch.tanh, F.gelu)):
        token, place = torch.where(ids == number)
        out.index_add_(0, token, acts(m.experts[(number + 1) % EXPERTS](x[token])) * top[token, place, None])
    return out


def of_some_alone(m: Modules, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number in range(EXPERTS - 1):
        token, place = torch.where(ids == number)
        out.index_add_(0, token, m.experts[number](x[token]) * top[token, place, None])
    return out


def used_after(m: Modules, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        token, place = torch.where(ids == number)
        rows = expert(x[token])
        out.index_add_(0, token, rows * top[token, place, None])
    return out.index_add(0, token, rows)


def in_another_order(m: Modules, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """Scores in the order of places, beside tokens in their own."""
    for number, expert in enumerate(m.experts):
        token, place = torch.where(ids == number)
        out = out.index_add(0, token, expert(x[token]) * top[token, place, None])
        out = out + top.t()[ids.t() == number].sum()
    return out


@pytest.mark.parametrize("loop", [read_between, of_others, of_some_alone, used_after, in_another_order])
def test_rounds_that_differ_are_computed_one_by_one(loop: Callable[..., Tensor]) -> None:
    assert num_products(loop) == 0
    assert_verified(loop, "data=2")


def test_the_loop_that_expert_cannot_take_is_named() -> None:
    """By the line with which it begins, and the one that stopped it, if that is known."""
    start = r"differ: .*test_expert_loops.py:\d+: \"token, place = torch.where\(ids == number\)\""
    for loop, where in ((of_others, r", at .*test_expert_loops.py:\d+"), (read_between, "")):
        with pytest.raises(PlanError, match=rf"expert=2 finds no experts.*{start}{where};"):
            plait.verify(Modules(loop).double(), loss_fn, made(faded)[1], "expert=2")


def faded_by_hand(m: Modules, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        token, place = torch.where(ids == number)
        out[token] = expert(x[token]) * top[token, place, None]
    return out


def test_what_a_loop_may_do_is_said() -> None:
    with pytest.raises(CaptureError, match=r"out\[token\].*may only add its rows.*for all experts alike"):
        capture(Modules(faded_by_hand).double(), loss_fn, made(faded)[1])


def last_expert(m: Modules, x: Tensor, number: Any, rows: Any, out: Tensor) -> Tensor:
    for each in number:
        expert = m.experts[each[0]]
        out.index_add_(0, *rows(each, expert))
    return out + expert(x)


def last_number(m: Modules, x: Tensor, number: Any, rows: Any, out: Tensor) -> Tensor:
    for each in number:
        last = int(each[0])
        out.index_add_(0, *rows(each, m.experts[last]))
    return out * last


def times_number(m: Modules, x: Tensor, number: Any, rows: Any, out: Tensor) -> Tensor:
    for each in number:
        token, found = rows(each, m.experts[each[0]])
        out.index_add_(0, token, found * (each[0].item() + 1))
    return out


def next_expert(m: Modules, x: Tensor, number: Any, rows: Any, out: Tensor) -> Tensor:
    for each in number:
        out.index_add_(0, *rows(each, m.experts[(each[0].item() + 1) % EXPERTS]))
    return out


def without_one(m: Modules, x: Tensor, number: Any, rows: Any, out: Tensor) -> Tensor:
    for each in number:
        if int(each[0]) == 3:
            continue
        out.index_add_(0, *rows(each, m.experts[each[0]]))
    return out


@pytest.mark.parametrize("run", [last_expert, last_number, times_number, next_expert, without_one])
def test_a_loop_over_the_experts_that_are_hit_has_to_treat_them_alike(run: Callable[..., Tensor]) -> None:
    def loop(m: Modules, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
        mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)

        def rows(number: Any, expert: nn.Module) -> tuple[Tensor, Tensor]:
            place, token = torch.where(mask[number[0]])
            return token, expert(x[token]) * top[token, place, None]

        return run(m, x, mask.sum((1, 2)).nonzero(), rows, out)

    with pytest.raises(CaptureError, match=r"test_expert_loops.py:\d+.*depends on the numbers"):
        capture(Modules(loop).double(), loss_fn, made(faded)[1])
