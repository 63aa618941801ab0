"""The optimizers of drawn models: functions of the parameters, wrappers of several, and pairs with name patterns."""

from __future__ import annotations

import functools
from typing import Any

import torch

import plait


class Both(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as one optimizer that steps both."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        params = list(params)
        matrices, rest = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
        self.each: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=lr)] if matrices else []
        self.each += [torch.optim.AdamW(rest, lr=lr, eps=1e-4)] if rest else []
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.each:
            one.step()


def listed(params: Any) -> list[torch.optim.Optimizer]:
    """Adafactor for matrices and SGD for the rest, as a list."""
    params = list(params)
    matrices, rest = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
    found: list[torch.optim.Optimizer] = [torch.optim.Adafactor(matrices, lr=0.02)] if matrices else []
    return found + ([torch.optim.SGD(rest, lr=0.05, momentum=0.9)] if rest else [])


def grouped(params: Any) -> torch.optim.Optimizer:
    """No decay for what has one dim."""
    params = list(params)
    decayed, rest = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3, eps=1e-4)


_ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
_SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
OPTIMIZERS: dict[str, Any] = {
    "sgd": _SGD,
    "plain": functools.partial(torch.optim.SGD, lr=0.05, weight_decay=0.01),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, dampening=0.0),
    "adamw": _ADAMW,
    "amsgrad": functools.partial(torch.optim.Adam, lr=1e-3, eps=1e-4, amsgrad=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-3, eps=1e-3, centered=True, momentum=0.5),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.02, eps=1e-3),
    "nadam": functools.partial(torch.optim.NAdam, lr=1e-3, eps=1e-4),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.02),
    "lamb": functools.partial(plait.optim.Lamb, lr=0.01),
    "grouped": grouped,
    "both": Both,
    "listed": listed,
    "pairs": [("*weight", _ADAMW), ("*", _SGD)],
    "matched": [("embed*", _SGD), ("layers.0.*", functools.partial(torch.optim.Adafactor, lr=0.02)), ("*", _ADAMW)],
}
