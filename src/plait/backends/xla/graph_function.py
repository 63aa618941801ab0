"""A captured graph as a function of jax arrays.

The graph is rewritten first, so that each of its ops has a lowering: what has none is written by simpler ops, as its
row in compile/ops says, or PyTorch's own table of decompositions.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax import Array
from torch._decomp import decomposition_table
from torch.fx import Graph, Node
from torch.fx.node import Target, map_arg

from plait.backends.xla.lowerings import LOWERINGS
from plait.backends.xla.lowerings.random_draws import drawn
from plait.backends.xla.lowerings.table import CannotLower, Result, jax_dtype
from plait.compile.ir.calls import copy_graph, op_spec_of, output_node
from plait.compile.ir.node_info import info_of
from plait.compile.ops.comm_ops import constrain
from plait.compile.ops.draw import draw
from plait.compile.sharding.decompose import decompose_node
from plait.errors import PlanError, Refusal


def simplified(graph: Graph) -> Graph:
    """A copy of the graph in which every call has a lowering.

    Raises PlanError, which names the op and its module, for an op that neither has one nor is written by ops that do.
    """
    copy = copy_graph(graph)
    node: Node = next(iter(copy.nodes))
    while node.op != "output":
        if node.op != "call_function" or is_lowered(node.target):
            node = node.next
            continue
        function = _by_simpler(node)
        if function is None:
            refusal = no_lowering(node)
            raise PlanError(refusal)
        try:
            node = decompose_node(node, function)
        except Exception as error:
            refusal = no_lowering(node)
            raise PlanError(refusal) from error
    copy.eliminate_dead_code()
    return copy


def is_lowered(op: Target) -> bool:
    """Whether the op has a lowering, or is handled by who runs the graph."""
    return op in LOWERINGS or op in (operator.getitem, draw, constrain)


def _by_simpler(node: Node) -> Callable[..., Any] | None:
    """A function that computes the op by others; None if there is none."""
    written = op_spec_of(node).decompose
    return written if written is not None else _of_torch(node.target)


@functools.cache
def _of_torch(op: Any) -> Callable[..., Any] | None:
    function = decomposition_table.get(op)
    if function is None:
        return None

    def written(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_own, args), **{key: _own(value) for key, value in kwargs.items()})

    return written


def _own(value: object) -> Any:
    """A list of a graph as one that may be changed, as some of these functions do."""
    return [_own(each) for each in value] if isinstance(value, list) else value


def no_lowering(node: Node, why: str = "") -> Refusal:
    """The refusal of an op that has no lowering, and that no simpler ops replace; `why` says more about the op."""
    where = info_of(node).module
    what = f"backend=xla has no lowering for the op {node.target}{f' {why}' if why else ''}"
    what += f", which {where} calls" if where else ", which the model or the loss calls"
    return Refusal(what, "", "write the module with other ops, or leave backend=xla out")


class GraphFunction:
    """Calls the ops of a graph on jax arrays, one after the other, by their lowerings.

    Under `jax.jit` that traces them. `graph` has only ops with a lowering, and calls of
    `comm_ops.constrain`, whose shardings are `constrained` by name.
    """

    def __init__(self, graph: Graph, constrained: Mapping[str, jax.sharding.Sharding] | None = None) -> None:
        self._graph = graph
        self._constrained = constrained or {}

    def __call__(self, inputs: Mapping[str, Array | None], seed: Array) -> list[Array | None]:
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


def _as(made: Array, node: Node) -> Array | None:
    return _converted(made, _result(node.meta["val"]), node)


def _result(value: object) -> Result | None:
    return Result(tuple(value.shape), jax_dtype(value.dtype)) if isinstance(value, torch.Tensor) else None


def _converted(made: Array | None, wanted: Result | None, node: Node) -> Array | None:
    """The result in the dtype that the graph says."""
    if made is None or wanted is None:
        return made
    assert made.shape == wanted.shape, f"{node.format_node()} has shape {made.shape}, and in torch {wanted.shape}"
    return made if made.dtype == wanted.dtype else jax.lax.convert_element_type(made, wanted.dtype)
