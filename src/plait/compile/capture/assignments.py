"""What a step assigns in Python: attributes, items of lists and dicts, globals."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.fx import Node

from plait.compile.capture.batch_numbers import BatchNumber, plain_numbers
from plait.compile.capture.captured import Effect
from plait.compile.capture.graph_recorder import GraphRecorder
from plait.compile.capture.outside_tensors import Outside
from plait.compile.capture.python_state import MISSING
from plait.compile.capture.reachable import PLAIN, Reached
from plait.errors import CaptureError


def assigned(reached: Reached, outside: Outside, recorder: GraphRecorder) -> tuple[dict[str, Tensor], list[Effect]]:
    """The Python values that the step has assigned: new values of tensors that it also reads, by place, and all
    others."""
    rebound: dict[str, Tensor] = {}
    effects: list[Effect] = []
    for holder, key, before, now in reached.changes():
        now = plain_numbers(now) if isinstance(now, BatchNumber) else now
        place = holder.place_of(key)
        old = outside.fakes.get(place)
        if old is None or now is old:
            node = recorder.nodes.get(id(now)) if isinstance(now, Tensor) else None
            effects.append(Effect(holder, key, before, now, node is not None and _varies(node)))
        elif not isinstance(now, Tensor) or (now.shape, now.dtype) != (old.shape, old.dtype):
            what = f"{now.dtype} of shape {list(now.shape)}" if isinstance(now, Tensor) else type(now).__name__
            raise CaptureError(
                f"the step reads {place}, {old.dtype} of shape {list(old.shape)}, and puts {what} in its place; a value"
                " that the step hands on to the next keeps its type and shape"
            )
        elif id(now) in recorder.nodes:
            rebound[place] = now
    if _prepares(reached, effects):  # a flag for "is prepared" is undone with the preparation
        effects = [e for e in effects if not (e.before is MISSING and isinstance(e.now, bool))]
    return rebound, effects


def _prepares(reached: Reached, effects: Sequence[Effect]) -> bool:
    """Whether the step has created an object that is neither a plain value nor a tensor, such as a hook, which is
    undone."""
    made = (e for e in effects if e.before is MISSING and not isinstance(e.now, (*PLAIN, Tensor)))
    return any(reached.empty) or any(made)


def _varies(node: Node) -> bool:
    """Whether a value depends on an input of the graph that is not a constant, or on random numbers."""
    seen, stack = {node}, [node]
    while stack:
        one = stack.pop()
        if one.op == "placeholder" and not one.name.startswith("constant_"):
            return True
        stack += [source for source in one.all_input_nodes if source not in seen]
        seen.update(one.all_input_nodes)
    return False
