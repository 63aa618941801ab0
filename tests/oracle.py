"""The oracle of op rules: run an op on parts, put the parts together, compare with the op on the whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from plait.backends.eager import ring_attention  # noqa: F401  registers what carries it out
from plait.backends.eager.collectives import function_of
from plait.comm.protocol import World
from plait.comm.thread_world import run_ranks
from plait.compile.ops import Call, OpSpec, Strategy, TensorSpec, comm_ops, strategies_of
from plait.compile.ops.attention_signature import SIGNATURES
from plait.compile.ops.comm_ops import take
from plait.compile.ops.context_attention import divides_heads
from plait.spec.layout import REPLICATE, Partial, Placement, Replicate, Shard, block_lengths, divides, local_shape
from plait.spec.mesh import Mesh


@dataclass(frozen=True)
class Sample:
    """A call of an op on small tensors. `shapes_only`: its values are undefined. `twin` stands in for a GPU's op."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes_only: bool = False
    twin: Callable[..., Any] | None = None

    @property
    def run(self) -> Callable[..., Any]:
        return self.op if self.twin is None else self.twin

    def __str__(self) -> str:
        def show(x: Any) -> Any:
            return f"{str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, Tensor) else x

        return f"{self.op}{tree_map(show, self.args)} {tree_map(show, self.kwargs) or ''}"


class EagerBuilder:
    """Runs what a rule emits at once, on one rank's tensors: a node is the value itself."""

    def __init__(self, rank: int, size: int, sample: Sample) -> None:
        self.rank = rank
        self.size = size
        self._sample = sample

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return (self._sample.run if op is self._sample.op else op)(*args, **kwargs)

    def value(self, node: Tensor) -> Tensor:
        return node

    def shape(self, node: Tensor) -> tuple[int, ...]:
        return tuple(node.shape)

    def dtype(self, node: Tensor) -> torch.dtype:
        return node.dtype

    def coordinate(self) -> int:
        return self.rank


class SendingBuilder(EagerBuilder):
    """An EagerBuilder of a rank that communicates with others."""

    axis = "axis"

    def __init__(self, world: World, kind: str, sample: Sample) -> None:
        super().__init__(world.comm(self.axis).rank, world.comm(self.axis).size, sample)
        self.world = world
        self.context_kind = kind

    def node(self, op: Any, args: Any, kwargs: Any, value: Any, num_bytes: int = 0, what: str = "") -> Any:
        return function_of(op)(self.world, *args)  # type: ignore[misc]

    def convert(self, node: Any, have: Placement, want: Placement) -> Any:
        def does(op: Any, *args: Any) -> Any:
            return function_of(op)(self.world, node, self.axis, *args)  # type: ignore[misc]

        match have, want:
            case _ if have == want:
                return node
            case Replicate(), Shard(dim=dim, blocks=blocks):
                return does(comm_ops.shard, dim, blocks)
            case Shard(dim=dim, blocks=blocks), Replicate():
                return does(comm_ops.all_gather, dim, blocks)
            case Partial(), Shard(dim=dim, blocks=blocks):
                return does(comm_ops.reduce_scatter, dim, blocks)
            case Shard(dim=a, blocks=b), Shard(dim=c, blocks=d):
                return does(comm_ops.all_to_all, a, b, c, d)
        raise AssertionError(f"{have} -> {want}")


def run_whole(sample: Sample) -> tuple[Any, ...]:
    # Ops that update an argument (statistics) must not see the sample's own tensors.
    args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (sample.args, sample.kwargs))
    result = sample.run(*args, **kwargs)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def call_of(sample: Sample, results: tuple[Any, ...]) -> Call:
    count = itertools.count()

    def spec(x: Any) -> Any:
        return TensorSpec(tuple(x.shape), x.dtype, next(count)) if isinstance(x, Tensor) else x

    args, kwargs = tree_map(spec, sample.args), tree_map(spec, sample.kwargs)
    inputs = tuple(x for x in tree_flatten((args, kwargs))[0] if isinstance(x, TensorSpec))
    outputs = tuple(
        TensorSpec(tuple(r.shape), r.dtype, i) if isinstance(r, Tensor) else None for i, r in enumerate(results)
    )
    return Call(sample.op, args, kwargs, inputs, outputs)


def fits(strategy: Strategy, call: Call, size: int) -> bool:
    return all(
        not isinstance(p, Shard) or (spec is not None and divides(spec.shape, p, size))
        for spec, p in zip((*call.inputs, *call.outputs), (*strategy.inputs, *strategy.outputs), strict=True)
    )


def given_placements(call: Call, size: int) -> Iterator[tuple[Placement, ...]]:
    """Nothing sharded; one input sharded in each way; all inputs sharded alike."""
    whole = (REPLICATE,) * len(call.inputs)
    yield whole
    for blocks in (1, 2, 3, (2, 1)):
        for i, spec in enumerate(call.inputs):
            for dim in range(spec.ndim):
                if divides(spec.shape, part := Shard(dim, blocks), size):
                    yield (*whole[:i], part, *whole[i + 1 :])
        for dim in range(max((s.ndim for s in call.inputs), default=0)):
            parts = [Shard(dim, blocks) for _ in call.inputs]
            if len(parts) > 1 and all(divides(s.shape, p, size) for s, p in zip(call.inputs, parts, strict=True)):
                yield tuple(parts)
    for i in range(len(whole)):
        yield (*whole[:i], Partial(), *whole[i + 1 :])


def strategies(rule: OpSpec, call: Call, size: int) -> dict[tuple[Any, ...], Strategy]:
    """Every strategy that any given placements bring up and that divides evenly, once."""
    found = {}
    for given in given_placements(call, size):
        for strategy in strategies_of(rule, call, given, size):
            assert len(strategy.inputs) == len(call.inputs), f"{call.op}: {strategy}"
            assert len(strategy.outputs) == len(call.outputs), f"{call.op}: {strategy}"
            bools = [p for s, p in zip(call.inputs, strategy.inputs, strict=True) if s.dtype is torch.bool]
            if fits(strategy, call, size) and Partial() not in bools:
                found[strategy.inputs, strategy.outputs] = strategy
    return found


def cut(tensor: Tensor, placement: Placement, size: int) -> list[Tensor]:
    """What each rank holds."""
    if isinstance(placement, Replicate):
        return [tensor.clone() for _ in range(size)]
    if isinstance(placement, Shard):
        return [take(tensor, rank, size, placement.dim, placement.blocks).clone() for rank in range(size)]
    assert placement == Partial("sum"), placement
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        terms = [torch.randn_like(tensor) for _ in range(size - 1)]
    else:
        terms = [torch.randint_like(tensor, 5) for _ in range(size - 1)]
    return [*terms, tensor - sum(terms)]  # type: ignore[list-item]


def join(parts: list[Tensor], placement: Placement) -> Tensor:
    """The inverse of `cut`."""
    size = len(parts)
    match placement:
        case Shard(dim=dim, blocks=blocks):
            if not isinstance(blocks, int):
                pieces = [p.split(block_lengths(p.shape[dim], blocks), dim) for p in parts]
                return torch.cat([torch.cat(block, dim) for block in zip(*pieces, strict=True)], dim)
            split = [p.unflatten(dim, (blocks, p.shape[dim] // blocks)) for p in parts]
            return torch.stack(split, dim + 1).flatten(dim, dim + 2)
        case Partial(op="sum"):
            return torch.stack(parts).sum(0, dtype=parts[0].dtype)
        case Partial(op="max"):
            return torch.stack(parts).amax(0)
        case Partial(op="min"):
            return torch.stack(parts).amin(0)
        case _:
            for rank in range(1, size):
                same(parts[rank], parts[0], f"rank {rank} and rank 0 of a whole value")
            return parts[0]


def same(found: Tensor, wanted: Tensor, what: str, tolerance: float = 0.0) -> None:
    assert found.shape == wanted.shape, f"{what}: shape {list(found.shape)}, not {list(wanted.shape)}"
    assert found.dtype == wanted.dtype, f"{what}: {found.dtype}, not {wanted.dtype}"
    if found.dtype.is_floating_point or found.dtype.is_complex:
        tolerance = max(tolerance, 1e-9 if torch.finfo(found.dtype).eps < 1e-10 else 2e-5)
        close = torch.isclose(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert bool(close.all()), f"{what}: off by {(found - wanted).abs().max().item()}"
    else:
        assert bool((found == wanted).all()), f"{what}: differs"


def run_parts(
    sample: Sample, rule: OpSpec, call: Call, strategy: Strategy, size: int, kind: str = ""
) -> list[tuple[Any, ...]]:
    """The outputs of each rank. Attention over a sequence that is cut is of the given kind."""
    leaves, tree = tree_flatten((sample.args, sample.kwargs))
    places = iter(strategy.inputs)
    cuts = [cut(x, next(places), size) if isinstance(x, Tensor) else [x] * size for x in leaves]
    outputs = []
    emit = strategy.emit or rule.emit
    if strategy.sends and emit is not None:

        def rank_outputs(world: World) -> tuple[Any, ...]:
            args, kwargs = torch.utils._pytree.tree_unflatten([c[world.rank] for c in cuts], tree)
            made = emit(SendingBuilder(world, kind, sample), call, strategy, tuple(args), kwargs)  # type: ignore[arg-type]
            return tuple(made) if isinstance(made, (tuple, list)) else (made,)

        return run_ranks(Mesh((("axis", size),)), rank_outputs, strict=True)
    for rank in range(size):
        args, kwargs = torch.utils._pytree.tree_unflatten([c[rank] for c in cuts], tree)
        if emit is not None:
            result = emit(EagerBuilder(rank, size, sample), call, strategy, tuple(args), kwargs)  # type: ignore[arg-type]
        else:
            if rule.sizes is not None and call.outputs[0] is not None:
                shape = list(local_shape(call.outputs[0].shape, strategy.outputs[0], size))
                args = (*args[: rule.sizes], shape, *args[rule.sizes + 1 :])
            result = sample.run(*args, **kwargs)
        outputs.append(tuple(result) if isinstance(result, (tuple, list)) else (result,))
    return outputs


def check(sample: Sample, rule: OpSpec, sizes: tuple[int, ...] = (2, 3)) -> int:
    """Try every strategy of the rule on the sample, and its decomposition; return how many strategies there were."""
    results = run_whole(sample)
    call = call_of(sample, results)
    single = any(s.dtype is torch.float32 for s in call.inputs)
    tried = 0
    for size in sizes:
        for strategy in strategies(rule, call, size).values():
            if all(isinstance(p, Replicate) for p in (*strategy.inputs, *strategy.outputs)):
                continue
            for kind in _kinds(call, strategy, size):
                where = f"{sample} on {size} ranks, {strategy.inputs} -> {strategy.outputs} {kind}"
                try:
                    parts = run_parts(sample, rule, call, strategy, size, kind)
                except Exception as error:
                    raise AssertionError(f"{where}: {error}") from error
                tried += 1
                _compare(sample, results, parts, strategy, size, where, 2e-5 if single else 0.0)
    return tried


def _kinds(call: Call, strategy: Strategy, size: int) -> tuple[str, ...]:
    """The kinds of attention to try."""
    if not strategy.sends or call.op not in SIGNATURES:
        return ("",)
    return ("ring", "gather", "ulysses") if divides_heads(call, size) else ("ring", "gather")


def _compare(
    sample: Sample, results: Any, parts: Any, strategy: Strategy, size: int, where: str, tolerance: float
) -> None:
    """Compare the outputs of ranks with those of the whole."""
    for i, (whole, placement) in enumerate(zip(results, strategy.outputs, strict=True)):
        if not isinstance(whole, Tensor):
            continue
        part_shape = local_shape(tuple(whole.shape), placement, size)
        pieces = [outputs[i] for outputs in parts]
        if strategy.sends and pieces[0] is None:
            continue
        for piece in pieces:
            assert tuple(piece.shape) == part_shape, f"{where}: part {list(piece.shape)} of output {i}"
        if not sample.shapes_only and math.prod(whole.shape):
            same(join(pieces, placement), whole, f"{where}: output {i}", tolerance)
