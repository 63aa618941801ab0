"""What memory holds on this rank, for the message when it runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from plait.comm.device import is_host, memory_of, memory_ran_out, memory_taken
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
from plait.errors import DeviceMemoryError, PlaitError
from plait.plan.plan import Plan

_REST = f"{ACTIVATIONS}, {BUFFERS}"  # what is neither of the other classes


@contextmanager
def explained(
    state: TrainState, what: str, num_rows: Callable[[], int], held_by_class: Callable[[], dict[str, int]] | None = None
) -> Iterator[None]:
    """Context in which a device or a host without memory left is a DeviceMemoryError, with what takes how much.

    what           what the rank does, in words
    num_rows       gives the rows of the global batch, which microbatches must divide
    held_by_class  gives the bytes of each class on one of XLA's devices; None: this rank has a device of PyTorch's
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, PlaitError) or not memory_ran_out(error):
            raise
        device, by_torch = state.world.device, held_by_class is None
        held = bytes_by_class(state) if held_by_class is None else held_by_class()
        of_all = f", of {human_bytes(memory_of(device))} in all" if by_torch else ""
        place = f"{'the host' if is_host(device) else device} ran out on rank {state.world.rank}"
        table = ", ".join(f"{name} {human_bytes(size)}" for name, size in held.items())
        first = (str(error).splitlines() or [""])[0]
        raise DeviceMemoryError(
            f"the memory of {place if by_torch else 'the devices of jax ran out'} in {what}: it held {table}{of_all};"
            f" {_remedy(state.plan, held, num_rows(), 'disk' if is_host(device) else 'host')}"
            f" ({'plait memory tells what each plan takes; PyTorch' if by_torch else 'XLA'} said: {first})"
        ) from error


def bytes_by_class(state: TrainState) -> dict[str, int]:
    """Bytes on this rank's device of parameters, gradients, optimizer state, and the rest; of a host, the rest of what
    the process has."""
    executor: Any = state.executor
    device = state.world.device
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
            found[name] = _bytes(tensors, device, seen)
    found[_REST] = max(0, memory_taken(device) - sum(found.values()))
    return found


def _bytes(tensors: Iterable[object], device: torch.device, seen: set[int]) -> int:
    """Bytes on the device of the storages of these tensors that are not among those seen."""
    total = 0
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.device.type == device.type:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
    return total


def _remedy(plan: Plan, held: dict[str, int], num_rows: int, home: str) -> str:
    """Changes of the plan that make the largest class smaller first, in words; `home` is where state may be kept."""
    words = [changed_words(plan, other) for other in single_changes(plan, num_rows)]
    for_rows = [each for each in words if "micro" in each or "recompute" in each]
    for_states = [each for each in words if each not in for_rows]
    if plan.home_optimizer == "device" and plan.backend == "torch":
        for_states.append(f"home.optimizer={home}")
    rest = held.get(_REST, 0) >= sum(size for name, size in held.items() if name != _REST)
    found = [*for_rows, *for_states] if rest else [*for_states, *for_rows]
    return f"add {', or '.join(found[:3])} to the plan" if found else "use more ranks, or a smaller batch"
