"""The ops of PyTorch's own test database under plans: each is verified, or refused by an error of plait's own.

    scripts/fuzz --torch-ops [NAME ...]

A sample of an op becomes a model that scales the op's first input, which is the batch, by a parameter. The other
tensors are buffers, or come with the batch where they have its rows. Prints each fault, and the ops that have no rule.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import plait
from fuzz.outcome import FAULTS, KINDS, Outcome, classify

SIZES = {"XS": 2, "S": 4, "M": 8, "L": 16}  # in place of the database's own, which ranks do not divide
MOST_LOOKED_AT = 80  # samples of an op
UNDEFINED = ("empty", "_segment_reduce")  # in names of ops whose results are undefined, or are so with these sizes


@dataclass(frozen=True)
class Found:
    """What came of an op's sample under a plan; `without_rule` are the ops that ran whole."""

    place: str
    outcome: Outcome
    without_rule: tuple[str, ...] = ()


class OpModel(nn.Module):
    """An op whose tensor argument `first` is the batch's `x`, scaled, and whose other tensors are buffers or in the
    batch, each by its place among the leaves of the arguments."""

    def __init__(self, op: Any, leaves: list[Any], tree: Any, first: int, in_batch: set[int]) -> None:
        super().__init__()
        x = leaves[first]
        noise = torch.linspace(0, 1, max(1, x[:1].numel()), dtype=x.dtype).reshape(1, *x.shape[1:])
        self.weight = nn.Parameter(1 + 0.05 * noise.sin())
        self.op, self.tree, self.first, self.in_batch = op, tree, first, in_batch
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and place != first and place not in in_batch:
                self.register_buffer(f"at{place}", leaf)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
        x = batch["x"] * self.weight
        given = {self.first: x, **{place: batch[f"at{place}"] for place in self.in_batch}}
        given |= {int(name[2:]): buffer for name, buffer in self.named_buffers()}
        args, kwargs = tree_unflatten([given.get(at, leaf) for at, leaf in enumerate(self.leaves)], self.tree)
        return self.op(*args, **kwargs), x


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean squares of all results, with weights, so that the order of elements counts."""
    results, x = model(batch)
    total, reached = x.new_zeros(()), False
    for leaf in tree_leaves(results):
        if isinstance(leaf, Tensor) and leaf.numel():
            reached |= leaf.requires_grad
            leaf = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            squares = leaf.to(x.dtype).square()
            total = total + (squares * (1 + 0.1 * torch.arange(leaf.shape[-1])) if leaf.ndim > 1 else squares).mean()
    return total if reached else total + x.square().mean()


def database() -> list[Any]:
    """The ops that compute in float64, with sizes that ranks divide."""
    if "expecttest" not in sys.modules:  # of which the database needs no more than the import
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from torch.testing._internal import common_methods_invocations

    for name, module in list(sys.modules.items()):
        for size in SIZES if name.startswith("torch.testing._internal") else ():
            if isinstance(getattr(module, size, None), int):
                setattr(module, size, SIZES[size])
    return [
        op
        for op in common_methods_invocations.op_db
        if torch.float64 in op.dtypes and not any(name in op.name for name in UNDEFINED)
    ]


def samples_of(op: Any) -> Iterator[Any]:
    """The op's samples, as far as they can be made with these sizes."""
    with contextlib.suppress(RuntimeError, IndexError):
        yield from op.sample_inputs("cpu", torch.float64, requires_grad=False)


def models(op: Any) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Models of up to three of an op's samples that plain PyTorch trains, each with its batch."""
    samples = []
    for sample in itertools.islice(samples_of(op), MOST_LOOKED_AT):
        leaves, tree = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        floats = (at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        first = next(floats, None)
        if first is not None and leaves[first].ndim and leaves[first].numel() and leaves[first].shape[0] % 2 == 0:
            samples.append((leaves, tree, first))
    for number in sorted({0, len(samples) // 2, len(samples) - 1} if samples else ()):
        leaves, tree, first = samples[number]
        x = leaves[first]
        alike = {at for at, each in enumerate(leaves)
                 if isinstance(each, Tensor) and at != first and each.shape[:1] == x.shape[:1]}  # fmt: skip
        for in_batch in [set(), alike] if alike else [set()]:
            model = OpModel(op.op, leaves, tree, first, in_batch)
            batch = {"x": x, **{f"at{at}": leaves[at] for at in in_batch}}
            if trains(model, batch):
                yield f"{op.name} {op.variant_test_name}sample {number}", model, batch


def trains(model: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Whether plain PyTorch has a finite loss and gradients."""
    try:
        loss = loss_fn(model, batch)
        loss.backward()
    except Exception:  # of the op itself, with these sizes
        return False
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return bool(loss.isfinite()) and bool(gradients) and all(bool(g.isfinite().all()) for g in gradients)


def plans(shape: torch.Size) -> Iterator[tuple[str, dict[str, str] | None]]:
    """Plans for a batch of this shape, each with layouts."""
    yield "data=2", None
    if shape[0] % 4 == 0:
        yield "data=2 micro=2", None
    last = next((dim for dim in range(len(shape) - 1, 0, -1) if shape[dim] % 2 == 0), None)
    if last is not None:
        yield "data=2 tensor=2", {"weight": ", ".join("tensor" if d == last else "-" for d in range(len(shape)))}
    if len(shape) > 1 and shape[1] % 2 == 0:
        yield "context=2", None


def serve(line: Any, index: int) -> None:
    """The child: what comes of an op's samples, before each of which it says what it begins."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, model, batch in models(OPS[index]):
        verifier = plait.Verifier(model, loss_fn, batch, steps=1)
        for plan, layouts in plans(batch["x"].shape):
            line.send(f"{name}, {plan}")
            try:
                report = verifier.verify(plan, layouts=layouts)
            except Exception as error:
                line.send(Found(f"{name}, {plan}", classify(error)))
                continue
            outcome = Outcome("verified") if report.ok else Outcome("wrong", "", str(report))
            line.send(Found(f"{name}, {plan}", outcome, tuple(map(str, report.without_rule))))
    line.send(None)


def check(index: int, limit: float) -> list[Found]:
    """What came of an op, in a process of its own, which may take `limit` seconds for a plan."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, index), daemon=True)
    process.start()
    theirs.close()
    found, place = [], OPS[index].name
    try:
        while ours.poll(limit):
            came = ours.recv()
            if came is None:
                return found
            if isinstance(came, Found):
                found.append(came)
            else:
                place = came
        return [*found, Found(place, Outcome("hung"))]
    except EOFError:
        process.join()
        return [*found, Found(place, Outcome("crashed", f"the process ended with {process.exitcode}"))]
    finally:
        process.kill()


def run(names: list[str], jobs: int, limit: float) -> int:
    """Check ops of these names, or all; `limit` is in seconds. Returns the exit status: 0 if there is no fault."""
    chosen = [index for index, op in enumerate(OPS) if not names or op.name in names]
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    counts: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(lambda index: check(index, limit), chosen):
            for each in found:
                counts[each.outcome.kind] += 1
                whole.update(each.without_rule)
                if each.outcome.kind in FAULTS:
                    print(
                        f"{each.outcome.kind}: {each.place}: {each.outcome.reason}\n{each.outcome.detail}", flush=True
                    )
    print(f"{len(chosen)} ops: {', '.join(f'{counts[kind]} {kind}' for kind in KINDS)}")
    print(f"without a rule: {', '.join(f'{op} ({num})' for op, num in whole.most_common())}")
    return int(any(counts[kind] for kind in FAULTS))


OPS = database()
