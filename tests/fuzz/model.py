"""A drawn model put together: its source, its layers, its head; and its loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plait
from fuzz.shape import Shape

Batch = dict[str, Tensor]


class Model(nn.Module):
    """`layers` are (class, options, how it is called, frozen); called with the batch, returns the output and a term of
    the loss."""

    def __init__(self, source: str, shape: Shape, layers: list[tuple[Any, dict[str, Any], str, bool]], out: int,
                 tied: bool) -> None:  # fmt: skip
        super().__init__()
        self.source, self.how = source, [how for _, _, how, _ in layers]
        if source == "ids":
            self.embed: nn.Module = nn.Embedding(out, shape.width)
        elif source == "image":
            self.embed = nn.Conv2d(3, shape.width, 3, padding=1)
        else:
            self.embed = nn.Linear(6, shape.width)
        found = []
        for make, options, _, frozen in layers:
            layer = make(shape, **options)
            if frozen:
                layer.requires_grad_(False)
            if layer.out_shape != shape:
                self.how[len(found)] = "plain"
            found.append(layer)
            shape = layer.out_shape
        self.layers = nn.ModuleList(found)
        last = shape.width
        self.norms = nn.ModuleList(
            nn.LayerNorm(layer.out_shape.width) if how == "prenorm" else nn.Identity()
            for layer, how in zip(found, self.how, strict=True)
        )
        self.head: nn.Module = nn.Conv2d(last, out, 1) if shape.kind == "image" else nn.Linear(last, out)
        if tied and source == "ids" and isinstance(self.head, nn.Linear) and last == self.embed.weight.shape[1]:
            self.head.weight = self.embed.weight

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x = self.embed(batch["x"])
        start, term = x, x.new_zeros(())
        for layer, norm, how in zip(self.layers, self.norms, self.how, strict=True):
            y = x
            if how == "prenorm":
                y = norm(y) if y.dim() < 4 else norm(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            found = checkpoint(layer, y, batch, use_reentrant=False) if how == "checkpoint" else layer(y, batch)
            if isinstance(found, tuple):
                found, more = found
                term = term + more
            if how == "twice":
                found = layer(found, batch)
                found = found[0] if isinstance(found, tuple) else found
            if how in ("residual", "prenorm"):
                found = x + found
            elif how == "skip" and start.shape == found.shape:  # from the very first value
                found = found + start
            x = found
        return self.head(x), term


class Loss:
    """The loss of a drawn model: `task` compares output and target, `form` is a mean or a sum and its weight; with
    `outputs` beside it."""

    def __init__(self, task: str, form: str, extra: str, outputs: bool) -> None:
        self.task, self.form, self.extra, self.outputs = task, form, extra, outputs

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        if not isinstance(batch, dict):  # the same leaves in a tuple, in the order of their names
            batch = dict(zip(NAMES, batch, strict=True))
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
        if self.form == "mean":
            loss: Any = each.mean() + more
        else:
            weight = self.weight(each, batch)
            loss = plait.Weighted((each * weight).sum() + more * weight.sum(), weight.sum())
        if not self.outputs:
            return loss
        return loss, {"score": out.detach().flatten(1).mean(1), "size": out.detach().abs().mean()}

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


NAMES = ("categories", "condition", "mask", "memory", "weight", "x", "y")
