"""Graphs as Python functions.

A line of a function is one call: the op is a global, and so is each constant among its arguments. torch.fx writes both
out, as `torch.ops.aten.add.Tensor(x, torch.float32)`, which takes twice as long to write and to compile, and looks up
four attributes at each call. A value is freed after its last use.
"""

from __future__ import annotations

import itertools
import threading
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch.fx import Graph, Node


class PythonFunction(Protocol):
    """A graph as a function of its placeholders."""

    def __call__(self, *values: object) -> tuple[Any, ...]: ...


_functions: WeakKeyDictionary[Graph, PythonFunction] = WeakKeyDictionary()  # shared by ranks that are threads
_lock = threading.Lock()
_numbers = itertools.count()
_FILE = "graph {}"  # Python asks the loader for lines of files whose names have no <>
_OWN = "plait__"  # globals of a function begin so, and names of nodes do not


def as_function(graph: Graph) -> PythonFunction:
    """The function of a graph of calls, made once; the graph must not change any more."""
    with _lock:
        if graph not in _functions:
            _functions[graph] = _make_function(graph)
        return _functions[graph]


def failed_node(traceback: TracebackType | None, graph: Graph) -> Node | None:
    """The node of the graph whose line in its function raised."""
    while traceback is not None:
        lines = traceback.tb_frame.f_globals.get(f"{_OWN}lines")
        if lines is not None:
            name = lines[traceback.tb_lineno]
            return next((node for node in graph.nodes if node.name == name), None)
        traceback = traceback.tb_next
    return None


def _make_function(graph: Graph) -> PythonFunction:
    writer = _Writer(graph)
    writer.names[f"{_OWN}lines"] = writer.lines
    name = _FILE.format(next(_numbers))
    writer.names |= {"__name__": name, "__loader__": _Source(writer.text)}
    exec(compile(writer.text, name, "exec"), writer.names)
    function: PythonFunction = writer.names[f"{_OWN}call"]
    return function


class _Source:
    """What shows the lines of a function in a traceback."""

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, name: str) -> str:
        return self._text


class _Writer:
    """Writes the `text` of a graph's function, the globals that it needs by `names`, and the nodes of its `lines`."""

    def __init__(self, graph: Graph) -> None:
        self.names: dict[str, Any] = {}
        self._known: dict[int, str] = {}  # the name of a global, by its id
        nodes = list(graph.nodes)
        inputs = [node.name for node in nodes if node.op == "placeholder"]
        self.lines = {1: ""}
        written = [f"def {_OWN}call({', '.join(inputs)}):"]
        last = _last_uses(nodes)
        for node in nodes:
            if node.op == "placeholder":
                continue
            assert node.op in ("call_function", "output"), f"{node} is a {node.op}, which no program has"
            if node.op == "output":
                written.append(f" return {self._value(node.args[0])}")
            else:
                given = [self._value(arg) for arg in node.args]
                given += [f"{key}={self._value(arg)}" for key, arg in node.kwargs.items()]
                freed = last.get(node)
                end = f"; del {', '.join(freed)}" if freed else ""
                written.append(f" {node.name} = {self._global(node.target)}({', '.join(given)}){end}")
            self.lines[len(written)] = node.name
        self.text = "\n".join(written)

    def _value(self, value: Any) -> str:
        """The expression of an argument."""
        if isinstance(value, Node):
            return value.name
        if value is None or type(value) in (bool, int):
            return repr(value)
        if isinstance(value, (list, tuple)) and _holds_nodes(value):
            inside = ", ".join([self._value(each) for each in value])
            return f"[{inside}]" if isinstance(value, list) else f"({inside},)"
        if isinstance(value, dict) and _holds_nodes(value.values()):
            return "{" + ", ".join([f"{self._value(k)}: {self._value(v)}" for k, v in value.items()]) + "}"
        if isinstance(value, slice):
            return f"slice({self._value(value.start)}, {self._value(value.stop)}, {self._value(value.step)})"
        return self._global(value)

    def _global(self, value: Any) -> str:
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = f"{_OWN}{len(self._known)}"
            self.names[known] = value
        return known


def _holds_nodes(values: Any) -> bool:
    return any(isinstance(v, Node) or (isinstance(v, (list, tuple)) and _holds_nodes(v)) for v in values)


def _last_uses(nodes: list[Node]) -> dict[Node, list[str]]:
    """The names of values that nothing reads after a node, by node."""
    seen: set[Node] = set()
    last: dict[Node, list[str]] = {}
    for node in reversed(nodes):
        if node.op == "placeholder":
            continue
        ends = [each for each in node.all_input_nodes if each not in seen]
        seen.update(ends)
        if not node.users and node not in seen and node.op != "output":
            ends.append(node)
        last[node] = [each.name for each in ends]
    return last
