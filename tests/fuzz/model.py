"""A drawn model put together: its source, its layers, its head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuzz.blocks_any import first, last
from fuzz.blocks_video import PaddedConv3d
from fuzz.shape import Shape

Batch = dict[str, Any]


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
        elif source == "video":
            self.embed = PaddedConv3d(3, shape.width, 3, padding=1)
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
        width = shape.width
        self.norms = nn.ModuleList(
            nn.LayerNorm(layer.out_shape.width) if how == "prenorm" else nn.Identity()
            for layer, how in zip(found, self.how, strict=True)
        )
        of = {"image": nn.Conv2d, "video": nn.Conv3d}.get(shape.kind)
        self.head: nn.Module = nn.Linear(width, out) if of is None else of(width, out, 1)
        if tied and source == "ids" and isinstance(self.head, nn.Linear) and width == self.embed.weight.shape[1]:
            self.head.weight = self.embed.weight

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x = self.embed(batch["x"])
        start, term = x, x.new_zeros(())
        for layer, norm, how in zip(self.layers, self.norms, self.how, strict=True):
            y = x
            if how == "prenorm":
                y = first(norm(last(y)))
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
