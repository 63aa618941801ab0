"""What of a step has its home outside the device, and the calls that a graph makes to fetch it and to let it go.

A graph reaches what is away through one placeholder, `homes`, as it reaches other ranks through `world`. Its object
speaks `OffloadStore`; it is implemented where files are (backends/eager/offload/store.py). Keys are `input/NAME` for a
parameter as the graph reads it, `gradient/NAME` for a gradient as the optimizer reads it, `sum/NAME` for one that
microbatches add up.

On CPU host memory is the device's memory, so that a home on the host is none of its own.
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

HOMES = "homes"  # name of the placeholder that stands for the rank's homes


class Coming(Protocol):
    """Tensors on their way to the device."""

    def wait(self) -> list[Tensor]:
        """The tensors, in memory of their own."""


class OffloadStore(Protocol):
    """Where a rank's tensors are while they are away. What a call takes is done in the order of the calls."""

    def fetch(self, keys: Sequence[str]) -> Coming:
        """Begin to bring copies of tensors to the device."""

    def leave(self, key: str, tensor: Tensor) -> None:
        """Begin to take a tensor away; its memory is free once nobody else holds it and that is done."""

    def stash(self, offset: int, tensor: Tensor) -> Any:
        """Begin to take a tensor away until it is unstashed; `offset` is its own among those that are away at once."""

    def unstash(self, stashed: Sequence[Any]) -> Coming:
        """Begin to bring back what was stashed."""


def homes_of(graph: Graph) -> Node:
    """The placeholder, made where there is none yet."""
    found = placeholders(graph)
    for node in found:
        if node.name == HOMES:
            return node
    world = next((node for node in found if node.name == WORLD), None)
    with graph.inserting_after(world) if world else graph.inserting_before(next(iter(graph.nodes))):
        node = graph.placeholder(HOMES)
    describe(node, NodeInfo(kind="homes", name=HOMES), None)
    return node


def fetch_start(homes: OffloadStore, keys: Sequence[str]) -> Coming:
    return homes.fetch(keys)


def coming_wait(coming: Coming) -> list[Tensor]:
    return coming.wait()


def leave(homes: OffloadStore, key: str, tensor: Tensor) -> None:
    homes.leave(key, tensor)


def stash(homes: OffloadStore, offset: int, tensor: Tensor) -> Any:
    return homes.stash(offset, tensor)


def unstash_start(homes: OffloadStore, *stashed: Any) -> Coming:
    return homes.unstash(stashed)


register(fetch_start, coming_wait, leave, stash, unstash_start, spec=OpSpec())
