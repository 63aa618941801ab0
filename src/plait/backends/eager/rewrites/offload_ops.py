"""The calls by which a graph offloads tensors to host memory or disk, and fetches them again.

A graph reaches offloaded tensors through one placeholder, `offload`, as it reaches other ranks through `world`. The
placeholder stands for an `OffloadStore`, which backends/eager/offload/store.py implements. Keys are `input/NAME` for a
parameter as the graph reads it, `gradient/NAME` for a gradient as the optimizer reads it, and `sum/NAME` for the sum of
a gradient over earlier microbatches.

On a CPU, host memory is the device's memory, so nothing is offloaded to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.fx import Graph, Node

from plait.backends.eager.collectives import WORLD
from plait.compile.ir.calls import placeholders
from plait.compile.ir.node_info import NodeInfo, describe
from plait.compile.ops import OpSpec, register

OFFLOAD = "offload"  # name of the placeholder of the rank's OffloadStore


class Arrival(Protocol):
    """Tensors in flight to the device."""

    def wait(self) -> list[Tensor]:
        """The tensors, in new memory."""


class OffloadStore(Protocol):
    """Keeps tensors that are off the device. The transfers of a tensor happen in the order of the calls."""

    def fetch(self, keys: Sequence[str]) -> Arrival:
        """Start to bring copies of tensors to the device."""

    def leave(self, key: str, tensor: Tensor) -> None:
        """Start to offload a tensor, to be kept under the key. Its memory on the device is freed once that is done and
        nothing else refers to it."""

    def stash(self, offset: int, tensor: Tensor) -> Any:
        """Start to offload a tensor until it is unstashed. Returns what `unstash` takes. `offset` is a number of bytes
        that no other tensor uses that is stashed at the same time."""

    def unstash(self, stashed: Sequence[Any]) -> Arrival:
        """Start to bring stashed tensors back."""


def offload_placeholder(graph: Graph) -> Node:
    """The placeholder of the OffloadStore, which is added to the graph if it has none."""
    found = placeholders(graph)
    for node in found:
        if node.name == OFFLOAD:
            return node
    world = next((node for node in found if node.name == WORLD), None)
    with graph.inserting_after(world) if world else graph.inserting_before(next(iter(graph.nodes))):
        node = graph.placeholder(OFFLOAD)
    describe(node, NodeInfo(kind="offload", name=OFFLOAD), None)
    return node


def fetch_start(offload: OffloadStore, keys: Sequence[str]) -> Arrival:
    return offload.fetch(keys)


def arrival_wait(arrival: Arrival) -> list[Tensor]:
    return arrival.wait()


def leave(offload: OffloadStore, key: str, tensor: Tensor) -> None:
    offload.leave(key, tensor)


def stash(offload: OffloadStore, offset: int, tensor: Tensor) -> Any:
    return offload.stash(offset, tensor)


def unstash_start(offload: OffloadStore, *stashed: Any) -> Arrival:
    return offload.unstash(stashed)


register(fetch_start, arrival_wait, leave, stash, unstash_start, spec=OpSpec(transfers=True))
