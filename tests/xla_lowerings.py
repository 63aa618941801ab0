"""The sample calls of every op that has a lowering as one graph, which XLA and PyTorch both compute."""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np
import torch
from oracle import Sample
from rule_samples import all_samples
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.utils._pytree import tree_map

from plait.backends.xla.graph_function import GraphFunction, simplified
from plait.backends.xla.jax_arrays import as_in_torch, to_numpy, to_torch
from plait.backends.xla.lowerings import LOWERINGS

aten = torch.ops.aten

MADE = {
    aten.empty_like.default,
    aten.empty.memory_format,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}  # of whatever is in memory


def _is_refused(sample: Sample) -> bool:
    """Whether a call is refused for its arguments: by frequencies, or by a mask; or its values are left open."""
    if sample.op is aten.embedding_dense_backward.default:
        return bool(sample.args[4])
    if sample.op is aten.index.Tensor:
        return any(i is not None and i.dtype == torch.bool for i in sample.args[1])
    return sample.op in MADE


def _own(value: Any) -> Any:
    """A copy of a tensor, because some calls change theirs."""
    return value.clone() if isinstance(value, Tensor) else value


class Calls:
    """A graph of calls, with the tensors that it takes and what PyTorch makes of them."""

    def __init__(self) -> None:
        self.graph, self._mode = Graph(), FakeTensorMode(allow_non_fake_inputs=True)
        self.inputs: dict[str, Any] = {}
        self.wanted: list[Tensor] = []
        self.titles: list[str] = []

    def add(self, sample: Sample) -> list[Any]:
        """Write a call. Returns the nodes of its results."""

        def given(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            node = self.graph.placeholder(f"in_{len(self.inputs)}")
            node.meta["val"] = self._mode.from_tensor(value)
            self.inputs[node.name] = value.clone()
            return node

        sample = Sample(sample.op, *tree_map(_own, (tuple(sample.args), dict(sample.kwargs))))
        args, kwargs = tree_map(given, (sample.args, sample.kwargs))
        node = self.graph.call_function(sample.op, args, kwargs)
        found = sample.op(*sample.args, **sample.kwargs)
        several = isinstance(found, (tuple, list))
        results = list(found) if several else [found]
        fakes = [self._mode.from_tensor(r) if isinstance(r, Tensor) else r for r in results]
        node.meta["val"] = tuple(fakes) if several else fakes[0]
        nodes = []
        for place, (result, fake) in enumerate(zip(results, fakes, strict=True)):
            if not isinstance(result, Tensor) or not result.numel():
                continue
            item = self.graph.call_function(operator.getitem, (node, place)) if several else node
            item.meta["val"] = fake
            nodes.append(item)
            self.wanted.append(result)
            self.titles.append(f"{sample.op} {place}")
        return nodes


def _runs_here(sample: Sample) -> bool:
    """Whether PyTorch has a kernel of the op for CPUs."""
    try:
        sample.op(*sample.args, **sample.kwargs)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def compared() -> dict[str, Any]:
    """The results that differ, how many there are, and the lowered ops that have no sample."""
    every, results = Calls(), []
    samples = all_samples()
    for op in LOWERINGS:
        for sample in samples.get(op, [])[:3]:
            results += [] if _is_refused(sample) or not _runs_here(sample) else every.add(sample)
    every.graph.output(tuple(results))
    function = GraphFunction(simplified(every.graph))
    with as_in_torch():
        inputs = {name: to_numpy(value) for name, value in every.inputs.items()}
        found = jax.jit(function)(inputs, np.zeros(2, np.uint32))
    differ = {}
    for title, mine, wanted in zip(every.titles, found, every.wanted, strict=True):
        exact = wanted.is_complex() or wanted.is_floating_point()
        here = to_torch(mine)
        same = torch.allclose(here, wanted, 1e-4, 1e-5, equal_nan=True) if exact else torch.equal(here, wanted)
        if not same:
            differ[title] = f"{here.flatten()[:4].tolist()} and in torch {wanted.flatten()[:4].tolist()}"
    without = sorted(str(op) for op in LOWERINGS if op not in samples and op.namespace == "aten")
    return {"differ": differ, "num": len(every.titles), "without": without}
