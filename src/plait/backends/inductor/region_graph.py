"""Regions as functions, and a graph with calls of them in place of what they compute.

    x = mm(a, b); y = relu(x)    ->    given = pack(a, b); done = region(given); y = done[0]

A region's function takes a list and empties it: what only the list still refers to is freed as soon as the region has
read it, as in eager execution.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from plait.backends.inductor.regions import FusedRegion, Step, functional
from plait.compile.ir.calls import (
    is_item,
    is_tensor,
    is_view,
    output_node,
    output_values,
    placeholders,
    writes_in_place,
)
from plait.compile.ir.node_info import NodeInfo, describe, info_of
from plait.compile.ops import OpSpec, register

RunRegion = Callable[[list[Tensor]], Sequence[Tensor]]


class RegionFunction:
    """What a graph calls for a region. Until it is compiled it runs the region's calls one by one.

    graph     the region as a functional graph (`graph_of_region`)
    text      of the graph
    fixed     indices of inputs that are at the same place in memory at every call
    site      number of the one call of this function; None if all regions of equal text share it
    compiled  what runs in place of the calls
    """

    def __init__(self, graph: Graph, text: str, fixed: tuple[int, ...] = (), site: int | None = None) -> None:
        self.graph = graph
        self.text = text
        self.fixed = fixed
        self.site = site
        self.compiled: RunRegion | None = None
        self._module = GraphModule({}, graph)
        self.__name__ = self.__qualname__ = "region"  # torch.fx writes it into the code of the graph that calls it

    def __call__(self, given: list[Tensor]) -> Sequence[Tensor]:
        if self.compiled is not None:
            return self.compiled(given)
        tensors = tuple(given)
        given.clear()
        return self._module(*tensors)  # type: ignore[no-any-return]

    @property
    def num_calls(self) -> int:
        """The number of calls of the graph."""
        return sum(node.op == "call_function" for node in self.graph.nodes)


def pack(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors as a list, such as a region takes and empties."""
    return list(tensors)


register(pack, spec=OpSpec())


def graph_of_region(region: FusedRegion, views: Collection[Node]) -> Graph:
    """A functional graph that computes the outputs of a region from its inputs. Equal regions have equal graphs."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for index, node in enumerate(region.inputs):
        copies[node] = graph.placeholder(f"given_{index}")
        copies[node].meta = dict(node.meta)

    def copy(node: Node) -> Node:
        if node not in copies:
            assert node in views, f"{node} is neither an input of its region nor a view"
            append(node)
        return copies[node]

    def append(node: Node) -> None:
        made = graph.node_copy(node, copy)
        if writes_in_place(node):
            assert isinstance(node.target, OpOverload)
            made.target = functional(node.target)  # type: ignore[assignment]
        copies[node] = made

    for node in region.calls:
        append(node)
    results = []
    for node in region.outputs:
        for place in _tensors_of(node):
            result = copies[node]
            if place is not None:
                result = graph.call_function(operator.getitem, (result, place))
                result.meta["val"] = node.meta["val"][place]
            results.append(result)
    graph.output(tuple(results))
    return graph


def _tensors_of(node: Node) -> list[int | None]:
    """Which items of a node's value are tensors, if it has several; [None] if it is one tensor."""
    if is_tensor(node):
        return [None]
    return [index for index, value in enumerate(output_values(node)) if value is not None]


def text_of(graph: Graph) -> str:
    """A region's graph as text: equal for graphs that compute the same from tensors of the same kinds."""
    numbers = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            lines.append(f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}")
        else:
            name = node.target if isinstance(node.target, (str, OpOverload)) else node.target.__name__
            args, kwargs = map_arg((node.args, node.kwargs), lambda source: _Named(numbers[source]))
            lines.append(f"{name}{args} {kwargs}")
    return "\n".join(lines)


class _Named(str):
    __slots__ = ()
    __repr__ = str.__str__


def with_regions(graph: Graph, steps: Collection[Step], functions: Mapping[FusedRegion, RegionFunction]) -> Graph:
    """A graph that runs the steps, with the functions of regions called in place of their calls."""
    found = Graph()
    copies: dict[Node, Node] = {node: found.node_copy(node) for node in placeholders(graph)}
    for step in steps:
        if isinstance(step, Node):
            copies[step] = found.node_copy(step, copies.__getitem__)
            continue
        first = info_of(step.calls[0])
        info = NodeInfo(phase=first.phase, module=first.module, stage=first.stage, owner=first.owner)
        given = found.call_function(pack, tuple(copies[node] for node in step.inputs))
        describe(given, info, None)
        done = found.call_function(functions[step], (given,))
        places = [(node, index) for node in step.outputs for index in _tensors_of(node)]
        values = [node.meta["val"] if index is None else node.meta["val"][index] for node, index in places]
        describe(done, info, tuple(values))
        items: dict[tuple[Node, int | None], Node] = {}
        for number, place in enumerate(places):
            items[place] = found.call_function(operator.getitem, (done, number))
            describe(items[place], info_of(place[0]), values[number])
        for node in step.outputs:
            if is_tensor(node):
                copies[node] = items[node, None]
            else:  # several tensors, which go to another cell of a pipeline together
                several = tuple(items.get((node, index)) for index, _ in enumerate(output_values(node)))
                copies[node] = found.call_function(pack, several)
                copies[node].meta = dict(node.meta)
    end = output_node(graph)
    found.node_copy(end, copies.__getitem__).meta = dict(end.meta)
    found.lint()
    return found


def base_of(node: Node) -> Node:
    """The call whose result a value is, or a view of."""
    while is_item(node) or is_view(node):
        node = node.all_input_nodes[0]
    return node


def own_results(graph: Graph, indices: Collection[int]) -> Graph:
    """Copy the results of a graph at these indices that a region returns, or views of what one returns. Changes `graph`
    and returns it."""
    end = output_node(graph)
    results = list(end.args[0])  # type: ignore[arg-type]
    for index in indices:
        result = results[index]
        if isinstance(result, Node) and isinstance(base_of(result).target, RegionFunction):
            with graph.inserting_before(end):
                results[index] = graph.call_function(torch.ops.aten.clone.default, (result,))
            results[index].meta = dict(result.meta)
    end.args = (tuple(results),)
    return graph
