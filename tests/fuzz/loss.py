"""The loss of a drawn model: what it compares, how it is normalised, and what it reads beside model and batch."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from fuzz.batches import unpack
from fuzz.blocks_any import last

Batch = dict[str, Any]


class Loss:
    """`task` compares output and target, `form` is a mean, one of selected terms, or a sum and its weight; with
    `outputs` beside it. `extra` is a further term, some with tensors or modules that are neither model nor batch."""

    def __init__(self, task: str, form: str, extra: str, outputs: bool, autocast: str) -> None:
        self.task, self.form, self.extra, self.outputs, self.autocast = task, form, extra, outputs, autocast

    def look_at(self, model: nn.Module, out: int, dtype: torch.dtype) -> None:
        """Make what the loss holds for this model."""
        if self.extra == "weight":
            self.kept = torch.tensor(0.05, dtype=dtype)
        elif self.extra == "teacher":
            self.teacher = nn.Linear(out, out).to(dtype).requires_grad_(False)
        elif self.extra == "target":
            self.target = copy.deepcopy(model.get_submodule("embed")).requires_grad_(False)
        elif self.extra == "centre":
            self.centre = torch.zeros(out, dtype=dtype)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        kind = getattr(torch, self.autocast) if self.autocast else None
        with torch.autocast("cpu", kind) if kind else contextlib.nullcontext():
            return self.of(model, batch)

    def of(self, model: nn.Module, batch: Any) -> Any:
        batch = unpack(batch)
        if self.extra == "penalty":
            batch = {**batch, "x": batch["x"].detach().requires_grad_(True)}
        if self.extra == "inner":
            out, term = self.adapted(model, batch)
        else:
            out, term = model(batch)
        each = self.each(out, batch)
        more = 0.1 * term
        if self.extra == "penalty":
            (slope,) = torch.autograd.grad(out.pow(2).sum(), batch["x"], create_graph=True)
            more = more + 0.1 * slope.pow(2).flatten(1).sum(1).mean()
        elif self.extra == "decay":
            more = more + 0.01 * sum(p.pow(2).sum() for p in model.parameters() if p.requires_grad)
        elif self.extra == "spread":
            more = more - 0.01 * out.float().flatten(1).std(0).mean().to(out.dtype)
        elif self.extra in ("weight", "teacher", "target", "centre"):
            more = more + self.beside(model, batch, out)
        if self.form == "mean":
            loss: Any = each.mean() + more
        elif self.form == "selected":
            loss = self.selected(out, each, batch) + more
        else:
            weight = self.weight(each, batch)
            loss = plait.Weighted((each * weight).sum() + more * weight.sum(), weight.sum())
        if self.extra == "logged":
            print(f"loss {each.mean().item():.3f}")
            assert out.isfinite().all()
        if not self.outputs:
            return loss
        out = out.detach()
        return loss, {
            "score": out.flatten(1).mean(1), "size": out.abs().mean(), "above": plait.Sum(out.sigmoid().sum()),
            "top": plait.Max(out.max()), "ratio": plait.Weighted(out.sum(), out.abs().sum() + 1),
        }  # fmt: skip

    def beside(self, model: nn.Module, batch: Batch, out: Tensor) -> Tensor:
        """A term with a tensor, a teacher, a target network that follows the model, or a centre of outputs."""
        y = last(out)
        if self.extra == "weight":
            return self.kept * out.pow(2).mean()
        if self.extra == "teacher":
            return 0.1 * (y - torch.tanh(self.teacher(y.detach()))).pow(2).mean()
        if self.extra == "target":
            embed = model.get_submodule("embed")
            with torch.no_grad():
                for mine, theirs in zip(self.target.parameters(), embed.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
            return 0.1 * (embed(batch["x"]) - 0.5 * self.target(batch["x"])).pow(2).mean()
        found = 0.1 * (y - self.centre).pow(2).mean()
        with torch.no_grad():
            self.centre.mul_(0.9).add_(y.flatten(0, -2).mean(0).to(self.centre.dtype), alpha=0.1)
        return found

    def selected(self, out: Tensor, each: Tensor, batch: Batch) -> Tensor:
        """The mean over the labels that count, or over rows of enough weight, taken out by a boolean mask."""
        y = batch["y"]
        if self.task in ("classify", "smooth") and y.dim() > 1:
            keep = y >= 0
            return F.cross_entropy(last(out)[keep], y[keep])
        return each[batch["weight"] > 1].mean() if each.dim() else each

    def weight(self, each: Tensor, batch: Batch) -> Tensor:
        """The weight of each term: labels that count, or the batch's weights of rows."""
        if self.task in ("classify", "smooth") and batch["y"].shape == each.shape and each.dim() > 1:
            return (batch["y"] >= 0).to(each.dtype)
        rows = batch["weight"].to(each.dtype)
        return rows.view(-1, *(1,) * (each.dim() - 1)).expand_as(each) if each.dim() else rows.sum()

    def adapted(self, model: nn.Module, batch: Batch) -> Any:
        """The model after one step of gradient descent on its head, through which the outer gradient flows (MAML)."""
        fast = {n: p for n, p in model.named_parameters() if n.startswith("head.")}
        out, term = torch.func.functional_call(model, fast, (batch,))
        inner = self.each(out, batch).mean() + 0.1 * term
        slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), slopes, strict=True)}
        return torch.func.functional_call(model, fast, (batch,))

    def each(self, out: Tensor, batch: Batch) -> Tensor:
        """A loss for each row, position or place."""
        y = batch["y"]
        if self.task in ("classify", "smooth"):
            by_class = out if out.dim() != 3 else out.transpose(1, 2)
            return F.cross_entropy(
                by_class, y, reduction="none", ignore_index=-100, label_smoothing=0.1 if self.task == "smooth" else 0.0
            )
        if self.task == "binary":
            return F.binary_cross_entropy_with_logits(out, torch.sigmoid(y), reduction="none")
        if self.task == "distil":
            return F.kl_div(out.log_softmax(1), y.softmax(1), reduction="none")
        if self.task == "huber":
            return F.smooth_l1_loss(out, y, reduction="none")
        if self.task == "contrast":  # each row against the targets of all rows
            one, other = F.normalize(out.flatten(1), dim=1), F.normalize(y.flatten(1), dim=1)
            return F.cross_entropy(one @ other.t() / 0.2, torch.arange(len(out), device=out.device), reduction="none")
        if self.task == "pairs":  # each pair of rows in their right order
            score, right = out.flatten(1).mean(1), y.flatten(1).mean(1)
            return F.softplus(-(score[:, None] - score[None, :]) * torch.sign(right[:, None] - right[None, :])).mean(1)
        if self.task == "cosine":
            return 1 - F.cosine_similarity(out, y, dim=1)
        return (out - y).pow(2)
