"""torch.optim.Adafactor (Shazeer and Stern 2018, arXiv 1804.04235) for tensors that are sharded over ranks.

Row and column means, and the root mean squares of parameter and update, are those of the whole tensor. For a matrix the
state, averages of its rows and columns, is whole on every rank, as on one device. For a vector the state is sharded
like the vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from plait.optim.sharded_parts import ShardedOptimizer


@dataclass
class _Update:
    """One parameter's update in a step."""

    parameter: Tensor
    gradient: Tensor
    group: dict[str, Any]
    state: dict[str, Any]

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums over ranks."""
        return torch.float64 if self.parameter.dtype == torch.float64 else torch.float32

    def square(self, tensor: Tensor) -> Tensor:
        """The squared 2-norm of this rank's part."""
        norm: Tensor = torch.linalg.vector_norm(tensor, dtype=self.wide)
        return norm.square()


class Adafactor(ShardedOptimizer, torch.optim.Adafactor):
    """torch.optim.Adafactor, with the same result on parts of parameters as on one device."""

    def _move(self) -> None:
        work = [self._begun(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        parts = self._parts
        terms: list[tuple[Tensor, Tensor]] = []
        for one in work:
            terms.append((one.parameter, one.square(one.parameter)))
            if one.gradient.ndim > 1:
                for dim in (-1, -2):
                    norms = torch.linalg.vector_norm(one.gradient, dim=dim, keepdim=True, dtype=one.wide)
                    terms.append((one.parameter, parts.place(one.parameter, norms.square(), summed=(dim,))))
        sums = iter(parts.sums(terms))
        squares, updates = [], []
        for one in work:
            squares.append(next(sums))
            updates.append(self._direction(one, (next(sums), next(sums)) if one.gradient.ndim > 1 else None))
        moved = parts.sums([(one.parameter, one.square(update)) for one, update in zip(work, updates, strict=True)])
        for one, update, factor in zip(work, updates, self._factors(work, squares, moved), strict=True):
            if one.group["weight_decay"]:
                one.parameter.mul_(1 - float(one.group["lr"]) * one.group["weight_decay"])
            one.parameter.add_(update.mul_(factor))

    def _begun(self, parameter: Tensor, group: dict[str, Any]) -> _Update:
        """Advance a parameter's state to the next step."""
        gradient = parameter.grad
        assert gradient is not None
        if parameter.is_complex() or gradient.is_sparse:
            kind = "sparse gradients" if gradient.is_sparse else "complex parameters"
            raise RuntimeError(f"Adafactor does not support {kind}")
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            shape = self._parts.shape(parameter)
            if gradient.ndim > 1:
                state["row_var"] = gradient.new_zeros((*shape[:-1], 1))
                state["col_var"] = gradient.new_zeros((*shape[:-2], 1, shape[-1]))
            else:
                state["variance"] = torch.zeros_like(gradient)
        state["step"] += 1
        return _Update(parameter, -gradient if group["maximize"] else gradient, group, state)

    def _direction(self, one: _Update, sums: tuple[Tensor, Tensor] | None) -> Tensor:
        """The gradient over the root of its variance; `sums` are the sums of squares of each row and each column."""
        state, eps = one.state, _eps(one)
        weight = (state["step"].double() ** one.group["beta2_decay"]).to(one.gradient, non_blocking=True)
        if sums is None:
            variance: Tensor = state["variance"].lerp_(one.gradient.square(), weight).clone()
        else:
            shape = self._parts.shape(one.parameter)
            rows, columns = state["row_var"], state["col_var"]
            rows.lerp_((sums[0] / shape[-1]).to(rows.dtype), weight)
            columns.lerp_((sums[1] / shape[-2]).to(columns.dtype), weight)
            scale = rows.mean(dim=-2, keepdim=True).clamp_(min=eps)
            here = self._parts.take(one.parameter, rows, summed=(-1,))
            variance = here @ self._parts.take(one.parameter, columns, summed=(-2,))
            variance.div_(self._parts.take(one.parameter, scale, summed=(-1, -2)))
        return variance.clamp_(min=eps * eps).rsqrt_().mul_(one.gradient)

    def _factors(self, work: list[_Update], squares: list[Tensor], moved: list[Tensor]) -> list[Tensor]:
        """The factor of each update, from the squared norms of each whole parameter and its whole update."""
        if not work:
            return []

        def each(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64).to(squares[0].device, non_blocking=True)

        nums = each([max(prod(self._parts.shape(one.parameter)), 1) for one in work])
        times = torch.stack([one.state["step"] for one in work]).to(nums, non_blocking=True)
        length = (torch.stack(squares).double() / nums).sqrt().maximum(each([one.group["eps"][1] for one in work]))
        rate = times.rsqrt().minimum(each([float(one.group["lr"]) for one in work]))
        limit = (torch.stack(moved).double() / nums).sqrt() / each([one.group["d"] for one in work])
        factors = -length * rate / limit.clamp(min=1.0)
        return [f.to(one.parameter.dtype) for f, one in zip(factors.unbind(), work, strict=True)]


def _eps(one: _Update) -> float:
    first = one.group["eps"][0]
    return torch.finfo(one.parameter.dtype).eps if first is None else float(first)
