"""A captured graph as a function of jax arrays."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from plait.backends.xla.lowerings import LOWERINGS
from plait.backends.xla.lowerings.random_draws import drawn
from plait.backends.xla.lowerings.table import CannotLower, Result, jax_dtype
from plait.backends.xla.simpler_ops import no_lowering
from plait.compile.ir.calls import output_node
from plait.compile.ops.comm_ops import constrain
from plait.compile.ops.draw import draw
from plait.errors import PlanError


class GraphFunction:
    """Calls the ops of a graph on jax arrays, one after the other, by their lowerings.

    Under `jax.jit` that traces them. `graph` has only ops with a lowering (simpler_ops.py), and calls of
    `comm_ops.constrain`, whose shardings are `constrained` by name.
    """

    def __init__(self, graph: Graph, constrained: Mapping[str, Any] | None = None) -> None:
        self._graph = graph
        self._constrained = constrained or {}

    def __call__(self, inputs: Mapping[str, Any], seed: Any) -> list[Any]:
        """The outputs of the graph, given its placeholders by name, and the seed of its random numbers: its lower and
        upper 32 bits.

        Raises PlanError, which names the op and its module, for a call that cannot be lowered.
        """
        found: dict[Node, Any] = {}
        for node in self._graph.nodes:
            if node.op == "placeholder":
                found[node] = inputs.get(node.name)
            elif node.target is draw:
                _, index, _, _, _, kind, params, *_ = node.args
                found[node] = _as(drawn(seed, index, kind, params, _result(node.meta["val"])), node)  # type: ignore[arg-type]
            elif node.target is constrain:
                (value,) = map_arg(node.args, lambda n: found[n])
                found[node] = jax.lax.with_sharding_constraint(value, self._constrained[node.name])
            elif node.op == "call_function":
                found[node] = _called(node, found)
        return [None if n is None else found[n] for n in output_node(self._graph).args[0]]  # type: ignore[union-attr,index]

    def check(self) -> None:
        """Raise PlanError for a call that cannot be lowered, without computing anything."""
        inputs = {
            node.name: jax.ShapeDtypeStruct(wanted.shape, wanted.dtype)
            for node in self._graph.nodes
            if node.op == "placeholder" and (wanted := _result(node.meta.get("val"))) is not None
        }
        jax.eval_shape(self, inputs, jax.ShapeDtypeStruct((2,), np.uint32))


def _called(node: Node, found: Mapping[Node, Any]) -> Any:
    args: Any
    kwargs: Any
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: found[n])
    if node.target is operator.getitem:
        return args[0][args[1]]
    row, value = LOWERINGS[node.target], node.meta["val"]
    several = isinstance(value, (tuple, list))
    wanted = [_result(each) for each in value] if several else [_result(value)]
    if row.wants_result:
        kwargs = {**kwargs, "result": wanted if several else wanted[0]}
    try:
        made = row.function(*args, **kwargs)
        made = made if several else [made]
        results = [_converted(each, one, node) for each, one in zip(made, wanted, strict=False)]
    except CannotLower as error:
        refusal = no_lowering(node, str(error))
        raise PlanError(refusal) from error
    except Exception as error:  # of arguments that nobody thought of
        refusal = no_lowering(node, f"with these arguments ({type(error).__name__}: {error})")
        raise PlanError(refusal) from error
    return tuple(results) if several else results[0]


def _as(made: Any, node: Node) -> Any:
    return _converted(made, _result(node.meta["val"]), node)


def _result(value: Any) -> Result | None:
    return Result(tuple(value.shape), jax_dtype(value.dtype)) if isinstance(value, torch.Tensor) else None


def _converted(made: Any, wanted: Any, node: Node) -> Any:
    """The result in the dtype that the graph says."""
    if made is None or wanted is None:
        return made
    assert made.shape == wanted.shape, f"{node.format_node()} has shape {made.shape}, and in torch {wanted.shape}"
    return made if made.dtype == wanted.dtype else jax.lax.convert_element_type(made, wanted.dtype)
