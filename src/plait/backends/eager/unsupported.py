"""An op that the device cannot do in half precision: which one, of which module, and what to write in the plan."""

from __future__ import annotations

import linecache
from types import TracebackType

from torch.fx import Graph, Node

from plait.compile.capture.precision import Precision
from plait.compile.ir.node_info import info_of
from plait.errors import PlanError

_GENERATED = "<eval_with_key>"  # how torch.fx calls the files that it writes


def missing_kernel(error: Exception, graph: Graph, precision: Precision) -> PlanError | None:
    """What to raise in place of an error of the graph's code; None where it is about something else."""
    node = _failed(error.__traceback__, graph)
    module = info_of(node).module if node is not None else ""
    return precision.refusal(error, module, str(node.target) if node is not None else "")


def _failed(traceback: TracebackType | None, graph: Graph) -> Node | None:
    """The node whose line of the generated code raised."""
    line = ""
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if name.startswith(_GENERATED):
            line = linecache.getline(name, traceback.tb_lineno)
        traceback = traceback.tb_next
    target = line.partition("=")[0].partition(":")[0].strip()
    return next((node for node in graph.nodes if node.name == target), None)
