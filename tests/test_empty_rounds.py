"""Loops over experts that leave out the experts without rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_expert_loops import EXPERTS, WIDTH, Modules, loss_fn, num_products
from torch import Tensor, nn

import plait
from plait.compile.capture.capture import capture
from plait.errors import CaptureError

Loop = Callable[["Counting", Tensor, Tensor, Tensor, Tensor], Tensor]
total = 0


class Counting(Modules):
    """A router, a list of MLPs and a number that a loop may change."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self.register_buffer("seen", torch.zeros(()))
        with torch.no_grad():
            self.gate.bias[[1, 2]] = -50.0  # no row has these experts
        self.calls = 0


def made(loop: Loop) -> tuple[Counting, Tensor]:
    torch.manual_seed(0)
    return Counting(loop).double(), torch.randn(8, WIDTH, dtype=torch.float64)


# ---- rows that torch.where gives ----


def by_numel(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        token, place = torch.where(ids == number)
        if token.numel() == 0:
            continue
        out[token] += top[token, place, None] * expert(x[token])
    return out


def by_size(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number in range(EXPERTS):
        token, place = torch.where(ids == number)
        if not token.size(0):
            continue
        out = out.index_add(0, token, top[token, place, None] * m.experts[number](x[token]))
    return out


def by_length(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        token, place = torch.where(ids == number)
        if len(token) > 0:
            rows = expert(x[token])
            if place.shape[0] != 0:
                out[token] += top[token, place, None] * rows
    return out


def as_mixtral(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """As transformers wrote it in the beginning."""
    mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    for number in range(EXPERTS):
        expert = m.experts[number]
        place, token = torch.where(mask[number])
        if token.shape[0] == 0:
            continue
        tokens, places = token.tolist(), place.tolist()
        rows = expert(x[None, tokens].reshape(-1, WIDTH)) * top[tokens, places, None]
        out.index_add_(0, token, rows.to(x.dtype))
    return out


def of_the_hit(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    for number in (mask.sum((-1, -2)) > 0).nonzero():
        expert = m.experts[number]
        place, token = torch.where(mask[number].squeeze(0))
        if token.numel() == 0:
            continue
        out.index_add_(0, token, expert(x[token]) * top[token, place, None])
    return out


# ---- conditions of their own ----


def by_mask(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        mask = ids == number
        if not mask.any():
            continue
        token, place = torch.where(mask)
        out[token] += top[token, place, None] * expert(x[token])
    return out


def as_deepseek(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """As DeepSeek-V3 is inferred."""
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
    for number in range(EXPERTS):
        if counts[number] == 0:
            continue
        token, place = torch.where(ids == number)
        out[token] += m.experts[number](x[token]) * top[token, place, None]
    return out


def as_tutorials(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """With a mask of tokens, as in makeMoE."""
    scores = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(-1, ids, top)
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(dim=-1)
        flat = mask.view(-1)
        if flat.any():
            rows = expert(x[flat]) * scores[flat, number].unsqueeze(1)
            out[mask] += rows.squeeze(1)
    return out


def by_choice(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """First and second choices one after the other."""
    for choice in range(2):
        for number in range(EXPERTS):
            mask = ids[:, choice] == number
            if mask.any():
                out[mask] += top[mask, choice].unsqueeze(-1) * m.experts[number](x[mask])
    return out


def by_sum(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(dim=-1)
        if mask.sum().item() == 0:
            continue
        weights = (top * (ids == number)).sum(-1)
        out[mask] = out[mask] + expert(x[mask]) * weights[mask].unsqueeze(-1)
    return out


def averaged_always(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """The mean of no rows is no number, but there are none that it is taken from."""
    for number, expert in enumerate(m.experts):
        rows = x[mask := (ids == number).any(dim=-1)]
        out[mask] += expert(rows - rows.mean(0))
    return out


def with_zeros(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """As MiniMind writes it: parameters without rows get zeros as gradients."""
    for number, expert in enumerate(m.experts):
        mask = ids == number
        if mask.any():
            token = mask.any(-1).nonzero().flatten()
            out.index_add_(0, token, expert(x[token]) * top[mask].view(-1, 1))
        elif m.training:
            out[0, 0] += 0 * sum(p.sum() for p in expert.parameters())
    return out


def by_method(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number in range(EXPERTS):
        add_rows(m, number, x, top, ids, out)
    return out


def add_rows(m: Counting, number: int, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> None:
    token, place = torch.where(ids == number)
    if token.numel() == 0:
        return
    out[token] += m.experts[number](x[token]) * top[token, place, None]


def by_function(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number in range(EXPERTS):
        out = with_rows(m, number, x, top, ids, out)
    return out


def with_rows(m: Counting, number: int, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    mask = ids == number
    if not mask.any():
        return out
    token, place = torch.where(mask)
    out = out.index_add(0, token, m.experts[number](x[token]) * top[token, place, None])
    return out


def with_ones(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        token, place = torch.where(ids == number)
        if token.numel() > 0:
            out[token] += expert(x[token]) * top[token, place, None]
        else:
            out[0, 0] += 1 * sum(p.sum() for p in expert.parameters())
    return out


def each_its_own(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, act in enumerate((F.relu, F.silu, torch.tanh, F.gelu)):
        token, place = torch.where(ids == number)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, act(m.experts[number](x[token])) * top[token, place, None])
    return out


TOGETHER = [
    by_numel, by_size, by_length, as_mixtral, of_the_hit, by_mask, as_deepseek, by_method, by_function, as_tutorials,
    by_choice, with_zeros,
]  # fmt: skip


@pytest.mark.parametrize("loop", [*TOGETHER, by_sum, each_its_own, averaged_always])
def test_experts_without_rows_may_be_left_out(loop: Loop) -> None:
    report = plait.verify(*_with_loss(*made(loop)), "data=2")
    assert report.ok, report
    assert (num_products(loop) > 0) is (loop in TOGETHER)  # type: ignore[arg-type]


class Twice(Counting):
    """Two routers, which may choose the same expert."""

    def forward(self, x: Tensor) -> Tensor:
        scores = [self.gate(each).softmax(-1) for each in (x, x.flip(-1))]
        top, ids = torch.stack(scores, 1).max(-1)
        return self.loop(self, x, top, ids, torch.zeros_like(x))


def test_a_mask_selects_a_token_once_that_has_an_expert_twice() -> None:
    torch.manual_seed(0)
    report = plait.verify(Twice(as_masks).double(), loss_fn, torch.randn(8, WIDTH).double(), "data=2")
    assert report.ok, report


def as_masks(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(dim=-1)
        out[mask] += expert(x[mask])
    return out


def _with_loss(model: nn.Module, batch: Tensor) -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor], Tensor]:
    return model, loss_fn, batch


# ---- what depends on whether there are rows ----


def counted(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    num = 0
    for number, expert in enumerate(m.experts):
        token, place = torch.where(ids == number)
        if token.numel() == 0:
            continue
        out[token] += top[token, place, None] * expert(x[token])
        num += 1
    return out / num


def counted_in_attribute(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    m.calls = 0
    for number, expert in enumerate(m.experts):
        token, place = torch.where(ids == number)
        if token.numel() == 0:
            continue
        out[token] += top[token, place, None] * expert(x[token])
        m.calls = m.calls + 1
    return out * m.calls


def counted_in_buffer(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(-1)
        if mask.any():
            out[mask] += expert(x[mask])
            m.seen += 1
    return out * m.seen


def counted_in_new_buffer(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(-1)
        if mask.any():
            out[mask] += expert(x[mask])
            m.seen = m.seen + 1
    return out * m.seen


def counted_globally(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    global total
    total = 0
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(-1)
        if mask.any():
            out[mask] += expert(x[mask])
            total += 1
    return out * total


def penalty(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """Of the weights of the experts that are used."""
    found = x.new_zeros(())
    for number, expert in enumerate(m.experts):
        mask = ids == number
        if mask.any():
            token, place = torch.where(mask)
            out.index_add_(0, token, top[token, place, None] * expert(x[token]))
            found += expert[0].weight.square().sum()  # type: ignore[index,union-attr,operator]
    return out * found


def collected(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    found = []
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(-1)
        if mask.any():
            out[mask] += expert(x[mask])
            found.append(expert[0].weight.sum())  # type: ignore[index,union-attr,operator]
    return out * sum(found)


def more_than_one(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        token, place = torch.where(ids == number)
        if token.numel() <= 1:
            continue
        out[token] += top[token, place, None] * expert(x[token])
    return out


def more_than_two(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(-1)
        if mask.sum() <= 2:
            continue
        out[mask] += expert(x[mask])
    return out


def of_another(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(-1)
        if not (ids == (number + 1) % EXPERTS).any():
            continue
        out[mask] += expert(x[mask])
    return out


def otherwise(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(-1)
        if mask.any():
            out[mask] += expert(x[mask])
        else:
            out = out + 1
    return out


def only_without(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        token, place = torch.where(ids == number)
        if token.numel() == 0:
            out = out + 1
        out[token] += top[token, place, None] * expert(x[token])
    return out


def stopped(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        token, place = torch.where(ids == number)
        if token.numel() == 0:
            break
        out[token] += top[token, place, None] * expert(x[token])
    return out


def returned(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(-1)
        if not mask.any():
            return out
        out[mask] += expert(x[mask])
    return out


def averaged(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """The mean of no rows is no number."""
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(-1)
        if mask.any():
            rows = x[mask]
            out[mask] += expert(rows - rows.mean(0))
    return out


def divided(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(-1)
        num = mask.sum()
        if num == 0:
            continue
        out[mask] += expert(x[mask]) / num
    return out


def divided_by_length(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        rows = x[mask := (ids == number).any(-1)]
        if rows.shape[0] == 0:
            continue
        out[mask] += expert(rows) / rows.shape[0]
    return out


def last_that_ran(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(-1)
        if mask.any():
            out[mask] += expert(x[mask])
            last = expert
    return out + last(x)  # type: ignore[no-any-return]


def drawn(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(-1)
        if mask.any():
            out[mask] += expert(x[mask]) * torch.rand((), dtype=x.dtype)
    return out


def halved(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(-1)
        if mask.any():
            out *= 0.5
            out[mask] += expert(x[mask])
    return out


def first_written(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(-1)
        if mask.any():
            out[mask] += expert(x[mask])
            out[0] += 1
    return out


def faded(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        token, place = torch.where(ids == number)
        if token.numel():
            out = out * 0.5
            out = out.index_add(0, token, expert(x[token]) * top[token, place, None])
    return out


def all_rows(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    if (ids == 0).any():
        out = out + m.experts[0](x)
    return out


DEPENDENT = [
    with_ones,
    counted, counted_in_attribute, counted_in_buffer, counted_in_new_buffer, counted_globally, penalty, collected,
    more_than_one, more_than_two, of_another, otherwise, only_without, stopped, returned, averaged, divided,
    divided_by_length, last_that_ran, drawn, halved, first_written, faded, all_rows,
]  # fmt: skip


def dropped(m: Counting, x: Tensor, top: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    for number, expert in enumerate(m.experts):
        mask = (ids == number).any(-1)
        out[mask] += F.dropout(expert(x[mask]), 0.1)
    return out


def test_dropout_of_rows_is_named() -> None:
    with pytest.raises(CaptureError, match="dropout draws as many numbers as there are rows; apply it to all rows"):
        capture(*_with_loss(*made(dropped)))


@pytest.mark.parametrize("loop", DEPENDENT)
def test_what_depends_on_whether_there_are_rows_is_named_with_its_line(loop: Loop) -> None:
    model, batch = made(loop)
    with pytest.raises(CaptureError, match=r'test_empty_rounds.py:\d+: "(if|out)') as caught:
        capture(model, loss_fn, batch)
    assert caught.value.data_dependent
