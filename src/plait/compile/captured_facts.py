"""What is known of a step once it is captured, as plain values."""

from __future__ import annotations

from dataclasses import replace

from plait.compile.capture.capture import Captured
from plait.compile.ir.node_info import info_of, is_forward
from plait.plan.step_facts import StepFacts


def captured_facts(facts: StepFacts, captured: Captured) -> StepFacts:
    """The facts of a model, with those of its captured step."""
    forward = [node for node in captured.graph.graph.nodes if node.op == "call_function" and is_forward(node)]
    changed = sorted(o.name for o in captured.outputs if o.kind == "buffer" and o.name in captured.outside)
    return replace(
        facts, called=tuple(dict.fromkeys(info_of(node).module for node in forward)), changed_outside=tuple(changed)
    )
