"""Local SGD, DiLoCo and compressed means as a serial program on one device, with which `verify` compares replicas.

Each replica is a copy of the model with an optimizer of its own. The program is a definition: it does not communicate,
and every exchange is arithmetic on the list of all replicas' values.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.compile.capture.batch import join_rows, take_rows
from plait.compile.capture.capture import LossFn
from plait.compile.capture.loss_values import ROWS, LossPart, Outputs, join_outputs, results
from plait.compile.stages.split import Pipeline
from plait.cost.wire_bytes import is_smaller, num_kept, num_owned
from plait.engine.local_batch import microbatches, num_rows, replica_key
from plait.engine.local_sgd.diloco import MIXING
from plait.engine.local_sgd.exchange import dtype_of_mean
from plait.engine.local_sgd.tensor_compression import decode, encode, first_factor
from plait.engine.optimizer_step import equal_draws
from plait.engine.slices import Fragment, fragments
from plait.plan.axes import parts_around
from plait.plan.compression import Compression
from plait.plan.plan import Plan
from plait.reference.one_device import one_device_step, stale_step
from plait.schedule.sync_rounds import SyncRounds, split_in_parts
from plait.spec.layout import Layout

Named = dict[str, Tensor]


class Compressor:
    """The definition of a compressed mean over replicas, where each rank of a replica compresses its own parts."""

    def __init__(self, plan: Plan, layouts: Mapping[str, Layout], compression: Compression) -> None:
        self._plan = plan
        self._layouts = layouts
        self._compression = compression
        self._errors: dict[tuple[int, int, str], Tensor] = {}  # error feedback, by replica, rank within it and name
        self._factors: dict[tuple[int, str], Tensor] = {}

    def mean(self, terms: Sequence[Named]) -> Named:
        """The mean of whole tensors, given by name for each replica, in the dtype that means have."""
        mesh = self._plan.inner_plan.mesh
        found = {name: torch.zeros(t.shape, dtype=dtype_of_mean(t.dtype)) for name, t in terms[0].items()}
        for rank in range(mesh.size):
            here = mesh.coordinates(rank)
            for name, whole in found.items():
                held = fragments(self._layouts[name], mesh, here)
                mean = self._mean(rank, name, [self._part(term[name], name, here) for term in terms]) if held else whole
                for each in held:
                    whole[Fragment(each.block, each.block.start).slices] = mean[each.slices]
        return found

    def _part(self, whole: Tensor, name: str, here: Mapping[str, int]) -> Tensor:
        layout, mesh = self._layouts[name], self._plan.inner_plan.mesh
        part = torch.empty(layout.local_shape(mesh, here), dtype=dtype_of_mean(whole.dtype))
        for each in fragments(layout, mesh, here):
            part[each.slices] = whole[Fragment(each.block, each.block.start).slices]
        return part

    def _mean(self, rank: int, name: str, terms: list[Tensor]) -> Tensor:
        """The mean of one tensor, given for each replica."""
        kind, size, shape, num = self._compression.kind, len(terms), terms[0].shape, terms[0].numel()
        owned, count = num_owned(num, size), num_kept(num, self._compression)
        exempt = any(fnmatch.fnmatchcase(name, pattern) for pattern in self._plan.exempt)
        if exempt or not is_smaller(shape, self._compression, size):
            return torch.stack(terms).mean(0)
        given = torch.stack([term.float() + self._errors.get((r, rank, name), 0.0) for r, term in enumerate(terms)])
        if kind == "powersgd":
            return self._low_rank(rank, name, list(given))
        flats = given.flatten(1)
        if kind == "topk":
            kept = torch.zeros_like(flats)
            places = flats.abs().topk(count, sorted=False).indices
            kept.scatter_(1, places, flats.gather(1, places))
            mean, errors = kept.mean(0), flats - kept
        else:
            rows = torch.nn.functional.pad(flats, (0, owned * size - num))
            coded = decode(encode(rows, kind), kind, owned * size)
            total = coded.sum(0) / size
            mean = decode(encode(total, kind), kind, owned * size)
            errors = rows - coded
            for owner in range(size):
                own = slice(owner * owned, (owner + 1) * owned)
                errors[owner, own] += size * (total - mean)[own]
        for r in range(size):
            self._errors[r, rank, name] = errors[r, :num].view(shape)
        return mean[:num].view(shape)

    def _low_rank(self, rank: int, name: str, terms: list[Tensor]) -> Tensor:
        matrices = torch.stack([term.reshape(term.shape[0], -1) for term in terms])
        right = self._factors.get((rank, name))
        if right is None:
            right = first_factor(name, matrices.shape[2], self._compression.rank)
        left = torch.linalg.qr((matrices @ right).mean(0)).Q
        right = self._factors[rank, name] = (matrices.transpose(1, 2) @ left).mean(0)
        mean = (left @ right.T).view(terms[0].shape)
        for r, term in enumerate(terms):
            self._errors[r, rank, name] = term - mean
        return mean  # type: ignore[no-any-return]


class SerialReplicas:
    """The replicas of a plan, run one after the other.

    Args:
        plan: the plan.
        twins: equal models, one per replica.
        optimizers: the optimizer of each twin.
        layouts: the layout of each parameter within a replica.
        changing: parameters that the step itself changes, as it changes buffers.
        pipeline: the pipeline of an asynchronous schedule, if the plan has one.
        scale: factor of the loss in backward.
        left_out: parameters that a step may leave without a gradient. Replicas that train by themselves then give them
            zeros, so that all have the same moments.
    """

    def __init__(
        self,
        plan: Plan,
        twins: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        layouts: Mapping[str, Layout],
        changing: Collection[str] = (),
        pipeline: Pipeline | None = None,
        scale: float = 1.0,
        left_out: Collection[str] = (),
    ) -> None:
        self.plan = plan
        self._left_out = left_out
        self._changing = changing
        self.twins = twins
        self._pipeline, self._scale = pipeline, scale
        self._optimizers = optimizers
        self._named = [{n: p for n, p in twin.named_parameters() if p.requires_grad} for twin in twins]
        self._rounds = SyncRounds.of(plan)
        self._compressor = Compressor(plan, layouts, plan.compress)
        part_of = split_in_parts([math.prod(layout.shape) for layout in layouts.values()], plan.streaming)
        self._part_of = dict(zip(layouts, part_of, strict=True))
        self._in_flight: dict[tuple[int, int], Named] = {}  # exchanges, by the step after which they began and part
        kept = self._named[0] if plan.keeps_agreed else {}
        self._outer = {n: nn.Parameter(p.detach().to(dtype_of_mean(p.dtype), copy=True)) for n, p in kept.items()}
        lr, momentum = plan.outer_rates
        self._outer_steps = {
            n: torch.optim.SGD([p], lr=lr, momentum=momentum, nesterov=plan.outer == "nesterov" and momentum > 0)
            for n, p in self._outer.items()
        }

    def step(
        self, loss_fn: LossFn, batch: Any, key: int, step: int, clip_norm: float | None
    ) -> tuple[float, Named, Named]:
        """Run step `step`, counted from 1. Returns loss, gradients and outputs as a trainer of the first replica does.

        After a step of an asynchronous schedule there are no gradients. Raises OverflowError if a gradient is too large
        for the scale.
        """
        plan, num = self.plan, len(self.twins)
        losses, weights = [], []
        outputs: list[Outputs] = []
        for index, twin in enumerate(self.twins):
            rows = rows_of(batch, plan, index)
            for parameter in twin.parameters():
                parameter.grad = None
            inner, own = plan.inner_plan, replica_key(key, index)
            if self._pipeline is not None:
                optimizer = self._optimizers[index]
                found = stale_step(twin, loss_fn, rows, inner, own, self._pipeline, optimizer, norm_parts(plan))
            else:
                found = one_device_step(twin, loss_fn, rows, inner, own, norm_parts(plan), self._scale)
            for name in self._left_out if plan.sync != 1 else ():
                parameter = self._named[index][name]
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            grads = [p.grad for p in twin.parameters() if p.grad is not None]
            if self._scale > 1 and not all(grad.isfinite().all() for grad in grads):
                raise OverflowError(f"a gradient is not finite with the loss times {self._scale:g}")
            losses.append(float(found.loss))
            weights.append(1.0 if found.weight is None else found.weight)
            outputs.append(found.outputs or {})
        if plan.sync == 1:
            total = sum(weights)
            with_gradient = {n for named in self._named for n, p in named.items() if p.grad is not None}
            terms = [
                {
                    n: (torch.zeros_like(p) if p.grad is None else p.grad) * (w * num / total)
                    for n, p in named.items()
                    if n in with_gradient
                }
                for named, w in zip(self._named, weights, strict=True)
            ]
            mean = self._compressor.mean(terms)
            for named in self._named:
                for name, gradient in mean.items():
                    named[name].grad = gradient.to(named[name].dtype).clone()
            losses[0] = sum(one * w for one, w in zip(losses, weights, strict=True)) / total
        gradients = {n: p.grad.clone() for n, p in self._named[0].items() if p.grad is not None}
        for named, optimizer in zip(self._named, self._optimizers, strict=True):
            if self._pipeline is not None:
                break  # stale_step has updated
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([p for p in named.values() if p.grad is not None], clip_norm)
            with equal_draws(optimizer, key):
                optimizer.step()
        if plan.sync != 1:
            self._agree(step)
        return losses[0], gradients, results(self._all_rows(outputs, num_rows(batch)) if plan.sync == 1 else outputs[0])

    def _all_rows(self, outputs: Sequence[Outputs], rows: int) -> Outputs:
        """The outputs of all replicas, with rows in the order of the global batch."""
        joined = join_outputs(outputs)
        places = torch.cat([rows_of(torch.arange(rows), self.plan, index) for index in range(len(outputs))])
        for name, part in joined.items():
            if part.kind == ROWS:
                joined[name] = LossPart(ROWS, part.value[places.argsort()])
        return joined

    @torch.no_grad()
    def _agree(self, step: int) -> None:
        for part in self._rounds.begun(step):
            names = [name for name in self._named[0] if self._part_of[name] == part]
            if self._outer:
                terms = [{n: self._outer[n] - named[n] for n in names} for named in self._named]
            else:
                terms = [{n: named[n].detach() for n in names} for named in self._named]
            self._in_flight[step, part] = self._compressor.mean(terms)
        for part in self._rounds.ended(step):
            for name, mean in self._in_flight.pop((step - self.plan.overlap, part)).items():
                if self._outer:
                    self._outer[name].grad = mean
                    self._outer_steps[name].step()
                    mean = self._outer[name].detach()
                mixing = MIXING if self.plan.overlap else 0.0
                for named in self._named:
                    own = named[name]
                    own.copy_(torch.lerp(own, mean.to(own.dtype), 1 - mixing) if mixing else mean)
                self._settle(name)
        if self.plan.overlap == 0 and len(self._rounds.begun(step)) == self.plan.streaming:
            for buffers in zip(*map(self._buffers, self.twins), strict=True):
                if buffers[0].is_floating_point():
                    mean = torch.stack(buffers).mean(0)
                    for buffer in buffers:
                        buffer.copy_(mean)

    def _buffers(self, twin: nn.Module) -> list[Tensor]:
        return [*twin.buffers(), *(p for name, p in twin.named_parameters() if name in self._changing)]

    def _settle(self, name: str) -> None:
        states = [
            optimizer.state.get(named[name], {}) for named, optimizer in zip(self._named, self._optimizers, strict=True)
        ]
        for key, first in states[0].items():
            if torch.is_tensor(first) and self.plan.moments != "kept":
                mean = torch.stack([state[key] for state in states]).mean(0)
                for state in states:
                    state[key].copy_(mean if self.plan.moments == "averaged" else torch.zeros_like(mean))


def rows_of(batch: Any, plan: Plan, index: int) -> Any:
    """The rows of replica `index`: the parts of each microbatch that its ranks read."""
    rows, inner = num_rows(batch), plan.inner_plan.num_batch_parts
    num = plan.num_batch_parts // inner
    _, after = parts_around(plan.mesh, plan.relaxed_axis)
    parts = []
    for micro in microbatches(batch, plan.micro):
        each = rows // (plan.micro * inner * num)
        for part in range(inner):
            place = (part // after * num + index) * after + part % after
            parts.append(take_rows(micro, rows // plan.micro, place * each, each))
    return join_rows(parts)


def norm_parts(plan: Plan) -> int:
    """The number of parts of a replica's rows that have batch-norm statistics of their own."""
    return plan.inner_plan.num_batch_parts if plan.batchnorm == "local" else 1
