from __future__ import annotations

from torch.fx import Graph

from plait.compile.ir.calls import op_spec_of
from plait.compile.ir.node_info import info_of
from plait.compile.ops.experts import EXPERT_MM, EXPERT_ROWS


def expert_weights(graph: Graph) -> dict[str, int]:
    found = {}
    for node in graph.nodes:
        place = {EXPERT_MM: 1, EXPERT_ROWS: 0}.get(node.target)
        if place is None:
            continue
        w = node.args[place]
        while w.op == "call_function" and (op_spec_of(w).view is not None or op_spec_of(w).copies == 0):
            w = w.args[0]
        if info_of(w).kind == "parameter":
            found[w.name] = w.meta["val"].shape[0]
    return found
