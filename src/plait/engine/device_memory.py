"""What an accelerator's memory holds on this rank, for the message when it runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from plait.comm.device import bytes_allocated, bytes_in_all
from plait.cost.memory_model import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    changed_words,
    human_bytes,
    single_changes,
)
from plait.engine.train_state import TrainState
from plait.errors import DeviceMemoryError
from plait.plan.plan import Plan

_REST = f"{ACTIVATIONS}, {BUFFERS}"  # what is neither of the other classes


@contextmanager
def explained(state: TrainState, what: str, num_rows: Callable[[], int]) -> Iterator[None]:
    """Context in which a device without memory left is a DeviceMemoryError, with what takes how much.

    what      what the rank does, in words
    num_rows  gives the rows of the global batch, which microbatches must divide
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        held = bytes_by_class(state)
        table = ", ".join(f"{name} {human_bytes(size)}" for name, size in held.items())
        first = (str(error).splitlines() or [""])[0]
        raise DeviceMemoryError(
            f"the memory of {state.world.device} ran out on rank {state.world.rank} in {what}: it held {table}, of"
            f" {human_bytes(bytes_in_all(state.world.device))} in all; {_remedy(state.plan, held, num_rows())}"
            f" (plait memory tells what each plan takes; PyTorch said: {first})"
        ) from error


def bytes_by_class(state: TrainState) -> dict[str, int]:
    """Bytes on this rank's device of parameters, gradients, optimizer state, and the rest."""
    executor: Any = state.executor
    found: dict[str, int] = {}
    if executor is not None:
        inputs = executor.rank_parameters.inputs.values() if hasattr(executor, "rank_parameters") else ()
        parameters = executor.parameters.values()
        values = state.optimizer.state.values() if state.optimizer is not None else ()
        seen: set[int] = set()
        classes: dict[str, Iterable[Any]] = {
            PARAMETERS: [*parameters, *inputs],
            GRADIENTS: [p.grad for p in parameters],
            OPTIMIZER: [value for each in values for value in each.values()],
        }
        for name, tensors in classes.items():
            found[name] = _bytes(tensors, state.world.device, seen)
    found[_REST] = max(0, bytes_allocated(state.world.device) - sum(found.values()))
    return found


def _bytes(tensors: Iterable[Any], device: torch.device, seen: set[int]) -> int:
    """Bytes on the device of the storages of these tensors that are not among those seen."""
    total = 0
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.device.type == device.type:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
    return total


def _remedy(plan: Plan, held: dict[str, int], num_rows: int) -> str:
    """Changes of the plan that make the largest class smaller first, in words."""
    words = [changed_words(plan, other) for other in single_changes(plan, num_rows)]
    for_rows = [each for each in words if "micro" in each or "recompute" in each]
    for_states = [each for each in words if each not in for_rows]
    if plan.home_optimizer == "device":
        for_states.append("home.optimizer=host")
    rest = held[_REST] >= sum(size for name, size in held.items() if name != _REST)
    found = [*for_rows, *for_states] if rest else [*for_states, *for_rows]
    return f"add {', or '.join(found[:3])} to the plan" if found else "use more ranks, or a smaller batch"
